"""Compares the program that runs with the user's own trace, and lists what an exported module has to write into that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jexc
import numpy as np

from spmdctx.rules.control_flow import opened
from spmdctx.step.export.align import Tag
from spmdctx.step.export.literals import literal_bytes, source
from spmdctx.step.export.losses import is_loss
from spmdctx.step.export.operations import Code, block_rows, code_of, dissolved, stated
from spmdctx.step.export.runtime import Numbered, bodies, fixed
from spmdctx.trace.build.canonical import Canonical

Row = tuple[Any, ...]
Table = dict[str, Any]


class Listing:
    """Lists the bodies of a program; `tables` has a table for each body that is not the user's own one as it is."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}

    def program(self, lowered: Any, own: Any, inputs: Sequence[int], results: Sequence[Any]) -> None:
        """Lists a whole program.

        Args:
            lowered: the tagged program as it is lowered.
            own: the user's trace.
            inputs: for each input of the lowered program, which one of the own trace it is.
            results: for each result of the own trace, the lowered one's place, or the name of an input.
        """
        body = _Body(self, Numbered(own.jaxpr), "")
        self.tables[""] = body.listed(lowered.jaxpr, [f"in.{number}" for number in inputs], results)

    def body(self, lowered: Any, own: Any, key: str) -> None:
        """Lists a body inside of an equation."""
        body, places = _Body(self, Numbered(own), key), range(len(opened(lowered).invars))
        table = body.listed(opened(lowered), [f"in.{place}" for place in places], range(len(opened(lowered).outvars)))
        if not body.is_plain(table):
            self.tables[key] = table


