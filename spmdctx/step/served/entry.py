"""A step whose state lies on servers, specialized to one set of shapes and one context."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jexc
from jax.sharding import NamedSharding, PartitionSpec

from spmdctx.errors import UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.lowering.compile import CompiledProgram, JitOptions, jit_program
from spmdctx.pipeline.stages.captured import Operand, Outcome, captured_program
from spmdctx.server.alone import run_alone
from spmdctx.server.engine.client import NUM_WORKERS, Client
from spmdctx.server.engine.fleet import Job
from spmdctx.server.loads import local_load, server_loads
from spmdctx.server.local.state import LocalState
from spmdctx.server.plan import served_plan
from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.crossing import crossing_of
from spmdctx.server.program.cut import Cut, cut_step
from spmdctx.server.program.worker import WorkerProgram, worker_program
from spmdctx.server.remote import RemoteArray, all_fetched
from spmdctx.step.entry import Entry
from spmdctx.step.planning.planner import Planned, plan_program
from spmdctx.step.served.local import LocalRun
from spmdctx.step.served.run import Part, ServedRun
from spmdctx.trace.build.jaxprs.equations import struct_of
from spmdctx.trace.capture.structure import Read
from spmdctx.trace.scope.environment import Environment
from spmdctx.trace.scope.mesh import auto_axes, without_one_device


class FetchingEntry(Entry):
    """A step without a loss, such as an evaluation: it gets the arrays that servers hold."""

    _handles: Sequence[Any] = ()

    def run(self, read: Read) -> Any:
        """Runs the step on this worker's devices; the user's objects keep their handles."""
        self._handles = read.leaves
        return super().run(read._replace(leaves=all_fetched(read.leaves)))

    @cached_property
    def direct(self) -> None:
        """None: JAX takes no handles."""
        return None

    def execute(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs the step on leaves, or on their values where servers hold them."""
        return super().execute(all_fetched(leaves))

    def gathered(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the leaves with the values that servers hold."""
        return all_fetched(leaves)

    def _placed(self, read: Read) -> list[Any]:
        placed = super()._placed(read)
        kept = [own if isinstance(own, RemoteArray) else leaf for own, leaf in zip(self._handles, placed, strict=True)]
        self.structure.place(read.handle, kept)
        return placed

    def _finish(self, read: Read, outputs: Sequence[Any]) -> Any:
        found = list(outputs)
        for result, index in self._unchanged.items():
            if isinstance(self._handles[index], RemoteArray):
                found[result] = self._handles[index]
        return super()._finish(read, found)

    @cached_property
    def _unchanged(self) -> dict[int, int]:
        """The results that are arguments, by the number of the argument."""
        body = self.captured.jaxpr.jaxpr
        places = {var: index for index, var in enumerate(body.invars)}
        return {number: places[atom] for number, atom in enumerate(body.outvars) if isinstance(atom, jexc.Var) and atom in places}


class ServedEntry(Entry):
    """A captured step of which workers run the loss, and servers the rest."""

    def __init__(self, step: ServedStep, environment: Environment, notes: Sequence[str] = ()) -> None:
        super().__init__(replace(step.captured, notes=(*step.captured.notes, *notes)), environment, notes)
        self.step = step

    @cached_property
    def part(self) -> WorkerProgram:
        """The program of one part of the batch."""
        return worker_program(self.step, cut_step(self.step, 1))

    @cached_property
    def cut(self) -> Cut:
        """The step, cut for the servers that the context asks for."""
        return cut_step(self.step, self.environment.context.servers.num_servers)

    @cached_property
    def planned(self) -> Planned:
        """The plan of that program on this worker's devices, with the servers."""
        part, inputs = self.part, self.captured.inputs
        servers = self.environment.context.servers
        if servers.update_mode == "async":
            crossing_of(self.step, self.cut)
        operands = [Operand(inputs[number].path, inputs[number].role) for number in part.inputs]
        operands += [Operand(f"ids {number} of tables", Role.ARGUMENT) for number in range(len(part.jaxpr.in_avals) - len(operands) - 1)]
        operands.append(Operand("number of the part", Role.ARGUMENT))
        results = [Outcome(self.step.loss.rows[number].path) for number in part.outputs]
        captured = captured_program(self.captured.name, part.jaxpr, None, operands, results)
        planned = plan_program(replace(captured, notes=(*self.captured.notes, *self._notes)), self.environment.settings)
        workers = int(os.environ.get(NUM_WORKERS, "1"))
        loads = server_loads(self.step, self.cut)
        return replace(planned, plan=served_plan(planned.plan, loads, self.step.loss.num_parts, workers, local_load(self.step)))

    @cached_property
    def program(self) -> CompiledProgram:
        """The jitted program of one part; what the step itself takes and gives is whole on each of this worker's devices."""
        whole = NamedSharding(self._part_program.mesh, PartitionSpec())
        captured = self.captured
        return replace(self._part_program, in_shardings=(whole,) * len(captured.inputs), out_shardings=(whole,) * len(captured.outputs))

    @cached_property
    def _part_program(self) -> CompiledProgram:
        planned = self.planned
        devices = self.environment.devices[: planned.mesh.num_devices]
        options = JitOptions((), self.compiler_options, self.captured.name)
        return jit_program(planned.program, planned.assignment, planned.mesh, devices, planned.directives, options)

    def _local_state(self) -> LocalState | None:
        """Returns a copy of what stays with workers, which has no arrays yet; parameters are split as the plan says."""
        if self.step.local is None:
            return None
        program = self._part_program
        shardings = dict(zip(self.part.inputs, program.in_shardings, strict=False))
        return LocalState(self.step.local, shardings, NamedSharding(program.mesh, PartitionSpec()))

    @cached_property
    def direct(self) -> None:
        """None: each call asks the scheduler."""
        return None

    @cached_property
    def served(self) -> ServedRun:
        """This worker's steps, connected to the servers."""
        self.environment.check_running()
        own = self.environment.context.servers
        folder = os.path.abspath(own.folder) if own.folder else ""
        client = Client(Job(own.num_servers, own.update_mode, own.max_staleness, own.save_every, folder))
        state = self._local_state()
        local = None if state is None else LocalRun(self.step, state, client)
        part = Part(self.part, self.program.jitted, lambda: self.lower(()).compile())
        return ServedRun(self.step, part, client, self.cut, local)

    @property
    def traffic(self) -> Mapping[str, int]:
        """The bytes that this worker has pushed and pulled, of rows of tables and of other arrays; none before the first call."""
        return dict(self.served.traffic) if "served" in self.__dict__ else {}

    def lower(self, leaves: Sequence[Any]) -> jax.stages.Lowered:
        """Lowers the program of one part."""
        del leaves
        with auto_axes(), without_one_device(self.plan.logical_mesh.num_devices):
            lowered: jax.stages.Lowered = self.program.jitted.lower(*map(struct_of, self.part.jaxpr.in_avals))
        return lowered

    def trace(self, leaves: Sequence[Any]) -> jax.stages.Traced:
        """Traces the program of one part."""
        del leaves
        with auto_axes(), without_one_device(self.plan.logical_mesh.num_devices):
            return self.program.jitted.trace(*map(struct_of, self.part.jaxpr.in_avals))

    def execute(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Does a step from these leaves with all servers in this process, and returns its flat results.

        Raises:
            UnsupportedError: parts of the batch give other numbers than the whole, with which `verify` would compare them.
        """
        if self.step.loss.differs_by_parts:
            raise UnsupportedError(
                f"verify cannot compare this step with one device: {self.step.loss.differs_by_parts}.",
                where=self.step.loss.where,
                fix="verify it with grad_accumulation_step=1",
            )
        self.environment.check_running()
        return run_alone(self.step, self.cut, (self.part, self.program.jitted), all_fetched(leaves), self._local_state())

    def gathered(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the leaves with the values that servers hold."""
        return all_fetched(leaves)

    def type_as_called(self, index: int, leaf: Any) -> jax.ShapeDtypeStruct:
        """Returns a leaf's type; the program of a part takes others."""
        aval = self.captured.in_avals[index]
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

    def run(self, read: Read) -> Any:
        """Does the next step.

        Raises:
            UnsupportedError: the step is called inside of jit, grad or vmap.
        """
        if any(isinstance(leaf, jax.core.Tracer) for leaf in read.leaves):
            raise UnsupportedError(
                f"{self.captured.name} is called inside of jit, grad or vmap, and its state lies on servers.", fix="call it outside of them"
            )
        return self.structure.finish(read.handle, self.served.run(read.leaves))
