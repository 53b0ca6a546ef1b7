"""Estimates how long each equation of a forward pass takes on one device, forwards and backwards."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from spmdctx.ir.primitives import MATRIX_PRODUCTS
from spmdctx.machine.topology import Topology
from spmdctx.pipeline.cut.line import Line, num_bytes, variables
from spmdctx.rules import rule_for
from spmdctx.rules.control_flow import BRANCHES, CALLS, LOOPS, RECOMPUTED, bodies_of, call_body, opened
from spmdctx.rules.flops import op_flops


class Seconds(NamedTuple):
    """The time of an equation in both passes."""

    forward: float
    backward: float

    def times(self, count: float) -> Seconds:
        """Returns the time of several runs."""
        return Seconds(self.forward * count, self.backward * count)


def line_seconds(line: Line, topology: Topology) -> list[Seconds]:
    """Returns the time of each equation of a line; in the backward pass, those of checkpointed regions run forwards once more."""
    costs = EquationCosts(topology)
    found = [costs.seconds(eqn) for eqn in line.eqns]
    return [
        Seconds(own.forward, own.backward + own.forward) if id(eqn) in line.region_of else own
        for eqn, own in zip(line.eqns, found, strict=True)
    ]


class EquationCosts:
    """Prices equations for a machine, each kind once.

    The backward pass of an equation computes two gradients of its size. What is recomputed runs forwards there, too.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._known: dict[Any, float] = {}
        self._bodies: dict[int, tuple[Any, Seconds]] = {}

    def seconds(self, eqn: Any) -> Seconds:
        """Returns the time of an equation, loops of unknown length counted once."""
        name = eqn.primitive.name
        if name in CALLS:
            inside = self._body(opened(call_body(name, eqn.params)))
            return Seconds(inside.forward, inside.backward + inside.forward) if name in RECOMPUTED else inside
        if name in LOOPS:
            bodies = [self._body(opened(body)) for body in bodies_of(eqn.params)]
            return _sum(bodies).times(eqn.params.get("length", 1))
        if name in BRANCHES:
            return max(self._body(opened(body)) for body in eqn.params["branches"])
        forward = self._alone(eqn)
        return Seconds(forward, 2 * forward)

    def _body(self, jaxpr: Any) -> Seconds:
        known = self._bodies.get(id(jaxpr))
        if known is None:
            # The body is kept, so that no other one gets its identity.
            known = self._bodies[id(jaxpr)] = jaxpr, _sum([self.seconds(eqn) for eqn in jaxpr.eqns])
        return known[1]

    def _alone(self, eqn: Any) -> float:
        operands, results = (tuple(tuple(getattr(var.aval, "shape", ())) for var in side) for side in (eqn.invars, eqn.outvars))
        key = (eqn.primitive.name, operands, results, *eqn.params.values())
        try:
            known = self._known.get(key)
        except TypeError:  # a parameter without a hash
            key, known = (eqn.primitive.name, operands, results, id(eqn)), None
        if known is None:
            rule = rule_for(eqn.primitive.name, operands, results, eqn.params)
            flops = op_flops(eqn.primitive.name, rule, operands, results, eqn.params)
            is_product = eqn.primitive.name in MATRIX_PRODUCTS
            rate = self._topology.peak_flops_per_s if is_product else self._topology.vector_flops_per_s
            moved = sum(map(num_bytes, {*variables(eqn.invars), *eqn.outvars})) if is_product else sum(map(num_bytes, eqn.outvars))
            known = self._known[key] = max(flops / rate, moved / self._topology.memory_bytes_per_s)
        return known


def _sum(each: list[Seconds]) -> Seconds:
    return Seconds(math.fsum(one.forward for one in each), math.fsum(one.backward for one in each))
