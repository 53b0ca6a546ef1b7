"""Rules of random number generation: keys pass through, and drawn dimensions split freely (each device computes its own counters)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdctx.ir.rule import OpRule
from spmdctx.rules.builder import RuleBuilder, Shape, broadcast_dims
from spmdctx.rules.elementwise import elementwise
from spmdctx.rules.registry import rule

rule("random_seed", "random_clone", "random_fold_in")(elementwise)
rule("threefry2x32", "threefry4x32", "philox2x32", "philox4x32")(elementwise)


@rule("random_wrap", "random_unwrap")
def random_wrap(operands: tuple[Shape, ...], results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Turns keys `[keys]` into their words `[keys, words]`, or back; the words of a key stay together."""
    (operand,), (result,) = operands, results
    builder = RuleBuilder()
    keys = builder.factors(operand if len(operand) < len(result) else result)
    return builder.build([_words(keys, operand)], [_words(keys, result)])


def _words(keys: list[tuple[int, ...]], shape: Shape) -> list[tuple[int, ...]]:
    return keys + [()] * (len(shape) - len(keys))


@rule("random_split", "random_bits")
def random_bits(operands: tuple[Shape, ...], results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Draws `[keys, drawn]` from `[keys]`."""
    (keys,), (result,) = operands, results
    builder = RuleBuilder()
    dims = builder.factors(result)
    return builder.build([dims[: len(keys)]], [dims])


@rule("rng_bit_generator")
def rng_bit_generator(operands: tuple[Shape, ...], results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Turns the state of a generator into its next state, both whole, and the drawn bits."""
    builder = RuleBuilder()
    state = [()] * len(operands[0])
    return builder.build([state], [state, builder.factors(results[1])])


@rule("random_gamma")
def random_gamma(operands: tuple[Shape, ...], results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Draws `[keys, drawn]` from keys `[keys]` and shape parameters `[keys, drawn]`.

    Both are flattened, so only the leading dimension splits without a gather of the parameters.
    """
    builder = RuleBuilder()
    (full,) = results
    leading = next((dim for dim, size in enumerate(full) if size > 1), 0)
    dims = [builder.factor(size, blocked=dim != leading) for dim, size in enumerate(full)]
    keys, parameters = operands
    return builder.build([dims[: len(keys)], broadcast_dims(dims, parameters, full)], [dims])


@rule("rng_uniform", "iota_2x32_shape")
def draw(operands: tuple[Shape, ...], results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    """Makes results of one shape from scalars alone."""
    builder = RuleBuilder()
    dims = builder.factors(results[0])
    return builder.build([broadcast_dims(dims, shape, results[0]) for shape in operands], [dims] * len(results))
