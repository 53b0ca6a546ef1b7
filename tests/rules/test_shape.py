"""Rules of primitives that move elements: against Shardy, on eight devices, and as text."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmdctx.rules import rule_for
from tests.rules.cases import Case


def case(label, function, *args, op=None, explained=()):
    primitive = label.split()[0]
    return Case(primitive, function, args, op=f"stablehlo.{op or primitive}", label=label, explained=explained)


X = (4, 8, 2)
ROW = jnp.int32(3)
# After jax 0.10.2 Shardy keeps every dimension whole that is written in part, or shifted, as if blocks had to move.
KEEPS_WHOLE = jax.__version_info__ > (0, 10, 2)


def written(*dims):
    """What Shardy says of dimensions that are written one element at a time, which XLA splits without communicating all the same."""
    return tuple(f"we split operand 0 dim {dim} = result 0 dim {dim} pass_through, Shardy permutation" for dim in dims if KEEPS_WHOLE)


ONE_OP = [
    case("broadcast_in_dim adding dimensions", lambda x: lax.broadcast_in_dim(x, (2, 4, 8), (1, 2)), (4, 8)),
    case("broadcast_in_dim from size 1", lambda x: lax.broadcast_in_dim(x, (4, 8), (0, 1)), (4, 1)),
    case("broadcast_in_dim of a scalar", lambda x: lax.broadcast_in_dim(x, (4, 8), ()), jnp.float32(3)),
    case("transpose", lambda x: lax.transpose(x, (2, 0, 1)), X),
    case("squeeze", lambda x: lax.squeeze(x, (1, -1)), (4, 1, 8, 1), op="reshape"),
    case("rev", lambda x: lax.rev(x, (1,)), X, op="reverse"),
    case("concatenate", lambda x, y: lax.concatenate((x, y), 1), X, (4, 6, 2)),
    case("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 3, 0), (0, 0, 1))), X),
    case("slice", lambda x: lax.slice(x, (0, 2, 0), (4, 6, 2)), X),
    case("slice to one element", lambda x: lax.slice(x, (0, 2, 0), (4, 3, 2)), X),
    case("slice with a stride", lambda x: lax.slice(x, (0, 0, 0), (4, 8, 2), (1, 2, 1)), X),
    case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (0, i, 0), (4, 4, 2)), X, ROW),
    case(
        "dynamic_update_slice of one row",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i, 0)),
        X,
        (4, 1, 2),
        ROW,
        explained=written(1),
    ),
    case(
        "dynamic_update_slice of one element",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i, 0)),
        X,
        (1, 1, 2),
        ROW,
        explained=written(0, 1),
    ),
]
SEVERAL_OPS = [
    case("split", lambda x: lax.split(x, (3, 5), 1), X),
    case("split in halves", lambda x: lax.split(x, (4, 4), 1), X),
    case("tile", lambda x: lax.tile(x, (2, 1)), (4, 8)),
    case("tile minor", lambda x: lax.tile(x, (1, 4)), (2, 8)),
    case("stack", lambda x, y: jnp.stack((x, y), 1), X, X),
    case("unstack", lambda x: tuple(jnp.unstack(x, axis=2)), X),
]
RESHAPES = [
    ((8, 4, 2), (32, 2)),
    ((32, 2), (8, 8)),
    ((4, 8, 2), (4, 16)),
    ((4, 8), (2, 2, 8)),
    ((4, 8), (4, 1, 2, 4)),
    ((2, 16), (8, 4)),
    ((2, 12), (6, 4)),
    ((64,), (8, 8)),
    ((2, 2, 2, 4), (32,)),
    ((6, 1, 20), (1, 12, 1, 10)),
]


def reshape(source, target):
    return Case("reshape", lambda x: lax.reshape(x, target), (source,), op="stablehlo.reshape", label=f"reshape {source} {target}")


ALIGNED = [reshape(source, target) for source, target in RESHAPES]
MISFIT = [reshape((6, 4), (4, 6)), reshape((8, 6), (12, 4))]


@pytest.mark.parametrize("case", ONE_OP + ALIGNED, ids=str)
def test_shardy_has_the_same_rule(case):
    assert case.disagreements() == list(case.explained)


@pytest.mark.parametrize("case", ONE_OP + SEVERAL_OPS + ALIGNED + MISFIT, ids=str)
def test_every_legal_sharding_computes_the_same_without_communicating(case):
    case.check()


def test_a_reshape_that_transposes_first_relates_the_dimensions_in_that_order():
    assert str(rule_for("reshape", ((4, 8, 2),), ((16, 4),), {"dimensions": (1, 2, 0)})) == "([k, i, j])->([(i j), k]) {i=8, j=2, k=4}"


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ((8, 4, 16), (32, 16), "([i, j, k])->([(i j), k]) {i=8, j=4, k=16}"),
        ((32, 16), (8, 64), "([(i j), k])->([i, (j k)]) {i=8, j=4, k=16}"),
        ((6, 4), (4, 6), "([(i j), m])->([(i k), l]) {i=2, j=3, k=2, l=6, m=4} blocked_propagation={j, k, l, m}"),
        ((3, 5, 8), (5, 3, 8), "([i, k, m])->([j, l, m]) {i=3, j=5, k=5, l=3, m=8} blocked_propagation={i, j, k, l}"),
        ((1, 8), (8, 1), "([1, i])->([i, 1]) {i=8}"),
    ],
)
def test_a_reshape_reads_as_the_common_refinement(source, target, text):
    assert str(rule_for("reshape", (source,), (target,), {"dimensions": None})) == text


@pytest.mark.parametrize("case", MISFIT, ids=str)
def test_minor_factors_behind_a_misfit_are_blocked_though_shardy_shares_them(case):
    """Shardy relates the last divisor of [6, 4] and [4, 6] too; a split of it is no split into blocks, so it is of no use."""
    found = case.disagreements()
    assert found
    assert all(message.startswith("Shardy splits") for message in found)


def test_an_array_without_elements_is_kept_whole_with_a_reason():
    assert "without elements" in rule_for("reshape", ((4, 0),), ((0, 4),), {"dimensions": None}).reason


PASSES = "Shardy splits operand 0 dim 1 = result 0 dim 1 pass_through, we don't"
LONG_UPDATE = case("dynamic_update_slice of two rows", lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i, 0)), X, (4, 2, 2), ROW)


def test_a_long_dynamic_update_keeps_its_dimension_whole_as_xla_would_gather_it():
    """Shardy let the operand's dimension pass; XLA's partitioner all-gathers it, unless the start is a constant."""
    LONG_UPDATE.check()
    same = [f"we call {place} need_replication, Shardy permutation" for place in ("operand 0 dim 1 = result 0 dim 1", "operand 1 dim 1")]
    assert LONG_UPDATE.disagreements() == (same if KEEPS_WHOLE else [PASSES])
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    program = jax.jit(LONG_UPDATE.function, in_shardings=(split, None, None), out_shardings=split)
    assert "all-gather" in program.lower(*LONG_UPDATE.values()).compile().as_text()


def test_a_shift_keeps_its_dimension_whole_as_neighbours_would_exchange_elements():
    """Padding one side and cropping the other keeps the size, so Shardy let the dimension pass."""
    shift = case("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0), (0, 0, 0))), X)
    assert shift.disagreements() == ([] if KEEPS_WHOLE else [PASSES])


@pytest.mark.parametrize(
    ("primitive", "operands", "results", "params", "text"),
    [
        ("iota", (), ((4, 8),), {"dimension": 1}, "()->([i, j]) {i=4, j=8}"),
        ("empty", (), ((4,),), {}, "()->([i]) {i=4}"),
        ("broadcast_to", ((8, 1),), ((4, 8, 2),), {}, "([j, 1])->([i, j, k]) {i=4, j=8, k=2}"),
        ("concatenate", ((4, 8),), ((4, 8),), {"dimension": 1}, "([i, j])->([i, j]) {i=4, j=8}"),
    ],
)
def test_rules_read_like_shardys(primitive, operands, results, params, text):
    assert str(rule_for(primitive, operands, results, params)) == text
