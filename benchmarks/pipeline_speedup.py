"""The searched plan of LLaMA2-70B on 64 devices against its hand strategy of 8 pipeline stages, by compiled stages and simulation.

    python -m benchmarks.pipeline_speedup [--machine tpu-v5p] [--layers 80] [--micro-batches 32,128] [--cycles]

The hand strategy is that of MindFormers' pretrain_llama2_70b.yaml: dp=2 mp=4 pp=8, 1F1B, one sequence of 4,096 tokens per slice of the
batch and micro-batch, 128 micro-batches. The searched plan is what `auto_pipeline` chooses of up to 8 stages and all schedules for so
many micro-batches, with no other option. Each distinct program of both is compiled for the devices of one stage (v5p, or hosts of 8
H100), its judged seconds replace the planned ones, and the schedule is simulated. SpeedUp is the hand strategy's step over the
searched plan's. Micro-batches are of one size, so that batches differ by their number alone.

Two hand strategies stand in the table: as spmdctx runs it, and as it would be if each stage reduced gradients once in a step.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import spmdctx
from benchmarks.pipeline_judge import (
    Judged,
    Machine,
    judged_apart,
    judged_programs,
    judged_seconds,
    lowers,
    peak_bytes,
    planned_seconds,
    reduced_once,
    step_s,
)
from spmdctx.lowering.compile import JitOptions
from spmdctx.models import UNSPLIT, Split, abstract_program, preset
from spmdctx.models.training import train_step
from spmdctx.pipeline.schedule.named import Scheduler
from spmdctx.pipeline.stages.memory import memory_of

DEVICES, SEQ, MICRO_ROWS = 64, 4096, 2
HAND = (2, 4, 8)
"""Slices of the batch, slices of the weights, stages."""
PACKAGES = ("jax", "jaxlib", "flax", "libtpu", "jax-cuda12-plugin")


class Contender(NamedTuple):
    """A way to train: its name, its stages, the micro-batches it was planned for, its entry, and the processor's seconds for its plan."""

    name: str
    stages: int
    num_micro: int
    entry: Any
    seconds: float

    def planned_s(self, num_micro: int) -> float:
        """Planned seconds of a step."""
        if self.stages == 1:
            return float(self.entry.planned.plan.cost.total_s) * num_micro / self.num_micro
        return self.step_s(planned_seconds(self.entry.pipeline), num_micro)

    def step_s(self, seconds: Mapping[str, float], num_micro: int) -> float:
        """Seconds of a step whose programs take these, by name."""
        topology = self.entry.environment.settings.topology
        other = None if num_micro == self.num_micro else Scheduler("1f1b").schedule(self.stages, num_micro, [])
        return step_s(self.entry.pipeline, seconds, topology, other)

    @property
    def memory_bytes(self) -> int:
        """The planned peak of the fullest device."""
        if self.stages == 1:
            return int(self.entry.planned.plan.cost.memory_bytes)
        return max(own.peak_bytes for own in memory_of(self.entry.pipeline))


def contender(machine: str, layers: int, num_micro: int, split: Split = UNSPLIT) -> Contender:
    """Plans one way; strategies that are given make it the hand strategy."""
    config = replace(preset("llama2-70b"), num_layers=layers, dtype="bfloat16", remat=True)
    _, arguments = abstract_program(config, MICRO_ROWS * num_micro, SEQ, split=split)
    is_searched = split is UNSPLIT
    step = spmdctx.parallel(
        train_step,
        parallel_mode="auto_parallel" if is_searched else "semi_auto_parallel",
        device_num=DEVICES,
        topology=machine,
        donate_argnums=(0, 1),
        pipeline_stages=HAND[2],
        grad_accumulation_step=num_micro,
        gradient_fp32_sync=False,
        **({"auto_pipeline": True} if is_searched else {"pipeline_config": {"pipeline_scheduler": "1f1b"}}),
    )
    start = time.process_time()
    step.plan(*arguments)
    entry = step._entry_of(arguments, {})
    pipeline = getattr(entry, "pipeline", None)
    stages = pipeline.schedule.num_stages if pipeline is not None else 1
    return Contender(_name(entry) if is_searched else "hand", stages, num_micro, entry, time.process_time() - start)


def _name(entry: Any) -> str:
    schedule = entry.pipeline.schedule if hasattr(entry, "pipeline") else None
    if schedule is None:
        return "searched p=1"
    return f"searched p={schedule.num_stages} {schedule.name}, {schedule.num_chunks // schedule.num_stages} chunks a stage"


