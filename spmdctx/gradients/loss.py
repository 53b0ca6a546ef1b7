"""A loss with the transformation that the user asked for, and one call of it as flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import numpy as np
from jax.tree_util import SequenceKey

from spmdctx.gradients.closure import Closure
from spmdctx.ir.graph import Role
from spmdctx.trace.build.jaxprs.equations import struct_of
from spmdctx.trace.capture.arguments import parameters_of
from spmdctx.trace.capture.capture import flattening_of
from spmdctx.trace.capture.objects import ObjectFlattening, has_objects
from spmdctx.trace.capture.portable.step import portable
from spmdctx.trace.capture.pytrees import NotPure
from spmdctx.trace.capture.structure import Flattening, Keys, key_text, path_text
from spmdctx.trace.flax_modules import nnx


class Loss(NamedTuple):
    """A function with what `jax.value_and_grad` was asked; `name` is "value_and_grad" or "grad".

    `micro_size` is the number of micro-batches in which a pipeline runs it, None where the context says it, `num_parts` the number of
    parts in which each runs.
    """

    fn: Callable[..., Any]
    name: str
    argnums: Any
    has_aux: bool
    options: dict[str, Any]
    micro_size: int | None = None
    num_parts: int = 1

    def transformed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Returns JAX's or nnx's transformation of the function, depending on the arguments."""
        module: Any = nnx if not self._is_of_jax or has_objects((args, kwargs)) else jax
        found: Callable[..., Any] = getattr(module, self.name)(self.fn, argnums=self.argnums, has_aux=self.has_aux, **self.options)
        return found

    @property
    def _is_of_jax(self) -> bool:
        entries = self.argnums if isinstance(self.argnums, tuple | list) else (self.argnums,)
        return all(isinstance(entry, int) for entry in entries)

    @property
    def gives_value(self) -> bool:
        """True if the call returns the loss beside its gradients."""
        return self.name == "value_and_grad"

    def with_value(self) -> Loss:
        """Returns the same loss, whose calls return its value too."""
        return self._replace(name="value_and_grad")

    def without_value(self, result: Any) -> Any:
        """Returns what a call gives, from the result of the same call `with_value`."""
        if self.gives_value:
            return result
        value, gradients = result
        return (gradients, value[1]) if self.has_aux else gradients

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of the plain transformation."""
        return self.transformed(args, kwargs)(*args, **kwargs)

    def parts(self, result: Any) -> dict[str, Any]:
        """Splits a result into gradients, and value and aux if the call returns them."""
        if self.name == "grad":
            return {"gradients": result[0], "aux": result[1]} if self.has_aux else {"gradients": result}
        value, gradients = result
        return {"gradients": gradients, "value": value[0], "aux": value[1]} if self.has_aux else {"gradients": gradients, "value": value}

    def whole(self, parts: dict[str, Any]) -> Any:
        """Builds the result that has these parts."""
        gradients = parts["gradients"]
        if self.name == "grad":
            return (gradients, parts["aux"]) if self.has_aux else gradients
        return ((parts["value"], parts["aux"]), gradients) if self.has_aux else (parts["value"], gradients)


class Made(NamedTuple):
    """One traced result: its path, and the argument leaf whose next value it is, None where it is new."""

    keys: Keys
    source: int | None

    @property
    def part(self) -> str:
        """ "value", "aux" or "gradients"; "state" for a variable of an nnx object."""
        head = key_text(self.keys[0]) if self.keys else ""
        return head if head in ("value", "aux", "gradients") and self.source is None else "state"

    @property
    def path(self) -> str:
        """The path of the result in messages."""
        return path_text(self.keys)


class Traced(NamedTuple):
    """The flat program of a call over its traced leaves, and what each of its results is."""

    jaxpr: jexc.ClosedJaxpr
    results: list[Made]


class LossCall:
    """One call: its traced leaves (`values`, with `paths`), those that the loss closes over first.

    `note` says what the last trace left out for `num_replicas` devices that run the loss by themselves, if there are several.
    """

    def __init__(self, loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any], num_replicas: int) -> None:
        self._loss, self._num_replicas, self.note = loss, num_replicas, ""
        self._closure = Closure(loss.fn)
        self._call: Any = ((tuple(self._closure.values), *args), kwargs)
        self._flattening: Flattening = flattening_of(self._call)
        self._kept: list[int] = []
        self._fixed: list[Any] = []
        self._take_leaves()

    def _take_leaves(self) -> None:
        leaves = self._flattening.leaves
        self._places = [index for index, leaf in enumerate(leaves) if isinstance(leaf.value, jax.core.Tracer)]
        self.leaves = [leaves[place] for place in self._places]
        self.values = [leaf.value for leaf in self.leaves]
        self.paths = [self._path(leaf.keys) for leaf in self.leaves]
        self._of_names: dict[tuple[int, tuple[str, ...]], int] = {}
        for index, leaf in enumerate(self.leaves):
            self._of_names.setdefault((_position(leaf.keys), _names(leaf.keys[2:])), index)

    def _path(self, keys: Keys) -> str:
        position = _position(keys)
        if position == _CLOSED_OVER and isinstance(keys[1], SequenceKey):
            return str(self._closure.paths[keys[2].idx])
        head = key_text(keys[1]) if position == _CLOSED_OVER else parameters_of(self._loss.fn).name(position)
        return "/".join([head, *map(key_text, keys[2:])])

    def trace(self, avals: Sequence[Any], axes: Sequence[tuple[str, int]] = ()) -> Traced:
        """Traces the differentiated loss for traced leaves of these types."""
        return self._traced(self._evaluate, avals, axes)

    def trace_forward(self, avals: Sequence[Any]) -> Traced:
        """Traces the loss alone; `finish` builds results of the last trace by `trace`."""
        return self._traced(self._evaluate_forward, avals, ())

    def _traced(self, evaluate: Callable[[Any], Any], avals: Sequence[Any], axes: Sequence[tuple[str, int]]) -> Traced:
        try:
            return self._trace(evaluate, avals, axes)
        except NotPure:
            self._flattening = ObjectFlattening(self._call)
            self._take_leaves()
            return self._trace(evaluate, avals, axes)

    def _trace(self, evaluate: Callable[[Any], Any], avals: Sequence[Any], axes: Sequence[tuple[str, int]]) -> Traced:
        made: list[Made] = []
        flat = self._flattening
        originals = [leaf.value for leaf in flat.leaves]
        position = {place: index for index, place in enumerate(self._places)}

        def program(*leaves: Any) -> list[Any]:
            given = list(originals)
            for place, leaf in zip(self._places, leaves, strict=True):
                given[place] = leaf
            results = flat.run(evaluate, given)
            same = [result.source is not None and result.value is given[result.source] for result in results]
            self._kept = flat.kept(same)
            self._fixed = []
            made.clear()
            outputs = []
            for index in self._kept:
                result = results[index]
                if result.source is not None and same[index]:
                    self._fixed.append(originals[result.source])
                elif _is_array(result.value):
                    self._fixed.append(_TRACED)
                    made.append(Made(result.keys, None if result.source is None else position.get(result.source)))
                    outputs.append(result.value)
                else:
                    self._fixed.append(result.value)
            return outputs

        # What a loss says of one device cannot stand in the shard_map in which each device runs it.
        replicas = self._num_replicas if self._num_replicas > 1 else None
        jaxpr, left_out = portable(jax.make_jaxpr(program, axis_env=list(axes))(*map(struct_of, avals)), replicas)
        self.note = left_out.note(self._num_replicas)
        return Traced(jaxpr, made)

    def _evaluate(self, call: Any) -> dict[str, Any]:
        (values, *args), kwargs = call
        loss = self._loss._replace(fn=self._closure.rebind(values))
        return loss.parts(loss.call(tuple(args), kwargs))

    def _evaluate_forward(self, call: Any) -> dict[str, Any]:
        (values, *args), kwargs = call
        result = self._closure.rebind(values)(*args, **kwargs)
        return {"value": result[0], "aux": result[1]} if self._loss.has_aux else {"value": result}

    def finish(self, outputs: Sequence[Any]) -> Any:
        """Builds the result of the user's call from the results of the traced program, and mutates nnx objects."""
        given = iter(outputs)
        leaves = [next(given) if value is _TRACED else value for value in self._fixed]
        structure = self._flattening.structure(self._kept)
        read = structure.read(self._call)
        assert read is not None, "a call has the structure of its own flattening"
        return self._loss.whole(structure.finish(read.handle, leaves))

    def primal(self, gradient: Made) -> int | None:
        """Returns the leaf to which a gradient belongs, or None if that leaf is not traced."""
        keys, entry = gradient.keys[1:], self._loss.argnums
        if isinstance(entry, tuple | list):
            entry, keys = entry[keys[0].idx], keys[1:]
        position = getattr(entry, "argnum", entry) % (len(self._call[0]) - 1)
        return self._of_names.get((position, _names(keys)))

    def is_stateful_key(self, index: int) -> bool:
        """Returns whether a leaf is the key of an nnx stream, whose count tells how often it was used."""
        leaf = self.leaves[index]
        return leaf.owned and leaf.role is Role.KEY


_TRACED = object()
_CLOSED_OVER = -1


def _position(keys: Keys) -> int:
    """Returns the positional argument of the user's call that holds a leaf; -1 for closed-over leaves and keywords."""
    return keys[1].idx - 1 if isinstance(keys[1], SequenceKey) else _CLOSED_OVER


def _names(keys: Keys) -> tuple[str, ...]:
    """Returns the names of a path without the last step into a variable."""
    names = tuple([key_text(key) for key in keys])
    return names[:-1] if names[-1:] == ("value",) else names


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray) and value.dtype != jax.dtypes.float0
