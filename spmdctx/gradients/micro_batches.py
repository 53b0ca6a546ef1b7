"""Micro-batches: a scan that accumulates gradients, averages losses, and carries state as a loop would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from spmdctx.gradients.keys import fold
from spmdctx.gradients.loss import LossCall, Traced
from spmdctx.gradients.operands import Operand
from spmdctx.gradients.options import GradientOptions
from spmdctx.gradients.reduce import is_low_precision, scatter_gradient
from spmdctx.gradients.results import Fate, Row

_SUMMED = (Fate.REDUCED, Fate.AVERAGED, Fate.OWN)


def run_micro_batches(
    call: LossCall, traced: Traced, operands: Sequence[Operand], rows: Sequence[Row], leaves: Sequence[Any], options: GradientOptions
) -> list[Any]:
    """Runs a traced loss over all micro-batches; gradients come in the type in which they were accumulated.

    Micro-batch j of k holds the elements j, j+k, j+2k, ... of every batch dimension, so that no element leaves its device.
    """
    evaluate = jexc.jaxpr_as_fun(traced.jaxpr)
    if options.micro_batches == 1:
        return list(evaluate(*leaves))
    return _Loop(call, traced, operands, rows, options).run(evaluate, leaves)


class _Loop:
    def __init__(self, call: LossCall, traced: Traced, operands: Sequence[Operand], rows: Sequence[Row], options: GradientOptions) -> None:
        self._operands, self._rows, self._count, self._options = operands, rows, options.micro_batches, options
        self._avals = traced.jaxpr.out_avals
        self._scanned = [index for index, operand in enumerate(operands) if operand.batch_dim is not None]
        self._folded = [index for index, operand in enumerate(operands) if operand.is_key and not call.is_stateful_key(index)]
        self._carried = {index: row.carry for index, row in enumerate(rows) if row.carry is not None}
        self._summed = [index for index, row in enumerate(rows) if row.fate in _SUMMED and index not in self._carried]
        self._stacked = [index for index in range(len(rows)) if index not in self._summed and index not in self._carried]

    def run(self, evaluate: Any, leaves: Sequence[Any]) -> list[Any]:
        own = [leaves[leaf] for leaf in self._carried.values()]
        sums = [jnp.zeros(self._sum_shape(index), self._sum_type(index)) for index in self._summed]
        scanned = [_parted(leaves[index], self._batch_dim(index), self._count) for index in self._scanned]

        def body(carry: Any, given: Any) -> Any:
            state, sums = carry
            number, parts = given
            own = list(leaves)
            for index, part in zip(self._scanned, parts, strict=True):
                own[index] = part
            for leaf, value in zip(self._carried.values(), state, strict=True):
                own[leaf] = value
            for index in self._folded:
                own[index] = fold(own[index], number)
            results = evaluate(*own)
            state = [_of_type(results[index], old) for index, old in zip(self._carried, state, strict=True)]
            sums = [
                total + self._summand(index, results[index]).astype(total.dtype) for index, total in zip(self._summed, sums, strict=True)
            ]
            return (state, sums), [results[index] for index in self._stacked]

        numbers = jnp.arange(self._count, dtype=jnp.uint32)
        (state, sums), stacks = jax.lax.scan(body, (own, sums), (numbers, scanned))
        results = dict(zip(self._carried, state, strict=True))
        results.update({index: total / self._count for index, total in zip(self._summed, sums, strict=True)})
        results.update({index: self._unstacked(index, stack) for index, stack in zip(self._stacked, stacks, strict=True)})
        return [results[index] for index in range(len(self._rows))]

    def _batch_dim(self, index: int) -> int:
        dim = self._operands[index].batch_dim
        assert dim is not None, "only leaves of the batch are cut"
        return dim

    def _scatter_dim(self, index: int) -> int | None:
        """Returns the dimension along which a sum is held in pieces, or None if it is whole."""
        return self._rows[index].scatter_dim if self._options.splits_accumulators else None

    def _sum_shape(self, index: int) -> tuple[int, ...]:
        dim, shape = self._scatter_dim(index), tuple(self._avals[index].shape)
        return shape if dim is None else (*shape[:dim], shape[dim] // self._options.num_replicas, *shape[dim + 1 :])

    def _summand(self, index: int, value: Any) -> Any:
        dim = self._scatter_dim(index)
        if dim is None:
            return value
        # Otherwise XLA would add up whole gradients and scatter their sum once.
        return jax.lax.optimization_barrier(scatter_gradient(value, self._avals[index].dtype, dim, self._options))

    def _sum_type(self, index: int) -> Any:
        dtype = self._avals[index].dtype
        return jnp.float32 if is_low_precision(dtype) else dtype

    def _unstacked(self, index: int, stack: Any) -> Any:
        """Joins the results of all micro-batches along the batch, or takes the last if they have no batch dimension."""
        dim = self._rows[index].dim
        return stack[-1] if dim is None else _joined(stack, dim)


def _parted(x: Any, dim: int, count: int) -> Any:
    """Splits an array into micro-batches along a new leading dimension."""
    size = x.shape[dim] // count
    return jnp.moveaxis(x.reshape((*x.shape[:dim], size, count, *x.shape[dim + 1 :])), dim + 1, 0)


def _joined(stack: Any, dim: int) -> Any:
    """Joins micro-batches; the inverse of `_parted`."""
    apart = jnp.moveaxis(stack, 0, dim + 1)
    return apart.reshape((*apart.shape[:dim], apart.shape[dim] * apart.shape[dim + 1], *apart.shape[dim + 2 :]))


def _of_type(value: Any, like: Any) -> Any:
    """Casts a next value to the type of the previous one, which a loop must keep."""
    return value if value.dtype == like.dtype else value.astype(like.dtype)
