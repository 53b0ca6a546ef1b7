"""ParallelStep: a user's step that plans, compiles and runs itself split over devices.

What plans and runs is imported by the first call that needs it: to make a step, as modules do when they are imported, is quick.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, Unpack, cast, overload
from weakref import WeakKeyDictionary

import jax

from spmdctx._compat import x64_is_on
from spmdctx.context.layers import AutoParallelContext, beneath_layers, current_context, version, warn_ineffective
from spmdctx.context.typed import ContextOptions
from spmdctx.errors import CommunicationError
from spmdctx.lowering.compile_options import warn_without_option
from spmdctx.step.direct.direct import OtherArgumentsError
from spmdctx.step.direct.donation import Buffers, check_alive, check_concrete, is_of_buffers
from spmdctx.step.direct.tracebacks import ShortTracebacks
from spmdctx.step.jitted.copies import CopyMethods
from spmdctx.step.jitted.methods import JitMethods
from spmdctx.step.options import ParallelOptions, step_options
from spmdctx.step.report.calls import log_compiling, noted
from spmdctx.step.report.methods import MeasuredMethods
from spmdctx.step.words.again import log_entry
from spmdctx.trace.capture.arguments import NO_STATIC, Call, Static, split_static
from spmdctx.trace.capture.target import target_of
from spmdctx.trace.marker import tracing_in
from spmdctx.trace.scope.environment import environment
from spmdctx.trace.scope.mesh import auto_axes, traced_for
from spmdctx.trace.scope.settings import StepOptions
from spmdctx.wording.user_warnings import warn_user

if TYPE_CHECKING:
    from spmdctx.audit import AuditReport
    from spmdctx.data.targets import Targets
    from spmdctx.plan.mindspore.file import ParameterLayout
    from spmdctx.plan.plan import Plan
    from spmdctx.step.entry import Entry
    from spmdctx.step.verify.verify import VerifyReport
    from spmdctx.trace.capture.capture import Captured
    from spmdctx.trace.capture.structure import Read

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
Owner = TypeVar("Owner")

_MOST_MISSES = 50
"""After so many misses calls skip the fast path: with arguments that keep changing, the slow one fails faster."""


class _Last(NamedTuple):
    """The entry of the last call, and what must not have changed for the next call to use it at once."""

    version: int
    x64: bool
    static: Static
    entry: Entry


class _Direct(NamedTuple):
    """The short way to run the next call, while the context stays the same; `buffers` looks at the arrays first."""

    version: int
    run: Callable[..., Any]
    entry: Entry
    buffers: Buffers | None


class ParallelStep(JitMethods, CopyMethods, MeasuredMethods, Generic[P, R]):
    """A step that runs split over devices; made by `spmdctx.parallel`.

    Calling it runs it. It is planned and compiled once per shapes, static arguments and context; `plan`, `lower`, `audit`
    and `verify` take the arguments of a call, real or abstract (`jax.ShapeDtypeStruct`).
    """

    __name__: str
    __qualname__: str
    __wrapped__: Callable[P, R]

    def __init__(self, fn: Callable[P, R], options: Mapping[str, Any]) -> None:
        fn, below = beneath_layers(fn)
        options = {**below, **options}
        self._options: StepOptions = step_options(options)
        self._target = target_of(fn, **self._options.arguments)  # type: ignore[arg-type]  # the checks of step_options have narrowed it
        self._given = (fn, dict(options))
        self._entries: dict[Any, list[Entry]] = {}
        self._last: _Last | None = None
        self._direct: _Direct | None = None
        self._has_run = False
        self._said: set[str] = set()
        self._bound: WeakKeyDictionary[Any, ParallelStep[..., Any]] = WeakKeyDictionary()
        self._lock = threading.RLock()
        functools.update_wrapper(self, self._target.fn if self._target.leading else fn, updated=())

    def __repr__(self) -> str:
        return f"<spmdctx.ParallelStep {self._target.name}>"

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> ParallelStep[P, R]: ...
    @overload
    def __get__(self: ParallelStep[Concatenate[Owner, Q], R], instance: Owner, owner: type | None = None) -> ParallelStep[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds a step that is a method to its object; each object has plans of its own."""
        if instance is None:
            return self
        fn, options = self._given
        try:
            bound = self._bound.get(instance)
            if bound is None:
                bound = self._bound[instance] = ParallelStep(MethodType(fn, instance), options)
        except TypeError:  # an object without weak references or hash
            return ParallelStep(MethodType(fn, instance), options)
        return bound

    def with_options(self, **options: Unpack[ParallelOptions]) -> ParallelStep[P, R]:
        """Returns a step of the same function with more options, or with other values of the same ones."""
        fn, given = self._given
        return ParallelStep(fn, {**given, **options})

    def with_context(self, **options: Unpack[ContextOptions]) -> ParallelStep[P, R]:
        """Returns the same step with context options, which its own options override.

        A decorator `@auto_parallel_context(...)` above the step calls this.
        """
        fn, given = self._given
        return ParallelStep(fn, {**options, **given})

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step; results, and nnx objects that are mutated, are split as the plan says.

        Raises:
            ContextError: options that contradict each other or the devices.
            StrategyError: strategies or a batch that do not fit.
            DonationError: an array was donated to an earlier call.
        """
        direct, start = self._direct, time.perf_counter()
        if self._calls is not None:
            self._calls.look()
        if direct is not None and direct.version == version() and not kwargs:
            buffers = direct.buffers
            try:
                if buffers is None or buffers.fit(jax.tree.leaves(args)):
                    result = cast(R, direct.run(*args))
                    if buffers is not None and buffers.keeps:
                        buffers.keep(jax.tree.leaves(result))
                    self._calls = noted(self._calls, direct.entry, start, result)
                    return result
            except (OtherArgumentsError, ValueError):  # the long way finds out what it is
                direct.entry.misses += 1
                self._direct = None
            except RuntimeError as error:
                if not is_of_buffers(error):
                    raise
        call, static = self._split(args, kwargs)
        with ShortTracebacks(), auto_axes():
            entry, read = self._found(call, static)
            if not self._has_run and entry.environment.context.parameter_broadcast:
                from spmdctx.step.broadcast import broadcast_read

                read = broadcast_read(entry, read)
            self._has_run = True
            self._say(entry)
            with entry.advising():
                try:
                    result = cast(R, entry.run(read))
                except Exception:
                    check_concrete(entry.captured, read.leaves)
                    raise
        if entry.direct is not None and static is NO_STATIC and entry.misses < _MOST_MISSES:
            self._direct = _Direct(version(), entry.direct, entry, entry.buffers if entry.on_several_devices else None)
        self._calls = noted(self._calls, entry, start, result)
        if self._profile is not None and self._calls.count == 1:
            self._profile.compiled()
        return result

    @property
    def context(self) -> AutoParallelContext:
        """The context as this step sees it: its own options over those set."""
        return current_context().with_checked(self._options.context)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the first call warns of, and the leaves that calls had to move or copy, one sentence for each."""
        return (
            () if self._last is None else (*self._last.entry.warnings, *self._last.entry.moved.values(), *self._last.entry.copied.values())
        )

    @property
    def traffic(self) -> Mapping[str, int]:
        """The bytes that this worker has exchanged with servers, with the shapes of the last call; empty for a step without servers.

        "pushed" and "pulled" are whole arrays, "rows pushed" and "rows pulled" rows of tables with their places.
        """
        return {} if self._last is None else self._last.entry.traffic

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan by which the step would run; needs no devices, and arguments may be abstract."""
        from spmdctx.step.exportable import exportable

        return exportable(self._entry_of(args, kwargs), self._target, self._split(args, kwargs)[1])

    def clear_cache(self) -> None:
        """Forgets all plans, programs and timings, also those of bound steps; the next call traces, plans and compiles again."""
        with self._lock:
            self._entries.clear()
            self._last = self._direct = self._calls = None
            for bound in list(self._bound.values()):
                bound.clear_cache()

    def in_shardings(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a NamedSharding for each argument leaf, as a tuple of the dynamic arguments; keywords follow as one dict.

        nnx objects appear as states.
        """
        from spmdctx.step import placement

        entry = self._entry_of(args, kwargs)
        return placement.arguments_tree(entry, entry.program.in_shardings, len(self._target.leading))

    def infer_predict_layout(self, *args: Any, **kwargs: Any) -> dict[str, ParameterLayout]:
        """Returns how a forward step's parameters are split, by dotted path, for `load_distributed_checkpoint`.

        Args:
            args: the step's arguments, real or abstract.
            kwargs: the same.

        Raises:
            ContextError: the step is planned in a mode other than semi_auto_parallel and auto_parallel.
        """
        from spmdctx.checkpoint.layouts import predicted_layouts

        return predicted_layouts(self.plan(*args, **kwargs))

    def audit(self, *args: Any, **kwargs: Any) -> AuditReport:
        """Compiles the program and compares its collectives and memory with the plan.

        A step on a pipeline answers with a `PipelineAudit`: each compiled program, what crosses between stages, what is in flight.
        After a call it counts what that call did.
        """
        call, static = self._split(args, kwargs)
        with ShortTracebacks():
            entry = self._entry(call, static)
            with entry.advising():
                return entry.audit(self._read(entry, call).leaves)

    def verify(self, *args: Any, rtol: float | None = None, **kwargs: Any) -> VerifyReport:
        """Runs the step split and on one device, on the same arguments, and compares; nothing is mutated or donated.

        Results that differ are judged by their noise floor: how far rounding alone moves them on one device.

        Args:
            args: the step's arguments.
            rtol: a difference, relative to the largest value of a result, that is accepted above the noise, too. A step that has an
                argument of this name gets it instead.
            kwargs: the step's arguments by keyword.

        Raises:
            ContextError: rtol is negative or not finite, or a device is missing.
        """
        from spmdctx.step.verify import verify

        if rtol is not None and "rtol" in (*self._target.parameters.names, *(self._target.parameters.keywords or ())):
            rtol, kwargs = None, {**kwargs, "rtol": rtol}
        accepted = verify.checked_rtol(rtol)
        entry = self._entry_of(args, kwargs)
        call, static = self._split(args, kwargs)
        with entry.advising():
            leaves = self._read(entry, call).leaves
            check_concrete(entry.captured, leaves)
            check_alive(entry.captured, leaves)
            plain = self._on_one_device(call, static, entry) if entry.captured.is_rewritten else None
            return verify.verify_entry(entry, leaves, accepted, plain)

    def init(self, init_fn: Callable[..., Any], *args: Any, batch: Any = None) -> Any:
        """Calls `init_fn(*args)` so that its result is made split, as this step takes it, never whole on one device.

        Args:
            init_fn: makes the state: a pytree, a TrainState, an nnx object, or a tuple of the step's first arguments.
            args: arguments of `init_fn`, a PRNG key for example.
            batch: the step's other arguments, real or abstract; a tuple where they are several. May be left out after a
                plan or a call, and where strategy_ckpt_load_file names a saved plan. Then static arguments may be left out alone, too.

        Raises:
            PlanError: no batch is given, and nothing was planned yet; or an argument of the step is missing.
            PlanMismatchError: the saved plan is for another state, mesh, machine or context.
        """
        from spmdctx.step import placement
        from spmdctx.step.planning.saved import loaded_plan

        made = placement.Init(init_fn, args)
        known = None if self._last is None else placement.abstract_call(self._last.entry, self._last.static)
        if batch is None and known is None:
            around = environment(self._options, self.context)
            saved = loaded_plan(around.settings)
            if saved is not None:
                around.check_running()
                return made.run_as_saved(saved, self._target, around.devices, self.context.strategy_ckpt_load_file)
        call, static = self._split(*made.arguments(self._target, batch, known))
        return made.run(self._entry(call, static), call)

    def shard_batch(self, batch: Any) -> Any:
        """Places a batch as the plan takes it: this process's block of it, or the whole with full_batch.

        Args:
            batch: one batch argument of the step, or a tuple of all of them. A leaf that is a `spmdctx.data.Blocks` stands for the
                whole batch; each process reads only its own blocks of it.

        Raises:
            PlanError: nothing was planned yet, or the plan has no such batch.
            StrategyError: a dimension does not divide.
        """
        from spmdctx.step import placement

        return placement.shard_batch(batch, self.batch_targets())

    def batch_targets(self) -> Targets:
        """Returns the targets of the last plan's batch arguments, which `spmdctx.data.shard` reads.

        Raises:
            PlanError: nothing was planned yet.
        """
        from spmdctx.step import placement

        return placement.batch_targets(None if self._last is None else self._last.entry, whole=self.context.full_batch)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Static]:
        target = self._target
        return split_static(target.static, (*target.leading, *args) if target.leading else args, kwargs)

    def _found(self, call: Call, static: Static) -> tuple[Entry, Read]:
        """Returns the entry of a call, preferring the last one, and the call's leaves."""
        last = self._last
        if last is not None and last.version == version() and last.x64 == x64_is_on() and last.static == static:
            read = last.entry.read(call)
            if read is not None:
                return last.entry, read
        entry = self._entry(call, static)
        return entry, self._read(entry, call)

    def _on_one_device(self, call: Call, static: Static, entry: Entry) -> Captured | None:
        """Traces the user's own step, or returns None if it holds collectives, which one device does not have."""
        try:
            with auto_axes(), traced_for(entry.environment):
                return entry.on_one_device(self._target, call, static)
        except CommunicationError:
            return None

    def _say(self, entry: Entry) -> None:
        """Warns once of what a user may not expect of a call that runs, and logs that it is compiled."""
        log_compiling(self._calls, entry)
        for sentence in entry.warnings:
            if sentence not in self._said:
                self._said.add(sentence)
                warn_user(sentence)

    @staticmethod
    def _read(entry: Entry, call: Call) -> Read:
        read = entry.read(call)
        assert read is not None, "an entry reads the call it was made for"
        return read

    def _ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry, Sequence[Any]]:
        call, static = self._split(args, kwargs)
        entry = self._entry(call, static)
        return entry, self._read(entry, call).leaves

    def _entry_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        with ShortTracebacks():
            return self._entry(*self._split(args, kwargs))

    def _entry(self, call: Call, static: Static) -> Entry:
        """Finds or makes the entry of a call, which becomes the last one."""
        from spmdctx.step.make import entry_of

        with self._lock, auto_axes():
            number, x64 = version(), x64_is_on()
            around = environment(self._options, self.context)
            # Tracing reads the x64 flag, and the types of the arguments do not show it.
            entries = self._entries.setdefault((around.settings, around.devices, static, x64), [])
            entry = next((entry for entry in entries if entry.read(call) is not None), None)
            if is_new := entry is None:
                notes = warn_ineffective(around.context)
                notes += warn_without_option(around.backend, around.context)
                with tracing_in(around.context.parallel_mode), traced_for(around):
                    entry = entry_of(self._target, call, static, around, notes)
                entries.append(entry)
            log_entry(self._target.name, entry, static, self._last, is_new=is_new)
            entry.planned  # noqa: B018  errors of planning belong to this call
            self._last = _Last(number, x64, static, entry)
            return entry
