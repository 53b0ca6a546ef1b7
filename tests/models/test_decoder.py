"""The decoder against independent formulas, and its options against each other."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spmdctx.errors import ContextError
from spmdctx.models import PRESETS, Decoder, DecoderConfig, Split, abstract_program, batches, create, preset, pure_step, train_step
from spmdctx.models.attention import Attention, rotate

CONFIG = DecoderConfig(vocab_size=48, width=24, num_layers=2, num_heads=6, num_kv_heads=3, hidden=48, max_seq=12)


def _batch(seed: int = 0) -> dict[str, np.ndarray]:
    return next(batches(np.arange(1000, dtype=np.int32) % CONFIG.vocab_size, 6, CONFIG.max_seq, seed=seed))


def _size(tree: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("name", "billions"), [("llama2-7b", 6.738), ("llama2-13b", 13.016), ("llama2-70b", 68.977)])
def test_the_presets_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert preset(name.replace("-", "_")).num_parameters == pytest.approx(billions * 1e9, rel=1e-3)


def test_a_configuration_counts_the_parameters_that_the_model_has() -> None:
    model, _ = create(CONFIG)
    assert _size(nnx.state(model, nnx.Param)) == CONFIG.num_parameters


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(ContextError, match="tiny, llama2-7b"):
        preset("gpt-9")


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ContextError, match="num_heads / num_kv_heads"):
        replace(CONFIG, num_kv_heads=4)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    x = jnp.broadcast_to(jnp.linspace(-1.0, 2.0, 8), (1, 6, 1, 8))
    turned = rotate(x, 10_000.0)
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)
    products = jnp.einsum("bqhd,bkhd->qk", turned, turned)
    np.testing.assert_allclose(products[0, 2], products[3, 5], rtol=1e-4)
    assert not np.allclose(products[0, 2], products[0, 3])


def test_attention_equals_the_formula_head_by_head() -> None:
    attention = Attention(CONFIG, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, CONFIG.max_seq, CONFIG.width))
    heads, groups, size = CONFIG.num_heads, CONFIG.num_heads // CONFIG.num_kv_heads, CONFIG.head_dim
    query = rotate(attention.query(x).reshape(2, -1, heads, size), CONFIG.rope_theta)
    key = rotate(attention.key(x).reshape(2, -1, CONFIG.num_kv_heads, size), CONFIG.rope_theta)
    value = attention.value(x).reshape(2, -1, CONFIG.num_kv_heads, size)
    mixed = []
    for head in range(heads):
        scores = jnp.einsum("bqd,bkd->bqk", query[:, :, head], key[:, :, head // groups]) / size**0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
        mixed.append(jax.nn.softmax(scores) @ value[:, :, head // groups])
    np.testing.assert_allclose(attention(x), attention.out(jnp.concatenate(mixed, axis=-1)), atol=1e-5)


def test_a_token_does_not_see_later_ones() -> None:
    model, _ = create(CONFIG)
    tokens = jnp.asarray(_batch()["inputs"])
    changed = tokens.at[:, 7:].set(0)
    np.testing.assert_allclose(model(tokens)[:, :7], model(changed)[:, :7], atol=1e-6)


@pytest.mark.parametrize("options", [{"remat": True}, {"scan_layers": True}, {"scan_layers": True, "remat": True}])
def test_scanned_and_rematerialised_layers_compute_the_same(options: dict[str, bool]) -> None:
    plain, _ = create(CONFIG)
    other, _ = create(replace(CONFIG, **options))
    _copy_parameters(plain, other)
    batch = _batch()
    expected, gradient = nnx.jit(nnx.value_and_grad(_loss))(plain, batch["inputs"])
    loss, other_gradient = nnx.jit(nnx.value_and_grad(_loss))(other, batch["inputs"])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(other_gradient["head"]["kernel"][...], gradient["head"]["kernel"][...], atol=1e-5)


def _loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    return (model(tokens) ** 2).mean()


def _copy_parameters(source: Decoder, target: Decoder) -> None:
    state = nnx.to_pure_dict(nnx.state(source))
    if target.config.scan_layers:
        layers = [state["layers"][index] for index in sorted(state["layers"])]
        state["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    nnx.update(target, state)


def test_bfloat16_compute_keeps_float32_parameters_and_logits() -> None:
    model, _ = create(replace(CONFIG, dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {np.dtype("float32")}
    assert model(jnp.asarray(_batch()["inputs"])).dtype == jnp.float32
    assert model.layers[0].mlp(jnp.ones((1, 2, CONFIG.width))).dtype == jnp.bfloat16


def test_the_pure_step_equals_the_nnx_step() -> None:
    model, optimizer = create(CONFIG)
    step, state = pure_step(*create(CONFIG))
    run, run_pure = nnx.jit(train_step), jax.jit(step)
    for seed in range(2):
        loss = run(model, optimizer, _batch(seed))
        state, pure_loss = run_pure(state, _batch(seed))
        np.testing.assert_allclose(pure_loss, loss, rtol=1e-6)
    for left, right in zip(jax.tree.leaves(nnx.state((model, optimizer))), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


def test_a_model_of_any_size_can_be_described_without_memory() -> None:
    config = replace(PRESETS["llama2-70b"], num_layers=12)
    step, (model, optimizer, batch) = abstract_program(config, batch_size=64)
    leaves = jax.tree.leaves(nnx.state((model, optimizer)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert _size(leaves) == pytest.approx(3 * config.num_parameters, rel=1e-6)
    assert batch["inputs"].shape == (64, 4096)
    assert step is train_step


@pytest.mark.parametrize("scan_layers", [False, True])
def test_strategies_keep_the_parameter_paths(scan_layers: bool) -> None:
    config = replace(CONFIG, scan_layers=scan_layers)
    plain, (model, _, _) = abstract_program(config, 6)
    for kind in ("megatron", "pins"):
        _, (split_model, _, _) = abstract_program(config, 6, split=Split(kind, 2, 3))
        assert jax.tree.structure(nnx.state(split_model)) == jax.tree.structure(nnx.state(model))
    assert plain is train_step
