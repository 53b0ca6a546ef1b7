"""jaxpr to Graph: every equation an op with its rule, calls inlined, control-flow bodies entered through boundary ops."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax.extend.core as jexc

from spmdctx.ir import LITERAL, Graph, Mark, Op, OpRule, Role, Value
from spmdctx.rules import rule_for
from spmdctx.rules.flops import op_flops
from spmdctx.rules.fusion import fused_bits, in_memory, read_before
from spmdctx.rules.traffic import fusion_works
from spmdctx.trace import bodies
from spmdctx.trace.equal import Site, find_copies, made_one
from spmdctx.trace.origins import LazyOrigins, Place
from spmdctx.trace.program import LossOperand, ManualRegion, Program, UserPin

Env = dict[Any, int]

_Literal = jexc.Literal

_new = tuple.__new__
"""Makes named tuples of all their fields, in half the time of their own constructors: a step has tens of thousands."""


class Argument(NamedTuple):
    """What the builder must know of one flat argument."""

    path: str
    role: Role


class _Tensor(NamedTuple):
    """What the graph keeps of an abstract value."""

    shape: tuple[int, ...]
    dtype: str


class _Known(NamedTuple):
    """A rule with its cost in FLOPs and its number, shared by all equations of one kind and shape.

    `is_exact` says that the parameters of these equations are equal, and not only written alike.
    """

    rule: OpRule
    flops: int
    number: int
    is_exact: bool = True


def build(jaxpr: jexc.ClosedJaxpr, arguments: Sequence[Argument], carried: Sequence[tuple[int, int]] = ()) -> Program:
    """Builds the graph of a flat program.

    Args:
        jaxpr: the traced step over flat leaves.
        arguments: one per input of the jaxpr.
        carried: pairs (output index, input index) of training state that goes in and comes out.
    """
    builder = Builder()
    env: Env = {}
    for var in jaxpr.jaxpr.constvars:
        env[var] = builder.add_value(var.aval, Role.CONSTANT, f"const/{len(env)}")
    inputs = tuple(builder.add_value(var.aval, leaf.role, leaf.path) for var, leaf in zip(jaxpr.jaxpr.invars, arguments, strict=True))
    env.update(zip(jaxpr.jaxpr.invars, inputs, strict=True))
    builder.walk(jaxpr.jaxpr, env, 1, "")
    outputs = tuple(LITERAL if isinstance(var, jexc.Literal) else env[var] for var in jaxpr.jaxpr.outvars)
    ties = [(inputs[source], outputs[target]) for target, source in carried if outputs[target] != LITERAL]
    return builder.finish(jaxpr, inputs, outputs, ties)


class Builder:
    """Collects values and ops while the jaxpr is walked."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.places: list[Place] = []
        self.caller: Place | None = None
        self.prefixes: list[str] = []
        self.scopes: list[int] = []
        self.scope = 0
        self._num_scopes = 1
        self.ties: list[tuple[int, int]] = []
        self.marks: list[Mark] = []
        self.user_pins: list[UserPin] = []
        self.manual: list[ManualRegion] = []
        self.loss_operands: list[LossOperand] = []
        self.notes: list[str] = []
        self._known: dict[Any, _Known] = {}
        self._quick: dict[Any, _Known] = {}
        self._kinds: list[str] = []
        self._tensors: dict[int, _Tensor] = {}
        self._trail: list[int] = []
        self._sites: list[Site] = []

    def add_value(self, aval: Any, role: Role = Role.INTERMEDIATE, path: str = "") -> int:
        """A new value with the shape and dtype of `aval`; tokens and other things without a shape count as scalars."""
        shape, dtype = self._tensor(aval)
        index = len(self.values)
        self.values.append(_new(Value, (index, shape, dtype, role, path)))
        return index

    def _tensor(self, aval: Any) -> _Tensor:
        # JAX shares abstract values between variables, and the jaxpr keeps them alive: identity spares hashing and text.
        known = self._tensors.get(id(aval))
        if known is None:
            known = self._tensors[id(aval)] = _Tensor(getattr(aval, "shape", ()), str(getattr(aval, "dtype", None)))
        return known

    def program_of(self, body: Any) -> Program:
        """The program of a body that runs on one device by itself."""
        jaxpr, consts = bodies.open_jaxpr(body)
        return build(jexc.ClosedJaxpr(jaxpr, consts), [Argument("", Role.ARGUMENT) for _ in jaxpr.invars])

    def walk(self, jaxpr: Any, env: Env, repeats: int, prefix: str) -> None:
        """Adds the ops of `jaxpr`, whose inputs `env` already knows; `prefix` is the name scope of the enclosing calls."""
        for eqn in jaxpr.eqns:
            handler = bodies.HANDLERS.get(eqn.primitive.name)
            if handler is None:
                self._add_equation(eqn, env, repeats, prefix)
            else:
                outer, self.caller = self.caller, Place(eqn.source_info, self.caller)
                handler(self, eqn, env, repeats, prefix)
                self.caller = outer

    @contextmanager
    def body(self) -> Iterator[None]:
        """The ops added inside belong to a computation of their own, with which the caller's shares no reshard."""
        outer, self.scope = self.scope, self._num_scopes
        self._num_scopes += 1
        yield
        self.scope = outer

    def read(self, env: Env, atoms: Sequence[Any]) -> tuple[int, ...]:
        """Value ids of an equation's operands."""
        return tuple([LITERAL if isinstance(atom, _Literal) else env[atom] for atom in atoms])

    def _add_equation(self, eqn: Any, env: Env, repeats: int, prefix: str) -> None:
        operands = self.read(env, eqn.invars)
        results = tuple([self.add_value(var.aval) for var in eqn.outvars])
        env.update(zip(eqn.outvars, results, strict=True))
        known = self._known_as(eqn)
        self._append(eqn.primitive.name, operands, results, known, repeats, eqn.source_info, prefix)
        self._sites.append((eqn if known.is_exact else None, known.number, self.scope))

    def add_op(
        self, primitive: str, operands: tuple[int, ...], results: tuple[int, ...], rule: OpRule, repeats: int, info: Any, prefix: str
    ) -> int:
        """An op that is no equation (a boundary), or one whose rule the caller knows; returns its id."""
        key = (primitive, rule)
        known = self._known.get(key)
        if known is None:
            known = self._learn(key, _Known(rule, 0, len(self._kinds)), f"{primitive} {rule}")
        self._sites.append((None, known.number, self.scope))
        return self._append(primitive, operands, results, known, repeats, info, prefix)

    def _append(
        self, primitive: str, operands: tuple[int, ...], results: tuple[int, ...], known: _Known, repeats: int, info: Any, prefix: str
    ) -> int:
        index = len(self.ops)
        self.ops.append(_new(Op, (index, primitive, operands, results, known.rule, known.flops, repeats, None, 0, None)))
        self.places.append(_new(Place, (info, self.caller)))
        self.prefixes.append(prefix)
        self.scopes.append(self.scope)
        self._trail += (known.number, self.scope, repeats, *operands)
        return index

    def _known_as(self, eqn: Any) -> _Known:
        # JAX shares abstract values between variables: their identities are hashed faster than shapes.
        invars = eqn.invars
        key = (eqn.primitive, len(invars), *[id(var.aval) for var in invars], *[id(var.aval) for var in eqn.outvars], *eqn.params.values())
        try:
            known = self._quick.get(key)
        except TypeError:
            return self._rule_of(eqn)
        if known is None:
            known = self._quick[key] = self._rule_of(eqn)
        return known

    def _rule_of(self, eqn: Any) -> _Known:
        name = eqn.primitive.name
        operands = tuple([self._tensor(var.aval).shape for var in eqn.invars])
        results = tuple([self._tensor(var.aval).shape for var in eqn.outvars])
        params = tuple(eqn.params.values())
        key: tuple[Any, ...] = (name, operands, results, params)
        is_exact = True
        try:
            known = self._known.get(key)
        except TypeError:
            key, is_exact = (name, operands, results, repr(params)), False
            known = self._known.get(key)
        if known is None:
            rule = rule_for(name, operands, results, eqn.params)
            text = f"{name} {operands} {results} {_stable_text(eqn.params)}"
            known = self._learn(key, _Known(rule, op_flops(name, rule, operands, results), len(self._kinds), is_exact), text)
        return known

    def _learn(self, key: Any, known: _Known, text: str) -> _Known:
        self._known[key] = known
        self._kinds.append(text)
        return known

    def finish(
        self, jaxpr: jexc.ClosedJaxpr, inputs: tuple[int, ...], outputs: tuple[int, ...], ties: Sequence[tuple[int, int]]
    ) -> Program:
        """Drops dead ops, makes equal ones one, renumbers the rest, and freezes everything."""
        alive = self._alive(outputs)
        ops = self._numbered(alive)
        held, loose = in_memory(self.values, ops, (*inputs, *outputs)), _loose_values(ops)
        same = made_one(find_copies(ops, [self._sites[index] for index in alive]), ops, held, loose)
        twins = {alive[copy]: alive[first] for copy, first in same.ops.items()}
        if twins:
            self._trail += [index for pair in twins.items() for index in pair]
            self.ops = [op._replace(operands=tuple([same.values.get(value, value) for value in op.operands])) for op in self.ops]
            outputs = tuple([same.values.get(value, value) for value in outputs])
            ties = [(before, same.values.get(after, after)) for before, after in ties]
            alive = self._alive(outputs)
            ops = self._numbered(alive)
            held, loose = in_memory(self.values, ops, (*inputs, *outputs)), _loose_values(ops)
        numbers = [-1] * len(self.ops)
        for number, index in enumerate(alive):
            numbers[index] = number
        fused = [fused_bits(op, held, read) for op, read in zip(ops, read_before(self.values, ops), strict=True)]
        works = fusion_works(self.values, ops, fused, [self.scopes[index] for index in alive])
        ops = [_new(Op, (*op[:8], bits, work)) for op, bits, work in zip(ops, fused, works, strict=True)]
        origins = LazyOrigins(self.places, self.prefixes).select(alive)
        graph = Graph(
            values=tuple(self.values),
            ops=tuple(ops),
            inputs=inputs,
            outputs=outputs,
            ties=(*self.ties, *ties),
            origins=origins,
            fingerprint=self._fingerprint(inputs, outputs, ties),
            notes=tuple(dict.fromkeys(self.notes)),
        )
        return Program(
            graph=graph,
            jaxpr=jaxpr,
            op_of_site=tuple([numbers[twins.get(index, index)] for index in range(len(numbers))] if twins else numbers),
            scopes=tuple([self.scopes[index] for index in alive]),
            marks=tuple(mark._replace(op=numbers[mark.op]) for mark in self.marks if numbers[mark.op] >= 0),
            user_pins=tuple(self.user_pins),
            manual=tuple(region._replace(op=numbers[region.op]) for region in self.manual if numbers[region.op] >= 0),
            loose=loose,
            region_ops=origins.inside_regions() if self.marks else frozenset(),
            loss_operands=tuple(one._replace(value=same.values.get(one.value, one.value)) for one in self.loss_operands),
        )

    def _numbered(self, alive: Sequence[int]) -> list[Op]:
        """Some of the ops, numbered anew."""
        return [_new(Op, (number, *self.ops[index][1:])) if index != number else self.ops[index] for number, index in enumerate(alive)]

    def _alive(self, outputs: tuple[int, ...]) -> list[int]:
        """The ops that some output or effect needs; a carry is needed with what the loop makes of it."""
        needed = set(outputs)
        while True:
            alive = []
            for op in reversed(self.ops):
                if not op.results or not needed.isdisjoint(op.results):
                    needed.update(op.operands)
                    alive.append(op.id)
            size = len(needed)
            needed.update(*[tie for tie in self.ties if not needed.isdisjoint(tie)])
            if len(needed) == size:
                return alive[::-1]

    def _fingerprint(self, inputs: tuple[int, ...], outputs: tuple[int, ...], ties: Sequence[tuple[int, int]]) -> str:
        """Hash of the program: kinds of equations with their parameters, who reads what how often, and the arguments."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update("\n".join(self._kinds).encode())
        digest.update(array("q", self._trail).tobytes())
        digest.update(array("q", [*outputs, *(value for tie in ties for value in tie)]).tobytes())
        regions: dict[int, int] = {}
        for mark in self.marks:
            number = regions.setdefault(mark.region, len(regions))
            digest.update(f"{mark.op} {number} {mark.side} {mark.position} {mark.strategy}".encode())
        for pin in self.user_pins:
            digest.update(repr(pin).encode())
        for region in self.manual:
            digest.update(region.body.graph.fingerprint.encode())
            written = [(row.kind, row.axes, row.payload_bytes, row.repeats) for row in region.collectives]
            digest.update(repr((region.mesh_axes, region.operands, region.results, written)).encode())
        for index in inputs:
            value = self.values[index]
            digest.update(f"{value.path} {value.shape} {value.dtype} {value.role}".encode())
        return digest.hexdigest()


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _stable_text(params: dict[str, Any]) -> str:
    """Parameters as text without memory addresses, so that every process writes the same."""
    return _ADDRESS.sub("", repr(sorted((name, str(value)) for name, value in params.items())))


def _loose_values(ops: Iterable[Op]) -> frozenset[int]:
    """Values computed from literals alone: no input, no constant array, no random key."""
    loose = {LITERAL}
    for op in ops:
        if loose.issuperset(op.operands) and op.primitive not in bodies.NEVER_LOOSE:
            loose.update(op.results)
    return frozenset(loose - {LITERAL})
