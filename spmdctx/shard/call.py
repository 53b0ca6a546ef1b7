"""One call of a sharded function or module: marks its arguments, parameters and results, or runs it split if called eagerly."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from flax import nnx

from spmdctx.context.layers import current_context
from spmdctx.context.options import PLANNED_MODES
from spmdctx.errors import ContextWarning, StrategyError
from spmdctx.ir.graph import fusion_scope
from spmdctx.ir.layout import Layout
from spmdctx.shard.eager import run_split, runs_eagerly
from spmdctx.trace.marker import mark, new_region, traced_mode
from spmdctx.wording.warned import warn_user

Spec = tuple[int, ...] | Layout | None
"""The strategy of one tensor: the number of slices of each dimension, a layout, or None (free)."""


class Strategies(NamedTuple):
    """The checked arguments of one `shard()`; hashable."""

    in_strategy: tuple[Spec, ...] | None
    out_strategy: tuple[Spec, ...] | None
    parameter_plan: tuple[tuple[str, Spec], ...]
    fusion: int = 0

    def parameter_spec(self, path: str) -> Spec:
        """Returns the strategy of the first pattern that matches a parameter's path, or None."""
        return next((spec for pattern, spec in self.parameter_plan if fnmatch.fnmatchcase(path, pattern)), None)


class Region(NamedTuple):
    """One traced call: its number, its label and its strategies."""

    number: int
    label: str
    strategies: Strategies

    def mark(self, x: Any, side: str, index: int, spec: Spec, label: str = "") -> Any:
        """Marks `x`; scalars have nothing to split."""
        if not x.shape:
            return x
        return mark(x, region=self.number, side=side, index=index, strategy=spec, label=label or self.label)

    def warn_missing(self, paths: Sequence[str]) -> None:
        """Warns of patterns of the parameter plan that match none of `paths`."""
        for pattern, _ in self.strategies.parameter_plan:
            if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
                text = f"parameter_plan of {self.label}: {pattern!r} matches no parameter; there are {', '.join(paths) or 'none'}."
                warn_user(text)


Body = Callable[[Region], Callable[..., Any]]
"""Makes the function that runs inside a region; a module marks its own parameters there."""


class Eager(NamedTuple):
    """How an eager call runs split: as a step of its own, which calls `split`.

    `owner` is the module whose variables tell whether the call is traced; it is the first argument of `split`.
    """

    split: Callable[..., Any]
    owner: Any = None


def call_marked(
    strategies: Strategies,
    label: str,
    body: Body,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    names: tuple[str, ...] | None = None,
    eager: Eager | None = None,
) -> Any:
    """Calls `body(region)(*args, **kwargs)` as a region.

    Args:
        strategies: of the region.
        label: the region's name in scopes and messages.
        body: what is sharded.
        args: positional arguments.
        kwargs: keyword arguments.
        names: of a function: names of its positional arguments, for the paths of its parameters. None for a module.
        eager: what runs when the call is eager; None: nothing, the call stays as it is.
    """
    mode = traced_mode() or current_context().parallel_mode
    if mode not in PLANNED_MODES:
        warnings.warn(f"shard() of {label} has no effect in parallel_mode {mode!r}.", ContextWarning, stacklevel=3)
    elif eager is not None and runs_eagerly(eager.owner, args, kwargs):
        return run_split(eager.split, args if eager.owner is None else (eager.owner, *args), kwargs)
    # The marks are made in every mode: JAX caches what it traces, and a later step in another mode may need them.
    region = Region(new_region(), label, strategies)
    with jax.named_scope(f"shard{region.number}:{label}{fusion_scope(strategies.fusion)}"):
        with _marked_arguments(region, args, kwargs, names) as (args, kwargs):
            result = body(region)(*args, **kwargs)
        return _marked_results(region, result)


class _Leaf(NamedTuple):
    path: str
    argument: int
    value: Any

    @property
    def is_array(self) -> bool:
        return hasattr(self.value, "shape") and hasattr(self.value, "dtype")


def _is_module(x: Any) -> bool:
    return isinstance(x, nnx.Module)


