"""A step on a pipeline, specialized to one set of shapes and one context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from spmdctx.errors import ContextError, UnsupportedError
from spmdctx.machine.xla.collectives.ways import ways_of
from spmdctx.pipeline.assemble import assembled
from spmdctx.pipeline.audit.report import Built, audit_pipeline
from spmdctx.pipeline.capture.carrier import PipelinedStep
from spmdctx.pipeline.plan import PipelinePlan
from spmdctx.pipeline.run.dry import dry_counts
from spmdctx.pipeline.run.lowered import LoweredPipeline
from spmdctx.pipeline.run.program import PipelineProgram
from spmdctx.pipeline.schedule.orders import one_f_one_b
from spmdctx.pipeline.stages.whole import PlannedPipeline, plan_pipeline
from spmdctx.step.entry import Entry
from spmdctx.step.pipelined.saved import loaded_pipeline, save_pipeline
from spmdctx.step.planning.planner import plan_program
from spmdctx.trace.scope.environment import Environment
from spmdctx.trace.scope.mesh import auto_axes, without_one_device
from spmdctx.wording import counted


class _Program:
    """A pipeline's program with the attributes of a single one."""

    def __init__(self, program: PipelineProgram) -> None:
        self.jitted = program
        self.in_shardings: tuple[NamedSharding, ...] = program.in_shardings
        self.out_shardings: tuple[NamedSharding, ...] = program.out_shardings
        self.mesh = program.meshes[0]


class PipelinedEntry(Entry):
    """A captured step with the plan of its pipeline."""

    def __init__(self, step: PipelinedStep, environment: Environment, notes: Sequence[str] = ()) -> None:
        super().__init__(replace(step.captured, notes=(*step.captured.notes, *notes)), environment, notes)
        self._step = step

    @cached_property
    def pipeline(self) -> PlannedPipeline:
        """The planned programs of all stages."""
        settings = self.environment.settings
        saved = loaded_pipeline(self._step, settings)
        if saved is not None:
            return saved
        stages = settings.context.pipeline_stages
        return plan_pipeline(self._step, settings, stages, lambda _, count: one_f_one_b(stages, count), plan_program)

    @cached_property
    def planned(self) -> Any:
        """The plan; errors of planning, and of the files of the context, belong to the call that asks for it."""
        save_pipeline(self._plan, self.environment.settings)
        return self.pipeline

    @property
    def plan(self) -> Any:
        """The plan of the pipeline."""
        return self._plan

    @cached_property
    def _plan(self) -> PipelinePlan:
        settings = self.environment.settings
        return assembled(self.pipeline, settings.context.parallel_mode, settings.topology.device, (*self._notes, *self._not_reused()))

    def _not_reused(self) -> list[str]:
        """Returns a note on donated arrays whose memory stays as it is; scalars are too small to be named."""
        reused = sum(len(one.donated) for programs in self.pipeline.rounds for one in programs)
        left = sum(leaf.donated and math.prod(leaf.shape) > 1 for leaf in self.captured.inputs) - reused
        text = counted(left, "donated array")
        return [f"The memory of {text} is not reused: a pipeline reuses that of state which is renewed after the loss."] if left else []

    @property
    def peak_bytes(self) -> int:
        """The planned peak of the fullest stage, per device."""
        return self._plan.memory_bytes

    @property
    def regions(self) -> tuple[()]:
        """None: a loss with a shard_map is not cut."""
        return ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the first call warns of."""
        return (*self.environment.warnings, *self.captured.warnings)

    @cached_property
    def spans_processes(self) -> bool:
        """False: a pipeline over several processes is refused."""
        if jax.process_count() > 1:
            raise UnsupportedError("A pipeline runs in one process so far.", fix="leave pipeline_stages out")
        return False

    @cached_property
    def on_several_devices(self) -> bool:
        """True: each stage has devices of its own."""
        return True

    @cached_property
    def program(self) -> Any:
        """The programs of all stages, as one function of flat leaves.

        Raises:
            ContextError: fewer devices than the plan is for.
        """
        needed, devices = self.plan.num_devices, self.environment.devices
        if len(devices) < needed:
            raise ContextError(f"The plan is for {needed} devices, and {len(devices)} are there.", fix="use step.plan, or fewer devices")
        return _Program(PipelineProgram(self.pipeline, devices[:needed]))

    @cached_property
    def _inner(self) -> Any:
        """The program, which refuses tracers by name."""
        return self.program

    @cached_property
    def call(self) -> Any:
        """The program, to be run."""
        self.environment.check_running()
        return self.program.jitted

    @cached_property
    def direct(self) -> None:
        """None: a pipeline has no shorter way."""
        return None

    def lower(self, leaves: Sequence[Any]) -> Any:
        """Lowers a program for each stage and kind of task; calls share what is compiled, whatever leaves they bring."""
        with auto_axes(), without_one_device(self.plan.num_devices):
            return LoweredPipeline({name: one.lower() for name, one in self.program.jitted.lowerable.items()})

    def audit(self, leaves: Sequence[Any]) -> Any:
        """Compiles all programs, and compares them and what the last call did with the plan."""
        program: PipelineProgram = self.program.jitted
        counts = program.counts
        done = dry_counts(self.pipeline) if counts is None else counts
        built = Built(self.lower(leaves).compile(), program.meshes, done, counts is not None)
        return audit_pipeline(self.pipeline, self._plan, built, lambda own: ways_of(value.dtype for value in own.graph.values))
