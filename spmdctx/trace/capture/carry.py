"""Finds training state: arguments whose next value a step returns, by structure, shapes and data flow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jexc

from spmdctx.ir.primitives import MATRIX_PRODUCTS
from spmdctx.rules.control_flow import CALLS, call_body, call_operands, opened
from spmdctx.trace.capture.updates import OF_RESULTS, holds_differentiated

Avals = Sequence[Any]
_MIXING = MATRIX_PRODUCTS | {"gather", "sort", "reshape", "transpose", "broadcast_in_dim"}


class Span(NamedTuple):
    """A subtree: its structure and its run of flat leaves."""

    tree: Any
    start: int
    stop: int


def children(span: Span) -> list[Span]:
    """Returns the direct subtrees."""
    spans = []
    start = span.start
    for child in span.tree.children():
        spans.append(Span(child, start, start + child.num_leaves))
        start += child.num_leaves
    return spans


def carried_leaves(arguments: Sequence[Span], in_avals: Avals, result: Span, out_avals: Avals, jaxpr: jexc.Jaxpr) -> dict[int, int]:
    """Maps each carried input leaf to the output leaf that is its next value.

    An argument is carried if the result holds a subtree of the same structure, shapes and dtypes. The structure of a bare array,
    or of a tuple of them, says too little. Such an argument also needs a path of element-wise ops to that output, and all
    arguments before it must be carried. What the loss gives of it, and of nothing that comes after it, is no next value: the
    prediction of a residual network.

    Args:
        arguments: the dynamic arguments as spans of the inputs, in order, without those that cannot be carried.
        in_avals: the abstract values of the flat inputs.
        result: the results as a span of the outputs.
        out_avals: the abstract values of the flat results.
        jaxpr: the flat program.
    """
    found: dict[int, int] = {}
    taken: set[int] = set()
    all_before = True
    for argument in arguments:
        candidates = [argument] if argument.tree.num_leaves else []
        matched = False
        while candidates:
            part = candidates.pop(0)
            output = _next_value(part, in_avals, result, out_avals, jaxpr, taken, all_before)
            if output is not None:
                found.update(zip(range(part.start, part.stop), range(output.start, output.stop), strict=True))
                taken.update(range(output.start, output.stop))
                matched = True
            elif part is argument:
                candidates = [child for child in children(part) if child.tree.num_leaves and not _is_bare(child.tree)]
        all_before = all_before and matched
    return found


def given_back(jaxpr: jexc.Jaxpr, inputs: Mapping[int, bool], outputs: Collection[int]) -> frozenset[int]:
    """Returns the inputs whose next value is most likely among results that are known as no argument's next value.

    A later call then gives such a result as the argument. An order of arguments in which `carried_leaves` does not look is enough
    for this, and a key, whose next value no element-wise ops make, needs the same type only.

    Args:
        jaxpr: the flat program.
        inputs: the flat inputs in question, and whether each is a key.
        outputs: the flat results.
    """
    types = {output: _signature(jaxpr.outvars[output].aval) for output in outputs}
    alike = {index: [place for place, own in types.items() if own == _signature(jaxpr.invars[index].aval)] for index in inputs}
    return frozenset(
        index
        for index, is_key in inputs.items()
        if alike[index] and (is_key or any(_is_update(jaxpr, index, place) for place in alike[index]))
    )


def _next_value(
    part: Span, in_avals: Avals, result: Span, out_avals: Avals, jaxpr: jexc.Jaxpr, taken: set[int], all_before: bool
) -> Span | None:
    bare = _is_bare(part.tree)
    if bare and not all_before:
        return None
    signature = [_signature(aval) for aval in in_avals[part.start : part.stop]]
    for output in _subtrees(result, part.tree.num_leaves):
        if output.tree != part.tree or not taken.isdisjoint(range(output.start, output.stop)):
            continue
        if signature != [_signature(aval) for aval in out_avals[output.start : output.stop]]:
            continue
        pairs = [(part.start + offset, output.start + offset) for offset in range(len(signature))]
        if not bare or (all(_is_update(jaxpr, *pair) for pair in pairs) and not _is_prediction(jaxpr, part, pairs)):
            return output
    return None


def _signature(aval: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(aval.shape), aval.dtype


def _subtrees(span: Span, num_leaves: int) -> Iterator[Span]:
    """Yields all subtrees of `num_leaves` leaves, outer ones and earlier ones first."""
    if span.tree.num_leaves < num_leaves:
        return
    if span.tree.num_leaves == num_leaves:
        yield span
    for child in children(span):
        yield from _subtrees(child, num_leaves)


def _is_bare(tree: Any) -> bool:
    """Returns whether a structure has no names: a leaf, or tuples and lists of leaves."""
    kind = tree.node_data()
    return kind is None or (kind[0] in (tuple, list, type(None)) and all(_is_bare(child) for child in tree.children()))


def _is_update(jaxpr: jexc.Jaxpr, index: int, output: int) -> bool:
    """Returns whether the output comes from the input through ops that keep elements in their places."""
    target = jaxpr.outvars[output]
    if isinstance(target, jexc.Literal):
        return False
    return target is jaxpr.invars[index] or target in _reach(jaxpr, {jaxpr.invars[index]})


def _is_prediction(jaxpr: jexc.Jaxpr, part: Span, pairs: Sequence[tuple[int, int]]) -> bool:
    """Returns whether a loss gives these outputs, and makes them of an argument and of those before it alone.

    State that a loss gives back, such as a hidden state, is also made of the batch.
    """
    made = {var for eqn in jaxpr.eqns if holds_differentiated(eqn) for var in eqn.outvars}
    outputs = {output for source, output in pairs if jaxpr.outvars[output] is not jaxpr.invars[source]}
    if not outputs or any(jaxpr.outvars[output] not in made for output in outputs):
        return False
    _, read = OF_RESULTS.alive(jaxpr, [index in outputs for index in range(len(jaxpr.outvars))])
    return not any(read[part.stop :])


def _reach(jaxpr: Any, start: set[Any]) -> set[Any]:
    """Returns the variables of the same shape into which `start` flows, element by element."""
    reached = set(start)
    shape = next(iter(start)).aval.shape if start else ()
    for eqn in jaxpr.eqns:
        operands = [var in reached for var in eqn.invars if not isinstance(var, jexc.Literal)]
        if not any(operands) or eqn.primitive.name in _MIXING:
            continue
        name = eqn.primitive.name
        if name not in CALLS or name == "custom_linear_solve":
            reached.update(var for var in eqn.outvars if getattr(var.aval, "shape", None) == shape)
            continue
        inner = opened(call_body(name, eqn.params))
        taken = [eqn.invars[place] for place in call_operands(name, eqn.params, len(eqn.invars))]
        entered = {bound for bound, var in zip(inner.invars, taken, strict=False) if not isinstance(var, jexc.Literal) and var in reached}
        leaving = _reach(inner, entered)
        reached.update(
            var for var, own in zip(eqn.outvars, inner.outvars, strict=False) if not isinstance(own, jexc.Literal) and own in leaving
        )
    return reached