def judged_of(own: Contender, machine: str, folder: Path, *, codegen: bool) -> list[Judged]:
    """Judges the programs of a plan."""
    place = Machine.of(machine, DEVICES // own.stages)
    if own.stages > 1:
        return list(judged_programs(own.entry.pipeline, place, folder, codegen=codegen))
    planned, captured = own.entry.planned, own.entry.captured
    donated = [index for index, leaf in enumerate(captured.inputs) if leaf.donated]

    lower = lowers(planned, captured.jaxpr.in_avals, JitOptions(donated))
    cost = planned.plan.cost
    return [Judged("step", ("step",), cost.total_s, cost.memory_bytes, judged_apart(lower, place, folder, codegen=codegen))]


def main() -> int:
    """Prints the plans, the judged programs and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=("tpu-v5p", "h100"), default="tpu-v5p")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--micro-batches", default="32,128")
    parser.add_argument("--cycles", action="store_true", help="compile to the end, for the compiler's cycles")
    parser.add_argument("--cache", type=Path, default=Path(".judged"), metavar="FOLDER")
    arguments = parser.parse_args()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES if _is_there(name))
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {versions}")
    print(f"{arguments.machine}, {arguments.layers} layers", flush=True)
    hand = contender(arguments.machine, arguments.layers, HAND[2] * 4, Split("megatron", *HAND[:2]))
    estimate = "cycles_s" if arguments.cycles else "roofline_s"
    rows = {hand.name: judged_of(hand, arguments.machine, arguments.cache, codegen=arguments.cycles)}
    print(_details(hand, rows[hand.name], estimate), flush=True)
    for num_micro in map(int, arguments.micro_batches.split(",")):
        chosen = contender(arguments.machine, arguments.layers, num_micro)
        for own in (hand, chosen):
            planned = f"planned {own.planned_s(num_micro):.3f} s, {own.memory_bytes / 2**30:.1f} GiB"
            print(f"m={num_micro} {own.name}: {planned}, {own.seconds:.0f} s of processor time", flush=True)
        print(*(note for note in chosen.entry.plan.notes if note.startswith("auto_pipeline")), sep="\n", flush=True)
        rows[chosen.name] = judged_of(chosen, arguments.machine, arguments.cache, codegen=arguments.cycles)
        print(_details(chosen, rows[chosen.name], estimate), flush=True)
        print(_line(hand, chosen, rows, num_micro, estimate), flush=True)
    return 0


def _is_there(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def _details(own: Contender, rows: Sequence[Judged], estimate: str) -> str:
    lines = [f"{own.name}: program, how many are alike, planned ms, judged ms, planned / judged, waiting ms, GiB"]
    for row in rows:
        made, seconds = row.judgement, getattr(row.judgement, estimate)
        lines.append(
            f"  {row.name:<12} {len(row.alike):>3} {row.planned_s * 1e3:9.2f} {seconds * 1e3:9.2f} {row.planned_s / seconds:6.3f} "
            f"{made.roofline_exposed_s * 1e3:8.2f} {made.peak_bytes / 2**30:6.1f}"
        )
    return "\n".join(lines)


def _judged_s(own: Contender, rows: Sequence[Judged], num_micro: int, estimate: str, *, once: bool = False) -> float:
    if own.stages == 1:
        return float(getattr(rows[0].judgement, estimate)) * num_micro / own.num_micro
    return own.step_s(reduced_once(rows, HAND[0], estimate) if once else judged_seconds(rows, estimate), num_micro)


def _judged_bytes(own: Contender, rows: Sequence[Judged]) -> int:
    return peak_bytes(own.entry.pipeline, rows) if own.stages > 1 else rows[0].judgement.peak_bytes


def _line(hand: Contender, chosen: Contender, rows: dict[str, list[Judged]], num_micro: int, estimate: str) -> str:
    hand_s, own_s = (_judged_s(own, rows[own.name], num_micro, estimate) for own in (hand, chosen))
    once_s = _judged_s(hand, rows[hand.name], num_micro, estimate, once=True)
    peaks = ", ".join(f"{own.name} {_judged_bytes(own, rows[own.name]) / 2**30:.1f} GiB" for own in (hand, chosen))
    planned = hand.planned_s(num_micro) / chosen.planned_s(num_micro)
    return (
        f"batch {MICRO_ROWS * num_micro}, m={num_micro}: {chosen.name}, SpeedUp {hand_s / own_s:.1%} (planned {planned:.1%}; "
        f"{once_s / own_s:.1%} of a hand strategy that reduces once), hand {hand_s:.3f} s ({once_s:.3f}), searched {own_s:.3f} s; "
        f"judged peaks: {peaks}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
