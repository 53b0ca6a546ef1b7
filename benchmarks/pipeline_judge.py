"""Judges a planned pipeline: each distinct program of its stages is compiled and judged, and the schedule runs with those seconds.

Stages in the middle of a model are alike, so that few programs are distinct. A program is compiled in a process of its own, for the
devices of one stage; on TPU it ends as soon as the compiler has scheduled it, so that it tells no cycles unless `codegen` is set. What
crosses between stages takes the machine model's seconds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.judge import Judgement, judge_text
from benchmarks.judge_compile import compile_gpu, compile_program, key_of
from benchmarks.judge_links import H100_HOSTS, Hosts, Slice, slice_of
from spmdctx.context.layers import current_context
from spmdctx.lowering.compile import JitOptions
from spmdctx.lowering.compile_only import gpu_devices, tpu_devices
from spmdctx.lowering.compile_options import Options
from spmdctx.lowering.program_options import fusion_options, limit_options
from spmdctx.machine.devices import default_topology
from spmdctx.machine.topology import Topology
from spmdctx.pipeline.run.compiled import compiled_chunk, jitted
from spmdctx.pipeline.schedule.simulate import simulate
from spmdctx.pipeline.schedule.tasks import Costs, Kind, Schedule, cost_of
from spmdctx.pipeline.stages.hops import hops_of
from spmdctx.pipeline.stages.memory import memory_of
from spmdctx.pipeline.stages.whole import PlannedPipeline

MODULE = "benchmarks.pipeline_judge"
SLICES = {8: "v5p:2x2x2", 16: "v5p:2x2x4", 32: "v5p:2x4x4", 64: "v5p:4x4x4"}


class Machine(NamedTuple):
    """Devices of one stage that exist only for the compiler: a slice such as "v5p:2x2x2", or "h100" with so many GPUs."""

    topology: str
    num_devices: int

    @classmethod
    def of(cls, name: str, num_devices: int) -> Machine:
        """The machine of a stage on "tpu-v5p" or "h100"."""
        return cls("h100" if name == "h100" else SLICES[num_devices], num_devices)

    @property
    def is_gpu(self) -> bool:
        """Whether these are GPUs."""
        return self.topology == "h100"

    def devices(self) -> Sequence[Any]:
        """The devices."""
        return gpu_devices(self.num_devices) if self.is_gpu else tpu_devices(self.topology)

    def links(self, devices: Sequence[Any]) -> Slice | Hosts:
        """What joins them."""
        return replace(H100_HOSTS, num_devices=self.num_devices) if self.is_gpu else slice_of(self.topology, devices)


class Judged(NamedTuple):
    """A program by its name, with those that are alike: what its plan foresees, and how the compiled program is judged."""

    name: str
    alike: tuple[str, ...]
    planned_s: float
    planned_bytes: int
    judgement: Judgement


Lower = Callable[[Sequence[Any]], jax.stages.Lowered]
"""Lowers a program for the devices of a stage."""


class Program(NamedTuple):
    """A program of a pipeline: its plan, the states that were chosen for it, and what lowers it."""

    plan: Any
    assignment: Any
    lower: Lower


def programs_of(pipeline: PlannedPipeline) -> dict[str, Program]:
    """Every program of a planned pipeline by its name; what divides the batch and joins results is left out."""
    found = {}
    for chunk in pipeline.planned:
        for kind, task in chunk.tasks.items():
            found[task.name] = Program(task.planned.plan, task.planned.assignment, _task_lower(chunk, kind))
    for task in pipeline.reductions.values():
        plan = task.planned
        found[task.name] = Program(
            plan.plan, plan.assignment, lowers(plan, task.program.jaxpr.in_avals, JitOptions(name=f"pipeline_{task.name}"))
        )
    for one in (one for programs in pipeline.rounds for one in programs):
        found[one.name] = Program(one.planned.plan, one.planned.assignment, _after_lower(one))
    return found


def _task_lower(chunk: Any, kind: Kind) -> Lower:
    def lower(devices: Sequence[Any]) -> jax.stages.Lowered:
        return compiled_chunk(chunk, devices, options_of=_options_of).lowerable[kind].lower()

    return lower


def _after_lower(one: Any) -> Lower:
    return lowers(one.planned, one.program.jaxpr.in_avals, JitOptions(one.donated, name=f"pipeline_{one.name}"))


def lowers(planned: Any, avals: Sequence[Any], options: JitOptions) -> Lower:
    """What lowers a planned program with the compile options of steps, for operands of these types."""

    def lower(devices: Sequence[Any]) -> jax.stages.Lowered:
        made = jitted(planned, avals, devices, options._replace(compiler_options=_options_of(planned, devices)))
        assert made.run is not None, "all devices are here"
        return made.run.lower(*made.types)

    return lower


def _options_of(planned: Any, devices: Sequence[Any]) -> Options:
    memory = default_topology(devices[0])[0].memory_bytes
    return {**limit_options(planned, devices, memory, None), **fusion_options(planned, devices, current_context())}


def judged_programs(pipeline: PlannedPipeline, machine: Machine, folder: Path, *, codegen: bool = False) -> Iterator[Judged]:
    """Judges each distinct program; programs are alike if one plan was made for them."""
    alike: dict[int, list[str]] = {}
    programs = programs_of(pipeline)
    for name, one in programs.items():
        alike.setdefault(id(one.assignment), []).append(name)
    for names in alike.values():
        one = programs[names[0]]
        judgement = judged_apart(one.lower, machine, folder, codegen=codegen)
        yield Judged(names[0], tuple(names), one.plan.cost.total_s, one.plan.cost.memory_bytes, judgement)


def judged_apart(lower: Lower, machine: Machine, folder: Path, *, codegen: bool = False) -> Judgement:
    """Judges a program in a process of its own."""

    def judged_text(scratch: Path) -> str:
        return json.dumps(judged(lower, machine, folder, scratch, codegen=codegen).to_dict())

    return Judgement.from_dict(json.loads(run_apart(judged_text)))


def run_apart(work: Callable[[Path], str]) -> str:
    """What `work` returns, given a folder, in a process of its own: it leaves the compiler where that is, also in the midst of its code."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result"
        worker = os.fork()
        if not worker:
            try:
                result.write_text(work(Path(scratch)))
            except Exception as error:  # the parent finds no result
                print(f"{type(error).__name__}: {error}"[:400], file=sys.stderr)
            finally:
                os._exit(0)
        os.waitpid(worker, 0)
        return result.read_text()


