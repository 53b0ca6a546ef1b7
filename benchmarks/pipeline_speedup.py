"""The searched plan of LLaMA2-70B on 64 devices against its hand strategy of 8 pipeline stages, by compiled stages and simulation.

    python -m benchmarks.pipeline_speedup [--machine tpu-v5p] [--layers 80] [--counts 2,4,8] [--schedules 1f1b,interleaved] [--cycles]

The hand strategy is that of MindFormers' pretrain_llama2_70b.yaml: dp=2 mp=4 pp=8, 1F1B, one sequence of 4,096 tokens per slice of the
batch and micro-batch, 128 micro-batches. The searched plan is the fastest one, by planned seconds, of all numbers of stages and
schedules that fits into the same memory. Each distinct program of both is compiled for the devices of one stage (v5p, or hosts of 8
H100), its judged seconds replace the planned ones, and the schedule is simulated. SpeedUp is the hand strategy's step over the
searched plan's. Micro-batches are of one size, so that batches differ by their number alone.

Two hand strategies stand in the table: as spmdctx runs it, which reduces gradients for each micro-batch, and as it would be if each
stage reduced them once in a step.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
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
    peak_bytes,
    planned_seconds,
    reduced_once,
    step_s,
)
from spmdctx.lowering.compile import JitOptions
from spmdctx.machine.presets import topology
from spmdctx.models import UNSPLIT, Split, abstract_program, preset
from spmdctx.models.training import train_step
from spmdctx.pipeline.run.compiled import jitted
from spmdctx.pipeline.schedule.named import Scheduler
from spmdctx.pipeline.stages.memory import memory_of

DEVICES, SEQ, MICRO_ROWS = 64, 4096, 2
HAND = (2, 4, 8)
"""Slices of the batch, slices of the weights, stages."""
MICRO_BATCHES = (32, 128)
SCHEDULES = {"1f1b": 1, "interleaved": 2, "interleaved 5": 5}
"""Chunks on each stage."""
PACKAGES = ("jax", "jaxlib", "flax", "libtpu", "jax-cuda12-plugin")


class Contender(NamedTuple):
    """A way to train: its name, its stages and chunks per stage, its entry, and the processor's seconds for its plan."""

    name: str
    stages: int
    rounds: int
    entry: Any
    seconds: float

    def planned_s(self, num_micro: int) -> float:
        """Planned seconds of a step."""
        if self.stages == 1:
            return float(self.entry.planned.plan.cost.total_s) * num_micro / MICRO_BATCHES[0]
        return self.step_s(planned_seconds(self.entry.pipeline), num_micro)

    def step_s(self, seconds: Mapping[str, float], num_micro: int) -> float:
        """Seconds of a step whose programs take these, by name."""
        return step_s(self.entry.pipeline, seconds, self.entry.environment.settings.topology, self.schedule(num_micro))

    def schedule(self, num_micro: int) -> Any:
        """The schedule of so many micro-batches."""
        return Scheduler("1f1b", self.rounds).schedule(self.stages, num_micro, [])

    @property
    def memory_bytes(self) -> int:
        """The planned peak of the fullest device."""
        if self.stages == 1:
            return int(self.entry.planned.plan.cost.memory_bytes)
        return max(own.peak_bytes for own in memory_of(self.entry.pipeline))


