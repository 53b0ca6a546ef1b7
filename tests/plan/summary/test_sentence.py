"""The sentence that says what a plan is, against strategies set by hand, and against the shardings of parameters that a search chose."""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import spmdctx
from spmdctx.plan.library import strategies_folder
from spmdctx.plan.summary.sentence import sentence_of
from tests.pipeline.losses import decoder
from tests.pipeline.losses import loss as decoder_loss
from tests.plan import small_plan
from tests.plan.summary.programs import (
    ATTENTION,
    CONVOLUTION,
    IMAGES,
    LANGUAGE,
    MLP,
    MLP_BATCH,
    MOE,
    TOKENS,
    attention_loss,
    convolution_loss,
    language_loss,
    mlp_loss,
    moe_loss,
    shaped,
    trained,
)
from tests.server import cases

pytestmark = pytest.mark.filterwarnings("ignore::spmdctx.ContextWarning")

COLUMN, ROW = ((2, 1, 1), (1, 4)), ((2, 1, 4), (4, 1))
BY_ROWS = ((8, 1, 1), (1, 1))
ON_LEVELS = {"parallel_optimizer_threshold": 0}


def zero(level):
    return {"enable_parallel_optimizer": True, "parallel_optimizer_config": {**ON_LEVELS, "optimizer_level": f"level{level}"}}


def pinned_loss(parameters, batch):
    """The loss of a layer, whose activations are constrained over an axis of size 1."""
    return mlp_loss()(parameters, {**batch, "x": jax.lax.with_sharding_constraint(batch["x"], jax.P("data", "one", "other"))})


