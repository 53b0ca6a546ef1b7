"""What Baichuan 2, Qwen, PanGu-alpha and low-rank updates add to the decoder, against direct formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spmdctx.errors import ContextError
from spmdctx.models import PRESETS, Decoder, DecoderConfig, Lora, Split, create, preset, train_step
from spmdctx.models.attention import Attention, alibi_slopes
from spmdctx.models.layers import LoraLinear, UnitHead

LLAMA = DecoderConfig(vocab_size=48, width=24, num_layers=2, num_heads=6, num_kv_heads=6, hidden=40, max_seq=12)
BAICHUAN = replace(LLAMA, positions="alibi", head="unit")
QWEN = replace(LLAMA, bias="qkv")
PANGU = replace(LLAMA, num_layers=3, positions="learned", norm="layer", feed_forward="gelu", bias="all", head="tied", query_layer=True)
LORA = replace(LLAMA, lora=Lora(rank=2, alpha=4.0, targets=("query", "value", "down")))
VARIANTS = {"llama": LLAMA, "baichuan": BAICHUAN, "qwen": QWEN, "pangu": PANGU, "lora": LORA}

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "baichuan2-7b": 7_505_973_248,
    "baichuan2-13b": 13_896_668_160,
    "qwen-7b": 7_721_324_544,
    "qwen-14b": 14_167_290_880,
}
"""Totals of the published checkpoints."""


def _shapes(config: DecoderConfig) -> Any:
    """The parameters as shapes."""
    return nnx.state(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))), nnx.Param)


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(7), (2, LLAMA.max_seq), 0, LLAMA.vocab_size)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    assert _size(_shapes(replace(preset(name), scan_layers=True))) == PUBLISHED[name] == preset(name).num_parameters


@pytest.mark.parametrize(("name", "billions"), [("pangu-alpha-2.6b", 2.6), ("pangu-alpha-13b", 13.1)])
def test_pangu_alpha_has_nearly_as_many_parameters_as_its_paper_says(name: str, billions: float) -> None:
    config = preset(name)
    assert _size(_shapes(replace(config, scan_layers=True))) == config.num_parameters
    assert config.num_parameters == pytest.approx(billions * 1e9, rel=0.025)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("-lora")])
def test_low_rank_updates_add_little_to_a_preset(name: str) -> None:
    config, base = preset(name), preset(name.removesuffix("-lora"))
    updates = nnx.state(nnx.eval_shape(lambda: Decoder(replace(config, scan_layers=True), nnx.Rngs(0))), nnx.LoRAParam)
    assert _size(updates) == config.num_lora_parameters == config.num_parameters - base.num_parameters
    assert 0 < config.num_lora_parameters < 0.025 * base.num_parameters


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_counts_the_parameters_that_it_has(name: str) -> None:
    assert _size(_shapes(VARIANTS[name])) == VARIANTS[name].num_parameters


@pytest.mark.parametrize("name", VARIANTS)
def test_a_token_of_a_variant_does_not_see_later_ones(name: str) -> None:
    model, tokens = Decoder(VARIANTS[name], nnx.Rngs(0)), _tokens()
    np.testing.assert_allclose(model(tokens)[:, :7], model(tokens.at[:, 7:].set(0))[:, :7], atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_scanned_layers_of_a_variant_compute_the_same(name: str) -> None:
    plain = Decoder(VARIANTS[name], nnx.Rngs(0))
    scanned = Decoder(replace(VARIANTS[name], scan_layers=True, remat=True), nnx.Rngs(1))
    state = nnx.to_pure_dict(nnx.state(plain))
    state["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(state["layers"][index] for index in sorted(state["layers"])))
    nnx.update(scanned, state)
    np.testing.assert_allclose(scanned(_tokens()), plain(_tokens()), rtol=1e-4, atol=1e-5)


def test_slopes_of_a_power_of_two_are_a_geometric_series() -> None:
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-n for n in range(1, 9)])


def test_slopes_of_other_numbers_of_heads_fill_the_gaps_of_the_series() -> None:
    np.testing.assert_allclose(alibi_slopes(6), [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    assert len(set(alibi_slopes(40))) == 40


def test_distance_bias_equals_the_formula_head_by_head() -> None:
    config = replace(BAICHUAN, num_kv_heads=3)
    attention = Attention(config, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 12, config.width))
    query, key, value = (layer(x).reshape(2, 12, -1, config.head_dim) for layer in (attention.query, attention.key, attention.value))
    distance = np.arange(12)[:, None] - np.arange(12)
    mixed = []
    for head, slope in enumerate(alibi_slopes(6)):
        scores = jnp.einsum("bqd,bkd->bqk", query[:, :, head], key[:, :, head // 2]) / config.head_dim**0.5 - slope * distance
        scores = jnp.where(distance >= 0, scores, -jnp.inf)
        mixed.append(jax.nn.softmax(scores) @ value[:, :, head // 2])
    np.testing.assert_allclose(attention(x), attention.out(jnp.concatenate(mixed, axis=-1)), atol=1e-5)


def test_a_unit_head_scales_each_tokens_weights_to_length_one() -> None:
    head = Decoder(BAICHUAN, nnx.Rngs(0)).head
    assert isinstance(head, UnitHead)
    kernel = np.asarray(head.kernel[...])
    x = jax.random.normal(jax.random.key(0), (2, 3, LLAMA.width))
    np.testing.assert_allclose(head(x), x @ (kernel / np.linalg.norm(kernel, axis=0)), rtol=1e-4, atol=1e-5)


def test_only_queries_keys_and_values_of_qwen_have_a_bias() -> None:
    biased = {path[-2] for path, _ in nnx.to_flat_state(_shapes(QWEN)) if path[-1] == "bias"}
    assert biased == {"query", "key", "value"}


def test_the_query_layer_takes_its_queries_from_a_table() -> None:
    model = Decoder(PANGU, nnx.Rngs(0))
    assert len(model.layers) == PANGU.num_layers - 1
    x = jax.random.normal(jax.random.key(2), (2, 12, PANGU.width))
    table = model.query.embedding[...]
    block = model.query_layer
    mixed = block.attention(block.attention_norm(x), table[None])
    assert mixed.shape == x.shape
    alone = block.attention(block.attention_norm(x), jnp.roll(table, 1, axis=0)[None])
    assert not np.allclose(mixed, alone)
    # The first position sees itself alone, whatever it asks for.
    np.testing.assert_allclose(mixed[:, 0], alone[:, 0], atol=1e-5)
    expected = x + mixed
    expected = expected + block.mlp(block.mlp_norm(expected))
    np.testing.assert_allclose(block(x, table[None]), expected, atol=1e-5)


def test_a_tied_head_multiplies_by_the_embedding() -> None:
    model = Decoder(PANGU, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(3), (1, 4, PANGU.width))
    table = model.embedding.embedding[...]
    np.testing.assert_allclose(model.head(x, table), x @ table.T, atol=1e-5)
    assert not any("head" in path for path, _ in nnx.to_flat_state(_shapes(PANGU)))


def test_more_tokens_than_learned_positions_are_refused() -> None:
    with pytest.raises(ContextError, match="longer than the learned positions"):
        Decoder(PANGU, nnx.Rngs(0))(jnp.zeros((1, PANGU.max_seq + 1), int))


def test_low_rank_updates_change_nothing_at_first() -> None:
    base, updated = Decoder(LLAMA, nnx.Rngs(0)), Decoder(LORA, nnx.Rngs(1))
    nnx.update(updated, nnx.state(base))
    np.testing.assert_allclose(updated(_tokens()), base(_tokens()), atol=1e-6)


def test_a_low_rank_update_equals_the_changed_weight() -> None:
    layer = LoraLinear(
        6, 4, Lora(2, 4.0, ("query",)), rngs=nnx.Rngs(0), use_bias=True, dtype=jnp.dtype("float32"), param_dtype=jnp.dtype("float32")
    )
    layer.lora_b[...] = jax.random.normal(jax.random.key(4), (2, 4))
    x = jax.random.normal(jax.random.key(5), (3, 6))
    whole = layer.kernel[...] + 2.0 * layer.lora_a[...] @ layer.lora_b[...]
    np.testing.assert_allclose(layer(x), x @ whole + layer.bias[...], atol=1e-5)


def test_training_with_low_rank_updates_leaves_the_rest_as_it_is() -> None:
    model, optimizer = create(LORA, learning_rate=0.1)
    before = jax.tree.map(jnp.copy, nnx.to_flat_state(nnx.state(model, nnx.Param)))
    batch = {"inputs": _tokens(), "targets": jnp.roll(_tokens(), -1, axis=1)}
    step = nnx.jit(train_step)
    losses = [float(step(model, optimizer, batch)) for _ in range(4)]
    assert losses[-1] < losses[0]
    for (path, old), (_, new) in zip(before, nnx.to_flat_state(nnx.state(model, nnx.Param)), strict=True):
        assert np.array_equal(old[...], new[...]) != str(path[-1]).startswith("lora_"), path


def test_the_optimizer_holds_no_state_of_frozen_weights() -> None:
    _, optimizer = create(LORA)
    moments = [leaf for leaf in jax.tree.leaves(nnx.state(optimizer)) if leaf.ndim]
    assert _size(moments) == 2 * LORA.num_lora_parameters


@pytest.mark.parametrize("lora", [{"rank": 0}, {"targets": ("query", "norm")}])
def test_bad_low_rank_updates_are_refused(lora: dict[str, Any]) -> None:
    with pytest.raises(ContextError, match="Low-rank updates"):
        Lora(**{"rank": 2, "alpha": 1.0, "targets": ("query",), **lora})


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", ["megatron", "pins"])
def test_strategies_name_parameters_that_a_variant_has(name: str, kind: Any) -> None:
    config = replace(VARIANTS[name], scan_layers=True)
    paths = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(_shapes(config))}
    for module, region in Split(kind, 2, 2).regions_of(config).items():
        for parameter in region.parameters:
            assert f"{module}/{parameter}".replace("/*", "") in paths
