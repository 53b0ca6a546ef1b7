"""Decides how each result of a loss is joined that replicas or micro-batches compute separately."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import jax.numpy as jnp

from spmdctx.errors import StrategyError, listed
from spmdctx.gradients.dependence import dependents
from spmdctx.gradients.loss import LossCall, Made, Traced
from spmdctx.gradients.operands import Operand, SeenCall
from spmdctx.gradients.options import GradientOptions
from spmdctx.ir.mesh import replicated
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.trace.build.jaxprs.passed import passed_inputs


class Fate(Enum):
    """The ways in which the pieces of a result become one."""

    REDUCED = auto()
    """A gradient: reduced over replicas, averaged over micro-batches."""
    AVERAGED = auto()
    """The loss, a floating scalar, statistics: the mean over both."""
    STACKED = auto()
    """Grows with the batch: the pieces one after the other."""
    OWN = auto()
    """Each replica keeps its own, averaged over micro-batches where it is a gradient."""
    SAME = auto()
    """All alike."""


class Row(NamedTuple):
    """One result: its fate, the dimension that is stacked, and its sharding over the replicas.

    `carry` is the leaf that takes it in the next micro-batch, or None. `scatter_dim` is the dimension along which a gradient is
    reduced in pieces.
    """

    path: str
    fate: Fate
    sharding: TensorSharding
    dim: int | None = None
    carry: int | None = None
    scatter_dim: int | None = None


class _Result(NamedTuple):
    """A result of the traced loss: whether it differs between replicas or micro-batches, and its type there and over the whole batch."""

    made: Made
    carry: int | None
    differs: bool
    aval: Any
    whole: Any


def rows_of(seen: SeenCall, call: LossCall, traced: Traced, operands: Sequence[Operand], options: GradientOptions) -> list[Row]:
    """Returns a row for each result of the traced loss of one replica and one micro-batch.

    Raises:
        StrategyError: a result differs between them and cannot be joined, or the results have another structure than before.
    """
    made = traced.results
    if [one.path for one in made] != [one.path for one in seen.results]:
        raise StrategyError(
            "The results of the loss change their structure with the size of the batch.",
            where=seen.where,
            fix="return arrays in place of lists",
        )
    primals = {call.primal(one) for one in made if one.part == "gradients"}
    states = [_state_of(one, aval, call, primals, operands) for one, aval in zip(made, traced.jaxpr.out_avals, strict=True)]
    carries = [
        state if state is not None else _carry(one, call) if options.micro_batches > 1 or one.part == "state" else None
        for one, state in zip(made, states, strict=True)
    ]
    # Micro-batches differ even if devices do not.
    joined = options.mesh.names if options.is_local and options.micro_batches == 1 else ()
    differs = _differs(traced, operands, carries, joined)
    columns = zip(made, carries, differs, traced.jaxpr.out_avals, seen.out_avals, strict=True)
    return [_row(_Result(*fields), call, operands, options, seen.where) for fields in columns]


def _differs(traced: Traced, operands: Sequence[Operand], carries: Sequence[int | None], joined: AxisNames) -> list[bool]:
    """Returns which results differ between replicas or micro-batches, also through carried values."""
    marks = [operand.is_split or operand.batch_dim is not None or operand.is_key for operand in operands]
    while True:
        found = dependents(traced.jaxpr, marks, joined)
        more = [carry for carry, mark in zip(carries, found, strict=True) if carry is not None and mark and not marks[carry]]
        if not more:
            return found
        for carry in more:
            marks[carry] = True


def _carry(made: Made, call: LossCall) -> int | None:
    """Returns the leaf whose next value a result is, or None.

    That is a variable's own leaf, or for linen's batch statistics the leaf of the same path.
    """
    if made.source is not None:
        return made.source
    tail = _after(made.path, "batch_stats")
    if made.part != "aux" or tail is None:
        return None
    return next((index for index, path in enumerate(call.paths) if _after(path, "batch_stats") == tail), None)


def _state_of(made: Made, aval: Any, call: LossCall, primals: Collection[int | None], operands: Sequence[Operand]) -> int | None:
    """Returns the leaf of which a result is the next value, as Haiku's state is: of its type, at the same place in its argument.

    Nothing marks such state. What the loss is differentiated by, and what is part of the batch, is none.
    """
    if made.part != "aux" or _after(made.path, "batch_stats") is not None or not jnp.issubdtype(aval.dtype, jnp.inexact) or not aval.shape:
        return None
    found = [
        index
        for index, (path, value) in enumerate(zip(call.paths, call.values, strict=True))
        if (below := path.partition("/")[2])
        and f"/{made.path}".endswith(f"/{below}")
        and (value.shape, value.dtype) == (aval.shape, aval.dtype)
        and index not in primals
        and not (operands[index].is_split or operands[index].batch_dim is not None)
    ]
    return found[0] if len(found) == 1 else None


def _after(path: str, word: str) -> str | None:
    head, found, tail = f"/{path}".rpartition(f"/{word}/")
    del head
    return tail if found else None


def _row(result: _Result, call: LossCall, operands: Sequence[Operand], options: GradientOptions, where: str) -> Row:
    made, carry, differs, aval, whole = result
    path, none = made.path, replicated(len(aval.shape))
    if made.part == "gradients":
        return _gradient(path, aval, whole, call.primal(made), operands, options, none)
    if made.part == "value":
        return Row(path, Fate.AVERAGED, none)
    if carry is not None and operands[carry].is_split and tuple(aval.shape) == _micro_shape(call, operands, carry, options):
        return Row(path, Fate.OWN, operands[carry].sharding, carry=carry)
    if not differs:
        return Row(path, Fate.SAME, none, carry=carry)
    dim = _grown(aval.shape, whole.shape, options)
    if dim is not None:
        return Row(path, Fate.STACKED, (*none[:dim], _axes(options), *none[dim + 1 :]), dim)
    floating = jnp.issubdtype(aval.dtype, jnp.inexact)
    is_state = carry is not None and made.part == "aux"
    if floating and (not aval.shape or is_state or _is_statistic(made, call)):
        return Row(path, Fate.AVERAGED, none, carry=carry)
    if carry is not None and not options.is_local:
        return Row(path, Fate.SAME, none, carry=carry)
    pieces = "devices" if options.is_local else "micro-batches"
    raise StrategyError(
        f"The loss gives '{path}', {aval.dtype}{list(aval.shape)}, which differs between {pieces}.",
        where=where,
        need="floating scalars, arrays with the batch as a dimension, batch statistics (nnx.BatchStat, below a key 'batch_stats', or state "
        "at the same place of an argument), or "
        "results that do not depend on the batch",
        fix="return one of those, or compute it outside of the loss",
    )


def state_notes(call: LossCall, rows: Sequence[Row]) -> list[str]:
    """Returns a note on state that nothing marks as batch statistics, and that is averaged as these are."""
    paths = [f"'{call.paths[row.carry]}'" for row in rows if row.carry is not None and _is_unmarked(row)]
    if not paths:
        return []
    return [f"The loss gives the next value of {listed(paths)}: its mean over the pieces of the batch is kept, as of batch statistics."]


def _is_unmarked(row: Row) -> bool:
    return row.fate is Fate.AVERAGED and row.path.startswith("aux/") and _after(row.path, "batch_stats") is None


def turn_notes(call: LossCall, traced: Traced, rows: Sequence[Row], micro_batches: int) -> list[str]:
    """Returns a note on state that every micro-batch changes, where one device changes it once a step.

    Counters of random keys are left out: micro-batches draw numbers of their own anyway. Of other state `state_notes` tells.
    """
    same = passed_inputs(traced.jaxpr)
    turns = [row.carry for row, source in zip(rows, same, strict=True) if row.carry not in (None, source) and not _is_unmarked(row)]
    paths = [
        f"'{call.paths[leaf]}'" for leaf in turns if leaf is not None and (call.values[leaf].shape or call.values[leaf].dtype != jnp.uint32)
    ]
    if micro_batches == 1 or not paths:
        return []
    return [
        f"Each of the {micro_batches} micro-batches gives the next value of {listed(paths)}, one after the other. On one device this "
        "state changes once a step, so its numbers are not those of one device."
    ]


def _axes(options: GradientOptions) -> tuple[str, ...]:
    return options.mesh.names if options.is_local else ()


def _gradient(
    path: str, aval: Any, whole: Any, primal: int | None, operands: Sequence[Operand], options: GradientOptions, none: TensorSharding
) -> Row:
    """Returns the row of a gradient.

    The gradient of a leaf that every replica holds whole is reduced; the gradient of a piece belongs to the piece.
    """
    if primal is None:
        dim = _grown(aval.shape, whole.shape, options)
        return (
            Row(path, Fate.REDUCED, none) if dim is None else Row(path, Fate.STACKED, (*none[:dim], _axes(options), *none[dim + 1 :]), dim)
        )
    operand = operands[primal]
    if operand.batch_dim is not None:
        return Row(path, Fate.STACKED, operand.sharding, operand.batch_dim)
    dim = operand.scatter_dim
    if dim is not None:
        return Row(path, Fate.REDUCED, (*none[:dim], _axes(options), *none[dim + 1 :]), scatter_dim=dim)
    return Row(path, Fate.OWN if operand.is_split else Fate.REDUCED, operand.sharding)


def _grown(shape: Sequence[int], whole: Sequence[int], options: GradientOptions) -> int | None:
    """Returns the one dimension that is larger in the whole by the number of pieces, or None."""
    pieces = options.num_replicas * options.micro_batches
    if len(shape) != len(whole):
        return None
    grown = [dim for dim, (part, full) in enumerate(zip(shape, whole, strict=True)) if part != full]
    return grown[0] if len(grown) == 1 and whole[grown[0]] == shape[grown[0]] * pieces else None


def _is_statistic(made: Made, call: LossCall) -> bool:
    return _after(made.path, "batch_stats") is not None or (made.source is not None and call.leaves[made.source].is_statistic)


def _micro_shape(call: LossCall, operands: Sequence[Operand], index: int, options: GradientOptions) -> tuple[int, ...]:
    return piece_shape(call.values[index].shape, operands[index], options)


def piece_shape(shape: Sequence[int], operand: Operand, options: GradientOptions) -> tuple[int, ...]:
    """Returns the shape of a leaf in one replica and one micro-batch."""
    sizes = [size // options.mesh.num_slices(names) for size, names in zip(shape, operand.sharding, strict=True)]
    if operand.batch_dim is not None:
        sizes[operand.batch_dim] //= options.micro_batches
    return tuple(sizes)
