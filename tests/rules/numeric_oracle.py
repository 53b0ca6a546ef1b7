"""Runs one op on eight devices, as spmdctx lowers it, under every legal sharding of its factors, and compares with one device."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jexc
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.rule import DimFactors, FactorKind, OpRule
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.rules import rule_for
from spmdctx.trace.specs import make_mesh
from tests.road import ops, trace
from tests.rules.sweep import Run, evaluate, reached

MESH = {"x": 2, "y": 4}
Shardings = tuple[TensorSharding, ...]
COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Equation:
    """The one equation that a function is made of: its rule, and which argument each operand is (None for a literal)."""

    primitive: str
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    arguments: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    rule: OpRule


def equation(function: Callable[..., Any], *args: Any, primitive: str) -> Equation:
    """Finds the equation of `primitive` in `function(*args)`, also inside nested jits, and asks for its rule."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    invars: list[Any] = list(jaxpr.invars)
    outvars: list[Any] = list(jaxpr.outvars)
    arguments: list[int | None] = list(range(len(invars)))
    outputs: list[int | None] = list(range(len(outvars)))
    while not any(eqn.primitive.name == primitive for eqn in jaxpr.eqns):
        (call,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("jit", "custom_jvp_call", "custom_vjp_call")]
        arguments = [_position(var, invars, arguments) for var in call.invars]
        outputs = [_position(var, outvars, outputs) for var in call.outvars]
        jaxpr = (call.params.get("jaxpr") or call.params["call_jaxpr"]).jaxpr
        invars, outvars = list(jaxpr.invars), list(jaxpr.outvars)
    (found,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == primitive]
    operands = tuple(tuple(var.aval.shape) for var in found.invars)
    results = tuple(tuple(var.aval.shape) for var in found.outvars)
    return Equation(
        primitive,
        operands,
        results,
        tuple(_position(var, invars, arguments) for var in found.invars),
        tuple(_position(var, outvars, outputs) for var in found.outvars),
        rule_for(primitive, operands, results, found.params),
    )


def _position(var: Any, known: Sequence[Any], positions: Sequence[int | None]) -> int | None:
    if isinstance(var, jexc.Literal):
        return None
    return next((position for own, position in zip(known, positions, strict=True) if own is var), None)


def assert_fits(eqn: Equation) -> None:
    """Checks that the rule has the ranks of the equation, and that the factors of each dimension multiply to its size."""
    for shapes, sides in ((eqn.operands, eqn.rule.operands), (eqn.results, eqn.rule.results)):
        assert [len(dims) for dims in sides] == [len(shape) for shape in shapes], f"{eqn.rule} for {eqn.operands} -> {eqn.results}"
        for shape, dims in zip(shapes, sides, strict=True):
            for size, factors in zip(shape, dims, strict=True):
                assert not factors or math.prod(eqn.rule.sizes[factor] for factor in factors) == size, f"{eqn.rule} for {shape}"


def legal_shardings(rule: OpRule, mesh: Mapping[str, int]) -> Iterator[tuple[tuple[AxisNames, ...], Shardings, Shardings]]:
    """Every way to give each mesh axis to one factor or to none, with what it means for operands and results."""
    choices = [None, *(factor for factor, splittable in enumerate(rule.splittable) if splittable)]
    for chosen in itertools.product(choices, repeat=len(mesh)):
        axes = tuple(tuple(name for name, own in zip(mesh, chosen, strict=True) if own == factor) for factor in range(len(rule.sizes)))
        if any(size % _slices(own, mesh) for size, own in zip(rule.sizes, axes, strict=True)):
            continue
        sides = [[_tensor(rule, dims, axes, mesh) for dims in side] for side in (rule.operands, rule.results)]
        if all(None not in side for side in sides):
            yield axes, tuple(s for s in sides[0] if s is not None), tuple(s for s in sides[1] if s is not None)


def _tensor(rule: OpRule, dims: tuple[DimFactors, ...], axes: Sequence[AxisNames], mesh: Mapping[str, int]) -> TensorSharding | None:
    """The tensor's sharding, or None where a minor factor is split inside a major one that is not split all the way."""
    sharding = []
    for factors in dims:
        whole = False
        for factor in factors:
            if axes[factor] and whole:
                return None
            whole = whole or _slices(axes[factor], mesh) < rule.sizes[factor]
        sharding.append(tuple(name for factor in factors for name in axes[factor]))
    return tuple(sharding)


def _slices(axes: AxisNames, mesh: Mapping[str, int]) -> int:
    return math.prod(mesh[name] for name in axes)


def check(
    function: Callable[..., Any],
    *args: Any,
    primitive: str,
    mesh: Mapping[str, int] = MESH,
    also: Sequence[str] = (),
    tolerance: float = 1e-5,
) -> OpRule:
    """Asserts that the op gives the one-device result under every legal sharding, and communicates no more than its rule says.

    All cases are one compiled program. Reductions may all-reduce; whatever else XLA is known to do is named in `also`.
    """
    eqn = equation(function, *args, primitive=primitive)
    assert_fits(eqn)
    cases = list(legal_shardings(eqn.rule, mesh))
    assert len(cases) > 1, f"{primitive} can't be split: {eqn.rule} {eqn.rule.reason}"
    traced, logical = trace(function, *args), LogicalMesh.of(dict(mesh))
    (op,) = ops(traced, primitive)

    def program(*args: Any) -> list[Any]:
        return [evaluate(Run(traced, logical, op, axes), jax.tree.leaves(args)) for axes, _, _ in cases]

    whole = NamedSharding(make_mesh(logical, jax.devices()), PartitionSpec())
    compiled = jax.jit(program, in_shardings=whole).lower(*(jax.device_put(arg, whole) for arg in args)).compile(compiler_options=_QUICK)
    leaves = jax.tree.leaves(jax.jit(function)(*args))
    expected = [_number(leaves[place]) for place in reached(Run(traced, logical, op, ()))]
    for (axes, _, _), outputs in zip(cases, compiled(*(jax.device_put(arg, whole) for arg in args)), strict=True):
        for leaf, own in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(
                _number(leaf), own, rtol=tolerance, atol=tolerance, err_msg=f"{primitive} {eqn.rule} split as {axes}"
            )
    _assert_quiet(compiled.as_text(), eqn.rule, cases, also)
    return eqn.rule


def _number(leaf: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    value = np.asarray(leaf)
    return value.astype(np.float32) if value.dtype.name == "bfloat16" else value


def _assert_quiet(
    text: str, rule: OpRule, cases: Sequence[tuple[tuple[AxisNames, ...], Shardings, Shardings]], also: Sequence[str]
) -> None:
    reductions = [factor for factor, kind in enumerate(rule.kinds) if kind is FactorKind.REDUCTION]
    reduces = any(axes[factor] for axes, _, _ in cases for factor in reductions)
    allowed = {*also, *(("all-reduce",) if reduces else ())}
    found = set(COLLECTIVE.findall(text))
    loud = [line.strip()[:300] for line in text.splitlines() if (own := COLLECTIVE.search(line)) and own.group(1) not in allowed]
    assert found <= allowed, f"{rule} communicates:\n" + "\n".join(loud[:6])
