"""Rules of gather and scatter: against Shardy, on eight devices, and what XLA's partitioner makes of each split.

The embedding of [vocab, width] looked up by [batch, seq] tokens, and its gradient, as compiled for a mesh x=2, y=4:

    lookup, tokens split over the batch              nothing
    lookup, vocab split over any axes                one all-reduce of the result's block
    gradient, vocab split                            nothing: each device drops the tokens of the others
    gradient, tokens split over the batch            one all-reduce of the gradient's block
    gradient, tokens split over batch and sequence   two such all-reduces, one per dimension
    a scatter that overwrites or subtracts, updates split   updates and indices are all-gathered, so we keep them whole

Where one update is written, we keep the written-into dimension whole, as XLA miscompiles its split (openxla/xla#49121).
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spmdctx.ir.rule import FactorKind
from spmdctx.rules import rule_for
from tests.rules.cases import Case

VOCAB, WIDTH, BATCH, SEQ = 8, 4, 4, 8
EMBED = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
WINDOWS = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
INTO = lax.ScatterDimensionNumbers(update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))


def indices(limit, *shape):
    return jnp.asarray(np.random.default_rng(1).integers(0, limit, size=shape), jnp.int32)


def distinct(limit, *shape):
    """Indices of which no two are equal, as a scatter that overwrites has no order."""
    return jnp.asarray(np.random.default_rng(1).permutation(limit)[: int(np.prod(shape))].reshape(shape), jnp.int32)


def case(label, function, *args, op=None, **more):
    primitive = label.split()[0]
    return Case(primitive, function, args, op=f"stablehlo.{op or primitive.split('-')[0]}", label=label, **more)


def embed(mode):
    return lambda table, tokens: lax.gather(table, tokens, EMBED, (1, WIDTH), mode=mode)


def window_rows(x, starts):
    return jax.vmap(lambda x, start: lax.dynamic_slice(x, (start, 0), (3, 4)))(x, starts)


def write_rows(x, update, starts):
    return jax.vmap(lambda x, update, start: lax.dynamic_update_slice(x, update, (start, 0)))(x, update, starts)


def write(kind):
    return lambda table, tokens, updates: getattr(lax, kind)(table, tokens, updates, INTO)


def along_axis_gradient(x, at, cotangent):
    """The gradient of take_along_axis alone, without its forward gather."""
    numbers = lax.ScatterDimensionNumbers((), (2,), (2,), operand_batching_dims=(0, 1), scatter_indices_batching_dims=(0, 1))
    return lax.scatter_add(x, at[..., None], cotangent, numbers)


TOKENS = indices(VOCAB, BATCH, SEQ, 1)
TABLE, UPDATES = (VOCAB, WIDTH), (BATCH, SEQ, WIDTH)

ONE_UPDATE = "Shardy splits operand 0 dim 0 = result 0 dim 0 pass_through, we don't"

LOOKUP = case("gather of an embedding", embed("clip"), TABLE, TOKENS)
GRADIENT = case("scatter-add into an embedding", write("scatter_add"), TABLE, TOKENS, UPDATES)

GATHERS = [
    case("gather of one row", lambda x, i: jnp.take(x, i, axis=0), (8, 4), jnp.int32(3)),
    LOOKUP,
    case("gather of an embedding, filled", embed("fill"), TABLE, TOKENS),
    case("gather of columns", lambda x, i: x[:, i], (4, 8, 2), indices(8, 4)),
    case("gather of elements", lambda x, i, j: x[i, j], (4, 8, 2), indices(4, 8), indices(8, 8)),
    case("gather along an axis", lambda x, i: jnp.take_along_axis(x, i, -1), (4, 8, 8), indices(8, 4, 8, 4)),
    case("gather of windows", window_rows, (4, 8, 4), indices(5, 4)),
    case(
        "gather of windows of one",
        lambda x, i: lax.gather(x, i, lax.GatherDimensionNumbers((1, 2), (), (0,)), (1, 4)),
        (8, 4),
        indices(8, 4, 1),
    ),
]
SCATTERS = [
    GRADIENT,
    *(case(f"scatter-{kind} into an embedding", write(f"scatter_{kind}"), TABLE, TOKENS, UPDATES) for kind in ("mul", "min", "max")),
    case("scatter-sub", write("scatter_sub"), TABLE, TOKENS, UPDATES),
    case("scatter", write("scatter"), (32, WIDTH), distinct(32, BATCH, SEQ, 1), UPDATES),
    *(
        case(f"scatter{kind} of one row", function, (8, 4), (4,), jnp.int32(3), explained=(ONE_UPDATE,))
        for kind, function in {
            "": lambda x, u, i: x.at[i].set(u),
            "-add": lambda x, u, i: x.at[i].add(u),
            "-max": lambda x, u, i: x.at[i].max(u),
        }.items()
    ),
    case("scatter of windows", write_rows, (4, 8, 4), (4, 2, 4), indices(7, 4)),
    case("scatter of single rows", write_rows, (4, 8, 4), (4, 1, 4), indices(7, 4)),
    case("scatter-add into columns", lambda x, i, u: x.at[:, i].add(u), (4, 8, 2), indices(8, 4), (4, 4, 2)),
    case("scatter-add along an axis", along_axis_gradient, (4, 8, 8), indices(8, 4, 8, 4), (4, 8, 4)),
    case("scatter-add of segments", lambda x, i: jax.ops.segment_sum(x, i, 4), (8, 4), indices(4, 8)),
    case("scatter applying a function", lambda x, i: x.at[i].apply(jnp.sin), (8, 4), distinct(8, 4)),
]


@pytest.mark.parametrize("case", GATHERS + SCATTERS, ids=str)
def test_shardy_has_the_same_rule(case):
    assert case.disagreements() == list(case.explained)


@pytest.mark.parametrize("case", GATHERS + SCATTERS, ids=str)
def test_every_legal_sharding_computes_the_same_and_only_reductions_communicate(case):
    case.check()


def test_an_embedding_and_its_gradient_split_every_dimension_but_the_coordinates():
    lookup = LOOKUP.check()
    gradient = GRADIENT.check()
    assert str(lookup) == "([k, l], [i, j, 1])->([i, j, l]) {i=4, j=8, k=8, l=4} reduction={k}"
    assert str(gradient) == "([k, l], [i, j, 1], [i, j, l])->([k, l]) {i=4, j=8, k=8, l=4} reduction={i, j}"
    assert all(lookup.splittable)
    assert all(gradient.splittable)


@pytest.mark.parametrize(
    ("primitive", "combiner"), [("scatter-add", "add"), ("scatter-mul", "mul"), ("scatter-min", "min"), ("scatter-max", "max")]
)
def test_split_updates_combine_as_the_scatter_does(primitive, combiner):
    rule = rule_for(primitive, ((8, 4), (4, 8, 1), (4, 8, 4)), ((8, 4),), {"dimension_numbers": INTO})
    assert rule.combiner == combiner
    assert FactorKind.REDUCTION in rule.kinds


_COLLECTIVE = re.compile(r"= (\w+)\[([\d,]*)\]\S* (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def collectives(function, specs, result, args):
    """Kind and result shape of each collective in the program compiled with these shardings."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def named(spec):
        return NamedSharding(mesh, PartitionSpec(*spec))

    text = jax.jit(function, in_shardings=tuple(map(named, specs)), out_shardings=named(result)).lower(*args).compile().as_text()
    return [(kind, tuple(map(int, dims.split(",")))) for _, dims, kind in _COLLECTIVE.findall(text)]


