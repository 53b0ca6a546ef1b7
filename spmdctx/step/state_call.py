"""The call of a step for the state that an initialiser makes, with a batch or with the other arguments of an earlier call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmdctx.errors import PlanError
from spmdctx.trace.capture.arguments import NO_STATIC, Call, Static, split_static
from spmdctx.trace.capture.objects import has_objects
from spmdctx.trace.capture.target import Target

_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
_SENTENCE = "What init makes and the batch do not make up the arguments of"


def after_known(target: Target, states: Sequence[tuple[Any, ...]], known: Call) -> Call:
    """Returns an earlier call with its first dynamic arguments replaced by one of `states`.

    Raises:
        PlanError: none fits.
    """
    num_leading = len(target.leading)
    (dynamic, kwargs), fixed = split_static(target.static, tuple(known[0]), dict(known[1]))
    args = dynamic[num_leading:]
    first = next(iter((*args, *_by_position(target, kwargs).values())), None)
    # Where the first argument is no tuple, a tuple holds several states.
    ordered = states if type(first) is tuple else list(reversed(states))
    calls = [_replaced(target, args, kwargs, state) for state in ordered if len(state) <= len(args) + len(kwargs)]
    whole = [fixed.join((*target.leading, *own), by_name) for own, by_name in calls]  # static arguments keep their places
    return _fitting(target, [(own[num_leading:], by_name) for own, by_name in whole])


def with_batch(target: Target, given: Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]], known: Call | None) -> Call:
    """Returns the call of which one of `given`, a state and a batch, has the values: all of them, or all but the static arguments.

    Static arguments that are left out are those of the `known` call, or have their defaults. The call that is most like the known one
    comes first.

    Raises:
        PlanError: none fits.
    """
    fixed = NO_STATIC if known is None else split_static(target.static, tuple(known[0]), dict(known[1]))[1]
    calls = [_in_order(target, state, batch) for state, batch in given]
    if target.static:
        calls += [_around_static(target, (*state, *batch), fixed) for state, batch in given]
    if known is not None:
        wanted = _forms(target, (known[0][len(target.leading) :], known[1]))
        calls.sort(key=lambda call: _unlike(_forms(target, call), wanted))
    return _fitting(target, calls)


def _forms(target: Target, call: Call) -> list[Any]:
    """Returns the structure of each dynamic argument in the order of the step's parameters."""
    (own, by_name), _ = _parted(target, *call)
    return [jax.tree.structure(value) for value in (*own, *_by_position(target, by_name).values())]


def _unlike(forms: list[Any], wanted: list[Any]) -> tuple[bool, int]:
    return len(forms) != len(wanted), sum(one != other for one, other in zip(forms, wanted, strict=False))


def _fitting(target: Target, candidates: Sequence[Call]) -> Call:
    """Returns the first candidate with which the step can be called; those come first of whose arguments just the dynamic ones are arrays.

    Raises:
        PlanError: none fits.
    """
    signature = inspect.signature(target.fn)
    found = []
    for args, kwargs in candidates:
        try:
            signature.bind(*target.leading, *args, **kwargs)
        except TypeError:
            continue
        (own, by_name), fixed = _parted(target, args, kwargs)
        if not any(map(_has_array, fixed)):
            found.append((any(map(_has_constant, (*own, *by_name.values()))), (args, kwargs)))
    if not found:
        raise _not_fitting(target, candidates)
    return min(found, key=lambda one: one[0])[1]


def _not_fitting(target: Target, candidates: Sequence[Call]) -> PlanError:
    """Returns the error of a step that no candidate can call, which names the static arguments without a default."""
    signature = inspect.signature(target.fn)
    own = list(signature.parameters.values())[len(target.leading) :]
    static = [one for place, one in enumerate(own, len(target.leading)) if _is_static(target, place, one.name)]
    names = [one.name for one in static if one.default is one.empty]
    if names:
        first = next((one for one in own if one not in static), None)
        rest = ", ".join(one.name for one in own if one is not first)
        return PlanError(
            f"{_SENTENCE} {target.name}, whose static argument{'s' * (len(names) > 1)} {' and '.join(map(repr, names))} must be known.",
            need=f"{target.name}{signature}",
            fix=f"pass what follows the state with them in order, batch=({rest}), or plan a call first, which init takes them from",
        )
    counts = sorted({len(args) + len(kwargs) for args, kwargs in candidates})
    return PlanError(
        f"{_SENTENCE} {target.name}.",
        got=f"{' or '.join(map(str, counts)) or 'no'} values for {', '.join(one.name for one in own)}",
        need=f"{target.name}{signature}",
        fix="let init_fn return the step's first argument, or a tuple of the first ones, and pass the others as batch=",
    )


