"""What the compiler makes of planned collectives: sums that are only sliced, and what only matrix products read."""

import pytest

from spmdctx.cost.price import price
from spmdctx.cost.step import Step
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import project
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.xla.partial_sums import Readers
from spmdctx.rules import rule_for
from spmdctx.rules.builder import identity
from tests.road import MESH
from tests.search.graphs import GraphMaker

TPU, GPU, CPU = (PRESETS[name] for name in ("tpu-v5e", "h100", "cpu"))
D, M, DM = ("data",), ("model",), ("data", "model")
SHAPE = (32, 16)
WHOLE, ROWS, SLICED = ((), ()), (D, ()), (DM, ())
DOT = rule_for("dot_general", ((32, 64), (64, 16)), (SHAPE,), {"dimension_numbers": (((1,), (0,)), ((), ()))})
PRODUCT = rule_for("dot_general", (SHAPE, (16, 8)), ((32, 8),), {"dimension_numbers": (((1,), (0,)), ((), ()))})
BYTES = 32 * 16 * 4


class Plan:
    """A graph written op by op, each with the axes of its factors and the sharding its result is stored in."""

    def __init__(self):
        self.make, self.axes, self.values, self.mesh = GraphMaker(), [], [], MESH

    def input(self, shape, sharding):
        self.values.append(sharding)
        return self.make.input(*shape)

    def op(self, primitive, rule, *operands, taken, stored, shape=SHAPE, dtype="float32"):
        """`taken` maps operand positions to the sharding in which the op takes them."""
        axes = [()] * len(rule.sizes)
        for position, sharding in taken.items():
            for factors, names in zip(rule.operands[position], sharding, strict=True):
                if factors:
                    axes[factors[0]] = names
        self.axes.append(OpSharding(tuple(axes)))
        self.values.append(stored)
        return self.make.op(primitive, rule, *operands, shape=shape, dtype=dtype)

    def partial_sum(self):
        """[32, 64] times [64, 16], rows split over data, contracted over model."""
        left, right = self.input((32, 64), (D, M)), self.input((64, 16), (M, ()))
        return self.op("dot_general", DOT, left, right, taken={0: (D, M)}, stored=ROWS)

    def unary(self, primitive, value, taken, stored=None):
        return self.op(primitive, identity(SHAPE), value, taken={0: taken}, stored=stored or taken)

    def collectives(self, topology, *outputs):
        graph = self.make.graph(*outputs)
        assignment = Assignment(tuple(self.axes), tuple(self.values), "by hand")
        found = price(Step(graph, (0,) * len(graph.ops), frozenset()), assignment, self.mesh, topology)
        return [(row.kind, row.axes, row.payload_bytes) for row in found.collectives]

    def readers(self, *outputs):
        return Readers(self.make.graph(*outputs), Assignment(tuple(self.axes), tuple(self.values), "by hand"))


