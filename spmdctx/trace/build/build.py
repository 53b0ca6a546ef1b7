"""Builds a Graph from a jaxpr: each equation becomes an op with its rule, and boundary ops lead into control-flow bodies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, count, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import jax.extend.core as jexc
import numpy as np

from spmdctx.ir.analysis.columns import Columns, Kind, Tensor
from spmdctx.ir.arrays import IntArray
from spmdctx.ir.graph import LITERAL, Graph, Mark, Role, Value
from spmdctx.ir.primitives import LOSS_VALUE
from spmdctx.ir.rule import OpRule
from spmdctx.machine.xla.fusion import in_memory, parts_elements
from spmdctx.rules import missing_all_reduces, rule_for
from spmdctx.rules.builder import replicate
from spmdctx.rules.flops import op_flops
from spmdctx.trace.build import control_flow as bodies
from spmdctx.trace.build.builder import Around, Env, ReadRegion
from spmdctx.trace.build.canonical import Canonical, Form
from spmdctx.trace.build.common_subexpressions import choices_of_one, copies_across, find_copies, made_one, sites_of
from spmdctx.trace.build.jaxprs.divisors import divisors
from spmdctx.trace.build.ops_of_columns import ops_of
from spmdctx.trace.build.origins import Frame, LazyOrigins, Place
from spmdctx.trace.build.program import LossOperand, Program, UserPin
from spmdctx.trace.build.shard_maps import read_regions

_Literal = jexc.Literal

_aval = attrgetter("aval")

_new = tuple.__new__
"""Makes named tuples from all their fields, in half the time of their own constructors. A step has tens of thousands."""


class Argument(NamedTuple):
    """A flat argument as the builder needs it."""

    path: str
    role: Role


def build(jaxpr: jexc.ClosedJaxpr, arguments: Sequence[Argument], carried: Sequence[tuple[int, int]] = ()) -> Program:
    """Builds the graph of a flat program.

    Args:
        jaxpr: the traced step over flat leaves.
        arguments: one per input of the jaxpr.
        carried: pairs (output index, input index) of training state that goes in and comes out.
    """
    builder = GraphBuilder()
    env: Env = {}
    for var in jaxpr.jaxpr.constvars:
        env[var] = builder.add_value(var.aval, Role.CONSTANT, f"const/{len(env)}")
    inputs = tuple(builder.add_value(var.aval, leaf.role, leaf.path) for var, leaf in zip(jaxpr.jaxpr.invars, arguments, strict=True))
    env.update(zip(jaxpr.jaxpr.invars, inputs, strict=True))
    builder.inputs = frozenset(inputs)
    builder.walk(jaxpr.jaxpr, env, Around(1, ""))
    outputs = tuple(LITERAL if isinstance(var, jexc.Literal) else env[var] for var in jaxpr.jaxpr.outvars)
    ties = [(inputs[source], outputs[target]) for target, source in carried if outputs[target] != LITERAL]
    return builder.finish(jaxpr, inputs, outputs, ties)


class GraphBuilder:
    """Collects values and ops, in columns, while the jaxpr is walked."""

    def __init__(self) -> None:
        self.caller: Place | None = None
        self.scope = 0
        self.inputs: frozenset[int] = frozenset()
        self.ties: list[tuple[int, int]] = []
        self.marks: list[Mark] = []
        self.user_pins: list[UserPin] = []
        self.manual: dict[int, ReadRegion] = {}
        self.loss_operands: list[LossOperand] = []
        self.notes: list[str] = []
        self._num_scopes = 1
        self._inlined: list[tuple[int, int]] = []
        # For each value, and for those that are not intermediate.
        self._avals: list[Any] = []
        self._named: dict[int, tuple[Role, str]] = {}
        self._tensors: dict[int, Tensor] = {}
        # For each op.
        self._kind_of: list[int] = []
        self._operands: list[tuple[int, ...]] = []
        self._results: list[tuple[int, ...]] = []
        self._equations: list[Any] = []
        self._infos: list[Any] = []
        self._frame_of: list[int] = []
        # Shared by many ops: rules with their cost in FLOPs, and frames.
        self._kinds: list[Kind] = []
        self._forms: list[bytes] = []
        self._by_form: dict[bytes, int] = {}
        self._canonical = Canonical()
        # Kinds whose parameters are only known by name, and kinds whose results have no elements.
        self._alike: set[int] = set()
        self._hollow: set[int] = set()
        self._quick: dict[Any, int] = {}
        self._known: dict[Any, int] = {}
        self._frames: list[Frame] = []
        self._known_frames: dict[Any, int] = {}

    @property
    def num_ops(self) -> int:
        """Added so far."""
        return len(self._kind_of)

    def add_value(self, aval: Any, role: Role = Role.INTERMEDIATE, path: str = "") -> int:
        """Adds a value with the shape and dtype of `aval`; tokens and others without a shape count as scalars."""
        index = len(self._avals)
        self._avals.append(aval)
        if role is not Role.INTERMEDIATE or path:
            self._named[index] = role, path
        return index

    def add_like(self, value: int) -> int:
        """Adds a value with the shape, dtype and role of another."""
        return self.add_value(self._avals[value], self._named.get(value, (Role.INTERMEDIATE,))[0])

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a value."""
        return self._tensor(self._avals[value]).shape

    def _tensor(self, aval: Any) -> Tensor:
        # JAX shares abstract values between variables, and the jaxpr keeps them alive: identity spares hashing and text.
        known = self._tensors.get(id(aval))
        if known is None:
            known = self._tensors[id(aval)] = Tensor(getattr(aval, "shape", ()), str(getattr(aval, "dtype", None)))
        return known

    def program_of(self, body: Any) -> Program:
        """Builds the program of a body that runs on one device by itself."""
        jaxpr, consts = bodies.open_jaxpr(body)
        return build(jexc.ClosedJaxpr(jaxpr, consts), [Argument("", Role.ARGUMENT) for _ in jaxpr.invars])

    def walk(self, jaxpr: Any, env: Env, around: Around) -> None:
        """Adds the ops of `jaxpr`, whose inputs `env` already knows."""
        run: list[Any] = []
        for eqn in jaxpr.eqns:
            handler = bodies.HANDLERS.get(eqn.primitive.name)
            if handler is None:
                run.append(eqn)
                continue
            self._add_equations(run, env, around)
            run = []
            outer, self.caller = self.caller, Place(eqn.source_info, self.caller)
            handler(self, eqn, env, around)
            self.caller = outer
        self._add_equations(run, env, around)

    @contextmanager
    def body(self, *, is_inlined: bool = False) -> Iterator[None]:
        """Puts the ops added inside into a computation of their own, which shares reshards with the caller's if it `is_inlined`."""
        outer, self.scope = self.scope, self._num_scopes
        self._num_scopes += 1
        if is_inlined:
            self._inlined.append((self.scope, outer))
        yield
        self.scope = outer

    def read(self, env: Env, atoms: Sequence[Any]) -> tuple[int, ...]:
        """Returns the value ids of an equation's operands."""
        return tuple([LITERAL if isinstance(atom, _Literal) else env[atom] for atom in atoms])

    def _add_equations(self, eqns: list[Any], env: Env, around: Around) -> None:
        """Ops for some equations in a row, column by column."""
        made = [eqn.outvars for eqn in eqns]
        variables = list(chain.from_iterable(made))
        first = len(self._avals)
        env.update(zip(variables, count(first)))
        self._avals += map(_aval, variables)
        sizes = list(map(len, made))
        starts = accumulate(sizes, initial=first)
        self._results += [(start,) if size == 1 else tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
        self._operands += [tuple([LITERAL if isinstance(atom, _Literal) else env[atom] for atom in eqn.invars]) for eqn in eqns]
        kinds = list(map(self._kind, eqns))
        if not self._hollow.isdisjoint(kinds):
            self._forget_operands(kinds)
        self._kind_of += kinds
        self._equations += eqns
        self._infos += [eqn.source_info for eqn in eqns]
        self._frame_of += [self._frame(around)] * len(eqns)

    def _forget_operands(self, kinds: Sequence[int]) -> None:
        """Has the last ops read nothing if their results have no elements."""
        first = len(self._operands) - len(kinds)
        for place, kind in enumerate(kinds, first):
            if kind in self._hollow:
                self._operands[place] = (LITERAL,) * len(self._operands[place])

    def add_op(self, primitive: str, operands: tuple[int, ...], results: tuple[int, ...], rule: OpRule, info: Any, around: Around) -> int:
        """An op that is no equation (a boundary), or one whose rule the caller knows; returns its id."""
        shapes = ([() if value == LITERAL else self.shape(value) for value in side] for side in (operands, results))
        rule = rule.without_empty(*shapes, blocks=False)
        key = (primitive, rule)
        kind = self._known.get(key)
        if kind is None:
            form = self._canonical.form((primitive, rule.operands, rule.results, rule.sizes, rule.kinds, rule.blocked, rule.combiner))
            kind = self._known[key] = self._learn(Kind(primitive, rule, 0), form)
        self._kind_of.append(kind)
        self._operands.append(operands)
        self._results.append(results)
        self._equations.append(None)
        self._infos.append(info)
        self._frame_of.append(self._frame(around))
        return len(self._kind_of) - 1

    def _frame(self, around: Around) -> int:
        key = (id(self.caller), around, self.scope)
        number = self._known_frames.setdefault(key, len(self._frames))
        if number == len(self._frames):
            self._frames.append(Frame(self.caller, around.prefix, self.scope, around.repeats))
        return number

    def _kind(self, eqn: Any) -> int:
        # JAX shares abstract values between variables: their identities are hashed faster than shapes. Types of results follow.
        key = (eqn.primitive, *map(id, map(_aval, eqn.invars)), *eqn.params.values())
        try:
            kind = self._quick.get(key)
        except TypeError:
            return self._kind_by_shapes(eqn)
        if kind is None:
            kind = self._quick[key] = self._kind_by_shapes(eqn)
        return kind

    def _kind_by_shapes(self, eqn: Any) -> int:
        name = eqn.primitive.name
        operands = tuple([self._tensor(var.aval).shape for var in eqn.invars])
        results = tuple([self._tensor(var.aval).shape for var in eqn.outvars])
        missing = missing_all_reduces(name, self._tensor(eqn.outvars[0].aval).dtype) if eqn.outvars else frozenset()
        key: Any = (name, missing, operands, results, tuple(eqn.params.values()))
        try:
            kind = self._known.get(key)
        except TypeError:
            key = kind = None
        if kind is None:
            # Bodies are hashed by identity, which depends on what JAX has kept of earlier traces: equal ones are one kind.
            form = self._canonical.form((name, sorted(missing), operands, results, eqn.params))
            kind = self._by_form.get(form.text) if form.is_exact or key is None else None
            if kind is None:
                if results and all(0 in shape for shape in results) and not eqn.effects:
                    # XLA drops such an op, and all that only it needs.
                    kind = self._learn(Kind("empty", replicate(operands, results, ""), 0), form)
                    self._hollow.add(kind)
                else:
                    rule = rule_for(name, operands, results, eqn.params, missing)
                    flops = op_flops(name, rule, operands, results, eqn.params)
                    kind = self._learn(Kind(name, rule, flops, parts_elements(name, eqn.params)), form)
            if key is not None:
                self._known[key] = kind
            elif not form.is_exact:
                self._alike.add(kind)
        return kind

    def _learn(self, kind: Kind, form: Form) -> int:
        number = len(self._kinds)
        self._kinds.append(kind)
        self._forms.append(form.text)
        self._by_form[form.text] = number
        return number

    def finish(
        self, jaxpr: jexc.ClosedJaxpr, inputs: tuple[int, ...], outputs: tuple[int, ...], ties: Sequence[tuple[int, int]]
    ) -> Program:
        """Drops dead ops, makes equal ones one, renumbers the rest, and freezes everything."""
        trail, alive = self._trail(), self._alive(outputs)
        columns = self._columns(alive)
        materialized, from_literals = in_memory(columns, (*inputs, *outputs)), bodies.values_from_literals(columns)
        same = made_one(copies := find_copies(columns, self._comparable(alive)), columns, materialized, from_literals)
        twins = {alive[copy]: alive[first] for copy, first in same.ops.items()}
        settled = [alive[op] for op in choices_of_one(columns, copies)]
        for op in settled:
            self._operands[op] = (LITERAL, *self._operands[op][1:])
        if twins or settled:
            self._operands = [tuple([same.values.get(value, value) for value in own]) for own in self._operands]
            outputs = tuple([same.values.get(value, value) for value in outputs])
            ties = [(before, same.values.get(after, after)) for before, after in ties]
            alive = self._alive(outputs)
            columns = self._columns(alive)
            materialized, from_literals = in_memory(columns, (*inputs, *outputs)), bodies.values_from_literals(columns)
        sites = sites_of(self.num_ops, alive, twins)
        regions = read_regions(self.manual, alive, outputs, (self._operands, self._results))
        origins = LazyOrigins(self._infos, self._frames, self._frame_of).select(alive)
        fingerprint, body = self._fingerprints([trail, *twins.items()], inputs, outputs, ties, regions)
        graph = Graph(
            values=self._values(),
            ops=ops_of(columns, materialized),
            inputs=inputs,
            outputs=outputs,
            ties=(*self.ties, *ties),
            origins=origins,
            fingerprint=fingerprint,
            notes=tuple(dict.fromkeys(self.notes)),
            body=body,
            inlined=tuple(self._inlined),
            copies=copies_across(columns, self._comparable(alive), self._inlined),
        )
        return Program(
            graph=graph,
            jaxpr=jaxpr,
            op_of_site=tuple(sites),
            scopes=tuple(columns.scopes.tolist()),
            marks=tuple(mark._replace(op=sites[mark.op]) for mark in self.marks if sites[mark.op] >= 0),
            user_pins=tuple(self.user_pins),
            manual=tuple(region._replace(op=sites[region.op]) for region in regions if sites[region.op] >= 0),
            from_literals=from_literals,
            region_ops=origins.inside_regions() if self.marks else frozenset(),
            loss_operands=tuple(one._replace(value=same.values.get(one.value, one.value)) for one in self.loss_operands),
            divisors=divisors(self._equations, sites) if self.loss_operands else {},
        )

    def _columns(self, alive: Sequence[int]) -> Columns:
        """Returns columns with some of the ops, renumbered, and all values."""
        kind_of, frames = np.array(self._kind_of, dtype=np.int64)[alive], np.array(self._frame_of, dtype=np.int64)[alive]
        around = np.array([(frame.repeats, frame.scope) for frame in self._frames], dtype=np.int64).reshape(-1, 2)[frames]
        operands, results = (list(map(column.__getitem__, alive)) for column in (self._operands, self._results))
        return Columns(self._kinds, kind_of, (around[:, 0], around[:, 1]), operands, results, self._tensors_of_values())

    def _comparable(self, alive: Sequence[int]) -> list[Any]:
        """Returns the equations of some ops, with None for boundaries and for ops whose parameters are only known by name."""
        kinds, alike = self._kind_of, self._alike
        return [self._equations[index] if kinds[index] not in alike else None for index in alive]

    def _tensors_of_values(self) -> tuple[list[Tensor], list[int]]:
        """Returns the distinct tensors, and for each value the index of its own."""
        known = {key: self._tensor(aval) for key, aval in dict(zip(map(id, self._avals), self._avals, strict=True)).items()}
        places = dict(zip(known, count(), strict=False))
        return list(known.values()), list(map(places.__getitem__, map(id, self._avals)))

    def _values(self) -> tuple[Value, ...]:
        size = len(self._avals)
        shapes, dtypes = (
            list(map({key: tensor[side] for key, tensor in self._tensors.items()}.__getitem__, map(id, self._avals))) for side in (0, 1)
        )
        roles, paths = [Role.INTERMEDIATE] * size, [""] * size
        for index, (role, path) in self._named.items():
            roles[index], paths[index] = role, path
        return tuple(map(_new, repeat(Value), zip(range(size), shapes, dtypes, roles, paths, strict=True)))

    def _alive(self, outputs: tuple[int, ...]) -> list[int]:
        """Returns the ops that some output or effect needs; a carry is needed along with its next value."""
        operands, results = self._operands, self._results
        needed = {*outputs, *(one.value for one in self.loss_operands if one.leaf == LOSS_VALUE)}
        acts = [kind.primitive == "io_callback" for kind in self._kinds]
        while True:
            alive = []
            for op in range(self.num_ops - 1, -1, -1):
                if not results[op] or acts[self._kind_of[op]] or not needed.isdisjoint(results[op]):
                    needed.update(operands[op])
                    alive.append(op)
            size = len(needed)
            needed.update(*[tie for tie in self.ties if not needed.isdisjoint(tie)])
            if len(needed) == size:
                return alive[::-1]

    def _trail(self) -> IntArray:
        """Returns for each op the form of its kind, its scope, how often it runs, and its operands, in one flat array."""
        sizes = np.fromiter(map(len, self._operands), dtype=np.int64, count=self.num_ops) + 3
        starts, total = np.cumsum(sizes) - sizes, int(sizes.sum())
        around = np.array([(frame.scope, frame.repeats) for frame in self._frames], dtype=np.int64).reshape(-1, 2)[self._frame_of]
        trail, is_operand = np.empty(total, dtype=np.int64), np.ones(total, dtype=bool)
        numbers = {form: number for number, form in enumerate(dict.fromkeys(self._forms))}
        forms = np.array([numbers[form] for form in self._forms], dtype=np.int64)[self._kind_of]
        for place, column in enumerate((forms, around[:, 0], around[:, 1])):
            trail[starts + place] = column
            is_operand[starts + place] = False
        trail[is_operand] = np.fromiter(chain.from_iterable(self._operands), dtype=np.int64, count=total - 3 * len(sizes))
        return trail

    def _fingerprints(
        self, trail: list[Any], inputs: Sequence[int], outputs: Sequence[int], ties: Sequence[tuple[int, int]], regions: Sequence[Any]
    ) -> tuple[str, str]:
        """Hashes the program: equations with their parameters, what reads what how often, and arguments, with their names and without."""
        digest, form = hashlib.blake2b(digest_size=16), self._canonical.text
        digest.update(form(list(dict.fromkeys(self._forms))))
        for part in (*trail, [*outputs, *(value for tie in ties for value in tie)]):
            digest.update(np.array(part, dtype=np.int64).tobytes())
        numbers: dict[int, int] = {}
        for mark in self.marks:
            number = numbers.setdefault(mark.region, len(numbers))
            digest.update(form((mark.op, number, mark.side, mark.position, mark.strategy)))
        digest.update(form(self.user_pins))
        for region in regions:
            written = [(row.kind, row.axes, row.payload_bytes, row.repeats) for row in region.collectives]
            digest.update(form((region.body.graph.fingerprint, region.mesh_axes, region.operands, region.results, written)))
        body = digest.copy()
        for index in inputs:
            tensor, (role, path) = self._tensor(self._avals[index]), self._named.get(index, (Role.INTERMEDIATE, ""))
            digest.update(form((*tensor, role, path)))
            body.update(form((*tensor, role)))
        return digest.hexdigest(), body.hexdigest()
