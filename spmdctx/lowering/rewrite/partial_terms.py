"""Writes the sums that loops add up unreduced.

They are values with a leading dimension; each device that a sum is partial over holds one element of it. The equations are the same for
all compilers: no collective runs before the total is complete. See `ir.analysis.loop_sums`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from spmdctx.ir.projection import partial_axes, project
from spmdctx.ir.rule import OpRule
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.lowering.rewrite.local_ops import is_grouped, on_block, own_groups, split_rows
from spmdctx.lowering.rewrite.precision import computing, computing_wide
from spmdctx.trace.build.jaxprs.equations import written


def _single(fn: Callable[..., Any], atoms: Sequence[Any], source_info: Any) -> tuple[list[Any], Any]:
    """Returns the equations of `fn` on some atoms, and the variable of its result."""
    eqns, (result,) = written(fn, atoms, source_info)
    return eqns, result


@dataclass(frozen=True)
class Term:
    """How a term of a sum is made: the split of its op, and the axes over which it stays partial.

    Along the axes in `alike` all devices have the same result, which only the first of them adds. A product that `is_turned` is made of its
    operands in the other order.
    """

    rule: OpRule
    split: tuple[AxisNames, ...]
    axes: AxisNames
    is_wide: bool
    is_turned: bool = False

    @property
    def alike(self) -> AxisNames:
        """The axes of the sum over which the term is not partial."""
        partial = partial_axes(self.rule, self.split)
        return tuple(name for name in self.axes if name not in partial)

    def manual_axes(self, specs: Sequence[TensorSharding], *, is_local: bool) -> tuple[AxisNames, AxisNames]:
        """Returns the axes that the partitioner must not touch, and those of them over which the term is reduced where it is made.

        These split a dimension together with some of the sum's axes. If the op is run per block (`is_local`), all its axes are manual.
        """
        if is_local:
            used = dict.fromkeys(name for names in (self.axes, *self.split) for name in names)
            return tuple(used), tuple(name for name in partial_axes(self.rule, self.split) if name not in self.axes)
        near = [names for spec in specs for names in spec if not set(self.axes).isdisjoint(names)]
        others = tuple(dict.fromkeys(name for names in near for name in names if name not in self.axes))
        return (*self.axes, *others), others


def partial_term(eqn: Any, operands: Sequence[Any], term: Term, mesh: Mesh) -> Any:
    """Writes the partial results of `eqn` on each device of the sum's axes; what no axis of these needs is left to the partitioner."""
    own = on_block(turned(eqn) if term.is_turned else eqn, term.rule, term.split, mesh)
    specs = [project(dims, term.split) for dims in term.rule.operands]
    rows = split_rows(eqn, term.rule, term.split)
    is_per_block = is_grouped(eqn) or bool(rows)
    manual, others = term.manual_axes(specs, is_local=is_per_block)
    compute = computing_wide(own, mesh.devices.flat[0].platform) if term.is_wide else computing(own)
    adds_to_first = eqn.primitive.name.startswith("scatter")
    made_as = _spec(project(term.rule.results[0], term.split), manual) if is_per_block else PartitionSpec()

    def local(number: Any, *blocks: Any) -> Any:
        if adds_to_first:
            # Only one device adds to the value that is there already.
            start = blocks[0]
            kept = jnp.broadcast_to(number[0] == 0, start.shape)
            blocks = (jax.lax.select(kept, start, jnp.zeros_like(start)), *blocks[1:])
        blocks = tuple(own_groups(eqn, rows, blocks)) if rows else blocks
        made = compute(*(reversed(blocks) if term.is_turned else blocks))
        made = jax.lax.psum(made, others) if others else made
        if term.alike:
            kept = jnp.broadcast_to(_is_first(number[0], term.axes, term.alike, mesh), made.shape)
            made = jax.lax.select(kept, made, jnp.zeros_like(made))
        return made[None]

    def partial(*arrays: Any) -> Any:
        in_specs = (PartitionSpec(term.axes), *(_spec(spec, manual) for spec in specs))
        out_specs = PartitionSpec(term.axes, *made_as)
        mapped: Callable[..., Any] = jax.shard_map(
            local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=frozenset(manual), check_vma=False
        )
        return mapped(jnp.arange(_count(term.axes, mesh)), *arrays)

    return _single(partial, operands, eqn.source_info)