SCATTERED, REDUCED = [("reduce_scatter", M, BYTES // 4)], [("all_reduce", M, BYTES // 4)]


@pytest.mark.parametrize(("topology", "expected"), [(TPU, SCATTERED), (GPU, SCATTERED), (CPU, REDUCED)], ids=["tpu", "gpu", "cpu"])
def test_a_sum_of_which_only_a_slice_is_kept_is_scattered(topology, expected):
    plan = Plan()
    total = plan.partial_sum()
    assert plan.collectives(topology, plan.unary("exp", total, SLICED)) == expected


@pytest.mark.parametrize(("topology", "expected"), [(TPU, SCATTERED), (GPU, REDUCED)], ids=["tpu", "gpu"])
@pytest.mark.parametrize("branches", [1, 2], ids=["one op", "two ops"])
def test_element_wise_ops_before_the_slice_stop_all_but_the_tpu_compiler(topology, expected, branches):
    plan = Plan()
    total = plan.partial_sum()
    between = [plan.unary("tanh", total, ROWS) for _ in range(branches)]
    assert plan.collectives(topology, *(plan.unary("exp", value, SLICED) for value in between)) == expected


MOVED = ["reduce_scatter", "collective_permute", "all_gather"]


@pytest.mark.parametrize(("topology", "first"), [(TPU, "reduce_scatter"), (CPU, "all_reduce")], ids=["tpu", "cpu"])
@pytest.mark.parametrize("stored", [ROWS, (M, ())], ids=["by its reader", "where it is made"])
def test_a_sum_that_is_sliced_to_be_moved_to_other_axes_is_scattered(topology, first, stored):
    plan = Plan()
    left, right = plan.input((32, 64), (D, M)), plan.input((64, 16), (M, ()))
    total = plan.op("dot_general", DOT, left, right, taken={0: (D, M)}, stored=stored)
    kinds = [kind for kind, _, _ in plan.collectives(topology, plan.unary("exp", total, (M, ())))]
    assert kinds == [first, *MOVED[1:]]


def test_a_slice_moves_up_through_the_addition_of_a_bias():
    plan = Plan()
    total, bias = plan.partial_sum(), plan.input((1, 16), WHOLE)
    rule = rule_for("add", (SHAPE, (1, 16)), (SHAPE,), {})
    shifted = plan.op("add", rule, total, bias, taken={0: ROWS}, stored=ROWS)
    assert plan.collectives(TPU, plan.unary("exp", shifted, SLICED)) == SCATTERED


def test_axes_of_one_device_do_not_keep_a_sum_from_being_scattered():
    plan = Plan()
    left, right = plan.input((32, 64), ((), DM)), plan.input((64, 16), (DM, ()))
    total = plan.op("dot_general", DOT, left, right, taken={0: ((), DM)}, stored=WHOLE)
    plan.mesh = LogicalMesh((("data", 1), ("model", 4)))
    assert [kind for kind, _, _ in plan.collectives(TPU, plan.unary("exp", total, SLICED))] == ["reduce_scatter"]


@pytest.mark.parametrize("primitive", ["spmdctx_shard", "sharding_constraint", "name"])
@pytest.mark.parametrize("stored", [ROWS, SLICED], ids=["sliced by the reader", "sliced by the mark"])
def test_marks_between_the_sum_and_the_slice_are_nothing(primitive, stored):
    plan = Plan()
    marked = plan.unary(primitive, plan.partial_sum(), ROWS, stored)
    assert plan.collectives(GPU, plan.unary("exp", marked, SLICED)) == SCATTERED


def test_a_sum_that_is_also_read_whole_is_reduced():
    plan = Plan()
    total = plan.partial_sum()
    assert plan.collectives(TPU, plan.unary("exp", total, SLICED), plan.unary("tanh", total, ROWS)) == REDUCED


def test_a_sum_that_is_a_result_of_the_step_is_reduced():
    plan = Plan()
    total = plan.partial_sum()
    assert plan.collectives(TPU, plan.unary("exp", total, SLICED), total) == REDUCED


def test_a_sum_sliced_in_two_ways_is_reduced():
    plan = Plan()
    total = plan.partial_sum()
    assert plan.collectives(TPU, plan.unary("exp", total, SLICED), plan.unary("tanh", total, (D, M))) == REDUCED


def test_terms_are_joined_before_their_sum_is_scattered():
    plan = Plan()
    terms = [plan.partial_sum(), plan.partial_sum()]
    rule = rule_for("add", (SHAPE, SHAPE), (SHAPE,), {})
    total = plan.op("add", rule, *terms, taken={0: ROWS}, stored=ROWS)
    assert plan.collectives(GPU, plan.unary("exp", total, SLICED)) == SCATTERED


def gathered(topology, *primitives, dtype="float32", source=SLICED):
    """What it costs that `primitives` take a value gathered over model."""
    plan = Plan()
    value = plan.op("exp", identity(SHAPE), plan.input(SHAPE, source), taken={0: source}, stored=source, dtype=dtype)
    outputs = [_read(plan, primitive, value, ROWS) for primitive in primitives]
    return plan.collectives(topology, *outputs)


def _read(plan, primitive, value, taken):
    if primitive != "dot_general":
        return plan.unary(primitive, value, taken)
    weights = plan.input((16, 8), WHOLE)
    return plan.op("dot_general", PRODUCT, value, weights, taken={0: taken}, stored=taken, shape=(32, 8))


@pytest.mark.parametrize(
    ("topology", "readers", "item_bytes"),
    [
        (TPU, ["dot_general"], 2),
        (TPU, ["dot_general", "dot_general"], 2),
        (TPU, ["dot_general", "exp"], 4),
        (TPU, ["exp"], 4),
        (GPU, ["dot_general"], 4),
        (CPU, ["dot_general"], 4),
    ],
    ids=["product", "two products", "product and exp", "exp", "gpu", "cpu"],
)
def test_what_only_matrix_products_read_is_gathered_in_their_precision_on_tpu(topology, readers, item_bytes):
    assert gathered(topology, *readers) == [("all_gather", M, 32 * 16 // 4 * item_bytes)]


def test_bfloat16_values_are_gathered_as_they_are():
    assert gathered(TPU, "dot_general", dtype="bfloat16") == [("all_gather", M, 32 * 16 // 4 * 2)]


def test_readers_of_the_value_as_it_is_stored_do_not_matter_to_its_gather():
    plan = Plan()
    value = plan.unary("exp", plan.input(SHAPE, SLICED), SLICED)
    outputs = [_read(plan, "dot_general", value, ROWS), plan.unary("tanh", value, SLICED)]
    assert plan.collectives(TPU, *outputs) == [("all_gather", M, 32 * 16 // 4 * 2)]


def test_a_product_that_reads_the_value_in_another_layout_counts_too():
    plan = Plan()
    turned = rule_for("transpose", (SHAPE,), ((16, 32),), {"permutation": (1, 0)})
    value = plan.unary("exp", plan.input(SHAPE, ROWS), ROWS)
    other = plan.op("transpose", turned, value, taken={0: ROWS}, stored=((), D), shape=(16, 32))
    rule = rule_for("dot_general", ((16, 32), (32, 8)), ((16, 8),), {"dimension_numbers": (((1,), (0,)), ((), ()))})
    product = plan.op("dot_general", rule, other, plan.input((32, 8), (D, ())), taken={0: ((), D)}, stored=WHOLE, shape=(16, 8))
    assert plan.readers(product).are_matrix_products(value)
    assert not plan.readers(product, other).are_matrix_products(value)


def test_a_reader_is_known_by_the_sharding_it_takes():
    plan = Plan()
    value = plan.unary("exp", plan.input(SHAPE, SLICED), SLICED)
    _read(plan, "dot_general", value, ROWS)
    readers = plan.readers()
    (op,) = readers.of(value)
    assert readers.taken(op, 0) == project(op.rule.operands[0], plan.axes[op.id].axes) == ROWS
