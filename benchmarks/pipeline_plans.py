"""Plans of Llama's decoders on pipelines: `python -m benchmarks.pipeline_plans [--models llama2-70b] [--stages 1,2,4,8] [--auto]`.

The decoders have all of their layers, unrolled and checkpointed, bfloat16 and a head of their own. For each number of stages: the
processor's seconds for the cut alone and for the whole plan without tracing, the longest stage over the mean in planned seconds, the
step and the waiting share of its schedule, how far that is above the bounds that are proven for its chunks and for any cut, and above
the estimated one, and the memory of the fullest stage. With `--auto`, one plan of up to the largest number of stages, whose schedule is
chosen too, and the note on the choice. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import spmdctx
from spmdctx.gradients import capture as gradients
from spmdctx.models import abstract_program, preset
from spmdctx.models.training import train_step
from spmdctx.pipeline.capture import carrier
from spmdctx.pipeline.cut.choose import choose_cuts
from spmdctx.pipeline.stages.staging import cut_loss
from spmdctx.step.pipelined import auto, make
from spmdctx.trace.collector import no_garbage_collection

MODELS = ("llama2-7b", "llama2-13b", "llama2-70b")
COLUMNS = ("model", "stages", "trace s", "cut s", "plan s", "longest/mean", "step s", "idle", "of chunks", "of cuts", "estimated", "GiB")


_traced: list[float] = []
"""The processor's seconds of each trace."""


def _timed(capture: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        start = time.process_time()
        found = capture(*arguments)
        _traced.append(time.process_time() - start)
        return found

    return run


def main() -> int:
    """Plans what the arguments choose, and prints a row for each plan."""
    make.capture_step = auto.capture_step = _timed(gradients.capture_step)
    carrier.capture_pipelined = auto.capture_pipelined = _timed(carrier.capture_pipelined)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--stages", default="1,2,4,8", help="numbers of stages (default: 1,2,4,8)")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--batch", type=int, default=128, help="sequences of 4,096 tokens")
    parser.add_argument("--micro", type=int, default=32, help="micro-batches")
    parser.add_argument("--topology", default="tpu-v5p")
    parser.add_argument("--auto", action="store_true", help="auto_pipeline=True up to the largest of the stages")
    parser.add_argument("--donate", action="store_true", help="the step gives the memory of its state to the next one")
    arguments = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {arguments.topology}{', donated' if arguments.donate else ''}"
    print(f"{datetime.date.today()}, jax {jax.__version__}, {machine}")
    numbers, models = sorted(map(int, arguments.stages.split(","))), arguments.models.split(",")
    if arguments.auto:
        for model in models:
            _print_choice(model, numbers[-1], arguments)
        return 0
    print(" | ".join(COLUMNS), flush=True)
    total = tracing = 0.0
    for model in models:
        for stages in numbers:
            row, seconds = _row(model, stages, arguments)
            total, tracing = total + seconds, tracing + _traced[-1]
            print(" | ".join(row), flush=True)
    print(f"{total:.1f} s of processor time, {tracing:.1f} s of them for tracing")
    return 0


def _print_choice(model: str, stages: int, arguments: Any) -> None:
    step, args = _step(model, stages, arguments)
    _traced.clear()
    start = time.process_time()
    plan: Any = step.plan(*args)
    seconds = time.process_time() - start - sum(_traced)
    # A plan without stages has no schedule.
    step_s = getattr(plan, "step_s", None) or plan.cost.total_s
    print(f"{model}: {sum(_traced):.1f} s of tracing, {seconds:.1f} s of planning, {step_s:.2f} s a step")
    print(next(note for note in plan.notes if note.startswith("auto_pipeline chose")), flush=True)


def _step(model: str, stages: int, arguments: Any) -> tuple[Any, Any]:
    config = replace(preset(model), dtype="bfloat16", remat=True)
    _, args = abstract_program(config, arguments.batch, 4096)
    step = spmdctx.parallel(
        train_step,
        parallel_mode="auto_parallel",
        device_num=arguments.devices,
        topology=arguments.topology,
        pipeline_stages=stages,
        auto_pipeline=arguments.auto,
        grad_accumulation_step=arguments.micro,
        donate_argnums=(0, 1) if arguments.donate else (),
    )
    return step, args


def _row(model: str, stages: int, arguments: Any) -> tuple[Sequence[str], float]:
    step, args = _step(model, stages, arguments)
    start = time.process_time()
    plan: Any = step.plan(*args)
    seconds = time.process_time() - start
    if stages == 1:
        gap = "-" if plan.gap is None else f"{plan.gap:.1%}"
        trace_s = _traced[-1]
        figures = ("1", "-", f"{plan.cost.total_s:.2f}", "0 %", "-", gap, "-", f"{plan.cost.memory_bytes / 2**30:.1f}")
        return (model, figures[0], f"{trace_s:.1f}", "-", f"{seconds - trace_s:.1f}", *figures[1:]), seconds
    entry: Any = step._entry_of(args, {})
    trace_s, cut_s = _traced[-1], _cut_s(entry, stages)
    gaps = [f"{plan.simulation.makespan_s / bound_s - 1:.1%}" if bound_s else "-" for bound_s in entry.pipeline.bounds]
    times = (f"{trace_s:.1f}", f"{cut_s:.2f}", f"{seconds - trace_s:.1f}", f"{plan.imbalance:.3f}")
    return (
        model,
        str(stages),
        *times,
        f"{plan.step_s:.2f}",
        f"{plan.simulation.bubble:.1%}",
        *gaps,
        f"{plan.memory_bytes / 2**30:.1f}",
    ), seconds


def _cut_s(entry: Any, stages: int) -> float:
    """Returns the seconds for the line, its prices and the cuts, without garbage collection, as planning has it."""
    start = time.process_time()
    with no_garbage_collection():
        loss = cut_loss(entry._step, entry.environment.settings)
        choose_cuts([sum(own) for own in loss.seconds], loss.line.crossing, stages)
    return time.process_time() - start


if __name__ == "__main__":
    raise SystemExit(main())
