"""Corrects guesses about the batch by what a step does with it: tables, codebooks and teachers are no batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from spmdctx.errors import StrategyError, listed
from spmdctx.gradients.options import GradientOptions
from spmdctx.ir.analysis.batch import batch_dims
from spmdctx.ir.analysis.batch_roles import judge
from spmdctx.ir.graph import LITERAL, Graph, Role
from spmdctx.ir.primitives import LOSS_VALUE
from spmdctx.trace.build.program import Program
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.scope.settings import Settings
from spmdctx.wording import counted

_MOST_LISTED = 4

_NO_BATCH = "{path} is not taken as the batch: {why}; batch_argnames= says it otherwise."
_NO_BATCHES = "{count} arguments are not taken as the batch: {why}; batch_argnames= says it otherwise. They are {paths}."
_UNSURE = "'{path}' is taken as the batch, although this is not shown ({why}); batch_argnames= says what is the batch."
_NAMED = (
    "The loss is not shown to be a sum over the rows of '{path}' ({why}). Each device or micro-batch takes the loss of its own rows, so "
    "the numbers may not be those of one device."
)

_ADDED = "The loss adds up the rows of {rows}, and is no mean over them."
_DIVIDED = (
    "The loss adds up the rows of {rows}, and divides by a number that is the same for fewer rows, such as the size of the whole batch."
)

_REPEATED = (
    "The random numbers at {where} are drawn for the rows of the batch by a key that is no argument of the step. Each device or "
    "micro-batch draws the same ones for its own rows, so the numbers are not those of one device; pass the key to the step."
)


class Call(Protocol):
    """What is known of a call of `value_and_grad`: where it is, if a shard_map lies in it, what it differentiates by, and its parts.

    `if_fixed` takes what to say if its loss divides by a number that does not follow the rows.
    """

    where: str
    is_manual: bool
    differentiated: frozenset[int]
    num_parts: int
    if_fixed: list[str]


def refine(captured: Captured, settings: Settings) -> Captured:
    """Takes guessed leaves for plain arguments whose dimension 0 is shown to be no batch, if others are shown to be one.

    The loss is global here, so that a wrong guess makes no number wrong. What is not clear stays as it was guessed.
    """
    if settings.num_devices == 1 or len(captured.guessed) < 2:
        return captured
    program = captured.built()
    graph = program.graph
    carried = {index for index, leaf in enumerate(captured.outputs) if leaf.carried_from is not None}
    results = [value for index, value in enumerate(graph.outputs) if index not in carried and value != LITERAL]
    floating = [value for value in results if graph.values[value].dtype.startswith(("float", "bfloat"))]
    losses = [value for value in floating if not graph.values[value].shape] or floating or results
    updated = frozenset(value for value in graph.inputs if graph.values[value].role in (Role.PARAMETER, Role.OPTIMIZER))
    verdict = judge(graph, _leaves(captured, graph), losses, updated, strictly=False)
    demoted = {leaf: why for leaf, why in verdict.others.items() if leaf in verdict.wrong} if verdict.batch else {}
    return _demoted(captured, graph, demoted) if demoted else replace(captured, program=program)


def judged_by_losses(captured: Captured, program: Program, calls: Sequence[Call], options: GradientOptions) -> Captured:
    """Returns the step of whose guessed leaves only those are the batch over which its losses are shown to be sums.

    Leaves that the user names are the batch; a note says where that is not shown.

    Raises:
        StrategyError: no guessed leaf is shown to be a batch.
    """
    graph = program.graph
    own = [one for one in program.loss_operands if not calls[one.call].is_manual and one.value != LITERAL]
    losses = {one.value for one in own if one.leaf == LOSS_VALUE}
    if not losses:
        return captured
    leaves = _leaves(captured, graph) if captured.guessed else _named(captured, graph)
    entering = {one.value for one in own if one.leaf != LOSS_VALUE}
    cut = [leaf for leaf in leaves if not entering.isdisjoint(batch_dims(graph, [leaf], options.mesh).found)]
    differentiated = {one.value for one in own if one.leaf in calls[one.call].differentiated}
    verdict = judge(graph, leaves, losses, differentiated, program.divisors, strictly=True)
    others = {leaf: why for leaf, why in verdict.others.items() if leaf in cut}
    paths = {value: leaf.path for value, leaf in zip(graph.inputs, captured.inputs, strict=True)}
    notes = _impure_notes([paths[leaf] for leaf in sorted(verdict.impure)])
    notes += _added_notes(_ADDED, [paths[leaf] for leaf in sorted(verdict.added - verdict.impure)], calls, options)
    for one in own:
        if one.leaf == LOSS_VALUE:
            fixed = sorted(verdict.divided[one.value] - verdict.added)
            calls[one.call].if_fixed += _added_notes(_DIVIDED, [paths[leaf] for leaf in fixed], [calls[one.call]], options)
    notes += [_REPEATED.format(where=where) for where in dict.fromkeys(graph.origins[op].source for op in sorted(verdict.repeated))]
    if others and not captured.guessed:
        first = min(others, key=lambda leaf: (leaf not in verdict.wrong, leaf))
        notes, others = [*notes, _NAMED.format(path=paths[first], why=others[first])], {}
    elif others and not verdict.batch:
        first = min(others, key=lambda leaf: (leaf not in verdict.wrong, leaf))
        place_of = dict(zip(graph.inputs, captured.arguments, strict=True))
        _check_rows(paths[first], graph.values[first].shape[0], calls, options, where=calls[own[0].call].where)
        if first in verdict.wrong or len({place_of[leaf] for leaf in cut}) > 1:
            raise _not_shown(paths[first], others[first], [paths[leaf] for leaf in cut], calls[own[0].call].where)
        notes, others = [_UNSURE.format(path=paths[first], why=others[first])], {}
    captured = replace(captured, notes=(*captured.notes, *notes), deviations=tuple(notes))
    return _demoted(captured, graph, others) if others else captured


def with_roles(captured: Captured, judged: Captured) -> Captured:
    """Returns a second trace of a step with the roles of the first, which was judged."""
    inputs = [replace(leaf, role=known.role) for leaf, known in zip(captured.inputs, judged.inputs, strict=True)]
    return replace(captured, inputs=tuple(inputs), guessed=judged.guessed, program=None)


def _named(captured: Captured, graph: Graph) -> list[int]:
    """Returns the values of the leaves that the user names as batch."""
    return [value for value, leaf in zip(graph.inputs, captured.inputs, strict=True) if leaf.role is Role.BATCH]


def _leaves(captured: Captured, graph: Graph) -> list[int]:
    """Returns the values of the guessed leaves."""
    return [graph.inputs[index] for index in sorted(captured.guessed)]


def _demoted(captured: Captured, graph: Graph, others: Mapping[int, str]) -> Captured:
    """Makes leaves plain arguments, and says so."""
    index = {value: number for number, value in enumerate(graph.inputs)}
    groups: dict[str, list[str]] = {}
    for leaf, why in sorted(others.items()):
        groups.setdefault(why, []).append(f"'{captured.inputs[index[leaf]].path}'")
    notes = [_not_taken(paths, why) for why, paths in list(groups.items())[:_MOST_LISTED]]
    left = sum(map(len, list(groups.values())[_MOST_LISTED:]))
    if left:
        notes.append(f"{left} more arguments are not taken as the batch for reasons of this kind.")
    return replace(captured.without_batch({index[leaf] for leaf in others}), notes=(*captured.notes, *notes))


def _not_taken(paths: Sequence[str], why: str) -> str:
    if len(paths) == 1:
        return _NO_BATCH.format(path=paths[0], why=why)
    whys = re.sub("^its ", "their ", re.sub(" depend on it$", " depend on them", why))
    return _NO_BATCHES.format(count=len(paths), why=whys, paths=listed(paths, _MOST_LISTED))


def _impure_notes(paths: Sequence[str]) -> list[str]:
    if not paths:
        return []
    listed = ", ".join(f"'{path}'" for path in paths[:_MOST_LISTED]) + (", ..." if len(paths) > _MOST_LISTED else "")
    return [
        f"The loss is no plain sum over the rows of {listed}: it also reads means or sums over them, as BatchNorm does or the number "
        "of rows in a mask. Each device or micro-batch takes those of its own rows, so the numbers are not those of one device."
    ]


def _added_notes(what: str, paths: Sequence[str], calls: Sequence[Call], options: GradientOptions) -> list[str]:
    """Returns a note on a loss that is a sum and no mean: what is averaged over parts of the batch is a part of it."""
    micro = options.micro_batches * max(call.num_parts for call in calls)
    count = micro * options.num_replicas
    if not paths or count == 1:
        return []
    of_gradients = count if options.mean or not options.is_local else micro
    gradients = "the same" if of_gradients == 1 else f"1/{of_gradients}"
    rows = listed([f"'{path}'" for path in paths], _MOST_LISTED)
    return [
        f"{what.format(rows=rows)} Its value is averaged over {count} parts of the batch: it is "
        f"1/{count} of that of one device, and its gradients are {gradients}. A mean over the rows gives the numbers of one device."
    ]


def _check_rows(path: str, rows: int, calls: Sequence[Call], options: GradientOptions, *, where: str) -> None:
    """Refuses too few rows by their number: what a loss does with a single row shows no batch."""
    parts = options.micro_batches * options.num_replicas * max(call.num_parts for call in calls)
    if rows < min(parts, 2):
        raise StrategyError(
            f"The loss splits the batch into {parts} parts, but '{path}' has {counted(rows, 'row')}.",
            where=where,
            need=f"a multiple of {parts} rows",
            fix="change the batch size, or name the arguments that hold the batch with batch_argnames=",
        )


def _not_shown(path: str, why: str, paths: Sequence[str], where: str) -> StrategyError:
    return StrategyError(
        f"'{path}' was guessed to be part of the batch, which devices or micro-batches read in parts, but it is not shown to be: {why}.",
        where=where,
        got=f"no batch_argnames= and no batch_argnums=; guessed: {', '.join(paths)}",
        fix="name the arguments that hold the batch with batch_argnames= or batch_argnums=; what is not named stays whole on every device",
    )
