"""A decoder in Flax NNX, configured as Llama 2, Baichuan 2, Qwen or PanGu-alpha, with or without low-rank updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmdctx.models.attention import Attention
from spmdctx.models.cache import KeyValues, check_length, stacked
from spmdctx.models.config import DecoderConfig
from spmdctx.models.hand_strategies import UNSPLIT, Split
from spmdctx.models.layers import block_linear, embedding, head, norm


class FeedForward(nnx.Module):
    """SwiGLU, a gated layer up and one down, or GELU between the two."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        self.gate = block_linear("gate", config, rngs) if config.feed_forward == "swiglu" else None
        self.up = block_linear("up", config, rngs)
        self.down = block_linear("down", config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, seq, width] to the same."""
        if self.gate is None:
            return self.down(jax.nn.gelu(self.up(x)))
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One layer: attention and feed-forward, each on the normalised residual stream.

    Args:
        config: sizes and options.
        rngs: random numbers for the parameters.
        split: strategies of the layers.
        name: path of the block in the strategies.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, split: Split = UNSPLIT, name: str = "layers/*") -> None:
        self.attention_norm: Any = norm(config, rngs)
        self.attention = split.layer(Attention(config, rngs), f"{name}/attention", config)
        self.mlp_norm: Any = norm(config, rngs)
        self.mlp = split.layer(FeedForward(config, rngs), f"{name}/mlp", config)

    def __call__(self, x: jax.Array, *source: jax.Array) -> jax.Array:
        """Maps [batch, seq, width] to the same; queries come from `source` if it is given, else from x."""
        x = x + self.attention(self.attention_norm(x), *source)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """The language model: tokens [batch, seq] to logits [batch, seq, vocab_size] in float32 or wider.

    Args:
        config: sizes and options.
        rngs: random numbers for the parameters.
        split: strategies that `shard()` gives the layers.

    Attributes:
        used: how many tokens are kept in the attention layers, where text is generated.
    """

    used: nnx.Cache[jax.Array] | None = None

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, split: Split = UNSPLIT) -> None:
        self.config = config
        self.embedding = split.layer(embedding(config.vocab_size, config, rngs), "embedding", config)
        self.positions = embedding(config.max_seq, config, rngs) if config.positions == "learned" else None
        self.layers: Any = _stacked(config, rngs, split) if config.scan_layers else _unrolled(config, rngs, split)
        self.norm: Any = norm(config, rngs)
        self.query = embedding(config.max_seq, config, rngs) if config.query_layer else None
        self.query_layer = Block(config, rngs, split, "query_layer") if config.query_layer else None
        self.head: Any = split.layer(head(config, rngs), "head", config)

    def remember(self, batch: int, length: int) -> None:
        """Makes later calls take the next tokens of `batch` sequences, which continue where the last call ended.

        Raises:
            ContextError: `length`, the most tokens of a sequence, exceeds the number of learned positions.
        """
        config = self.config
        check_length(config, length)
        self.used = nnx.Cache(jnp.zeros((), jnp.int32))
        new = partial(KeyValues, config, batch, length)
        for block in [self.layers] if config.scan_layers else self.layers:
            block.attention.past = stacked(new, config.num_blocks) if config.scan_layers else new()
        if self.query_layer is not None:
            self.query_layer.attention.past = new()

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits of the next token at every position; after `remember`, tokens continue those of the last call.

        Raises:
            ContextError: there are more tokens than learned positions.
        """
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self._rows(self.positions, tokens.shape[1])
        step: Callable[..., jax.Array] = nnx.remat(_run_block) if self.config.remat else _run_block
        if self.config.scan_layers:
            x = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        else:
            for block in self.layers:
                x = step(x, block)
        x = self.norm(x)
        if self.query is not None and self.query_layer is not None:
            x = step(x, self.query_layer, self._rows(self.query, tokens.shape[1]))
        if self.used is not None:
            self.used[...] += tokens.shape[1]
        logits: jax.Array = self.head(x, self.embedding.embedding[...]) if self.config.head == "tied" else self.head(x)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def _rows(self, table: nnx.Embed, seq: int) -> jax.Array:
        """Returns the rows of a table of positions for the next `seq` tokens, [1, seq, width]."""
        check_length(self.config, seq)
        if self.used is None:
            return table.embedding[None, :seq].astype(self.config.dtype)
        return jax.lax.dynamic_slice_in_dim(table.embedding[...], self.used[...], seq)[None].astype(self.config.dtype)


def _run_block(x: jax.Array, block: Block, *source: jax.Array) -> jax.Array:
    return block(x, *source)


def _unrolled(config: DecoderConfig, rngs: nnx.Rngs, split: Split) -> nnx.List[Block]:
    return nnx.List([Block(config, rngs, split) for _ in range(config.num_blocks)])


def _stacked(config: DecoderConfig, rngs: nnx.Rngs, split: Split) -> Block:
    """Makes one block whose parameters have a leading layer dimension."""

    @nnx.split_rngs(splits=config.num_blocks)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def build(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs, split)

    return build(rngs)