def turned_dims(eqn: Any) -> list[int]:
    """Returns the dimensions of a product in the order in which it has them if its operands change places."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    first = len(eqn.invars[0].aval.shape) - len(contracted)
    return [*range(len(batch)), *range(first, len(eqn.outvars[0].aval.shape)), *range(len(batch), first)]


def turned(eqn: Any) -> Any:
    """Returns a product whose operands have changed places."""
    params = dict(eqn.params)
    params["dimension_numbers"] = tuple(tuple(reversed(pair)) for pair in params["dimension_numbers"])
    precision = params["precision"]
    params["precision"] = tuple(reversed(precision)) if isinstance(precision, tuple) else precision
    shape = eqn.outvars[0].aval.shape
    made = jexc.Var(eqn.outvars[0].aval.update(shape=tuple(shape[place] for place in turned_dims(eqn))))
    return eqn.replace(invars=list(reversed(eqn.invars)), outvars=[made], params=params)


def _is_first(number: Any, axes: AxisNames, alike: AxisNames, mesh: Mesh) -> Any:
    """Returns whether a device, by its number along `axes`, is the first along those that are `alike`."""
    is_first, stride = True, 1
    for name in reversed(axes):
        if name in alike:
            is_first &= (number // stride) % mesh.shape[name] == 0
        stride *= mesh.shape[name]
    return is_first


def _spec(sharding: TensorSharding, axes: AxisNames) -> PartitionSpec:
    """Returns the part of a sharding that lies along some axes."""
    return PartitionSpec(*[tuple(name for name in names if name in axes) or None for names in sharding])


def _count(axes: AxisNames, mesh: Mesh) -> int:
    count = 1
    for name in axes:
        count *= mesh.shape[name]
    return count


def whole_term(atom: Any, shape: Sequence[int], axes: AxisNames, mesh: Mesh, source_info: Any) -> Any:
    """Writes a value that is whole on all devices as a term that only the first device adds."""
    count = _count(axes, mesh)

    def lifted(value: Any) -> Any:
        spread = jnp.broadcast_to(value, (count, *shape))
        place = jax.lax.broadcasted_iota(jnp.int32, spread.shape, 0)
        return jax.lax.select(place == 0, spread, jnp.zeros_like(spread))

    return _single(lifted, [atom], source_info)


def linear(eqn: Any, operand: Any, place: int) -> Any:
    """Writes an equation on every element of its only operand that is no literal, at `place`."""
    name, params = eqn.primitive.name, dict(eqn.params)
    if name == "convert_element_type" and operand.aval.dtype == params["new_dtype"]:
        return [], operand
    literals = [atom.val if isinstance(atom, jexc.Literal) else None for atom in eqn.invars]

    def each(value: Any) -> Any:
        given = [value if index == place else jnp.asarray(literal, value.dtype) for index, literal in enumerate(literals)]
        return eqn.primitive.bind(*given, **params)

    return _single(jax.vmap(each), [operand], eqn.source_info)


def added(first: Any, second: Any, source_info: Any) -> Any:
    """Writes the sum of two values, in the wider of their types."""

    def total(one: Any, other: Any) -> Any:
        dtype = jnp.promote_types(one.dtype, other.dtype)
        return jax.lax.add(one.astype(dtype), other.astype(dtype))

    return _single(total, [first, second], source_info)


def unstacked(var: Any, source_info: Any) -> Any:
    """Writes the values that a loop has stacked with the devices first."""
    return _single(lambda stack: jnp.moveaxis(stack, 1, 0), [var], source_info)


def of_type(var: Any, dtype: Any, source_info: Any) -> Any:
    """Writes the cast of a value to a type."""
    return ([], var) if var.aval.dtype == dtype else _single(lambda value: value.astype(dtype), [var], source_info)


def complete(var: Any, source_info: Any) -> Any:
    """Writes the sum over the devices, in the type of its terms."""
    return _single(lambda value: jax.lax.reduce_sum(value, (0,)), [var], source_info)