def contender(machine: str, layers: int, stages: int, schedule: str, split: Split = UNSPLIT) -> Contender:
    """Plans one way; strategies that are given make it the hand strategy."""
    config = replace(preset("llama2-70b"), num_layers=layers, dtype="bfloat16", remat=True)
    _, arguments = abstract_program(config, MICRO_ROWS * MICRO_BATCHES[0], SEQ, split=split)
    rounds = SCHEDULES[schedule]
    step = spmdctx.parallel(
        train_step,
        parallel_mode="auto_parallel" if split is UNSPLIT else "semi_auto_parallel",
        device_num=DEVICES,
        topology=machine,
        memory_bytes=topology(machine).memory_bytes,
        donate_argnums=(0, 1),
        pipeline_stages=stages,
        grad_accumulation_step=MICRO_BATCHES[0],
        pipeline_config={"pipeline_interleave": rounds > 1, "pipeline_scheduler": "1f1b"},
        **({"pipeline_segments": rounds} if rounds > 1 else {}),
        gradient_fp32_sync=False,
    )
    start = time.process_time()
    step.plan(*arguments)
    name = "hand" if split is not UNSPLIT else f"searched p={stages} {schedule if stages > 1 else ''}".strip()
    return Contender(name, stages, rounds, step._entry_of(arguments, {}), time.process_time() - start)


def contenders(machine: str, layers: int, counts: Sequence[int], schedules: Sequence[str]) -> Iterator[Contender]:
    """Every plan that the search compares."""
    for stages in counts:
        for schedule in schedules if stages > 1 else schedules[:1]:
            try:
                yield contender(machine, layers, stages, schedule)
            except spmdctx.InfeasibleError as error:
                print(f"  searched p={stages} {schedule}: {str(error).splitlines()[0]}", flush=True)


def judged_of(own: Contender, machine: str, folder: Path, *, codegen: bool) -> list[Judged]:
    """Judges the programs of a plan."""
    place = Machine.of(machine, DEVICES // own.stages)
    if own.stages > 1:
        return list(judged_programs(own.entry.pipeline, place, folder, codegen=codegen))
    planned, captured = own.entry.planned, own.entry.captured
    donated = [index for index, leaf in enumerate(captured.inputs) if leaf.donated]

    def lower(devices: Sequence[Any]) -> Any:
        made = jitted(planned, captured.jaxpr.in_avals, devices, JitOptions(donated))
        return made.run.lower(*made.types)

    cost = planned.plan.cost
    return [Judged("step", ("step",), cost.total_s, cost.memory_bytes, judged_apart(lower, place, folder, codegen=codegen))]


def main() -> int:
    """Prints the plans, the judged programs and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=("tpu-v5p", "h100"), default="tpu-v5p")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--counts", default="1,2,4,8", help="numbers of stages that the search compares")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help=f"some of {', '.join(SCHEDULES)}")
    parser.add_argument("--cycles", action="store_true", help="compile to the end, for the compiler's cycles")
    parser.add_argument("--cache", type=Path, default=Path(".judged"), metavar="FOLDER")
    arguments = parser.parse_args()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES if _is_there(name))
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {versions}")
    print(f"{arguments.machine}, {arguments.layers} layers", flush=True)
    data, model, stages = HAND
    hand = contender(arguments.machine, arguments.layers, stages, "1f1b", Split("megatron", data, model))
    counts = list(map(int, arguments.counts.split(",")))
    found = list(contenders(arguments.machine, arguments.layers, counts, arguments.schedules.split(",")))
    for own in (hand, *found):
        times = ", ".join(f"m={micro} {own.planned_s(micro):.3f} s" for micro in MICRO_BATCHES)
        print(f"  {own.name:<26} planned {times}, {own.memory_bytes / 2**30:.1f} GiB, {own.seconds:.0f} s of processor time", flush=True)
    room = topology(arguments.machine).memory_bytes
    fitting = [own for own in found if own.memory_bytes <= room]
    estimate = "cycles_s" if arguments.cycles else "roofline_s"
    rows: dict[str, list[Judged]] = {}
    for num_micro in MICRO_BATCHES:
        chosen = min(fitting, key=lambda own: own.planned_s(num_micro))
        for own in (hand, chosen):
            if own.name not in rows:
                rows[own.name] = judged_of(own, arguments.machine, arguments.cache, codegen=arguments.cycles)
                print(_details(own, rows[own.name], estimate), flush=True)
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
        return float(getattr(rows[0].judgement, estimate)) * num_micro / MICRO_BATCHES[0]
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