def judged(lower: Lower, machine: Machine, folder: Path, scratch: Path, *, codegen: bool = True) -> Judgement:
    """Judges a program in this process; without `codegen`, a thread is left that still compiles for TPU."""
    devices = machine.devices()
    lowered = lower(devices)
    place = folder / f"{key_of({'program': lowered.as_text(), 'machine': machine}, MODULE, codegen)}.json"
    if place.exists():
        text, peak = json.loads(place.read_text())
    else:
        text, peak = compile_gpu(lowered) if machine.is_gpu else compile_program(lowered, scratch / "dump", codegen=codegen)
        folder.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps([text, peak]))
    return judge_text(text, machine.links(devices), peak)


def step_s(pipeline: PlannedPipeline, seconds: Mapping[str, float], topology: Topology, schedule: Schedule | None = None) -> float:
    """Seconds of a step whose programs take these, by name.

    Args:
        pipeline: the planned pipeline.
        seconds: of each program.
        topology: the machine, which prices what crosses.
        schedule: for another number of micro-batches of the same size.
    """
    schedule = schedule or pipeline.schedule
    costs = [Costs(*(seconds[chunk.tasks[kind].name] if kind in chunk.tasks else 0.0 for kind in Kind)) for chunk in pipeline.planned]
    run = simulate(schedule, cost_of(costs), hops_of(pipeline.planned, schedule.stage_of, topology))
    turns: dict[str, float] = {}
    for task in pipeline.reductions.values():
        turn = task.name.partition("_")[0]
        turns[turn] = max(turns.get(turn, 0.0), seconds[task.name])
    after_s = sum(max((seconds[one.name] for one in programs), default=0.0) for programs in pipeline.rounds)
    return run.makespan_s + sum(turns.values()) + after_s


def planned_seconds(pipeline: PlannedPipeline) -> dict[str, float]:
    """The planned seconds of every program."""
    return {name: one.plan.cost.total_s for name, one in programs_of(pipeline).items()}


def judged_seconds(rows: Sequence[Judged], estimate: str) -> dict[str, float]:
    """The judged seconds of every program."""
    return {name: getattr(row.judgement, estimate) for row in rows for name in row.alike}


def reduced_once(rows: Sequence[Judged], data: int, estimate: str) -> dict[str, float]:
    """The judged seconds if gradients were reduced over the `data` slices of the batch once in a step, and not for each micro-batch.

    A stage then waits for these reductions after the loss.
    """
    found = judged_seconds(rows, estimate)
    waits = {
        name: sum(one["exposed_s"] for one in row.judgement.traffic if one["group_size"] == data and one["kind"] == "all_reduce")
        for row in rows
        for name in row.alike
        if name.startswith("backward")
    }
    once = max(waits.values(), default=0.0)
    after = {name: seconds + once for name, seconds in found.items() if name.startswith("after0")}
    return found | {name: found[name] - wait for name, wait in waits.items()} | after


def peak_bytes(pipeline: PlannedPipeline, rows: Sequence[Judged]) -> int:
    """The compiled peak of the fullest stage: what its plan holds when a program begins, and what the program takes beside its operands."""
    programs = programs_of(pipeline)
    beside = {name: row.judgement.peak_bytes - _operand_bytes(programs[name].plan) for row in rows for name in row.alike}
    return max(live + beside[name] for own in memory_of(pipeline) for name, live in own.live_bytes.items())


def _operand_bytes(plan: Any) -> int:
    return sum(leaf.local_bytes(plan.logical_mesh) for leaf in plan.inputs)
