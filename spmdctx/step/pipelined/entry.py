"""A step on a pipeline, specialized to one set of shapes and one context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn

import jax
from jax.sharding import NamedSharding

from spmdctx.errors import ContextError, UnsupportedError
from spmdctx.pipeline.assemble import assembled
from spmdctx.pipeline.capture.carrier import PipelinedStep
from spmdctx.pipeline.plan import PipelinePlan
from spmdctx.pipeline.run.program import PipelineProgram
from spmdctx.pipeline.search.plan import plan_pipeline
from spmdctx.pipeline.stages.notes import whole_backward
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.step.entry import Entry
from spmdctx.step.pipelined.scheduler import scheduler_of
from spmdctx.step.planning.planner import plan_program
from spmdctx.trace.scope.environment import Environment
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
        stages, scheduler = settings.context.pipeline_stages, scheduler_of(settings.context)
        return plan_pipeline(
            self._step,
            settings,
            scheduler.num_chunks(stages),
            lambda costs, count: scheduler.schedule(stages, count, costs),
            plan_program,
        )

    @cached_property
    def planned(self) -> Any:
        """The plan; errors of planning belong to the call that asks for it."""
        return self.pipeline

    @property
    def plan(self) -> Any:
        """The plan of the pipeline."""
        return self._plan

    @cached_property
    def _plan(self) -> PipelinePlan:
        settings = self.environment.settings
        donated = sum(leaf.donated for leaf in self.captured.inputs)
        notes = [f"The pipeline's programs reuse no memory of {counted(donated, 'donated array')} so far."] if donated else []
        return assembled(
            self.pipeline, settings.context.parallel_mode, settings.topology.device, (*self._notes, *notes, *whole_backward(self.pipeline))
        )

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

    def lower(self, leaves: Sequence[Any]) -> NoReturn:
        """Refuses: a pipeline is many programs."""
        raise UnsupportedError("A pipeline is lowered as a program for each stage and kind of task.", fix="leave pipeline_stages out")
