"""Writes a scan over layers as several shorter ones, so that a cut can lie between two of its iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from spmdctx._compat import scan_counts
from spmdctx.pipeline.cut.inline import Opened, Region
from spmdctx.trace.build.jaxprs.equations import written

Tag = tuple[Any, ...]
"""What an equation is, whatever the lengths into which scans are divided."""


class Divided(NamedTuple):
    """Equations among which some scans are written in parts.

    Attributes:
        eqns: the equations.
        tag_of: the tag of each, by its identity: ("equation", place), or ("scan", scan, iterations up to its end).
        region_of: the region of each equation that was in one, by its identity.
        source_of: the identity of the equation of the given program from which each one comes, by its identity.
    """

    eqns: list[Any]
    tag_of: dict[int, Tag]
    region_of: dict[int, Region]
    source_of: dict[int, int]


def divided_scans(opened: Opened, scans: Sequence[Any], lengths: Sequence[Sequence[int]]) -> Divided:
    """Writes scans in parts.

    Args:
        opened: the program.
        scans: equations of it.
        lengths: of the parts of each scan, in the order in which they run.
    """
    number_of = {id(eqn): number for number, eqn in enumerate(scans)}
    found = Divided([], {}, dict(opened.region_of), dict(opened.source_of))
    for place, eqn in enumerate(opened.closed.jaxpr.eqns):
        number = number_of.get(id(eqn))
        parts = [(("equation", place), eqn)] if number is None else _parts(eqn, lengths[number], number)
        region = opened.region_of.get(id(eqn))
        for tag, part in parts:
            found.eqns.append(part)
            found.tag_of[id(part)] = tag
            found.source_of[id(part)] = opened.source_of[id(eqn)]
            if region is not None:
                found.region_of[id(part)] = region
    return found


def num_iterations(tag: Tag, scan: int) -> int:
    """Returns how many iterations of a scan have run after an equation, as far as its tag says."""
    return int(tag[2]) if tag[:2] == ("scan", scan) else 0


def _parts(eqn: Any, lengths: Sequence[int], number: int) -> list[tuple[Tag, Any]]:
    """Returns the equations that run a scan in parts: slices of what it reads by layers, the parts, and their results joined."""
    (consts, carries), total = scan_counts(eqn.params), eqn.params["length"]
    if len(lengths) == 1:
        return [(("scan", number, total), eqn)]
    fixed, carry, stacked = eqn.invars[:consts], eqn.invars[consts : consts + carries], eqn.invars[consts + carries :]
    found: list[tuple[Tag, Any]] = []
    made: list[list[Any]] = []
    before = 0
    for length in lengths:
        first = total - before - length if eqn.params["reverse"] else before
        before += length
        own = []
        for index, atom in enumerate(stacked):
            eqns, (part,) = written(_slice(first, length), [atom], eqn.source_info)
            found += [(("slice", number, before, index), one) for one in eqns]
            own.append(part)
        is_last = before == total
        carry_out = eqn.outvars[:carries] if is_last else [jexc.Var(var.aval) for var in eqn.outvars[:carries]]
        rows = [jexc.Var(var.aval.update(shape=(length, *var.aval.shape[1:]))) for var in eqn.outvars[carries:]]
        part = eqn.replace(invars=[*fixed, *carry, *own], outvars=[*carry_out, *rows], params={**eqn.params, "length": length})
        found.append((("scan", number, before), part))
        carry = carry_out
        made.append(rows)
    ordered = made[::-1] if eqn.params["reverse"] else made
    for index, var in enumerate(eqn.outvars[carries:]):
        eqns, _ = written(lambda *parts: jnp.concatenate(parts), [rows[index] for rows in ordered], eqn.source_info)
        eqns[-1] = eqns[-1].replace(outvars=[var])
        found += [(("joined", number, index, place), one) for place, one in enumerate(eqns)]
    return found


def _slice(first: int, length: int) -> Any:
    return lambda x: jax.lax.slice_in_dim(x, first, first + length)