def _is_static(target: Target, place: int, name: str) -> bool:
    return target.static.holds(place) or target.static.holds(name)


def _parted(target: Target, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, list[Any]]:
    """Returns the dynamic arguments of a call, which lacks the leading ones, and the values of its static arguments."""
    static = {place for place in range(len(args)) if target.static.holds(place + len(target.leading))}
    names = {name for name in kwargs if target.static.holds(name)}
    own = tuple(value for place, value in enumerate(args) if place not in static)
    values = [*(args[place] for place in sorted(static)), *(kwargs[name] for name in sorted(names))]
    return (own, {name: value for name, value in kwargs.items() if name not in names}), values


def _has_array(value: Any) -> bool:
    return has_objects(value) or any(isinstance(leaf, _ARRAYS) for leaf in jax.tree.leaves(value))


def _has_constant(value: Any) -> bool:
    """Returns whether a value holds what is no array: a Python number, a string, a function."""
    return not has_objects(value) and not all(isinstance(leaf, _ARRAYS) for leaf in jax.tree.leaves(value))


def _around_static(target: Target, values: tuple[Any, ...], fixed: Static) -> Call:
    """Returns a call with these values for the dynamic arguments in their order.

    Static arguments are those of `fixed`, or have their defaults.
    """
    first = len(target.leading)
    parameters = list(inspect.signature(target.fn).parameters.values())[first:]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        args, kwargs = fixed.join((*target.leading, *values), {})
        return args[first:], kwargs
    known: dict[int | str, Any] = {**dict(fixed.positional), **dict(fixed.keyword)}
    left, placed, by_name, has_gap = list(values), [], {}, False
    for place, parameter in enumerate(parameters, first):
        if _is_static(target, place, parameter.name):
            own = known.get(place, known.get(parameter.name, parameter.default if left else parameter.empty))
        else:
            own = left.pop(0) if left and parameter.kind is not parameter.VAR_KEYWORD else parameter.empty
        if own is parameter.empty:
            has_gap = True
        elif has_gap or parameter.kind is parameter.KEYWORD_ONLY:
            by_name[parameter.name] = own
        else:
            placed.append(own)
    return (*placed, *left), by_name


def _in_order(target: Target, state: Sequence[Any], batch: Sequence[Any]) -> Call:
    """Returns a call with the state for the first dynamic arguments and the batch for all others, in their order.

    Arguments by name only come last.
    """
    parameters = list(inspect.signature(target.fn).parameters.values())[len(target.leading) :]
    names = [parameter.name for parameter in parameters]
    first, others, values = list(state), list(batch), list[Any]()
    while first or others:
        place = len(values)
        is_static = _is_static(target, place + len(target.leading), names[place] if place < len(names) else "")
        values.append((others if others and (is_static or not first) else first).pop(0))
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return tuple(values), {}
    by_name = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    count = max(len(parameters) - len(by_name), 0)
    if len(values) - count > len(by_name):
        return tuple(values), {}
    return tuple(values[:count]), dict(zip(by_name, values[count:], strict=False))


def _by_position(target: Target, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of a call in the order of the step's parameters."""
    names = [name for name in inspect.signature(target.fn).parameters if name in kwargs]
    return {name: kwargs[name] for name in (*names, *(name for name in kwargs if name not in names))}


def _replaced(target: Target, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: tuple[Any, ...]) -> Call:
    """Returns a call with its first arguments replaced, by position or by name as they were passed."""
    names = list(_by_position(target, kwargs))
    by_name = dict(zip(names, state[len(args) :], strict=False))
    return (*state[: len(args)], *args[len(state) :]), {**kwargs, **by_name}
