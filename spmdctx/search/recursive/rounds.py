"""The rounds of recursive_programming: each mesh axis in turn cuts one factor of each main op, in topological order.

A round depends only on decisions that came before it in the same round. So all rounds of one op can be decided before the next op, with
the same decisions. Ops that are no main ops pass on the shardings of their operands, at no cost. A product of the backward pass
follows the forward product with which it shares an operand.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from spmdctx.ir.graph import LITERAL, Graph, Op, Role
from spmdctx.ir.mesh import LogicalMesh, units
from spmdctx.ir.primitives import MATRIX_PRODUCTS, OUTSIDE, RENAMES
from spmdctx.ir.projection import FactorAxes, legal, merge, project
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.search.problem.space import NO_SLOT, Space
from spmdctx.search.propagation import Spreader, keeps_dimensions
from spmdctx.search.recursive.costs import NO_CUT, REDISTRIBUTION, Option, Roles, describe, describe_choice, op_costs, roles_of
from spmdctx.search.setup.request import Setup

LOG = logging.getLogger("spmdctx")
_CONVOLUTION = "conv_general_dilated"
_OTHER_FORMS = RENAMES | {"optimization_barrier"}


Inputs = tuple[int, int]
"""The kinds of a main op's two operands: `_ARGUMENT`, `_WEIGHT` or `_OTHER`."""


class Round(NamedTuple):
    """One decision of the log: the op's local sizes by cut, the options, and the chosen one."""

    edges: str
    options: tuple[Option, ...]
    chosen: Option
    parts: int


class Decision(NamedTuple):
    """The decision of the rounds for one op: axes for each factor, and a round for each mesh axis that was free."""

    axes: FactorAxes
    rounds: tuple[Round, ...]


class Decided(NamedTuple):
    """The result of all rounds: decisions by op id, and a sharding number for each slot as far as the decisions spread forwards."""

    space: Space
    decisions: dict[int, Decision]
    spreader: Spreader


def decide(space: Space, setup: Setup, mem_coeff: float, followers: frozenset[int], inputs: Mapping[int, Inputs]) -> Decided:
    """Runs all rounds on the axes of `space.mesh`, the first axis first; axes that are used only together take one round.

    Args:
        space: the graph on a mesh with one axis per round.
        setup: pins and forced ops, which stand; seeds, which spread like the cuts of an earlier op.
        mem_coeff: price of cutting the rows of a matrix product.
        followers: op ids of products that are not decided by themselves.
        inputs: the kinds of each main op's operands.
    """
    spreader = Spreader(space, setup.pins, setup.forced, setup.one_way)
    if setup.forced or setup.pins:
        spreader.spread()
    rounds = _Rounds(space, spreader, mem_coeff, inputs)
    for value, sharding in setup.seeds.items():
        slot = space.slot_of[value]
        if slot not in spreader.fixed:
            spreader.put(slot, sharding)
            rounds.seeded.add(slot)
    mains = {index for index in main_ops(space.graph) if index not in followers and index not in setup.forced}
    for index in range(len(space.op_slots)):
        if index in mains:
            rounds.take(index)
        else:
            spreader.visit(index)
    return Decided(space, rounds.decisions, spreader)


def main_ops(graph: Graph) -> list[int]:
    """Lists the ids of products and convolutions with two operands."""
    return [op.id for op in graph.ops if op.primitive in MATRIX_PRODUCTS and LITERAL not in op.operands[:2] and not op.rule.reason]


