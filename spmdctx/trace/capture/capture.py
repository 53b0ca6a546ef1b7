"""Captures the user's function and arguments as a pure, flat program: leaves with roles, a jaxpr, and the way back."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc

from spmdctx._compat import JitOptions, unwrap_jit, without_high_primitives
from spmdctx.errors import UnsupportedError, message
from spmdctx.ir.graph import Role
from spmdctx.trace.capture.arguments import Call, Names, Parameters, Positions, Selection, Static, parameters_of
from spmdctx.trace.capture.as_lowered import as_lowered
from spmdctx.trace.capture.carry import Span, carried_leaves
from spmdctx.trace.capture.objects import ObjectFlattening, has_objects
from spmdctx.trace.capture.partitioning import PartitionNames
from spmdctx.trace.capture.pytrees import NotPure, PureFlattening
from spmdctx.trace.capture.roles import Argument, guesses, roles_of
from spmdctx.trace.capture.structure import Flattening, Keys, Result, Structure, argument_of, key_text, path_text, shape_of
from spmdctx.trace.collector import no_garbage_collection


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """One flat argument of the program; `shape` is global.

    `metadata` holds the partition names of Flax metadata (a pin), None where the leaf has none. `layerwise` marks a
    parameter that stays split in hybrid_parallel.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    donated: bool = False
    metadata: PartitionNames | None = None
    layerwise: bool = False


@dataclass(frozen=True, slots=True)
class OutputLeaf:
    """One flat result; `carried_from` is the index of the input whose next value it is, None where it is new."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    carried_from: int | None = None


class LossGradient(NamedTuple):
    """A gradient that a loss of each device's own reduces, and the bucket in which it does; None for none."""

    path: str
    bucket: int | None


@dataclass(frozen=True)
class Captured:
    """A traced step over flat leaves.

    `jaxpr` takes one variable for each entry of `inputs` and gives one for each entry of `outputs`; closed-over arrays are its
    consts. `structure` flattens arguments and rebuilds results. `owned` marks the inputs that belong to nnx objects. `mesh_axes`
    is the mesh that was set while the step was traced, empty if none was. `gradients` belong to losses that each device computes
    by itself, in the order of their first use.
    """

    name: str
    jaxpr: jexc.ClosedJaxpr
    inputs: tuple[InputLeaf, ...]
    outputs: tuple[OutputLeaf, ...]
    structure: Structure
    trace_s: float
    owned: tuple[bool, ...] = ()
    notes: tuple[str, ...] = ()
    mesh_axes: tuple[tuple[str, int], ...] = ()
    gradients: tuple[LossGradient, ...] = ()

    @property
    def carried(self) -> tuple[tuple[int, int], ...]:
        """Pairs (output index, input index) of state that goes in and comes out."""
        return tuple((index, leaf.carried_from) for index, leaf in enumerate(self.outputs) if leaf.carried_from is not None)

    @property
    def in_avals(self) -> tuple[Any, ...]:
        """Abstract values of the inputs, weak types kept."""
        return tuple(self.jaxpr.in_avals)


@dataclass(frozen=True)
class Target:
    """A function as the trace calls it: with the nnx objects it is bound to as leading arguments."""

    fn: Callable[..., Any]
    leading: tuple[Any, ...]
    name: str
    parameters: Parameters
    static: Selection
    donated: Selection
    batch: Selection | None


def target_of(
    fn: Callable[..., Any],
    *,
    batch_argnums: Positions = None,
    batch_argnames: Names = None,
    static_argnums: Positions = (),
    static_argnames: Names = (),
    donate_argnums: Positions = (),
    donate_argnames: Names = (),
) -> Target:
    """Looks through jax.jit, nnx.jit, bound methods and partials of nnx objects, and resolves which arguments are which.

    Raises:
        ContextError: a position or name that the function does not have.
        TypeError: `fn` is no function, or a position or name of a wrong type.
    """
    if not callable(fn):
        raise TypeError(message("A step must be a function, a method, or a function of jax.jit or nnx.jit.", got=type(fn).__name__))
    fn, leading = _unbound(fn)
    fn, jitted = unwrap_jit(fn) if not _is_filter_jit(fn) else _unwrap_filter_jit(fn)
    parameters = parameters_of(fn)
    visible = replace(parameters, names=parameters.names[len(leading) :])

    def select(what: str, positions: Positions, names: Names) -> Selection:
        return visible.select(what, positions, names).shifted(len(leading))

    def also(selection: Selection, numbers: tuple[int, ...], words: tuple[str, ...]) -> Selection:
        return Selection(selection.positions | frozenset(numbers), selection.names | frozenset(words))

    return Target(
        fn=fn,
        leading=leading,
        name=getattr(fn, "__name__", type(fn).__name__),
        parameters=parameters,
        static=also(select("static", static_argnums, static_argnames), jitted.static_argnums, jitted.static_argnames),
        donated=also(select("donate", donate_argnums, donate_argnames), jitted.donate_argnums, jitted.donate_argnames),
        batch=None if batch_argnums is None and batch_argnames is None else select("batch", batch_argnums, batch_argnames),
    )


