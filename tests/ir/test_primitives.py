"""Each class of primitives has members of its own, which exist, and what one model says of an op holds for all of them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from spmdctx.cost.roofline import sliced_time_s
from spmdctx.gradients.marker import loss_p
from spmdctx.ir import primitives
from spmdctx.ir.primitives import BOUNDARY_OF, COND_EXIT, CONTRACTIONS, HEAVY, LOSS, MARKER, MATRIX_PRODUCTS, Boundary
from spmdctx.ir.rule import FactorKind, OpRule
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.xla.narrowing import narrow_readers
from spmdctx.machine.xla.overlap import overlap_candidates
from spmdctx.machine.xla.schedule import needed_products
from spmdctx.rules import RULES
from spmdctx.trace.marker import shard_p
from tests.road import trace
from tests.search.graphs import GraphMaker

CLASSES = {name: own for name, own in vars(primitives).items() if isinstance(own, frozenset)}
PRODUCT = OpRule(
    (((0,), (1,)), ((1,), (2,))), (((0,), (2,)),), (8, 8, 8), (FactorKind.PASS_THROUGH, FactorKind.REDUCTION, FactorKind.PASS_THROUGH)
)


def test_no_two_classes_have_the_same_members():
    assert len(set(CLASSES.values())) == len(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_every_member_is_an_op_that_a_graph_can_hold(name):
    by_structure = {MARKER, "shard_map", *BOUNDARY_OF}
    assert CLASSES[name] <= RULES.keys() | by_structure


def test_the_trace_makes_the_boundaries_of_the_table_and_no_others():
    def body(carry, x):
        return lax.while_loop(lambda one: one.sum() < 3.0, lambda one: one + x, carry), lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)

    graph = trace(lambda start, xs: lax.scan(body, start, xs), jnp.ones(8), jnp.ones((4, 8))).graph
    assert {op.primitive: op.boundary for op in graph.ops if op.boundary} == BOUNDARY_OF
    assert {op.primitive for op in graph.ops if op.boundary is None}.isdisjoint(BOUNDARY_OF)


def test_the_join_of_branches_is_no_boundary_of_a_loop():
    assert BOUNDARY_OF.keys() - primitives.LOOP_BOUNDARIES == {COND_EXIT}
    assert BOUNDARY_OF[COND_EXIT] is Boundary.JOIN


def two_products(primitive):
    """A product of a product, the second of which is of the given primitive."""
    make = GraphMaker()
    first = make.op("dot_general", PRODUCT, make.input(8, 8), make.input(8, 8), shape=(8, 8))
    return make.graph(make.op(primitive, PRODUCT, first, make.input(8, 8), shape=(8, 8)))


@pytest.mark.parametrize("primitive", sorted(MATRIX_PRODUCTS))
def test_every_matrix_product_is_one_for_the_models_of_memory_and_of_overlap(primitive):
    graph = two_products(primitive)
    assert list(narrow_readers(graph)) == [1, 1]
    assert needed_products(graph) == (0,)
    assert not overlap_candidates(graph).terminal[graph.ops[0].results[0]]


def test_a_shard_map_hides_communication_but_does_not_narrow_its_operands():
    graph = two_products("shard_map")
    assert {"shard_map", "pallas_call"} == HEAVY - MATRIX_PRODUCTS
    assert needed_products(graph) == (0,)
    assert list(narrow_readers(graph)) == [1, 0]


def test_convolutions_run_on_the_matrix_unit_but_contract_no_whole_dimensions():
    assert {"conv_general_dilated"} == MATRIX_PRODUCTS - CONTRACTIONS


def test_a_ragged_product_s_terms_can_be_written_but_not_in_a_wider_type():
    assert {"ragged_dot_general"} == primitives.TERMS - primitives.WIDENED


def test_what_only_says_how_a_tensor_is_split_hides_no_view_and_no_layout_of_it():
    assert primitives.IDENTITIES < primitives.ANNOTATIONS < primitives.RENAMES < primitives.VIEWS
    assert primitives.ANNOTATIONS < primitives.LAYOUT < primitives.LINEAR


def test_a_rounding_that_the_user_asked_for_does_not_commute_with_sums():
    assert {"reduce_precision"} == primitives.CASTS - primitives.LINEAR


def test_the_markers_are_the_primitives_of_that_name():
    assert (shard_p.name, loss_p.name) == (MARKER, LOSS)


@pytest.mark.parametrize("annotate", [jnp.copy, lambda one: checkpoint_name(one, "here")])
def test_copies_and_names_are_nothing_in_the_program_that_the_compiler_gets(annotate):
    def text(between):
        return jax.jit(lambda x: jnp.sin(between(jnp.cos(x)))).lower(jnp.ones(8)).as_text()

    assert text(annotate) == text(lambda one: one)
    graph = trace(annotate, jnp.ones(8)).graph
    assert [op.primitive in primitives.ANNOTATIONS for op in graph.ops] == [True]


def test_a_copy_takes_no_time():
    program = trace(lambda x: jnp.sort(jnp.copy(jnp.sort(x))), jnp.ones(8))
    (copied,) = [op for op in program.graph.ops if op.primitive == "copy"]
    assert sliced_time_s(program.graph, copied, [1], PRESETS["tpu-v5e"]) == 0.0
