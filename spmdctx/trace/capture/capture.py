"""Captures the user's function and arguments as a pure, flat program: leaves with roles, a jaxpr, and the way back."""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc

from spmdctx._compat import entered_mesh, without_high_primitives
from spmdctx.errors import UnsupportedError, message
from spmdctx.ir.graph import Role
from spmdctx.machine.topology import Compiler
from spmdctx.trace.build.build import Argument, build
from spmdctx.trace.build.compiled import as_compiled
from spmdctx.trace.build.jaxprs.constants import without_constants
from spmdctx.trace.build.jaxprs.equations import struct_of
from spmdctx.trace.build.origins import at_home, definition_line
from spmdctx.trace.build.program import Program
from spmdctx.trace.capture.arguments import Call, Static
from spmdctx.trace.capture.as_lowered import as_lowered
from spmdctx.trace.capture.carry import Span, carried_leaves, given_back
from spmdctx.trace.capture.objects import ObjectFlattening, has_objects, model_name
from spmdctx.trace.capture.partitioning import PartitionNames, batch_axes, notes_on_rules
from spmdctx.trace.capture.portable.axis_names import explaining_axis_names
from spmdctx.trace.capture.portable.one_device import OneDevice
from spmdctx.trace.capture.portable.placements import is_one_device
from spmdctx.trace.capture.portable.step import portable
from spmdctx.trace.capture.pytrees import NotPure, PureFlattening
from spmdctx.trace.capture.roles import Argument as CallArgument
from spmdctx.trace.capture.roles import guesses, roles_of, with_update_roles
from spmdctx.trace.capture.structure import Flattening, Keys, Result, Structure, argument_of, key_text, path_text
from spmdctx.trace.capture.target import Target
from spmdctx.trace.capture.updates import Updates
from spmdctx.trace.collector import no_garbage_collection


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """One flat argument of the program; `shape` is global.

    `metadata` holds the partition names of Flax metadata (a pin), None where the leaf has none. `layerwise` marks a
    parameter that stays split in hybrid_parallel, `served` one that servers hold.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    donated: bool = False
    metadata: PartitionNames | None = None
    layerwise: bool = False
    served: bool = False


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
    is the mesh that was set while the step was traced, empty if none was. `batch_axes` are those of the rule of the batch, if there is
    one. `gradients` belong to losses that each device computes by itself, in the order of their first use. `guessed` are the inputs that
    were taken as the batch without being told, and `arguments` the argument of the user's call to which each input belongs. `warnings`
    are said at the first call.

    The rest is set where gradient options change what the step computes: `is_rewritten` says so, `deviations` why its results are not
    those of one device, and `draws_apart` that devices or micro-batches draw random numbers of their own. `is_part` marks a program of a
    pipeline, whose arguments are not the user's. `model` is the class of the step's model, and `home` the line of its function.
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
    batch_axes: tuple[str, ...] | None = None
    gradients: tuple[LossGradient, ...] = ()
    guessed: frozenset[int] = frozenset()
    arguments: tuple[int | str, ...] = ()
    warnings: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()
    is_rewritten: bool = False
    draws_apart: bool = False
    is_part: bool = False
    model: str = ""
    home: str = ""
    program: Program | None = None

    def built(self) -> Program:
        """Returns the program with its graph, which is built once if something has looked at it before it is planned."""
        if self.program is not None:
            return self.program
        with no_garbage_collection():
            return at_home(build(self.jaxpr, [Argument(leaf.path, leaf.role) for leaf in self.inputs], self.carried), self.home)

    def built_for(self, compiler: Compiler) -> Program:
        """Returns the program as the compiler of a machine fuses it."""
        return as_compiled(self.built(), compiler)

    def without_batch(self, demoted: Collection[int]) -> Captured:
        """Returns the same step, of whose inputs those `demoted` are plain arguments and not the batch."""
        inputs = [replace(leaf, role=Role.ARGUMENT) if index in demoted else leaf for index, leaf in enumerate(self.inputs)]
        return replace(self, inputs=tuple(inputs), guessed=self.guessed - frozenset(demoted), program=None)

    @property
    def carried(self) -> tuple[tuple[int, int], ...]:
        """Pairs (output index, input index) of state that goes in and comes out."""
        return tuple((index, leaf.carried_from) for index, leaf in enumerate(self.outputs) if leaf.carried_from is not None)

    @property
    def given_back(self) -> frozenset[int]:
        """Inputs outside of the batch that are no known state, but most likely are given the results of the last call."""
        owned = self.owned or (False,) * len(self.inputs)
        known = {source for _, source in self.carried}
        asked = {
            index: leaf.role is Role.KEY
            for index, leaf in enumerate(self.inputs)
            if not owned[index] and index not in known and leaf.role is not Role.BATCH
        }
        new = [index for index, leaf in enumerate(self.outputs) if leaf.carried_from is None]
        return given_back(self.jaxpr.jaxpr, asked, new)

    @property
    def in_avals(self) -> tuple[Any, ...]:
        """Abstract values of the inputs, weak types kept."""
        return tuple(self.jaxpr.in_avals)


def flattening_of(call: Call) -> Flattening:
    """Flattens the dynamic arguments of one call."""
    return ObjectFlattening(call) if has_objects(call) else PureFlattening(call)


def capture_call(target: Target, call: Call, static: Static, num_devices: int = 1) -> Captured:
    """Traces one call whose static arguments are already set apart, for so many devices.

    Raises:
        UnsupportedError: the call names an axis that nothing in it binds.
    """
    with explaining_axis_names():
        try:
            with no_garbage_collection():
                flattening = flattening_of(call)
            return replace(_capture_flat(target, static, flattening, num_devices), model=model_name(call))
        except NotPure:  # known once it is traced: an initialiser, for example
            return replace(_capture_flat(target, static, ObjectFlattening(call), num_devices), model=model_name(call))


def _capture_flat(target: Target, static: Static, flattening: Flattening, num_devices: int) -> Captured:
    started = time.perf_counter()
    paths = [_path(target, static, leaf.keys) for leaf in flattening.leaves]
    avals = [abstract(leaf.value, path) for leaf, path in zip(flattening.leaves, paths, strict=True)]
    places = tuple(_argument(static, leaf.keys) for leaf in flattening.leaves)
    donated = [target.donated.holds(place) for place in places]
    with _naming(paths, target):
        traced = _trace(target, static, flattening, avals, donated)
    jaxpr, left_out = portable(traced.jaxpr, num_devices)
    traced = traced._replace(jaxpr=without_constants(jaxpr))
    mesh_axes, names = _partitioning(flattening, num_devices, left_out)
    roles, carried, notes = _roles(target, static, flattening, traced)
    inputs = tuple(
        InputLeaf(path, tuple(aval.shape), dtype_text(aval.dtype), role, given, own, leaf.layerwise, leaf.served)
        for path, aval, role, given, own, leaf in zip(paths, traced.jaxpr.in_avals, roles, donated, names, flattening.leaves, strict=True)
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
        (*notes, *filter(None, [traced.note, left_out.note(num_devices), *(notes_on_rules() if num_devices > 1 else ())])),
        mesh_axes,
        batch_axes(),
        guessed=frozenset(index for index, role in enumerate(roles) if role is Role.BATCH and target.batch is None),
        arguments=places,
        home=definition_line(target.fn),
    )


def _partitioning(
    flattening: Flattening, num_devices: int, left_out: OneDevice
) -> tuple[tuple[tuple[str, int], ...], list[PartitionNames | None]]:
    """Returns the axes of the mesh that is set, and the partition names of each leaf; those of a mesh of one device say nothing."""
    mesh, names = jax.sharding.get_abstract_mesh(), [leaf.names for leaf in flattening.leaves]
    entered = entered_mesh()
    if num_devices == 1 or not (is_one_device(mesh) or (mesh.empty and is_one_device(entered))):
        return tuple(mesh.shape.items()), names
    known = set((entered if mesh.empty else mesh).axis_names)
    for index, own in enumerate(names):
        named = {name for dim in own or () for name in ((dim,) if isinstance(dim, str) else dim or ())}
        if named and named <= known:
            left_out.add("partitioned argument")
            names[index] = None
    return (), names


@functools.lru_cache(maxsize=256)
def dtype_text(dtype: Any) -> str:
    """Returns the name of a type, which NumPy would work out anew each time."""
    return str(dtype)


class _Traced(NamedTuple):
    jaxpr: jexc.ClosedJaxpr
    results: list[Result]
    kept: list[int]
    note: str = ""


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

    shapes, note = [struct_of(aval) for aval in avals], ""
    try:
        jaxpr = jax.make_jaxpr(flat)(*shapes)
    except ValueError as error:
        if jax.sharding.get_abstract_mesh().empty:
            raise
        axes, reason = ", ".join(jax.sharding.get_abstract_mesh().axis_names), str(error).partition("\n")[0]
        jaxpr, without_mesh = _traced_again(flat, shapes, error)
        if without_mesh:
            note = (
                f"The step is traced without the mesh that is set (axes {axes}), so that constraints by names of axes have no effect. "
                f"With it, JAX says {reason!r}."
            )
    return _Traced(as_lowered(without_high_primitives(jaxpr)), results, kept, note)


def _traced_again(flat: Callable[..., Any], shapes: Sequence[Any], error: ValueError) -> tuple[jexc.ClosedJaxpr, bool]:
    """Traces a step that failed while a mesh is set, such as the step's own; returns the program, and whether no mesh was set this time.

    JAX allows no shard_map of another mesh there, be it of one device. If it fails without the mesh too, the first error counts.
    """
    try:
        from spmdctx.trace.initials import unconstrained_initials

        with unconstrained_initials():
            return jax.make_jaxpr(flat)(*shapes), False
    except ValueError:
        pass
    try:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return jax.make_jaxpr(flat)(*shapes), True
    except Exception:
        raise error from None


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
        # What stands for an array that another process holds says its type itself.
        aval = getattr(value, "remote_aval", None) or jax.typeof(value)
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
    carried = {source: output for output, source in enumerate(sources) if source is not None}
    roles = with_update_roles(roles, arguments, Updates(traced.jaxpr.jaxpr, carried))
    return roles, sources, guesses(arguments, roles, frozenset(found), target.batch)


def _arguments(target: Target, static: Static, flattening: Flattening, avals: Sequence[Any]) -> Iterator[CallArgument]:
    """Yields the dynamic arguments; leaves of one argument that are not adjacent count as several arguments of one name."""
    start = 0
    for place, group in itertools.groupby(flattening.leaves, key=lambda leaf: (_argument(static, leaf.keys), leaf.owned)):
        leaves = list(group)
        stop = start + len(leaves)
        tree = (
            jax.tree.structure(flattening.argument(argument_of(leaves[0].keys))) if not place[1] else jax.tree.structure([0] * len(leaves))
        )
        yield CallArgument(target.parameters.name(place[0]), place[0], Span(tree, start, stop), leaves, avals[start:stop])
        start = stop
