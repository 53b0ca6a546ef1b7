"""Gives each chunk the layers of stacked parameters that it runs, as leaves of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from spmdctx.pipeline.capture.around import Around
from spmdctx.pipeline.capture.loss import PipelinedLoss
from spmdctx.pipeline.cut.line import Line, is_array, needed, variables
from spmdctx.pipeline.programs.stacks import Layers, Stack
from spmdctx.trace.build.jaxprs.equations import written

_LAYER_BY_LAYER = frozenset({"convert_element_type", "copy", "neg", "reduce_precision"})
"""Equations of one operand that may follow a slice as well as come before it."""


class Slice(NamedTuple):
    """Layers `first` to `last` - 1 of a leaf; `eqn` makes them of the leaf, or of what `chain` makes of it."""

    leaf: int
    first: int
    last: int
    eqn: Any
    chain: tuple[Any, ...]


class Sliced(NamedTuple):
    """A loss whose chunks have slices as leaves, and the stacked parameters and gradients of the step that these are parts of."""

    line: Line
    loss: PipelinedLoss
    around: Around
    stacks: tuple[Stack, ...]


def sliced(line: Line, loss: PipelinedLoss, around: Around) -> Sliced:
    """Returns a loss with a leaf for each slice that chunks take of a parameter, as far as all of its layers are taken once.

    Args:
        line: the equations, each scan in as few parts as its cuts allow.
        loss: the loss.
        around: the step's program around it.
    """
    found = {leaf: parts for leaf, parts in _slices(line).items() if leaf not in loss.carried}
    if not found:
        return Sliced(line, loss, around, ())
    invars, copied = list(line.jaxpr.invars), dict(line.copied)
    numbers: dict[int, list[int]] = {}
    for leaf, parts in found.items():
        numbers[leaf] = []
        for part in parts:
            numbers[leaf].append(len(invars))
            invars.append(_leaf_of(part, copied))
    own = replace(
        line,
        jaxpr=line.jaxpr.replace(invars=invars, debug_info=_plain(line.jaxpr)),
        copied=copied,
        scans=(),
        is_parameter=(*line.is_parameter, *(True for parts in found.values() for _ in parts)),
    )
    return Sliced(own, *_around(loss, around, found, numbers))


def _plain(jaxpr: Any) -> Any:
    return jaxpr.debug_info._replace(arg_names=None, result_paths=None)


def _slices(line: Line) -> dict[int, list[Slice]]:
    """Returns the slices of each leaf that is read by them alone, if they are all of it, in order."""
    leaf_of = {var: index for index, var in enumerate(line.jaxpr.invars) if line.is_parameter[index]}
    made_by = {id(eqn): eqn for eqn in line.copied.values()}
    found: dict[int, list[Slice]] = defaultdict(list)
    passed: set[int] = set()
    for eqn in made_by.values():
        if line.tag_of[id(eqn)][0] == "slice" and eqn.primitive.name == "slice" and id(eqn) not in line.region_of:
            chain, atom = [], eqn.invars[0]
            while atom not in leaf_of and (before := line.copied.get(atom)) is not None and before.primitive.name in _LAYER_BY_LAYER:
                chain.append(before)
                atom = before.invars[0]
            if atom in leaf_of:
                passed.update(map(id, (eqn, *chain)))
                bounds = eqn.params["start_indices"][0], eqn.params["limit_indices"][0]
                found[leaf_of[atom]].append(Slice(leaf_of[atom], *bounds, eqn, tuple(reversed(chain))))
    others = [eqn for eqn in (*line.eqns, *made_by.values()) if id(eqn) not in passed]
    read = {var for eqn in others for var in variables(eqn.invars)} | set(variables(line.jaxpr.outvars))
    ordered = {leaf: sorted(parts, key=lambda own: own.first) for leaf, parts in sorted(found.items())}
    return {leaf: parts for leaf, parts in ordered.items() if _is_all(parts, line.jaxpr.invars[leaf], read)}


def _is_all(parts: Sequence[Slice], var: Any, read: set[Any]) -> bool:
    """Returns whether slices follow each other through a whole leaf, which nothing else reads."""
    values = {var, *(made for part in parts for eqn in part.chain for made in eqn.outvars)}
    ends = [0, *(part.last for part in parts)]
    return read.isdisjoint(values) and [part.first for part in parts] == ends[:-1] and ends[-1] == var.aval.shape[0]


def _leaf_of(part: Slice, copied: dict[Any, Any]) -> Any:
    """Returns the variable of a slice as a leaf; what came before the slice now follows it."""
    (result,) = part.eqn.outvars
    del copied[result]
    if not part.chain:
        return result
    count = part.last - part.first

    def short(aval: Any) -> Any:
        return jexc.Var(aval.update(shape=(count, *aval.shape[1:])))

    leaf = operand = short(part.chain[0].invars[0].aval)
    for place, eqn in enumerate(part.chain):
        made = result if place == len(part.chain) - 1 else short(eqn.outvars[0].aval)
        copied[made] = eqn.replace(invars=[operand], outvars=[made])
        operand = made
    return leaf


def _around(
    loss: PipelinedLoss, around: Around, found: Mapping[int, Sequence[Slice]], numbers: Mapping[int, Sequence[int]]
) -> tuple[PipelinedLoss, Around, tuple[Stack, ...]]:
    """Returns the loss and the step around it with slices of stacked values, and these."""
    info, call = around.loss.source_info, around.loss
    paths, operands, invars = list(loss.paths), list(loss.operands), list(call.invars)
    rows, types, outvars = list(loss.rows), list(loss.types), list(call.outvars)
    gradient_of, result_of = dict(loss.gradient_of), {leaf: index for index, leaf in loss.gradient_of.items()}
    before: list[Any] = []
    joins: list[Any] = []
    stacks: list[Stack] = []
    others = _arrays(around, [atom for leaf, atom in enumerate(call.invars) if leaf not in found])
    for leaf, parts in found.items():
        may_spread = others.isdisjoint(_arrays(around, [call.invars[leaf]]))
        for part in parts:
            eqns, (value,) = written(_taking(part), [call.invars[leaf]], info)
            before += eqns
            invars.append(value)
            paths.append(f"{loss.paths[leaf]}[{part.first}:{part.last}]")
            operands.append(loss.operands[leaf])
        stacks.append(_stack(call.invars[leaf], invars[-len(parts) :], numbers[leaf], parts)._replace(may_spread=may_spread))
        if leaf not in result_of:
            continue
        whole, index = call.outvars[result_of[leaf]], result_of[leaf]
        gradients = [jexc.Var(whole.aval.update(shape=(part.last - part.first, *whole.aval.shape[1:]))) for part in parts]
        places = [index, *range(len(outvars), len(outvars) + len(parts) - 1)]
        outvars += gradients[1:]
        rows += [rows[index]] * (len(parts) - 1)
        types += [types[index]] * (len(parts) - 1)
        outvars[index] = gradients[0]
        for place, number, var in zip(places, numbers[leaf], gradients, strict=True):
            gradient_of[place] = number
            types[place] = jax.typeof(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=var.aval.weak_type))
        eqns, _ = written(lambda *own: jnp.concatenate(own), gradients, info)
        joins += [*eqns[:-1], eqns[-1].replace(outvars=[whole])]
        stacks.append(_stack(whole, gradients, numbers[leaf], parts)._replace(is_gradient=True, may_spread=may_spread))
    eqn = call.replace(invars=invars, outvars=outvars)
    # No stage runs what takes slices and joins them: stages hand each other what they lack.
    eqns = [*around.before, *before, eqn, *joins, *around.after]
    own = replace(around, jaxpr=jexc.ClosedJaxpr(around.jaxpr.jaxpr.replace(eqns=eqns), around.jaxpr.consts), loss=eqn)
    changed = replace(loss, paths=tuple(paths), operands=tuple(operands), rows=tuple(rows), types=tuple(types), gradient_of=gradient_of)
    return changed, own, tuple(stacks)


def _stack(whole: Any, own: Sequence[Any], leaves: Sequence[int], parts: Sequence[Slice]) -> Stack:
    rows = zip(own, leaves, parts, strict=True)
    return Stack(whole, tuple(Layers(var, leaf, part.first, part.last) for var, leaf, part in rows), False, False)


def _arrays(around: Around, atoms: Sequence[Any]) -> set[Any]:
    """Returns the arrays that the step reads and makes before the loss for some operands, these included."""
    eqns = needed(around.before, variables(atoms))
    return {var for var in (*variables(atoms), *(var for eqn in eqns for var in (*variables(eqn.invars), *eqn.outvars))) if is_array(var)}


def _taking(part: Slice) -> Any:
    return lambda x: jax.lax.slice_in_dim(x, part.first, part.last)
