"""Folding: repeated layers share their classes, and what a folded plan costs is what it costs op by op."""

import jax
import jax.numpy as jnp
import optax
import pytest

from spmdctx import plan
from spmdctx.cost.evaluate import evaluate
from spmdctx.cost.step import Step
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.presets import topology
from spmdctx.search.dynamic.results import DynamicOptions
from spmdctx.search.dynamic.searcher import Searcher
from spmdctx.search.problem.fold import Folding, fold
from spmdctx.search.problem.space import Space
from spmdctx.search.setup.request import Setup
from tests.search.random_graphs import StepMaker, random_machine, random_step

MESH = LogicalMesh.of((2, 2))
PER_LAYER = 4


def _layers(count, width=64, rows=32):
    """x + tanh(x up) down, so many times."""
    make = StepMaker()
    x = make.input(rows, width, role=Role.BATCH)
    for _ in range(count):
        up, down = make.input(width, 4 * width, role=Role.PARAMETER), make.input(4 * width, width, role=Role.PARAMETER)
        x = make.same("add", x, make.dot(make.same("tanh", make.dot(x, up)), down))
    return make.finish(x)


def _shared_rules(step):
    """As a trace does it: equal ops have one rule object, by which kinds are told apart."""
    rules = {}
    ops = tuple(op._replace(rule=rules.setdefault((op.primitive, str(op.rule)), op.rule)) for op in step.graph.ops)
    return step.graph.__class__(
        step.graph.values, ops, step.graph.inputs, step.graph.outputs, step.graph.ties, step.graph.origins, step.graph.fingerprint
    )


def _fold(graph, op_marks=None, slot_marks=None, **options):
    space = Space(graph, MESH, topology("h100"), frozenset())
    return fold(space, op_marks or [0] * len(graph.ops), slot_marks or {}, folding=Folding(**options))


def test_a_small_program_is_not_folded():
    graph = _shared_rules(_layers(10))
    folded = _fold(graph)
    assert all(len(members) == 1 for members in (*folded.op_members, *folded.slot_members))


def test_layers_in_the_middle_share_their_classes():
    count = 130
    graph = _shared_rules(_layers(count))
    folded = _fold(graph)
    middle = folded.op_class[30 * PER_LAYER : 31 * PER_LAYER]
    assert middle == folded.op_class[31 * PER_LAYER : 32 * PER_LAYER]
    assert len(set(middle)) == PER_LAYER
    assert folded.op_class[:PER_LAYER] != middle
    assert folded.op_class[-PER_LAYER:] != middle
    assert len(folded.op_members) < 20 * PER_LAYER


def test_fewer_rounds_look_less_far_and_make_fewer_classes():
    graph = _shared_rules(_layers(130))
    near, far = _fold(graph, rounds=1), _fold(graph)
    assert len(near.op_members) < len(far.op_members)
    # What is alike far around is alike nearby.
    assert all(len({near.op_class[member] for member in members}) == 1 for members in far.op_members)
    # The layers are still told from their own parts.
    assert len(set(near.op_class[30 * PER_LAYER : 31 * PER_LAYER])) == PER_LAYER


def test_few_ops_that_look_alike_decide_for_themselves():
    together, apart = (_fold(_shared_rules(_layers(8)), small_program=0, few=few, most=1.0) for few in (1, 3))
    assert {len(own) for own in together.op_members} == {1, 3, 4, 5, 6}
    assert {len(own) for own in apart.op_members} == {1, 4, 5, 6}
    assert not {2, 3} & {len(own) for own in apart.slot_members}


def test_a_fold_that_leaves_most_classes_is_none():
    graph = _shared_rules(_layers(8))
    folded, whole = _fold(graph, small_program=0, most=1.0), _fold(graph, small_program=1000)
    left, every = (len(own.op_members) + len(own.slot_members) for own in (folded, whole))
    assert 0.3 < left / every < 0.95
    assert _fold(graph, small_program=0, most=left / every) == folded
    assert _fold(graph, small_program=0, most=0.99 * left / every) == whole
    assert _fold(graph, small_program=0, most=0.99 * left / every, large_program=len(graph.ops)) == folded


def _two_towers(weights, state, left, right):
    """A contrastive loss over the rows and the columns of the scores of two towers."""

    def loss(weights):
        ends = []
        for own, x in zip(weights, (left, right), strict=True):
            x = jax.nn.relu(jax.nn.relu(x @ own[0]) @ own[1]) @ own[2]
            ends.append(x / jnp.linalg.norm(x, axis=-1, keepdims=True))
        scores = ends[0] @ ends[1].T
        return -sum(jnp.diagonal(jax.nn.log_softmax(own)).mean() for own in (scores, scores.T))

    updates, state = optax.adamw(1e-3).update(jax.grad(loss)(weights), state, weights)
    return optax.apply_updates(weights, updates), state


def test_scores_and_transposed_scores_are_split_along_the_same_axes():
    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights = [[floats(width, 1536), floats(1536, 1536), floats(1536, 512)] for width in (2048, 768)]
    arguments = weights, jax.eval_shape(optax.adamw(1e-3).init, weights), floats(4096, 2048), floats(4096, 768)
    machine = {"device_num": 8, "topology": "tpu-v5e"}
    found = plan(_two_towers, *arguments, parallel_mode="auto_parallel", **machine)
    config = {"optimizer_level": "level3"}
    rival = plan(
        _two_towers,
        *arguments,
        parallel_mode="data_parallel",
        enable_parallel_optimizer=True,
        parallel_optimizer_config=config,
        **machine,
    )
    assert found.lower_bound_s is not None
    assert found.lower_bound_s <= found.cost.total_s <= rival.cost.total_s