BY_HAND = {
    "data_parallel": ((mlp_loss(), MLP, MLP_BATCH), {"parallel_mode": "data_parallel"}, "Data-parallel over 8 devices"),
    "batch": ((mlp_loss(), MLP, MLP_BATCH), {}, "Data-parallel over 8 devices"),
    "one device": ((mlp_loss(), MLP, MLP_BATCH), {"parallel_mode": "stand_alone", "device_num": 1}, "One device, nothing is split"),
    "two devices": ((mlp_loss(), MLP, MLP_BATCH), {"device_num": 2}, "Data-parallel over 2 devices"),
    "zero 1": ((mlp_loss(), MLP, MLP_BATCH), zero(1), "ZeRO-1 over 8 devices"),
    "zero 2": ((mlp_loss(), MLP, MLP_BATCH), zero(2), "ZeRO-2 over 8 devices"),
    "zero 3": ((mlp_loss(), MLP, MLP_BATCH), zero(3), "ZeRO-3 over 8 devices"),
    "zero 1, language": ((language_loss(), LANGUAGE, TOKENS), zero(1), "ZeRO-1 over 8 devices"),
    "zero 3, attention": ((attention_loss(), ATTENTION, MLP_BATCH), zero(3), "ZeRO-3 over 8 devices"),
    "zero 3, kernels of 3 x 3": ((convolution_loss(), CONVOLUTION, IMAGES), zero(3), "Data-parallel over 8 devices"),
    "megatron": ((mlp_loss(COLUMN, ROW), MLP, MLP_BATCH), {}, "Data-parallel over 2 devices, MLP tensor-parallel over 4"),
    "megatron, zero 1": ((mlp_loss(COLUMN, ROW), MLP, MLP_BATCH), zero(1), "ZeRO-1 over 2 devices, MLP tensor-parallel over 4"),
    "megatron, zero 3": ((mlp_loss(COLUMN, ROW), MLP, MLP_BATCH), zero(3), "ZeRO-3 over 2 devices, MLP tensor-parallel over 4"),
    "megatron by axes named so, zero 3": (
        (mlp_loss(), MLP, MLP_BATCH, {"up": ("fsdp", "tp"), "down": ("tp", "fsdp")}),
        {"mesh": {"fsdp": 2, "tp": 4, "one": 1}, "parallel_mode": "auto_parallel", "dataset_strategy": ((2, 1, 1), (2, 1, 1))},
        "ZeRO-3 over 2 devices, MLP tensor-parallel over 4",
    ),
    "stored over some of the batch's axes": (
        (mlp_loss(BY_ROWS, BY_ROWS), MLP, MLP_BATCH, {"up": (None, "tp"), "down": ("tp", None)}),
        {"mesh": {"fsdp": 2, "tp": 4}},
        "Data-parallel over 8 devices, ZeRO-3 over 4",
    ),
    "weights alone are pinned, and the batch takes the other axis": (
        (mlp_loss(), MLP, MLP_BATCH, {"up": (None, "tp"), "down": ("tp", None)}),
        {"mesh": {"fsdp": 2, "tp": 4}},
        "Data-parallel over 2 devices, MLP tensor-parallel over 4",
    ),
    "zero 1 in groups": (
        (mlp_loss(), MLP, MLP_BATCH),
        {**zero(1), "optimizer_weight_shard_size": 4},
        "Data-parallel over 8 devices, ZeRO-1 over 4",
    ),
    "axes of size 1": (
        (pinned_loss, MLP, MLP_BATCH, {"up": ("data", "one")}),
        {"mesh": {"data": 8, "one": 1, "other": 1}},
        "Data-parallel over 8 devices, ZeRO-3 for MLP",
    ),
    "megatron alone": (
        (mlp_loss(((1, 1, 1), (1, 8)), ((1, 1, 8), (8, 1))), MLP, MLP_BATCH),
        {"dataset_strategy": "full_batch"},
        "MLP tensor-parallel over 8",
    ),
    "row first": (
        (mlp_loss(((2, 1, 4), (4, 1)), ((2, 1, 1), (1, 4))), MLP, MLP_BATCH),
        {},
        "Data-parallel over 2 devices, MLP tensor-parallel over 4",
    ),
    "vocabulary": (
        (language_loss(table=((4, 1), (2, 1))), LANGUAGE, TOKENS),
        {},
        "Data-parallel over 8 devices, embedding split by vocabulary over 4",
    ),
    "features": (
        (language_loss(table=((1, 4), (2, 1))), LANGUAGE, TOKENS),
        {},
        "Data-parallel over 8 devices, embedding split by features over 4",
    ),
    "features of all": (
        (language_loss(table=((1, 8), (1, 1))), LANGUAGE, TOKENS),
        {},
        "Data-parallel over 8 devices, embedding split by features",
    ),
    "head": (
        (language_loss(head=((2, 1, 1), (1, 4))), LANGUAGE, TOKENS),
        {},
        "Data-parallel over 8 devices, head tensor-parallel over 4",
    ),
    "sequence": (
        (mlp_loss(((2, 4, 1), (1, 1)), ((2, 4, 1), (1, 1))), MLP, MLP_BATCH),
        {"dataset_strategy": ((2, 4, 1), (2, 4, 1))},
        "Data-parallel over 2 devices, sequence split over 4",
    ),
    "sequence alone": (
        (attention_loss(((1, 8, 1), (1, 1, 1)), ((1, 8, 1, 1), (1, 1, 1))), ATTENTION, MLP_BATCH),
        {"dataset_strategy": ((1, 8, 1), (1, 8, 1))},
        "Sequence split over 8",
    ),
    "heads": (
        (attention_loss(((1, 1, 1), (1, 8, 1)), ((1, 1, 8, 1), (8, 1, 1))), ATTENTION, MLP_BATCH),
        {"dataset_strategy": "full_batch"},
        "Data-parallel over 8 devices, attention tensor-parallel over 8",
    ),
    "experts": (
        (moe_loss(((8, 1, 1), (8, 1, 1)), ((8, 1, 1), (8, 1, 1))), MOE, MLP_BATCH),
        {},
        "Data-parallel over 8 devices, expert-parallel over 8",
    ),
    "experts, batch": (
        (moe_loss(((4, 2, 1), (4, 1, 1)), ((4, 2, 1), (4, 1, 1))), MOE, MLP_BATCH),
        {},
        "Data-parallel over 2 devices, expert-parallel over 4",
    ),
    "experts, features": (
        (moe_loss(((4, 1, 1), (4, 1, 2)), ((4, 1, 2), (4, 2, 1))), MOE, MLP_BATCH),
        {},
        "Data-parallel over 8 devices, experts split by expert and by features",
    ),
    "images": ((convolution_loss(), CONVOLUTION, IMAGES), {}, "Data-parallel over 8 devices"),
    "channels": (
        (convolution_loss(((2, 1, 1, 1), (1, 1, 1, 4)), ((2, 1, 1, 4), (1, 1, 4, 1))), CONVOLUTION, IMAGES),
        {},
        "Data-parallel over 2 devices, deep and stem tensor-parallel over 4",
    ),
    "space": (
        (convolution_loss(), CONVOLUTION, IMAGES),
        {"dataset_strategy": ((2, 4, 1, 1), (2, 1))},
        "Data-parallel over 8 devices, height and width of the batch stored over 4",
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_a_strategy_set_by_hand_is_said(case):
    program, options, sentence = BY_HAND[case]
    plan = trained(*program, **{"parallel_mode": "semi_auto_parallel", **options})
    assert plan.summary == sentence
    assert f"{sentence}." in " ".join(str(plan).split())


def pipelined(**options):
    params, tx = decoder(jax.random.key(0), 2, tied=False), optax.adam(1e-3)

    def step(state, batch):
        params, own = state
        value, gradients = spmdctx.value_and_grad(decoder_loss)(params, batch)
        updates, own = tx.update(gradients, own, params)
        return (optax.apply_updates(params, updates), own), value

    options = {"parallel_mode": "semi_auto_parallel", "device_num": 8, "pipeline_stages": 2, "grad_accumulation_step": 2, **options}
    return spmdctx.parallel(step, **options).plan((params, jax.eval_shape(tx.init, params)), (jnp.zeros((16, 8), int),) * 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device_num": 2}, "2 pipeline stages by 1f1b, each on one device"),
        (zero(1), "2 pipeline stages by 1f1b, each ZeRO-1 over 4 devices"),
    ],
    ids=["alone", "zero"],
)
def test_a_pipeline_says_its_stages(options, sentence):
    plan = pipelined(**options)
    assert (plan.summary, plan.to_dict()["summary"]) == (sentence, sentence)
    assert sentence in str(plan)
    assert sentence in plan._repr_html_()


def test_servers_are_said():
    tx = optax.adam(1e-3)
    plan = cases.served(cases.step_of(tx), 2, 4).plan(cases.state_of(tx), cases.batch())
    assert plan.summary == "State on 2 servers, 1 worker, each: one device, nothing is split"
    assert plan.summary in str(plan)


SEARCHED = {
    "mlp": (mlp_loss(), {"up": shaped(1024, 4096), "down": shaped(4096, 1024)}, {name: shaped(16, 32, 1024) for name in "xy"}),
    "language": (language_loss(), {**LANGUAGE, "embedding": shaped(32768, 64), "lm_head": shaped(64, 32768)}, TOKENS),
    "attention": (attention_loss(), ATTENTION, MLP_BATCH),
    "experts": (moe_loss(), MOE, MLP_BATCH),
    "images": (convolution_loss(), CONVOLUTION, IMAGES),
}


def axes_of(spec, dim):
    return () if dim >= len(spec) or spec[dim] is None else (spec[dim],) if isinstance(spec[dim], str) else tuple(spec[dim])


def checked(sentence, tensors, mesh):
    """Holds what a sentence says against the shardings of the inputs alone: (path, role, shape, PartitionSpec) each."""

    def bytes_split(role, kind=""):
        own = [(path, shape, spec) for path, of, shape, spec in tensors if of == role and len(shape) > 1 and kind in path]
        sizes = [(jnp.prod(jnp.array(shape, float)), any(part is not None for part in spec)) for _, shape, spec in own]
        return sum(size * split for size, split in sizes) / sum(size for size, _ in sizes)

    def devices(axes):
        count = 1
        for axis in axes:
            count *= mesh[axis]
        return count

    rows = {axis for _, role, _, spec in tensors if role == "batch" for axis in axes_of(spec, 0)}
    found = re.match(r"(?:Data-parallel|ZeRO-(\d)) over (\d+) devices?", sentence)
    if found and found[1] == "3":
        assert bytes_split("parameter") > 0.8
    elif found and found[1]:
        assert bytes_split("optimizer") > 0.8
    elif found and "ZeRO" not in sentence and "split" not in sentence and "parallel over" not in sentence[len(found[0]) :]:
        assert bytes_split("parameter") < 0.5
        assert bytes_split("optimizer") < 0.5
        assert devices(rows) == int(found[2])
    if "embedding split by features" in sentence:
        assert any(axes_of(spec, 1) for path, role, _, spec in tensors if role == "parameter" and "embed" in path)
    if "embedding split by vocabulary" in sentence:
        assert any(axes_of(spec, 0) for path, role, _, spec in tensors if role == "parameter" and "embed" in path)
    if "MLP tensor-parallel" in sentence:
        assert bytes_split("parameter", "mlp" if any("mlp" in path for path, *_ in tensors) else "") > 0.5
    if not found and sentence.startswith("Sequence"):
        assert any(axes_of(spec, 1) for _, role, _, spec in tensors if role == "batch")


@pytest.mark.parametrize("topology", ["tpu-v5p", "h100", "cpu"])
@pytest.mark.parametrize("program", SEARCHED)
def test_a_searched_plan_is_what_the_shardings_of_its_inputs_say(program, topology):
    loss, parameters, batch = SEARCHED[program]
    plan = trained(loss, parameters, batch, parallel_mode="auto_parallel", topology=topology)
    tensors = [(t.path, t.role.value, t.shape, [axes or None for axes in t.sharding]) for t in plan.inputs]
    checked(plan.summary, tensors, plan.mesh)


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_a_budget_gives_a_plan_that_says_what_it_splits(share):
    loss, parameters, batch = SEARCHED["mlp"]
    whole = trained(loss, parameters, batch, parallel_mode="semi_auto_parallel", topology="h100")
    budget = int(share * whole.safe_memory_bytes)
    plan = trained(loss, parameters, batch, parallel_mode="auto_parallel", topology="h100", memory_bytes=budget)
    assert plan.summary != whole.summary == "Data-parallel over 8 devices"
    checked(plan.summary, [(t.path, t.role.value, t.shape, [axes or None for axes in t.sharding]) for t in plan.inputs], plan.mesh)


@pytest.mark.parametrize("place", sorted(strategies_folder().glob("*/8/searched.json")), ids=lambda path: path.parts[-3])
def test_ready_plans_are_what_the_shardings_of_their_inputs_say(place):
    plan = spmdctx.Plan.load(place)
    tensors = [(t.path, t.role.value, t.shape, [axes or None for axes in t.sharding]) for t in plan.inputs]
    checked(plan.summary, tensors, plan.mesh)


def test_a_plan_from_a_file_says_the_same(tmp_path):
    program, options, sentence = BY_HAND["megatron, zero 1"]
    plan = trained(*program, **{"parallel_mode": "semi_auto_parallel", **options})
    plan.save(tmp_path / "plan.json")
    assert spmdctx.Plan.load(tmp_path / "plan.json").summary == sentence
    assert sentence not in (tmp_path / "plan.json").read_text()


def test_a_plan_made_by_hand_says_its_zero():
    assert sentence_of(small_plan()) == "ZeRO-3 over 8 devices"


def test_a_step_without_splits_says_that_all_is_repeated():
    plan = spmdctx.parallel(lambda w: w * 2, parallel_mode="semi_auto_parallel", device_num=8).plan(shaped(3, 5))
    assert plan.summary == "Everything repeated on 8 devices"


class Linear(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(x)


def test_a_plan_names_its_step_its_model_and_the_versions():
    def train_step(model, x):
        return nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = spmdctx.parallel(train_step, parallel_mode="data_parallel").plan(Linear(nnx.Rngs(0)), jnp.ones((8, 16)))
    assert (plan.about.step, plan.about.model) == ("train_step", "Linear")
    assert [name for name, _ in plan.about.versions] == ["spmdctx", "jax", "jaxlib"]
    assert "train_step, Linear, " in str(plan)
    assert f"jax {jax.__version__}" in str(plan)
    assert "train_step · Linear" in plan._repr_html_()


def test_the_module_of_a_train_state_is_the_model():
    dense = Dense()
    state = TrainState.create(apply_fn=dense.apply, params=dense.init(jax.random.key(0), jnp.ones((8, 16))), tx=optax.sgd(0.1))

    def step(state, x):
        return state.apply_gradients(grads=jax.grad(lambda params: jnp.mean(state.apply_fn(params, x) ** 2))(state.params))

    assert spmdctx.parallel(step, parallel_mode="data_parallel").plan(state, jnp.ones((8, 16))).about.model == "Dense"


def test_planned_rates_follow_from_the_planned_time():
    plan = trained(language_loss(), LANGUAGE, TOKENS, parallel_mode="semi_auto_parallel", topology="h100")
    assert plan.rates.samples_per_s == pytest.approx(16 / plan.cost.total_s)
    assert plan.rates.tokens_per_s == pytest.approx(16 * 32 / plan.cost.total_s)
    products = 3 * 2 * 16 * 32 * (2 * 64 * 128 + 64 * 512)  # forward, and twice that backward
    assert plan.rates.utilization == pytest.approx(products / plan.cost.total_s / 8 / 989.4e12, rel=0.2)
    assert "tokens a second" in str(plan)
    assert "MFU" in str(plan)


def test_the_memory_of_a_device_is_in_the_chart():
    plan = trained(*SEARCHED["mlp"], parallel_mode="semi_auto_parallel", memory_bytes=10**9)
    assert 'class="limit"' in plan._repr_html_()
    without = trained(*SEARCHED["mlp"], parallel_mode="semi_auto_parallel", topology="h100")
    assert "which is above the chart" in without._repr_html_()
    assert "GiB usable" in str(without)