class _Rounds:
    def __init__(self, space: Space, spreader: Spreader, mem_coeff: float, inputs: Mapping[int, Inputs]) -> None:
        self.space, self.spreader, self.mem_coeff, self.inputs = space, spreader, mem_coeff, inputs
        self.decisions: dict[int, Decision] = {}
        self.seeded: set[int] = set()
        self._given = list(spreader.state)
        self._roles: dict[tuple[int, bool], Roles] = {}
        self._memo: dict[tuple[int, ...], Decision] = {}

    def take(self, index: int) -> None:
        """Decides one op, and gives its tensors the shardings that follow."""
        space, state = self.space, self.spreader.state
        op = space.graph.ops[index]
        inputs = self.inputs[index]
        given = [self._given[slot] for slot in space.op_slots[index]]
        key = (*space.key(index, state), *given, *inputs)
        known = self._memo.get(key)
        if known is None:
            known = self._memo[key] = self._decide(op, key[1 : 1 + len(given)], given, inputs)
        self.decisions[index] = known
        for slot, dims in zip(space.op_slots[index], (*op.rule.operands, *op.rule.results), strict=True):
            if slot == NO_SLOT or slot in self.spreader.fixed:
                continue
            # The first main op that reads or makes a tensor decides how it is stored.
            if state[slot] == space.whole[slot] or slot in self.seeded:
                self.seeded.discard(slot)
                state[slot] = space.number(project(dims, known.axes))

    def _decide(self, op: Op, numbers: tuple[int, ...], given: list[int], inputs: Inputs) -> Decision:
        space, rule = self.space, op.rule
        sides = (*rule.operands, *rule.results)
        tensors = [(dims, self._sharding(number)) for dims, number in zip(sides, given, strict=True)]
        splittable = space.splittable(rule)
        taken = merge(rule, [pair for pair in tensors if any(pair[1])], splittable, space.mesh)
        roles = self._roles_of(op, splittable, swapped=inputs == (_WEIGHT, _OTHER))
        # Tensors that an earlier op has cut or left whole. Arguments take the sharding that their first reader needs.
        decided = [
            (dims, self._sharding(number))
            for dims, number, kind in zip(rule.operands, numbers, inputs, strict=False)
            if kind == _OTHER and dims
        ]
        attempt = self._cut_all(op, roles, taken, decided, whole=True)
        if space.limits and not space.limits.allows(op, attempt.axes, space.mesh):
            attempt = self._cut_all(op, roles, taken, decided, whole=False)
            if not space.limits.allows(op, attempt.axes, space.mesh):
                attempt = Decision(taken, attempt.rounds)
        return attempt

    def _sharding(self, number: int) -> TensorSharding:
        return self.space.shardings[number] if number != NO_SLOT else ()

    def _roles_of(self, op: Op, splittable: tuple[bool, ...], *, swapped: bool) -> Roles:
        key = (id(op.rule), swapped)
        if key not in self._roles:
            self._roles[key] = roles_of(op.rule, splittable, is_conv=op.primitive == _CONVOLUTION, swapped=swapped)
        return self._roles[key]

    def _cut_all(
        self, op: Op, roles: Roles, taken: FactorAxes, decided: list[tuple[tuple[tuple[int, ...], ...], TensorSharding]], *, whole: bool
    ) -> Decision:
        mesh, rule = self.space.mesh, op.rule
        axes = [list(own) for own in taken]
        local = [size // mesh.num_slices(own) for size, own in zip(rule.sizes, taken, strict=True)]
        used = {name for own in taken for name in own}
        log: list[Round] = []
        for unit in units(mesh):
            if not used.isdisjoint(unit):
                continue
            parts = mesh.num_slices(unit)
            options = self._options(op, roles, axes, local, (unit[0], parts), decided)
            if not whole and any(not one.forbidden and one.cut != NO_CUT for one in options):
                options = tuple([one for one in options if one.cut != NO_CUT])
            chosen = min((one for one in options if not one.forbidden), key=lambda one: one.total)
            if LOG.isEnabledFor(logging.INFO):
                log.append(Round(_edges(roles, local), options, chosen, parts))
            if chosen.factor >= 0:
                axes[chosen.factor] += unit
                local[chosen.factor] //= parts
        return Decision(legal(rule, tuple([tuple(own) for own in axes]), mesh), tuple(log))

    def _options(
        self,
        op: Op,
        roles: Roles,
        axes: list[list[str]],
        local: list[int],
        axis: tuple[str, int],
        decided: list[tuple[tuple[tuple[int, ...], ...], TensorSharding]],
    ) -> tuple[Option, ...]:
        name, parts = axis
        sizes = [_product(local, tensor) for tensor in roles.tensors]
        options = []
        for cut, cost in op_costs(roles, sizes, local, parts, self.mem_coeff).items():
            if cut != NO_CUT and not roles.cuts[cut]:
                continue
            factor = -1 if cut == NO_CUT else self._factor(op, roles, cut, axes, local, parts)
            why = "" if cut == NO_CUT else _forbidden(roles, cut, factor, axes, local, parts)
            rest = sum(_redistribution(dims, sharding, factor, name, local) for dims, sharding in decided)
            options.append(Option(cut, factor, cost, rest, why))
        return _batch_first(options) if roles.kind == "conv" else tuple(options)

    def _factor(self, op: Op, roles: Roles, cut: str, axes: list[list[str]], local: list[int], parts: int) -> int:
        """Returns the first factor of a cut that divides once more and that the limits let be cut; -1 if there is none."""
        for factor in roles.cuts[cut]:
            if local[factor] < parts or local[factor] % parts:
                continue
            cut_axes = tuple([(*own, "") if index == factor else tuple(own) for index, own in enumerate(axes)])
            if self._is_legal(op, cut_axes, factor, local, parts):
                return factor
        return -1

    def _is_legal(self, op: Op, axes: tuple[AxisNames, ...], factor: int, local: list[int], parts: int) -> bool:
        """Returns whether a minor factor of a compound dimension has its major ones split completely, and the slices stay aligned."""
        limits = self.space.limits
        for dims in (*op.rule.operands, *op.rule.results):
            for factors in dims:
                if factor in factors and any(local[major] > 1 for major in factors[: factors.index(factor)]):
                    return False
                if limits and limits.slice_multiple > 1 and factor in factors and dims in op.rule.operands:
                    size = _product(local, factors) // parts
                    if size % limits.slice_multiple and op.primitive != _CONVOLUTION:
                        return False
        return True


def _batch_first(options: list[Option]) -> tuple[Option, ...]:
    """Orders the options of a convolution, forbidden ones first.

    Of the others only the cut along the batch is left; without one the cuts along channels; and no cut only if nothing divides.
    """
    allowed = [one for one in options if not one.forbidden]
    batch = [one for one in allowed if one.cut == "B"]
    return tuple([one for one in options if one.forbidden] + (batch or [one for one in allowed if one.cut != NO_CUT] or allowed))


def _product(local: Sequence[int], factors: Iterable[int]) -> int:
    count = 1
    for factor in factors:
        count *= local[factor]
    return count


def _edges(roles: Roles, local: list[int]) -> str:
    names = {"I": "i", "K": "k", "J": "j"} if roles.kind != "conv" else {"B": "batch", "Q": "in", "K": "out"}
    return ", ".join(f"{name}={_product(local, roles.cuts[cut])}" for cut, name in names.items())


def _forbidden(roles: Roles, cut: str, factor: int, axes: list[list[str]], local: list[int], parts: int) -> str:
    """Returns why a cut is forbidden; an empty string if it is not."""
    other = {"J": "K", "K": "J"}.get(cut) if roles.kind == "matmul" else None
    if other is not None and any(axes[one] for one in roles.cuts[other]):
        return f"the {other}-axis is cut already"
    if factor < 0:
        return f"its local size {_product(local, roles.cuts[cut])} cannot be cut into {parts}"
    return ""


def _redistribution(dims: tuple[tuple[int, ...], ...], sharding: TensorSharding, factor: int, name: str, local: list[int]) -> float:
    """Returns 16 times the local elements of a tensor that was cut otherwise in this round, else 0."""
    there = next((dim for dim, names in enumerate(sharding) if name in names), -1)
    here = next((dim for dim, factors in enumerate(dims) if factor in factors), -1)
    return 0.0 if there == here else float(REDISTRIBUTION * _product(local, [f for factors in dims for f in factors]))


_ARGUMENT, _WEIGHT, _OTHER = 0, 1, 2
"""The kind of an operand: an argument of the step, a parameter among these, or the result of an op."""


class Roots:
    """The origins of operands, found through ops that only rename, convert, stack or unstack."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[int, int] = {}
        self._simple: dict[int, bool] = {}

    def of(self, value: int) -> int:
        """Returns the original value that a value is another form of."""
        trail = []
        while value not in self._known:
            trail.append(value)
            producer = self._graph.producers.get(value)
            op = self._graph.ops[producer] if producer is not None else None
            if op is None or not self._renames(op):
                self._known[value] = value
            else:
                value = next(operand for operand in op.operands if operand != LITERAL)
        for passed in trail:
            self._known[passed] = self._known[value]
        return self._known[value]

    def _renames(self, op: Op) -> bool:
        if op.primitive in OUTSIDE:
            return op.operands[0] != LITERAL
        known = self._simple.get(id(op.rule))
        if known is None:
            known = self._simple[id(op.rule)] = len(op.rule.operands) == len(op.rule.results) == 1 and keeps_dimensions(op.rule)
        return known and op.primitive in _OTHER_FORMS

    def inputs(self, op: Op) -> Inputs:
        """Returns the kinds of the two operands of a main op."""
        left, right = (self._kind(value) for value in op.operands[:2])
        return left, right

    def _kind(self, value: int) -> int:
        root = self.of(value)
        if root in self._graph.producers:
            return _OTHER
        return _WEIGHT if self._graph.values[root].role is Role.PARAMETER else _ARGUMENT


def backward_products(graph: Graph) -> frozenset[int]:
    """Returns the two products of the backward pass of each main op.

    They share an operand with the main op. Of this operand they contract dimensions that the main op keeps, and keep those that it
    contracts. Their other operand has the shape of the main op's result.
    """
    roots = Roots(graph)
    before: dict[int, list[tuple[frozenset[int], list[int]]]] = {}
    contractions: dict[tuple[int, int], frozenset[int]] = {}
    found = []
    for index in main_ops(graph):
        op = graph.ops[index]
        rows = []
        for position in (0, 1):
            key = (id(op.rule), position)
            if key not in contractions:
                contractions[key] = _contracted(op, position)
            rows.append((roots.of(op.operands[position]), contractions[key], sorted(graph.values[op.operands[1 - position]].shape)))
        if any(now and kept and not now & kept and shape == other for root, now, other in rows for kept, shape in before.get(root, ())):
            found.append(index)
            continue
        result = sorted(graph.values[op.results[0]].shape)
        for root, now, _ in rows:
            before.setdefault(root, []).append((now, result))
    return frozenset(found)


def _contracted(op: Op, position: int) -> frozenset[int]:
    """Returns the contracted dimensions of an operand, counted from the last."""
    kept = {factor for factors in op.rule.results[0] for factor in factors}
    dims = op.rule.operands[position]
    return frozenset(len(dims) - dim for dim, factors in enumerate(dims) if factors and kept.isdisjoint(factors))


def log_rounds(graph: Graph, mesh: LogicalMesh, decisions: Mapping[int, Decision], sites: Sequence[int]) -> None:
    """Writes the decisions to the logger "spmdctx" at level INFO, round by round, in topological order.

    `sites` are the ids under which `graph.origins` knows the ops.
    """
    if not LOG.isEnabledFor(logging.INFO):
        return
    for number in range(len(units(mesh))):
        for index, decision in decisions.items():
            if number >= len(decision.rounds):
                continue
            step, origin = decision.rounds[number], graph.origins[sites[index]]
            LOG.info("Round %d: %s '%s' (%s), %s", number + 1, graph.ops[index].primitive, origin.name, origin.source, step.edges)
            for option in step.options:
                LOG.info("%s", describe(option, step.parts))
            LOG.info("%s", describe_choice(step.chosen))
