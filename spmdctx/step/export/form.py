"""The form in which an exported module takes a step: pytrees in, pytrees out. nnx objects go in and come back as a state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from spmdctx.errors import ContextWarning, UnsupportedError
from spmdctx.step.entry import Entry
from spmdctx.step.export.runtime import functions, traced
from spmdctx.trace.build.jaxprs.equations import struct_of
from spmdctx.trace.capture.arguments import Static
from spmdctx.trace.capture.objects import ObjectStructure, is_object
from spmdctx.trace.capture.pytrees import PureStructure
from spmdctx.trace.capture.target import Target
from spmdctx.trace.flax_modules import nnx

STATE = "state"
"""The name of the argument that holds the state of a step's nnx objects."""


@dataclass(frozen=True)
class Form:
    """A step as pytrees.

    Attributes:
        fn: the step.
        call: its dynamic arguments, abstract.
        names: the names of its positional arguments.
        axes: those of the mesh that is set while the step is traced.
        inputs: for each input of the captured program, which leaf of `call` it is.
        updated: for each leaf of a state, which result of the captured program is its next value, None for one that stays.
        objects: the names of the arguments that are nnx objects.
        static: the names of the arguments that are bound.
        given: the dynamic arguments as the step takes them, nnx objects among them.
    """

    fn: Callable[..., Any]
    call: tuple[tuple[Any, ...], dict[str, Any]]
    names: tuple[str, ...]
    axes: tuple[tuple[str, int], ...]
    inputs: tuple[int, ...]
    updated: tuple[int | None, ...] = ()
    objects: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    given: Any = None

    def traced(self) -> tuple[Any, Any]:
        """Returns the step's own trace, and the structure of its result."""
        leaves, tree = jax.tree.flatten(self.call)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ContextWarning)  # of shard(), which has no effect in a plain trace
            return traced(self.fn, [leaf for leaf in leaves if not callable(leaf)], (tree, functions(leaves)), dict(self.axes))

    def results(self, own: Any) -> list[int | str]:
        """Returns for each result of the own trace which result of the captured program it is, or the input that it is."""
        first = sum(place is not None for place in self.updated)
        state: list[int | str] = [f"in.{number}" if place is None else place for number, place in enumerate(self.updated)]
        return [*state, *range(first, first + len(own.jaxpr.outvars) - len(state))]


def form_of(entry: Entry, target: Target, static: Static) -> Form:
    """Returns the form of a step.

    Raises:
        UnsupportedError: arguments that an exported module cannot take, by name.
    """
    structure = entry.structure
    leaves = [struct_of(aval) for aval in entry.captured.in_avals]
    names = _positional(target, static)
    if isinstance(structure, PureStructure):
        args, kwargs = structure.inputs(leaves)

        def step(*own: Any, **others: Any) -> Any:
            joined = static.join(own, others)
            return target.fn(*joined[0], **joined[1])

        return Form(
            step,
            (tuple(args), kwargs),
            names[: len(args)],
            entry.captured.mesh_axes,
            tuple(range(len(leaves))),
            static=_bound(target, static),
            given=(tuple(args), kwargs),
        )
    if isinstance(structure, ObjectStructure) and structure.regrown is None:
        return _with_state(entry, structure, target, static, leaves)
    raise UnsupportedError(
        'export("jax") cannot write a step that makes nnx objects, or changes their form.',
        where=entry.captured.name,
        fix="let the step take and return states: nnx.split and nnx.merge",
    )


def _positional(target: Target, static: Static) -> tuple[str, ...]:
    known = target.parameters.names
    count = max(len(known), 64)
    every = [known[place] if place < len(known) else f"argument{place}" for place in range(count)]
    return tuple(
        every[static.position(place)] if isinstance(static.position(place), int) else f"argument{place}" for place in range(count - 8)
    )


def _bound(target: Target, static: Static) -> tuple[str, ...]:
    return tuple(sorted(target.static.names)) + tuple(
        target.parameters.names[place] for place in sorted(target.static.positions) if place < len(target.parameters.names)
    )


def _with_state(entry: Entry, structure: ObjectStructure, target: Target, static: Static, leaves: Sequence[Any]) -> Form:
    """Returns the form of a step whose nnx objects are given as one state, in the order of the arguments."""
    count = structure.values.num_leaves
    args, kwargs = structure.form.build(_objects(structure, range(count)), leaves[count:])
    places = [place for place, argument in enumerate(args) if is_object(argument)]
    held = sum(structure.form.places)
    if held != len(places):
        raise UnsupportedError(
            'export("jax") cannot write a step that takes nnx objects inside of other arguments.',
            where=entry.captured.name,
            fix="pass each object as an argument of its own",
        )
    graphdef, numbered = nnx.split(tuple(args[place] for place in places))
    inputs = {leaf: place for place, leaf in enumerate(jax.tree.leaves(numbered))}
    state = jax.tree.unflatten(jax.tree.structure(numbered), [leaves[leaf] for leaf in inputs])
    others = [argument for place, argument in enumerate(args) if place not in places]

    def step(state: Any, *own: Any, **keywords: Any) -> Any:
        objects, rest = nnx.merge(graphdef, state), iter(own)
        given = iter(objects)
        joined = static.join(tuple(next(given) if place in places else next(rest) for place in range(len(args))), keywords)
        result = target.fn(*joined[0], **joined[1])
        return nnx.state(objects), result

    captured = entry.captured
    made = {leaf.path: place for place, leaf in enumerate(captured.outputs[: structure.num_state])}
    updated = tuple(made.get(captured.inputs[leaf].path) for leaf in inputs)
    every = _positional(target, static)
    names = (STATE, *[every[place] for place in range(len(args)) if place not in places])
    return Form(
        step,
        ((state, *others), kwargs),
        names,
        captured.mesh_axes,
        (*[inputs[leaf] for leaf in range(count)], *range(count, len(leaves))),
        updated,
        tuple(every[place] for place in places),
        _bound(target, static),
        structure.form.build(_objects(structure, leaves[:count]), leaves[count:]),
    )


def _objects(structure: ObjectStructure, leaves: Sequence[Any]) -> Sequence[Any]:
    objects, _ = nnx.graph.unflatten(structure.graphdef, structure.values.unflatten(list(leaves)))
    return objects  # type: ignore[no-any-return]  # a tuple, as it was taken apart
