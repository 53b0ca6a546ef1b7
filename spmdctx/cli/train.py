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
from spmdctx.checkpoint.files import checked_directory
from spmdctx.cli.generate import MODEL, STATE, save_model
from spmdctx.cli.output import Output
from spmdctx.cli.program import Choice, started
from spmdctx.models import Batch, DecoderConfig, WordTokenizer, batches, create, read_text, train_step
from spmdctx.plan.plan import Plan
from spmdctx.step.processes import wait_for_all
from spmdctx.step.report.metrics import Metrics
from spmdctx.step.step import ParallelStep
from spmdctx.wording.files import check_writable
from spmdctx.wording.targets import metrics_target

PLAN, PAGE = "plan.json", "plan.html"
"""Files that `train` writes last."""


def train(arguments: argparse.Namespace, output: Output) -> int:
    """Plans, trains, audits, verifies and saves; returns 1 if the audit or the numbers fail."""
    choice = started(arguments, output)
    config, tokenizer, data = _data(choice)
    _check_places(arguments)  # before the planning, which takes longer
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


def _check_places(arguments: argparse.Namespace) -> None:
    """Refuses, on the first process, files and folders that cannot be written."""
    if jax.process_index():
        return
    state = checked_directory(arguments.out / STATE)
    metrics = [Path(target.where) for target in map(metrics_target, arguments.metrics) if target is not None and target.kind == "lines"]
    for file in (arguments.out / PLAN, arguments.out / PAGE, state / MODEL, *(file for file in metrics if not file.exists())):
        check_writable(file)


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
    output.finish_with(
        "train",
        {"plan": plan.to_dict(), "losses": losses, "step_s": seconds, "report": report, "audit": audit, "verify": verify, "files": files},
    )
    return 0 if audit.ok and verify.ok else 1


def _save(plan: Plan, out: Path) -> dict[str, str]:
    files = {"plan": out / PLAN, "page": out / PAGE, "state": out / STATE}
    if jax.process_index() == 0:
        plan.save(files["plan"])
        plan.save_html(files["page"])
    return {name: str(path) for name, path in files.items()}