@contextmanager
def _marked_arguments(
    region: Region, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...] | None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields the arguments with their arrays marked; variables of nnx modules among them are marked until the block ends."""
    leaves, tree = _flatten(args, kwargs, names or ())
    planned: dict[int, Spec] = {}
    modules: dict[str, nnx.Module] = {}
    if names is not None:
        matches = {index: region.strategies.parameter_spec(leaf.path) for index, leaf in enumerate(leaves) if leaf.is_array}
        planned = {index: spec for index, spec in matches.items() if spec is not None}
        modules = {leaf.path: leaf.value for leaf in leaves if _is_module(leaf.value)}
        paths = [leaf.path for leaf in leaves if leaf.is_array]
        region.warn_missing(paths + [path for prefix, module in modules.items() for path in variables_of(module, prefix)])
    marked = [leaf.value for leaf in leaves]
    for order, (index, spec) in enumerate(planned.items()):
        marked[index] = region.mark(marked[index], "parameter", order, spec, f"{region.label}/{leaves[index].path}")
    for order, (index, spec) in enumerate(_argument_specs(region, leaves, planned, len(args) + len(kwargs)).items()):
        marked[index] = region.mark(marked[index], "in", order, spec)
    with marked_variables(region, modules, len(planned)):
        yield jax.tree.unflatten(tree, marked)


def _flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...]) -> tuple[list[_Leaf], Any]:
    leaves = []
    for argument, (name, value) in enumerate(_named_arguments(args, kwargs, names)):
        for path, leaf in jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_module)[0]:
            leaves.append(_Leaf("/".join((name, *map(path_part, path))), argument, leaf))
    return leaves, jax.tree.structure((args, dict(kwargs)), is_leaf=_is_module)


def _named_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Returns all arguments with their names, in flattening order."""
    positional = [(names[index] if index < len(names) else str(index), value) for index, value in enumerate(args)]
    return positional + sorted(kwargs.items())


def path_part(key: Any) -> str:
    """Returns one step of a path as the user writes it: the key, index or attribute name alone."""
    return str(jax.tree_util.keystr((key,), simple=True))


def _argument_specs(region: Region, leaves: list[_Leaf], planned: Mapping[int, Spec], num_arguments: int) -> dict[int, Spec]:
    """Returns the strategy of each array leaf that is not a parameter; in_strategy may count arrays, leaves or whole arguments."""
    arrays = [index for index, leaf in enumerate(leaves) if leaf.is_array]
    free = [index for index in arrays if index not in planned]
    given = region.strategies.in_strategy
    if given is None:
        return dict.fromkeys(free)
    per_argument = [[index for index, leaf in enumerate(leaves) if leaf.argument == number] for number in range(num_arguments)]
    for slots in ([[i] for i in arrays], [[i] for i in free], [[i] for i in range(len(leaves))], per_argument):
        if len(slots) == len(given):
            break
    else:
        raise StrategyError(
            f"in_strategy has {len(given)} entries, but the call has {len(arrays)} array arguments.",
            where=f"shard() of {region.label}",
            got=f"in_strategy {given}; arguments {', '.join(leaves[index].path for index in arrays) or 'none'}",
            fix="give one entry per array, None for those that are free",
        )
    specs: dict[int, Spec] = dict.fromkeys(free)
    for indices, spec in zip(slots, given, strict=True):
        if spec is None:
            continue
        if len(indices) != 1 or indices[0] not in specs:
            raise StrategyError(
                f"in_strategy gives {spec} to what is not one free array: {', '.join(leaves[index].path for index in indices)}.",
                where=f"shard() of {region.label}",
                fix="use None there, and parameter_plan for the arrays inside",
            )
        specs[indices[0]] = spec
    return specs


def _marked_results(region: Region, result: Any) -> Any:
    leaves, tree = jax.tree.flatten(result, is_leaf=_is_module)
    arrays = [index for index, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    given = region.strategies.out_strategy or (None,) * len(arrays)
    if len(given) != len(arrays):
        raise StrategyError(
            f"out_strategy has {len(given)} entries, but the result has {len(arrays)} arrays.",
            where=f"shard() of {region.label}",
            got=f"out_strategy {given}",
        )
    for order, (index, spec) in enumerate(zip(arrays, given, strict=True)):
        leaves[index] = region.mark(leaves[index], "out", order, spec)
    return jax.tree.unflatten(tree, leaves)


def variables_of(module: nnx.Module, prefix: str) -> dict[str, nnx.Variable[Any]]:
    """Returns the module's variables by path; `prefix` is the module's own path, or empty."""
    found = {}
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            found["/".join((*([prefix] if prefix else ()), *map(str, path)))] = node
    return found


@contextmanager
def marked_variables(region: Region, modules: Mapping[str, nnx.Module], first: int) -> Iterator[None]:
    """Puts marked values into the planned variables of `modules` inside the block, and restores their own values after it."""
    swapped: list[tuple[nnx.Variable[Any], Any, Any]] = []
    if not region.strategies.parameter_plan:
        yield
        return
    for prefix, module in modules.items():
        for path, variable in variables_of(module, prefix).items():
            spec = region.strategies.parameter_spec(path)
            value = variable.get_raw_value()
            if spec is None or not isinstance(value, jax.Array):
                continue
            marked = region.mark(value, "parameter", first + len(swapped), spec, f"{region.label}/{path}")
            _put(variable, marked)
            swapped.append((variable, value, marked))
    try:
        yield
    finally:
        for variable, value, marked in swapped:
            if variable.get_raw_value() is marked:
                _put(variable, value)


def _put(variable: nnx.Variable[Any], value: Any) -> None:
    # A model that a step closes over belongs to an outer trace, where nnx refuses changes; this one is undone before anyone sees it.
    object.__setattr__(variable, "_raw_value", value)
