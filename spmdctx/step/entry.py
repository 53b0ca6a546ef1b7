"""A step specialized to one set of shapes and one context: its trace, plan, program, and the fast path of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from spmdctx.errors import UnsupportedError
from spmdctx.lowering.program_options import fusion_options, limit_options
from spmdctx.machine.devices import backend_of
from spmdctx.machine.xla.collectives.ways import ways_of
from spmdctx.plan.plan import Plan
from spmdctx.step.agreement import agree_on_plan, spans_processes
from spmdctx.step.direct.direct import OtherArgumentsError, direct_call, signature
from spmdctx.step.direct.donation import Buffers, is_of_buffers
from spmdctx.step.direct.two_bits import check_two_bits
from spmdctx.step.out_of_memory import add_advice
from spmdctx.step.planning.planner import Planned
from spmdctx.step.planning.saved import planned_with_files
from spmdctx.step.processes import is_of_one_process, on_all
from spmdctx.step.words.alone import faster_alone
from spmdctx.trace.build.program import ManualRegion
from spmdctx.trace.capture.arguments import Call, Static
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.capture.pytrees import PureStructure
from spmdctx.trace.capture.structure import Read
from spmdctx.trace.capture.target import Target
from spmdctx.trace.scope.environment import Environment
from spmdctx.trace.scope.mesh import auto_axes, has_explicit_type, has_mesh_type, without_one_device

if TYPE_CHECKING:
    from spmdctx.audit import AuditReport
    from spmdctx.lowering.compile import CompiledProgram


def aval_of(leaf: Any) -> Any:
    """Returns the abstract value of a leaf; jax arrays and tracers hold theirs."""
    try:
        return leaf.aval
    except AttributeError:
        return jax.typeof(leaf)


class Entry:
    """A captured step with its plan; the program is compiled when it is first needed.

    `direct` runs a call of pytrees that has the arguments of the last one. `read` and `run` take every call. They first compare
    abstract values and shardings with the last ones by identity, so that a loop over nnx objects costs no more than `nnx.jit`.
    """

    def __init__(self, captured: Captured, environment: Environment, notes: Sequence[str] = ()) -> None:
        self.captured = captured
        self.environment = environment
        self.structure = captured.structure
        self.signature = signature(captured.in_avals)
        self.misses = 0
        self.moved: dict[int, str] = {}
        self.copied: dict[int, str] = {}
        self._notes = (*environment.notes, *environment.warnings, *notes)
        self._owned = captured.owned
        sources = {leaf.carried_from for leaf in captured.outputs} - {None}
        self._carried = {index for index, owned in enumerate(captured.owned) if index in sources and not owned}
        self._comes_back = self._carried | captured.given_back
        self.buffers = Buffers(captured)
        self._is_state = [owned or index in self._comes_back for index, owned in enumerate(captured.owned)]
        self._donated = [leaf.donated for leaf in captured.inputs]
        self._seen_avals: list[Any] = []
        self._seen_shardings: list[Any] | None = None
        self._placed_by_jit: tuple[int, ...] = ()

    @cached_property
    def planned(self) -> Planned:
        """The plan with what lowering needs."""
        captured = replace(self.captured, notes=(*self.captured.notes, *self._notes))
        return planned_with_files(captured, self.environment.settings)

    @property
    def plan(self) -> Plan:
        """The plan of this step for these shapes."""
        return self.planned.plan

    @property
    def peak_bytes(self) -> int:
        """The planned peak, per device."""
        return self.plan.cost.memory_bytes

    def on_one_device(self, target: Target, call: Call, static: Static) -> Captured:
        """Traces the user's own step, with which `verify` compares."""
        from spmdctx.gradients.capture import capture_plainly

        return capture_plainly(target, call, static)

    @property
    def regions(self) -> Sequence[ManualRegion]:
        """The shard_maps of the step."""
        return self.planned.program.manual

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the first call warns of: a step that is not parallel or slower than on one device, a batch that is not split, gradients
        that are summed."""
        return (*self.environment.warnings, *self.captured.warnings, *self.planned.warnings, *self._alone)

    @cached_property
    def _alone(self) -> tuple[str, ...]:
        return faster_alone(self.planned, self.captured, self.environment.settings, self.environment.devices)

    @property
    def traffic(self) -> Mapping[str, int]:
        """The bytes that were exchanged with servers: none."""
        return {}

    @cached_property
    def spans_processes(self) -> bool:
        """True if the step runs on devices of several processes."""
        return spans_processes(self.environment.devices[: self.planned.mesh.num_devices])

    @cached_property
    def on_several_devices(self) -> bool:
        """True if the step runs on more than one device."""
        return self.planned.mesh.num_devices > 1

    @cached_property
    def agreed(self) -> bool:
        """True if several processes run the step.

        Reading this makes the processes agree on the plan, so each of them reads it before it runs anything.

        Raises:
            PlanMismatchError: another process has another program or plan.
        """
        if self.spans_processes:
            agree_on_plan(self.captured.name, self.planned.plan, self.captured.jaxpr)
        return self.spans_processes

    @property
    def compiler_options(self) -> dict[str, int | str]:
        """The compiler options of this step alone."""
        return {**self._scheduler_options, **self._fusion_options}

    @cached_property
    def _scheduler_options(self) -> dict[str, int | str]:
        environment = self.environment
        return limit_options(self.planned, environment.devices, environment.device_bytes, environment.settings.memory_bytes)

    @cached_property
    def _fusion_options(self) -> dict[str, int | str]:
        return fusion_options(self.planned, self.environment.devices, self.environment.context)

    @cached_property
    def program(self) -> CompiledProgram:
        """The jitted flat program.

        Raises:
            ContextError: fewer devices than the plan is for.
        """
        return self._jitted(self.compiler_options)

    @cached_property
    def _inner(self) -> CompiledProgram:
        """The program as part of a larger one, whose compiler is told nothing for its sake."""
        if self._fusion_options:
            raise UnsupportedError(
                f"{self.captured.name} needs compiler options, which a step inside of jit, grad or vmap cannot have.",
                fix="call the step outside, or leave out the options that need them",
            )
        return self._jitted({}) if self.compiler_options else self.program

    def _jitted(self, compiler_options: dict[str, int | str]) -> CompiledProgram:
        from spmdctx.lowering.compile import JitOptions, jit_program

        planned = self.planned
        devices = self.environment.devices[: planned.mesh.num_devices]
        donated = [index for index, leaf in enumerate(self.captured.inputs) if leaf.donated]
        return jit_program(
            planned.program,
            planned.assignment,
            planned.mesh,
            devices,
            planned.directives,
            JitOptions(donated, compiler_options, self.captured.name),
        )

    @cached_property
    def _runnable(self) -> bool:
        """True if the devices can run the program.

        Raises:
            ContextError: fewer devices than the plan is for, or devices that cannot run.
            UnsupportedError: the program does what ends the process.
        """
        self.environment.check_running()
        planned, backend = self.planned, backend_of(self.environment.devices)
        check_two_bits(planned.program.graph, planned.mesh, backend, lambda: self.lower(self.captured.in_avals).compile())
        return True

    @cached_property
    def call(self) -> Callable[..., tuple[Any, ...]]:
        """The jitted flat program, to be run.

        Raises:
            ContextError: fewer devices than the plan is for, or devices that cannot run.
        """
        self._runnable  # noqa: B018  raises
        return self.program.jitted

    @cached_property
    def direct(self) -> jax.stages.Wrapped | None:
        """The fast path for calls, or None if the step has none; see `spmdctx.step.direct.direct`."""
        if not isinstance(self.structure, PureStructure) or self.structure.has_functions:
            return None
        donated = [leaf.donated for leaf in self.captured.inputs]
        return direct_call(self.program, self.structure, self.captured.in_avals, donated, self._comes_back, self.compiler_options)

    def lower(self, leaves: Sequence[Any]) -> jax.stages.Lowered:
        """Lowers the program that a call with these leaves runs; JAX shares the compiled program with such calls.

        The leaves may be abstract.
        """
        with auto_axes(), without_one_device(self.plan.logical_mesh.num_devices):
            program, avals = self._as_called(leaves)
            return program.lower(*avals)

    def trace(self, leaves: Sequence[Any]) -> jax.stages.Traced:
        """Traces the program that a call with these leaves runs."""
        with auto_axes(), without_one_device(self.plan.logical_mesh.num_devices):
            program, avals = self._as_called(leaves)
            return program.trace(*avals)

    def _as_called(self, leaves: Sequence[Any]) -> tuple[jax.stages.Wrapped, Sequence[Any]]:
        """Returns what a call runs, and the types of its arguments."""
        avals = [self.type_as_called(index, leaf) for index, leaf in enumerate(leaves)]
        return (self.program.jitted, avals) if self.direct is None else (self.direct, self.structure.inputs(avals)[0])

    def audit(self, leaves: Sequence[Any]) -> AuditReport:
        """Compiles the program that a call with these leaves runs, and compares it with the plan."""
        ways = ways_of(value.dtype for value in self.planned.program.graph.values)
        is_own = backend_of(self.environment.devices) == self.environment.backend
        from spmdctx.audit import audit_program

        return audit_program(self.plan, self.lower(leaves).compile(), ways, judges_memory=is_own)

    @contextmanager
    def advising(self) -> Iterator[None]:
        """Adds to XLA's errors of memory what was planned and what to do, where the program is compiled or run."""
        try:
            with without_one_device(self.plan.logical_mesh.num_devices):
                yield
        except jax.errors.JaxRuntimeError as error:
            add_advice(error, self.peak_bytes, self.environment.settings.topology)
            raise

    def type_as_called(self, index: int, leaf: Any) -> jax.ShapeDtypeStruct:
        """Returns a leaf's type as the program sees it in a call; the sharding is None if the program places the leaf itself."""
        aval, target = self.captured.in_avals[index], self.program.in_shardings[index]
        sharding = getattr(leaf, "sharding", None)
        is_state = self._is_state[index]
        if isinstance(leaf, jax.Array) and not is_state:
            moves = leaf.committed and not target.is_equivalent_to(leaf.sharding, leaf.ndim)
            on_mesh = moves or has_mesh_type(leaf)
        else:
            on_mesh = is_state or sharding is not None
        on_mesh = on_mesh or self.spans_processes
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=target if on_mesh else None)

    def gathered(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns leaves that each process can gather by itself; every process has to call this."""
        return list(leaves)

    def execute(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs the program on leaves that are already placed and returns its flat results; the user's objects stay unchanged."""
        self._runnable  # noqa: B018  raises
        self.agreed  # noqa: B018  before anything runs
        if self.direct is not None:
            try:
                return jax.tree.leaves(self.direct(*self.structure.inputs(leaves)[0]))
            except OtherArgumentsError:  # a copy without its weak type
                pass
        outputs: Sequence[Any] = self.call(*leaves)
        return outputs

    def read(self, call: Call) -> Read | None:
        """Returns the leaves of a call, or None if the call does not fit this entry."""
        read = self.structure.read(call)
        if read is None:
            return None
        try:
            avals = [leaf.aval for leaf in read.leaves]
        except AttributeError:
            try:
                avals = [aval_of(leaf) for leaf in read.leaves]
            except (TypeError, OverflowError):  # no array: tracing names the argument
                return None
        if avals != self._seen_avals:
            if signature(avals) != self.signature:
                return None
            self._seen_avals = avals
        return read

    def run(self, read: Read) -> Any:
        """Runs the step on leaves that `read` gave."""
        leaves = read.leaves
        try:
            known = [leaf.sharding for leaf in leaves] == self._seen_shardings
        except AttributeError:  # leaves of NumPy or Python, or tracers
            known = [getattr(leaf, "sharding", None) for leaf in leaves] == self._seen_shardings
        for index in self._placed_by_jit:
            known = known and not leaves[index].committed
        if (not known or self.direct is not None) and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            from spmdctx.ops.scope import in_local_loss

            inner = self._inner.jitted
            if self.on_several_devices and in_local_loss():
                raise UnsupportedError(
                    f"{self.captured.name} is split over devices, and is called inside of a loss of which each device computes its part.",
                    need="spmdctx.parallel or AutoParallel around the outermost step only",
                    fix="give spmdctx.value_and_grad the function itself, or the outer step semi_auto_parallel or auto_parallel",
                )
            self._runnable  # noqa: B018  raises
            return self.structure.finish(read.handle, inner(*leaves))
        if not known or self.on_several_devices or self.direct is not None:
            return self._call(*self._settled(read, known))
        try:
            return self._call(read, known)
        except (RuntimeError, ValueError) as error:
            if not is_of_buffers(error):
                raise
        return self._call(*self._settled(read, known))

    def _settled(self, read: Read, known: bool) -> tuple[Read, bool]:
        """Returns the call with arrays that may be donated, and whether they still are where the last call had them."""
        if self.buffers.fit(read.leaves):
            return read, known
        leaves, notes = self.buffers.settled(read.leaves)
        self.copied |= notes
        return read._replace(leaves=leaves), known and not notes

    def _call(self, read: Read, known: bool) -> Any:
        leaves = read.leaves if known else self._placed(read)
        if self.direct is not None:
            return self.direct(*self.structure.inputs(leaves)[0])
        outputs = self.call(*leaves)
        if self.buffers.keeps and self.on_several_devices:
            self.buffers.keep(outputs)
        return self._finish(read, outputs)

    def _finish(self, read: Read, outputs: Sequence[Any]) -> Any:
        return self.structure.finish(read.handle, outputs)

    def _placed(self, read: Read) -> list[Any]:
        """Moves leaves that are committed elsewhere to where the plan wants them, and returns all leaves."""
        self._runnable  # noqa: B018  raises
        placed, placed_by_jit, moves, spread = list(read.leaves), [], False, self.agreed
        for index, (leaf, target) in enumerate(zip(read.leaves, self.program.in_shardings, strict=True)):
            sharding = getattr(leaf, "sharding", None)
            if spread and is_of_one_process(leaf):
                placed[index], moves = on_all(leaf, target), True
                continue
            if self._is_state[index] and not (getattr(leaf, "committed", False) and has_mesh_type(leaf)):
                # jit would place it too, but then compile again for the next call, whose leaf has the mesh in its type.
                placed[index], moves = jax.device_put(leaf, target, donate=index in self._carried and self._donated[index]), True
                if self._owned[index] and sharding is not None and not sharding.is_equivalent_to(target, leaf.ndim):
                    self._note_move(index, sharding, target)
                continue
            if sharding is None:
                continue
            if sharding.is_equivalent_to(target, leaf.ndim):
                if has_explicit_type(leaf):
                    placed[index], moves = jax.device_put(leaf, target), True  # the same bytes, of another type
                continue
            if not leaf.committed:
                placed_by_jit.append(index)  # jit places it itself, on each call
                continue
            placed[index], moves = jax.device_put(leaf, target), True
            self._note_move(index, sharding, target)
        if moves:
            self.structure.place(read.handle, placed)
        else:
            self._seen_shardings, self._placed_by_jit = [getattr(leaf, "sharding", None) for leaf in placed], tuple(placed_by_jit)
        return placed

    def _note_move(self, index: int, sharding: Any, target: NamedSharding) -> None:
        self.moved.setdefault(index, f"{self.captured.inputs[index].path} was on {sharding}; it is moved to {target.spec}.")
