"""A step on a pipeline, specialized to one set of shapes and one context."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from spmdctx.communication.transfers import can_transfer
from spmdctx.errors import CommunicationError, ContextError, UnsupportedError
from spmdctx.lowering.compile_options import Options
from spmdctx.lowering.program_options import fusion_options, limit_options
from spmdctx.machine.xla.collectives.ways import ways_of
from spmdctx.pipeline.assemble import assembled
from spmdctx.pipeline.audit.report import Built, audit_pipeline
from spmdctx.pipeline.capture.around import SPREAD
from spmdctx.pipeline.capture.carrier import PipelinedStep
from spmdctx.pipeline.plan import PipelinePlan
from spmdctx.pipeline.run.lowered import LoweredPipeline
from spmdctx.pipeline.run.program import PipelineProgram
from spmdctx.pipeline.search.plan import plan_pipeline
from spmdctx.pipeline.stages.notes import crossing_after, selected_branches, undivided_batch, whole_backward, without_buckets
from spmdctx.pipeline.stages.plans import Planned
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.step.agreement import agree_on_plan, spans_processes
from spmdctx.step.entry import Entry
from spmdctx.step.pipelined.insight import PipelineReplanner
from spmdctx.step.pipelined.saved import loaded_pipeline, save_pipeline
from spmdctx.step.pipelined.scheduler import scheduler_of
from spmdctx.step.planning.notes import unmatched_patterns
from spmdctx.step.planning.planner import plan_program
from spmdctx.step.processes import from_owners, is_of_one_process, is_spread, on_all
from spmdctx.trace.capture.arguments import Call, Static
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.capture.structure import Read
from spmdctx.trace.capture.target import Target
from spmdctx.trace.scope.environment import Environment
from spmdctx.trace.scope.mesh import auto_axes, has_explicit_type, has_mesh_type, without_one_device
from spmdctx.wording import counted, mesh_text
from spmdctx.wording.phases import log_of
from spmdctx.wording.user_warnings import warn_user

_LOG = log_of("plan")


class _Program:
    """A pipeline's program with the attributes of a single one."""

    def __init__(self, program: PipelineProgram) -> None:
        self.jitted = program
        self.in_shardings: tuple[NamedSharding, ...] = program.in_shardings
        self.mesh = program.mesh

    @property
    def out_shardings(self) -> tuple[NamedSharding, ...]:
        """Where each result lies."""
        return self.jitted.out_shardings


def _lies_at(leaf: Any, target: NamedSharding) -> bool:
    """Returns whether a leaf is on its devices already, in the type in which programs return it."""
    if not isinstance(leaf, jax.Array) or not leaf.committed or not isinstance(leaf.sharding, NamedSharding):
        return False
    is_there = leaf.sharding == target or leaf.sharding.is_equivalent_to(target, leaf.ndim)
    return is_there and has_mesh_type(leaf) and not has_explicit_type(leaf)


