"""Generation: kept keys and values change no logits, and every split gives the text of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spmdctx
from spmdctx.errors import ContextError
from spmdctx.models import Decoder, DecoderConfig, Generator, Split, create

TINY = DecoderConfig(vocab_size=64, width=48, num_layers=2, num_heads=4, num_kv_heads=2, hidden=96, max_seq=24)
PANGU: dict[str, Any] = {
    "positions": "learned",
    "norm": "layer",
    "feed_forward": "gelu",
    "bias": "all",
    "head": "tied",
    "query_layer": True,
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"scan_layers": True, "remat": True}, {"positions": "alibi", "head": "unit"}, {**PANGU, "scan_layers": True}],
    ids=["llama", "scanned", "alibi", "query layer"],
)
def test_tokens_one_by_one_have_the_logits_of_the_whole_sequence(changes):
    model = Decoder(replace(TINY, **changes), nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 64, (2, 20)).astype(np.int32)
    step = nnx.jit(lambda model, tokens: model(tokens))
    whole = step(model, tokens)
    model.remember(2, 22)
    parts = [step(model, tokens[:, :7]), step(model, tokens[:, 7:12]), *(step(model, tokens[:, at : at + 1]) for at in range(12, 20))]
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Files per rank of a training state, from a mesh of 8."""
    folder = tmp_path_factory.mktemp("checkpoint")
    step = spmdctx.parallel(lambda model, optimizer, tokens: model(tokens).sum(), parallel_mode="semi_auto_parallel", device_num=8)
    model, optimizer = step.init(lambda: create(TINY, split=Split("megatron", 4, 2)), batch=np.zeros((8, 4), np.int32))
    spmdctx.save_distributed_checkpoint({"model": model, "optimizer": optimizer}, folder)
    return folder


PROMPTS = [np.array([5, 6, 7, 8]), np.array([9, 10, 11, 12, 13, 14])]


def answers(generator, folder):
    network = generator.network()
    spmdctx.load_distributed_checkpoint({"model": network}, folder, generator.layouts)
    shown: list[np.ndarray] = []
    greedy = generator.run(network, PROMPTS, 5, show=shown.append)
    return greedy, generator.run(network, PROMPTS, 5, temperature=1.0, seed=3), shown


@pytest.fixture(scope="module")
def one_device(checkpoint):
    return answers(Generator(TINY, batch=2, length=12, parallel_mode="stand_alone", device_num=1), checkpoint)


@pytest.mark.parametrize(
    "options",
    [
        {"parallel_mode": "auto_parallel", "device_num": 4, "topology": "tpu-v5e"},
        {"parallel_mode": "semi_auto_parallel", "device_num": 6, "split": Split("megatron", 3, 2)},
    ],
    ids=["searched", "megatron"],
)
def test_every_split_gives_the_tokens_of_one_device(checkpoint, one_device, options):
    generator = Generator(TINY, batch=2, length=12, **options)
    greedy, drawn, _ = answers(generator, checkpoint)
    np.testing.assert_array_equal(greedy, one_device[0])
    np.testing.assert_array_equal(drawn, one_device[1])
    assert any(tensor.sharding != ((),) * len(tensor.shape) for tensor in generator.plan.inputs)
    for seq in (1, 4):
        assert generator._for_tokens(seq).step.notes == ()


def test_one_device_gives_what_whole_sequences_give(checkpoint, one_device):
    model = Decoder(TINY, nnx.Rngs(0))
    spmdctx.load_distributed_checkpoint({"model": model}, checkpoint)
    greedy, drawn, shown = one_device
    for prompt, answer in zip(PROMPTS, greedy, strict=True):
        text = np.concatenate([prompt, answer, np.zeros(12)])[None, :12].astype(np.int32)
        likeliest = nnx.jit(lambda model, tokens: model(tokens).argmax(-1))(model, text)[0]
        np.testing.assert_array_equal(likeliest[len(prompt) - 1 : len(prompt) + 4], answer)
    assert greedy.shape == drawn.shape == (2, 5)
    assert not np.array_equal(greedy, drawn)
    np.testing.assert_array_equal(np.stack(shown, axis=1)[1], [13, 14, *greedy[1]])


def test_a_token_that_ends_an_answer_stands_for_all_that_would_follow(checkpoint, one_device):
    greedy, shown = one_device[0], []
    generator = Generator(TINY, batch=2, length=12, device_num=1)
    network = generator.network()
    spmdctx.load_distributed_checkpoint({"model": network}, checkpoint, generator.layouts)
    stop = int(greedy[0, 1])
    found = generator.run(network, PROMPTS, 5, stop=stop, show=shown.append)
    for row, whole in zip(found, greedy, strict=True):
        end = list(whole).index(stop) if stop in whole else 5
        assert list(row) == [*whole[:end], *[stop] * (5 - end)]
    ended = generator.run(network, PROMPTS, 5, stop=int(greedy[1, 4]))
    assert ended[1, 4] == greedy[1, 4]
    assert len(shown) <= 7


def test_what_does_not_fit_is_refused():
    generator = Generator(TINY, batch=2, length=12, parallel_mode="stand_alone", device_num=1)
    network = generator.network()
    with pytest.raises(ContextError, match="another number of prompts"):
        generator.run(network, PROMPTS[:1], 2)
    with pytest.raises(ContextError, match="at least one token"):
        generator.run(network, [PROMPTS[0], np.zeros(0, np.int32)], 2)
    with pytest.raises(ContextError, match="no room"):
        generator.run(network, PROMPTS, 7)
    with pytest.raises(ContextError, match="learned positions"):
        Generator(replace(TINY, positions="learned"), batch=1, length=25)