@pytest.mark.parametrize(
    ("specs", "result", "expected"),
    [
        ([(), ("x", "y")], ("x", "y"), []),
        ([(None, "y"), ("x",)], ("x", None, "y"), []),
        ([("x",), ()], (), [(4, 8, 4)]),
        ([(("x", "y"),), ()], (), [(4, 8, 4)]),
        ([("x",), ("y",)], ("y",), [(1, 8, 4)]),
        ([("y", "x"), ()], (None, None, "x"), [(4, 8, 2)]),
    ],
)
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_a_split_vocabulary_costs_one_all_reduce_of_the_looked_up_block(mode, specs, result, expected):
    args = LOOKUP.values()
    assert collectives(embed(mode), specs, result, args) == [("all-reduce", shape) for shape in expected]


@pytest.mark.parametrize(
    ("specs", "result", "expected"),
    [
        ([("x",), (), ()], ("x",), []),
        ([("x", "y"), (), (None, None, "y")], ("x", "y"), []),
        ([(), ("x",), ("x",)], (), [(8, 4)]),
        ([("x",), ("y",), ("y",)], ("x",), [(4, 4)]),
        ([(None, "y"), ("x",), ("x", None, "y")], (None, "y"), [(8, 1)]),
        ([(), ("x", "y"), ("x", "y")], (), [(8, 4), (8, 4)]),
    ],
)
def test_split_updates_cost_one_all_reduce_of_the_written_block_per_dimension(specs, result, expected):
    assert collectives(write("scatter_add"), specs, result, GRADIENT.values()) == [("all-reduce", shape) for shape in expected]


@pytest.mark.parametrize("kind", ["scatter", "scatter_sub"])
def test_split_updates_that_do_not_combine_would_be_gathered(kind):
    found = collectives(write(kind), [(), ("x",), ("x",)], (), GRADIENT.values())
    assert {name for name, _ in found} == {"all-gather"}
