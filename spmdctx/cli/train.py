"""`spmdctx train`: trains a language model on real text, from plan to audit, and writes down all results."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from spmdctx.checkpoint import CheckpointManager
from spmdctx.cli.generate import STATE, save_model
from spmdctx.cli.output import Output, audit_data, plan_data, verify_data
from spmdctx.cli.program import Choice, add_program_arguments, started
from spmdctx.cli.values import positive
from spmdctx.errors import ContextError
from spmdctx.models import Batch, DecoderConfig, WordTokenizer, batches, create, read_text, train_step
from spmdctx.plan.plan import Plan
from spmdctx.step.processes import wait_for_all
from spmdctx.step.report.metrics import KINDS, Metrics, check_target
from spmdctx.step.step import ParallelStep


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `train`."""
    add_program_arguments(parser)
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=40, metavar="N", help="training steps (default: %(default)s)")
    training.add_argument("--text", metavar="FILE", help="UTF-8 text to train on (default: Python's language reference)")
    training.add_argument("--learning-rate", type=float, default=3e-3, metavar="X", help="of AdamW (default: %(default)s)")
    training.add_argument("--seed", type=int, default=0, metavar="N", help="of parameters and batches (default: %(default)s)")
    training.add_argument(
        "--save-every",
        type=positive,
        metavar="N",
        help="save every N steps, and go on from the last one where this command was stopped before (default: at the end only)",
    )
    training.add_argument(
        "--metrics",
        action="append",
        default=[],
        type=_target,
        metavar="WHERE",
        help=f"write loss and seconds of each step, and the report; may be given several times: {KINDS} (default: nowhere)",
    )
    training.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where state and plan go (default: %(default)s)")


def _target(text: str) -> str:
    try:
        return check_target(text)
    except ContextError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {KINDS}") from error


def train(arguments: argparse.Namespace, output: Output) -> int:
    """Plans, trains, audits, verifies and saves; returns 1 if the audit or the numbers fail."""
    choice = started(arguments, output)
    config, tokenizer, data = _data(choice)
    with choice.context():
        step = choice.parallel(train_step)
        with output.waiting("making the model, split over the devices"):
            model, optimizer = step.init(
                lambda: create(config, seed=arguments.seed, split=choice.split, learning_rate=arguments.learning_rate), batch=choice.batch()
            )
            batch = next(data)
            plan = step.plan(model, optimizer, batch)
        output.show(plan)
        if jax.process_index() == 0:
            save_model(arguments.out, config, tokenizer)
        with _checkpoints(arguments) as checkpoints, Metrics(*arguments.metrics) as metrics:
            state = {"model": model, "optimizer": optimizer}
            done = checkpoints.restore(state).step
            for _ in range(done):
                next(data)
            losses, seconds = _run(
                *(step, state, data, range(done, arguments.steps)),
                *(partial(checkpoints.save, state=state, plan=plan), metrics, output),
            )
            checkpoints.wait()
            if checkpoints.latest_step() != max(done, arguments.steps):
                checkpoints.save(arguments.steps, state, plan=plan, force=True)
        return _check_and_save(step, (model, optimizer, batch), plan, losses, seconds, arguments.out, output)


def _checkpoints(arguments: argparse.Namespace) -> CheckpointManager:
    """Returns the manager for the state's checkpoints; without `--save-every` it replaces an old checkpoint once."""
    if arguments.save_every is None and jax.process_index() == 0 and (arguments.out / STATE).exists():
        shutil.rmtree(arguments.out / STATE)
    wait_for_all("spmdctx train")
    return CheckpointManager(arguments.out / STATE, every=max(1, arguments.steps) if arguments.save_every is None else arguments.save_every)


def _data(choice: Choice) -> tuple[DecoderConfig, WordTokenizer, Iterator[Batch]]:
    config = choice.decoder()
    text = read_text(choice.arguments.text)
    tokenizer = WordTokenizer.train(text, config.vocab_size)
    data = batches(tokenizer.encode(text), choice.arguments.batch_size, choice.seq, seed=choice.arguments.seed)
    return replace(config, max_seq=choice.seq), tokenizer, data


def _run(
    step: ParallelStep[..., Any],
    state: dict[str, Any],
    data: Iterator[Batch],
    numbers: range,
    save: Callable[[int], bool],
    metrics: Metrics,
    output: Output,
) -> tuple[list[float], float]:
    """Runs the steps of these numbers; returns their losses, and the median seconds of a step."""
    times: list[float] = []

    def one(index: int) -> float:
        start = time.perf_counter()
        loss = float(step(state["model"], state["optimizer"], next(data)))
        times.append(time.perf_counter() - start)
        metrics.write(numbers[index] + 1, loss=loss, step_s=times[-1])
        save(numbers[index] + 1)
        return loss

    output.title("Training")
    if numbers.start:
        output.say(f"goes on from the checkpoint of step {numbers.start}")
    losses = list(output.steps(len(numbers), one))
    if losses:
        metrics.report(step.report(), numbers[-1] + 1)
    seconds = sorted(times)[len(times) // 2] if times else 0.0
    if losses:
        output.say(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps, {1000 * seconds:.0f} ms each")
    return losses, seconds


def _check_and_save(
    step: ParallelStep[..., Any], args: tuple[Any, ...], plan: Plan, losses: list[float], seconds: float, out: Path, output: Output
) -> int:
    report = step.report() if losses else None
    if report is not None:
        output.title("Measured beside planned")
        output.show(report)
    with output.waiting("auditing the compiled program"):
        audit = step.audit(*args)
    output.title("Audit: planned against compiled")
    output.show(audit)
    with output.waiting("running the step on one device"):
        verify = step.verify(*args)
    output.title("Verification: against one device")
    output.show(verify)
    files = _save(plan, out)
    output.title("Written")
    output.say("  ".join(files.values()))
    output.finish(
        {
            "plan": plan_data(plan),
            "losses": losses,
            "step_s": seconds,
            "report": None if report is None else report.to_dict(),
            "audit": audit_data(audit),
            "verify": verify_data(verify),
            "files": files,
        }
    )
    return 0 if audit.ok and verify.ok else 1


def _save(plan: Plan, out: Path) -> dict[str, str]:
    files = {"plan": out / "plan.json", "page": out / "plan.html", "state": out / STATE}
    if jax.process_index() == 0:
        plan.save(files["plan"])
        plan.save_html(files["page"])
    return {name: str(path) for name, path in files.items()}