def test_three_towers_are_planned_to_the_end():
    """Each pair of towers has scores and transposed scores. Folded, the plan is 7 % slower, and not proven."""
    widths = (2048, 1024, 640)

    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def loss(weights, *batch):
        ends = []
        for own, x in zip(weights, batch, strict=True):
            x = jnp.tanh(jax.nn.gelu(x @ own[0]) @ own[1]) @ own[2]
            ends.append(x / jnp.linalg.norm(x, axis=-1, keepdims=True))
        pairs = [ends[first] @ ends[second].T for first, second in ((0, 1), (0, 2), (1, 2))]
        return -sum(jnp.diagonal(jax.nn.log_softmax(own)).mean() for scores in pairs for own in (scores, scores.T))

    def step(weights, state, *batch):
        updates, state = optax.adamw(1e-3).update(jax.grad(loss)(weights, *batch), state, weights)
        return optax.apply_updates(weights, updates), state

    weights = [[floats(width, 1536), floats(1536, 1536), floats(1536, 512)] for width in widths]
    arguments = weights, jax.eval_shape(optax.adamw(1e-3).init, weights), *[floats(4096, width) for width in widths]
    found = plan(step, *arguments, parallel_mode="auto_parallel", device_num=8, topology="h100", memory_bytes=1 << 60)
    assert len(found.ops) > Folding().small_program
    assert found.gap == 0


def test_every_member_knows_its_class():
    graph = _shared_rules(_layers(130))
    folded = _fold(graph)
    for class_of, members in ((folded.op_class, folded.op_members), (folded.slot_class, folded.slot_members)):
        assert all(class_of[member] == number for number, own in enumerate(members) for member in own)
        assert sum(map(len, members)) == sum(number >= 0 for number in class_of)


def test_a_mark_keeps_an_op_or_a_slot_apart():
    graph = _shared_rules(_layers(130))
    middle = 65 * PER_LAYER
    marks = [int(index == middle) for index in range(len(graph.ops))]
    assert _fold(graph, op_marks=marks).op_members[_fold(graph, op_marks=marks).op_class[middle]] == [middle]
    value = graph.ops[middle].results[0]
    folded = _fold(graph, slot_marks={value: 1})
    assert folded.slot_members[folded.slot_class[value]] == [value]


def test_a_fold_only_restricts():
    """The folded plan's cost is exact, and no less than that of the plan in which every op decides for itself."""
    graph, machine = _shared_rules(_layers(12)), random_machine(3)
    step = Step(graph, (0,) * len(graph.ops), frozenset(), frozenset())
    costs = {}
    for small in (Folding().small_program, 0):
        found = Searcher(step, machine, DynamicOptions(folding=Folding(small_program=small, most=1.0))).search(Setup(MESH))
        seconds = evaluate(graph, step.scopes, frozenset(), found.assignment, MESH, machine)
        assert seconds.total_s == pytest.approx(found.cost_s, rel=1e-9)
        assert seconds.reshard_s + seconds.reduction_s > 0
        costs[small] = found
    assert costs[0].cost_s >= costs[Folding().small_program].cost_s * (1 - 1e-9)


def _refined_by_name(graph, rounds):
    """Classes of ops and slots by colours that are written out: nothing of the fold's arithmetic."""
    space = Space(graph, MESH, topology("h100"), frozenset())
    op_colour = [(kind, op.repeats) for kind, op in zip(space.kind_of, graph.ops, strict=True)]
    slot_colour = [(value.shape, value.dtype) for value in graph.values]
    for _ in range(rounds):
        old = op_colour, slot_colour
        op_colour = _numbers(
            (own, *map([*slot_colour, None].__getitem__, slots)) for own, slots in zip(old[0], space.op_slots, strict=True)
        )
        met = [[] for _ in slot_colour]
        for index, slots in enumerate(space.op_slots):
            for place, slot in enumerate(slots):
                if slot >= 0:
                    met[slot].append((op_colour[index], place))
        slot_colour = _numbers((own, *sorted(around)) for own, around in zip(old[1], met, strict=True))
    return op_colour, slot_colour


def _numbers(keys):
    known = {}
    return [known.setdefault(key, len(known)) for key in keys]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rounds", [1, 3])
def test_classes_are_those_of_colours_written_out(seed, rounds):
    step = random_step(seed)
    graph = _shared_rules(step)
    folded = _fold(graph, rounds=rounds, small_program=0, few=1, most=1.0)
    op_colour, slot_colour = _refined_by_name(graph, rounds)
    for classes, colours in ((folded.op_class, op_colour), (folded.slot_class, slot_colour)):
        pairs = {(own, colour) for own, colour in zip(classes, colours, strict=True) if own >= 0}
        assert len(pairs) == len({own for own, _ in pairs}) == len({colour for _, colour in pairs})


def test_a_program_that_decides_nothing_has_no_class():
    make = StepMaker()
    x = make.input(32, role=Role.ARGUMENT)
    folded = _fold(make.finish(x).graph)
    assert folded.op_members == []
    assert folded.slot_members == []