class PipelinedEntry(Entry):
    """A captured step with the plan of its pipeline; `planned` gives it if it is there already."""

    def __init__(
        self,
        step: PipelinedStep,
        environment: Environment,
        notes: Sequence[str] = (),
        planned: PlannedPipeline | None = None,
        replan: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(replace(step.captured, notes=(*step.captured.notes, *notes)), environment, notes)
        self._step, self._given, self._given_notes = step, planned, notes
        self._replan = replan or PipelineReplanner(step, environment, self._again)

    def _again(self, around: Environment, found: PlannedPipeline) -> PipelinePlan:
        return PipelinedEntry(self._step, around, self._given_notes, found, self._replan)._plan

    @cached_property
    def pipeline(self) -> PlannedPipeline:
        """The planned programs of all stages."""
        if self._given is not None:
            return self._given
        settings = self.environment.settings
        saved = loaded_pipeline(self._step, settings)
        if saved is not None:
            return saved
        stages, scheduler = settings.context.pipeline_stages, scheduler_of(settings.context)
        _LOG.info("%s is planned as a pipeline for %s.", self.captured.name, counted(settings.num_devices, "device"))
        return plan_pipeline(
            self._step,
            settings,
            scheduler.num_chunks(stages),
            lambda costs, count: scheduler.schedule(stages, count, costs),
            plan_program,
        )

    @cached_property
    def _runnable(self) -> bool:
        self.environment.check_running()
        return True

    @cached_property
    def planned(self) -> Any:
        """The plan; errors of planning, and of the files of the context, belong to the call that asks for it."""
        plan = self._plan
        if _LOG.isEnabledFor(logging.INFO):
            _LOG.info("%s was planned: %s.", self.captured.name, plan.summary)
        for text in self._without_buckets:
            warn_user(text)
        save_pipeline(plan, self.environment.settings)
        return self.pipeline

    @property
    def plan(self) -> Any:
        """The plan of the pipeline."""
        return self._plan

    @cached_property
    def _plan(self) -> PipelinePlan:
        settings = self.environment.settings
        notes = [
            *self._not_reused(),
            *unmatched_patterns(self.captured, settings),
            *self._without_buckets,
            *whole_backward(self.pipeline),
            *crossing_after(self.pipeline),
            *selected_branches(self.pipeline),
        ]
        plan = assembled(self.pipeline, settings.context.parallel_mode, settings.topology.device, (*self._notes, *notes))
        return replace(plan, replan=self._replan)

    @cached_property
    def _without_buckets(self) -> list[str]:
        compiler = self.environment.settings.topology.compiler
        return without_buckets(self.pipeline, self.environment.context, keeps_barriers=compiler.keeps_barriers)

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

    def on_one_device(self, target: Target, call: Call, static: Static) -> Captured:
        """Traces the user's own step, in micro-batches if each of them draws random numbers of its own."""
        if not self.captured.draws_apart:
            return super().on_one_device(target, call, static)
        from spmdctx.gradients.capture import capture_in_micro_batches

        return capture_in_micro_batches(target, call, static, self.environment.settings, self._step.loss.num_micro)

    @property
    def regions(self) -> tuple[()]:
        """None: a loss with a shard_map is not cut."""
        return ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the first call warns of."""
        undivided = undivided_batch(self.pipeline)
        return (*self.environment.warnings, *self.captured.warnings, *([" ".join(undivided)] if undivided else []))

    @cached_property
    def spans_processes(self) -> bool:
        """True if the pipeline runs on devices of several processes."""
        return spans_processes(self.environment.devices[: self.plan.num_devices])

    @cached_property
    def agreed(self) -> bool:
        """True if several processes run the step; reading this makes them agree on the plan of each program.

        Raises:
            PlanMismatchError: another process has another program or plan.
        """
        if self.spans_processes:
            for number, chunk in enumerate(self.pipeline.planned):
                for task in chunk.tasks.values():
                    agree_on_plan(f"{self.captured.name}: {task.program.kind}{number}", task.planned.plan, task.program.jaxpr)
            for one in (one for programs in self.pipeline.rounds for one in programs if one.program.stage == SPREAD):
                agree_on_plan(f"{self.captured.name}: {one.name}", one.planned.plan, one.program.jaxpr)
            agree_on_plan(self.captured.name, self.pipeline.planned[0].joint.planned.plan, self.captured.jaxpr)
        return self.spans_processes

    def _placed(self, read: Read) -> list[Any]:
        """Moves leaves to where their stages want them, and returns all leaves."""
        placed, moved = self._at_home(read.leaves)
        for index in moved:
            leaf = read.leaves[index]
            if self._owned[index] and isinstance(leaf, jax.Array) and leaf.committed:
                self._note_move(index, leaf.sharding, self.program.in_shardings[index])
        if moved:
            self.structure.place(read.handle, placed)
        else:
            self._seen_shardings = [leaf.sharding for leaf in placed]
        return placed

    def _at_home(self, leaves: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """Returns the leaves on their stages, and which of them were moved.

        Raises:
            UnsupportedError: a leaf lies on devices of several processes, and not where the pipeline has it.
        """
        self.environment.check_running()
        placed, moved, spread = list(leaves), [], self.agreed
        for index, (leaf, target) in enumerate(zip(leaves, self.program.in_shardings, strict=True)):
            if _lies_at(leaf, target):
                continue
            moved.append(index)
            if not spread:
                placed[index] = jax.device_put(leaf, target, donate=index in self._carried and self._donated[index])
            elif is_of_one_process(leaf):
                placed[index] = on_all(leaf, target)
            else:
                raise UnsupportedError(
                    f"{self.captured.inputs[index].path} lies on devices of several processes, and not where the pipeline has it.",
                    got=str(leaf.sharding),
                    need=str(target),
                    fix="make the state by step.init and the batch by step.shard_batch, or restore a checkpoint into them",
                )
        return placed, moved

    def gathered(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the leaves, those as whole NumPy arrays that lie on devices of some processes alone."""
        if not self.agreed:
            return list(leaves)
        homes = zip(leaves, self.program.in_shardings, strict=True)
        return [from_owners(leaf) if is_spread(home) and _lies_at(leaf, home) else leaf for leaf, home in homes]

    def execute(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs the program and returns its flat results, which every process can read; the user's objects stay unchanged."""
        outputs: Sequence[Any] = self.call(*self._at_home(leaves)[0])
        if not self.spans_processes:
            return outputs
        jax.block_until_ready(outputs)
        return [from_owners(own) if is_spread(home) else own for own, home in zip(outputs, self.program.out_shardings, strict=True)]

    @cached_property
    def on_several_devices(self) -> bool:
        """True: each stage has devices of its own."""
        return True

    @cached_property
    def program(self) -> Any:
        """The programs of all stages, as one function of flat leaves.

        Raises:
            ContextError: fewer devices than the plan is for.
            CommunicationError: several processes that `spmdctx.communication.init` has not prepared.
            UnsupportedError: stages that share a process and span several.
        """
        needed, devices = self.plan.num_devices, self.environment.devices
        if self.spans_processes and devices[0].platform == "cpu" and not can_transfer():
            raise CommunicationError(
                "The processes of this pipeline cannot exchange arrays.",
                fix='call spmdctx.communication.init("gloo") at the start of the script, before anything uses a device',
            )
        if len(devices) < needed:
            stages, own = len(self.plan.stages), mesh_text(self.plan.logical_mesh)
            raise ContextError(
                f"The plan is for {needed} devices, and {len(devices)} are there.",
                got=f"pipeline_stages={stages}, each on {counted(needed // stages, 'device')} of its own: {own}",
                fix=f"use step.plan, or a mesh of {len(devices) // stages} devices: that of one stage",
            )
        return _Program(PipelineProgram(self.pipeline, devices[:needed], self._options_of))

    def _options_of(self, planned: Planned, devices: Sequence[Any]) -> Options:
        """Returns the compile options of a program: the limit of its scheduler, and how its collectives are combined."""
        own = self.environment
        limits = limit_options(planned, devices, own.device_bytes, own.settings.memory_bytes)
        return {**limits, **fusion_options(planned, devices, own.context)}

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

    def trace(self, leaves: Sequence[Any]) -> Any:
        """Refuses: there is no one program.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"{self.captured.name} runs on a pipeline, so it is no one program to trace.", fix="lower has all of them")

    def audit(self, leaves: Sequence[Any]) -> Any:
        """Compiles all programs, and compares them and what the last call did with the plan."""
        program: PipelineProgram = self.program.jitted
        counts = program.counts
        done = program.dry_counts() if counts is None else counts
        built = Built(self.lower(leaves).compile(), program.meshes, program.mesh, done, counts is not None)
        return audit_pipeline(self.pipeline, self._plan, built, lambda own: ways_of(value.dtype for value in own.graph.values))