def _unbound(fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function and the nnx objects to which it is bound, which are state and not constants."""
    if inspect.ismethod(fn) and has_objects(fn.__self__):
        return fn.__func__, (fn.__self__,)
    if isinstance(fn, functools.partial) and fn.args and not fn.keywords and has_objects(fn.args):
        inner, leading = _unbound(fn.func)
        return inner, (*leading, *fn.args)
    if not inspect.isroutine(fn) and has_objects(fn):
        return type(fn).__call__, (fn,)
    return fn, ()


def _is_filter_jit(fn: Any) -> bool:
    """Returns whether Equinox's `filter_jit` made a function."""
    return type(fn).__module__.startswith("equinox") and all(hasattr(fn, name) for name in ("__wrapped__", "donate_first", "donate_rest"))


def _unwrap_filter_jit(fn: Any) -> tuple[Callable[..., Any], JitOptions]:
    """Returns the function under Equinox's `filter_jit` with what it donates; the trace sets apart functions in modules by itself."""
    inner = fn.__wrapped__
    positions = range(len(parameters_of(inner).names))
    donated = tuple(position for position in positions if (fn.donate_rest if position else fn.donate_first))
    return inner, JitOptions(donate_argnums=donated)


def flattening_of(call: Call) -> Flattening:
    """Flattens the dynamic arguments of one call."""
    return ObjectFlattening(call) if has_objects(call) else PureFlattening(call)


def capture_call(target: Target, call: Call, static: Static) -> Captured:
    """Traces one call whose static arguments are already set apart."""
    try:
        with no_garbage_collection():
            flattening = flattening_of(call)
        return _capture_flat(target, static, flattening)
    except NotPure:  # known once it is traced: an initialiser, for example
        return _capture_flat(target, static, ObjectFlattening(call))


def _capture_flat(target: Target, static: Static, flattening: Flattening) -> Captured:
    started = time.perf_counter()
    paths = [_path(target, static, leaf.keys) for leaf in flattening.leaves]
    avals = [abstract(leaf.value, path) for leaf, path in zip(flattening.leaves, paths, strict=True)]
    donated = [target.donated.holds(_argument(static, leaf.keys)) for leaf in flattening.leaves]
    with _naming(paths, target):
        traced = _trace(target, static, flattening, avals, donated)
    roles, carried, notes = _roles(target, static, flattening, traced)
    inputs = tuple(
        InputLeaf(path, tuple(aval.shape), dtype_text(aval.dtype), role, given, leaf.names, leaf.layerwise)
        for path, aval, role, given, leaf in zip(paths, traced.jaxpr.in_avals, roles, donated, flattening.leaves, strict=True)
    )
    outputs = tuple(
        OutputLeaf(
            path_text(("out", *result.keys)) if result.source is None else paths[result.source],
            tuple(aval.shape),
            dtype_text(aval.dtype),
            source,
        )
        for result, aval, source in zip(traced.results, traced.jaxpr.out_avals, carried, strict=True)
    )
    structure = flattening.structure(traced.kept)
    return Captured(
        target.name,
        traced.jaxpr,
        inputs,
        outputs,
        structure,
        time.perf_counter() - started,
        tuple(leaf.owned for leaf in flattening.leaves),
        notes,
        tuple(jax.sharding.get_abstract_mesh().shape.items()),
    )


@functools.lru_cache(maxsize=256)
def dtype_text(dtype: Any) -> str:
    """Returns the name of a type, which NumPy would work out anew each time."""
    return str(dtype)


class _Traced(NamedTuple):
    jaxpr: jexc.ClosedJaxpr
    results: list[Result]
    kept: list[int]


def _trace(target: Target, static: Static, flattening: Flattening, avals: list[Any], donated: list[bool]) -> _Traced:
    """Traces the flat program; leaves out results that only pass an nnx variable through, unless its memory is donated."""
    results: list[Result] = []
    kept: list[int] = []

    def run(call: Call) -> Any:
        args, kwargs = static.join(*call)
        return target.fn(*args, **kwargs)

    def flat(*leaves: Any) -> list[Any]:
        made = flattening.run(run, leaves)
        unchanged = [entry.source is not None and not donated[entry.source] and entry.value is leaves[entry.source] for entry in made]
        kept[:] = flattening.kept(unchanged)
        results[:] = [made[index]._replace(value=None) for index in kept]
        return [made[index].value for index in kept]

    jaxpr = without_high_primitives(jax.make_jaxpr(flat)(*[shape_of(aval) for aval in avals]))
    return _Traced(as_lowered(jaxpr), results, kept)


@contextmanager
def _naming(paths: Sequence[str], target: Target) -> Iterator[None]:
    """Makes errors of the trace name the user's arguments and function instead of the flat ones that JAX was given."""
    try:
        yield
    except Exception as error:
        error.args = tuple([_named(text, paths, target) if isinstance(text, str) else text for text in error.args])
        raise


def _named(text: str, paths: Sequence[str], target: Target) -> str:
    text = re.sub(r"\bleaves\[(\d+)\]", lambda found: paths[int(found[1])] if int(found[1]) < len(paths) else found[0], text)
    code = getattr(target.fn, "__code__", None)
    place = f"{target.name} at {code.co_filename}:{code.co_firstlineno}" if code is not None else target.name
    return re.sub(rf"\bflat at {re.escape(__file__)}:\d+", lambda _: place, text)


def abstract(value: Any, path: str) -> Any:
    """Returns the abstract value of a leaf with its weak type.

    Raises:
        TypeError: the leaf is not an array, number or key.
        UnsupportedError: the leaf is a mutable array reference.
    """
    try:
        aval = jax.typeof(value)
    except TypeError:
        raise TypeError(
            message(
                f"Argument {path!r} is no array.",
                got=f"{type(value).__module__}.{type(value).__qualname__}",
                fix="pass it as a static argument (static_argnames), or close over it",
            )
        ) from None
    if not isinstance(aval, jax.core.ShapedArray):
        raise UnsupportedError(
            f"Argument {path!r} is a mutable array reference.", got=str(aval), fix="pass an array and return its next value"
        )
    return aval


def _argument(static: Static, keys: Keys) -> int | str:
    """Returns the argument of the user's call to which a leaf belongs: its position, or its keyword."""
    argument = argument_of(keys)
    return argument if isinstance(argument, str) else static.position(argument)


def leaf_paths(target: Target, call: Call, static: Static) -> list[str]:
    """Returns the paths that plans give the leaves of a call, which may have the step's first arguments only."""
    return [_path(target, static, leaf.keys) for leaf in flattening_of(call).leaves]


def _path(target: Target, static: Static, keys: Keys) -> str:
    return "/".join([target.parameters.name(_argument(static, keys)), *[key_text(key) for key in keys[2:]]])


def _roles(target: Target, static: Static, flattening: Flattening, traced: _Traced) -> tuple[list[Role], list[int | None], tuple[str, ...]]:
    """Returns the role of each input, for each output the input whose next value it is, and notes on what was guessed."""
    arguments = list(_arguments(target, static, flattening, traced.jaxpr.in_avals))
    sources = [result.source for result in traced.results]
    first = sum(index < flattening.num_state for index in traced.kept)
    unowned = [argument for argument in arguments if not argument.is_key and not any(leaf.owned for leaf in argument.leaves)]
    found = carried_leaves(
        [argument.span for argument in unowned],
        traced.jaxpr.in_avals,
        Span(flattening.result_tree, first, len(sources)),
        traced.jaxpr.out_avals,
        traced.jaxpr.jaxpr,
    )
    for source, output in found.items():
        sources[output] = source
    roles = roles_of(arguments, frozenset(found), target.batch)
    return roles, sources, guesses(arguments, roles, frozenset(found), target.batch)


def _arguments(target: Target, static: Static, flattening: Flattening, avals: Sequence[Any]) -> Iterator[Argument]:
    """Yields the dynamic arguments; leaves of one argument that are not adjacent count as several arguments of one name."""
    start = 0
    for place, group in itertools.groupby(flattening.leaves, key=lambda leaf: (_argument(static, leaf.keys), leaf.owned)):
        leaves = list(group)
        stop = start + len(leaves)
        tree = (
            jax.tree.structure(flattening.argument(argument_of(leaves[0].keys))) if not place[1] else jax.tree.structure([0] * len(leaves))
        )
        yield Argument(target.parameters.name(place[0]), place[0], Span(tree, start, stop), leaves, avals[start:stop])
        start = stop