class _Body:
    """Lists one body. `names` is what the exported module would know at each row: the variable of each name."""

    def __init__(self, listing: Listing, own: Numbered, key: str) -> None:
        self._listing, self._own, self._key = listing, own, key
        self._names: dict[str, Any] = {}
        self._of: dict[Any, str] = {}
        self._rows: list[Row] = []
        self._last: dict[Any, float] = {}
        self._count: dict[str, int] = {}

    def is_plain(self, table: Table) -> bool:
        """Returns whether a table says nothing: the user's equations, in order."""
        plain = {
            "rows": (("run", 0, len(self._own.lines)),),
            "results": tuple([name if isinstance(name, str) else None for name in self._own.results]),
        }
        return {name: tuple(entry) for name, entry in table.items()} == plain

    def listed(self, lowered: Any, inputs: Sequence[str], results: Sequence[Any]) -> Table:
        table: Table = {}
        self._bind([f"const.{place}" for place in range(len(lowered.constvars))], lowered.constvars)
        self._bind(inputs, lowered.invars)
        for place, (name, var) in enumerate(zip(inputs, lowered.invars, strict=True)):
            if var.aval.shape != self._own.inputs[name].aval.shape:
                table.setdefault("inputs", {})[place] = tuple(var.aval.shape)
        eqns, outputs = dissolved(lowered)
        self._last = {atom: place for place, eqn in enumerate(eqns) for atom in eqn.invars if not isinstance(atom, jexc.Literal)}
        self._last |= {atom: math.inf for atom in outputs if not isinstance(atom, jexc.Literal)}
        # An input that comes back as it is keeps its name.
        self._last |= {self._names[name]: math.inf for name in results if isinstance(name, str)}
        self._equations(eqns)
        own = [self._result(outputs, place, at) for at, place in enumerate(results)]
        if any(map(is_loss, eqns)):
            table["fixed"] = fixed(self._own, self._rows)
        return {**table, "rows": tuple(self._rows), "results": tuple(own)}

    def _result(self, outputs: Sequence[Any], place: Any, at: int) -> Any:
        if isinstance(place, str):
            return place
        atom = outputs[place]
        default = self._own.results[at] if at < len(self._own.results) else None
        if isinstance(default, str) and self._names.get(default) is atom:
            return default
        if isinstance(default, jexc.Literal) and _is_same_literal(atom, default):
            return None  # the step's own number, which may change
        return self._read(atom)

    def _bind(self, names: Sequence[str], variables: Sequence[Any]) -> None:
        for name, var in zip(names, variables, strict=True):
            self._names[name] = var
            self._of[var] = name

    def _read(self, atom: Any) -> Any:
        """Returns the name of an atom, or its number and type."""
        if isinstance(atom, jexc.Literal):
            return np.asarray(atom.val).item(), str(atom.aval.dtype)
        return self._of[atom]

    def _equations(self, eqns: Sequence[Any]) -> None:
        for place, eqn in enumerate(eqns):
            tag, kind = eqn.ctx, eqn.primitive.name
            number = tag.number if isinstance(tag, Tag) and tag.key == self._key else None
            if number is not None and len(eqn.invars) == len(self._own.lines[number][1]):
                self._known(eqn, number)
            elif kind == "sharding_constraint":
                self._constraint(eqn, place)
            elif kind == "optimization_barrier":
                self._barrier(eqn, place)
            elif kind == "shard_map":
                self._local(eqn)
            else:
                self._new(eqn)

    def _known(self, eqn: Any, number: int) -> None:
        """Lists an equation of the user's."""
        own, operands, results = self._own.lines[number]
        changed: dict[str, Any] = {}
        for place, (atom, name) in enumerate(zip(eqn.invars, operands, strict=True)):
            if isinstance(name, str) and name not in self._names and not isinstance(atom, jexc.Literal):
                # An equal equation was there before, and stands for this one.
                self._rows.append(("same", name, self._read(atom)))
                self._names[name] = atom
            if not (self._names.get(name) is atom if isinstance(name, str) else _is_same_literal(atom, name)):
                changed.setdefault("reads", {})[place] = self._read(atom)
        inner = {name for name, _, _ in bodies(own)}
        for name, value in eqn.params.items():
            if name not in inner and not _is_same(value, own.params[name]):
                changed.setdefault("params", {})[name] = code_of(value, eqn)
        for place, (var, before) in enumerate(zip(eqn.outvars, own.outvars, strict=True)):
            if var.aval.shape != before.aval.shape:
                changed.setdefault("shapes", {})[place] = tuple(var.aval.shape)
        for (name, place, body), (_, _, before) in zip(bodies(eqn), bodies(own), strict=True):
            self._listing.body(body, before, f"{self._key}{number}/{name}.{place}/")
        if results and results[0] in self._names:
            results = [self._fresh(name) for name in results]
            changed["to"] = tuple(results)
        self._bind(results, eqn.outvars)
        if changed:
            self._rows.append(("equation", number, changed, self._own.text(number)))
        elif self._rows and self._rows[-1][0] == "run" and self._rows[-1][2] == number:
            self._rows[-1] = ("run", self._rows[-1][1], number + 1)
        else:
            self._rows.append(("run", number, number + 1))

    def _fresh(self, name: str) -> str:
        base = name.partition(":")[0]
        self._count[base] = self._count.get(base, 0) + 1
        return f"{base}:{self._count[base]}"

    def _target(self, atom: Any, var: Any, place: int) -> str:
        """Returns the name of a value's new version: the old one if nothing else reads the old version, else a new one."""
        name = self._of[atom] if not isinstance(atom, jexc.Literal) else "number"
        return name if not isinstance(atom, jexc.Literal) and self._last[atom] == place else self._fresh(name)

    def _constraint(self, eqn: Any, place: int) -> None:
        (atom,), (var,) = eqn.invars, eqn.outvars
        name, to = self._read(atom), self._target(atom, var, place)
        self._bind([to], [var])
        base = str(to).partition(":")[0].partition(".")[0]
        text = self._own.text(int(base)) if base.isdigit() else ""
        spec = Code(source(eqn.params["sharding"].spec))
        self._rows.append(("constrain", name, spec, None if to == name else to, text))

    def _barrier(self, eqn: Any, place: int) -> None:
        names = [self._read(atom) for atom in eqn.invars]
        to = [self._target(atom, var, place) for atom, var in zip(eqn.invars, eqn.outvars, strict=True)]
        self._bind(to, eqn.outvars)
        self._rows.append(("barrier", tuple(names), tuple(to)))

    def _new_names(self, count: int) -> list[str]:
        return [self._fresh("new") for _ in range(count)]

    def _new(self, eqn: Any) -> None:
        """Lists an operation that is none of the user's."""
        params = {name: code_of(stated(value), eqn) for name, value in eqn.params.items()}
        names, to = tuple(map(self._read, eqn.invars)), self._new_names(len(eqn.outvars))
        self._bind(to, eqn.outvars)
        self._rows.append(("apply", eqn.primitive.name, names, params, tuple(to)))

    def _local(self, eqn: Any) -> None:
        """Lists operations on each device's block."""
        params = eqn.params
        rows, results = block_rows(params["jaxpr"])
        specs = tuple(tuple(Code(source(spec)) for spec in params[side]) for side in ("in_specs", "out_specs"))
        axes = tuple(sorted(params.get("newly_manual_axes", params.get("manual_axes", ()))))
        operands, made = tuple(map(self._read, eqn.invars)), self._new_names(len(eqn.outvars))
        self._bind(made, eqn.outvars)
        self._rows.append(("local", operands, specs, axes, rows, results, tuple(made)))


def _is_same(one: Any, other: Any) -> bool:
    if one is other or callable(one):
        return True
    try:
        if bool(one == other):
            return True
    except (TypeError, ValueError):
        pass
    canonical = Canonical()
    return canonical.text(one) == canonical.text(other)


def _is_same_literal(atom: Any, own: Any) -> bool:
    if not isinstance(atom, jexc.Literal):
        return False
    return bool(atom.aval.dtype == own.aval.dtype and literal_bytes(atom) == literal_bytes(own))
