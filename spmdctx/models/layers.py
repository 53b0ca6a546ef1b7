"""Small layers of the decoder: projections with low-rank updates, norms, embeddings and heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from spmdctx.models.config import DecoderConfig, Lora, Target


class LoraLinear(nnx.Linear):
    """A linear layer with a low-rank update, which is zero at first because B is.

    Args:
        inputs: features in.
        outputs: features out.
        lora: rank and scale.
        rngs: random numbers for the parameters.
        use_bias: as for `nnx.Linear`.
        dtype: of the products.
        param_dtype: of the parameters.
    """

    def __init__(
        self, inputs: int, outputs: int, lora: Lora, *, rngs: nnx.Rngs, use_bias: bool, dtype: jnp.dtype, param_dtype: jnp.dtype
    ) -> None:
        super().__init__(inputs, outputs, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.lora_a = nnx.LoRAParam(nnx.initializers.he_uniform()(rngs.params(), (inputs, lora.rank), param_dtype))
        self.lora_b = nnx.LoRAParam(jnp.zeros((lora.rank, outputs), param_dtype))
        self.scale = lora.alpha / lora.rank

    def __call__(self, inputs: jax.Array) -> jax.Array:  # type: ignore[override]  # narrower than nnx.Module's open signature
        """Maps [..., inputs] to [..., outputs]."""
        dtype = self.dtype or inputs.dtype
        inputs = inputs.astype(dtype)
        update = (inputs @ self.lora_a[...].astype(dtype)) @ self.lora_b[...].astype(dtype)
        whole: jax.Array = super().__call__(inputs)
        return whole + update * self.scale


class UnitHead(nnx.Linear):
    """An output layer whose columns, one per token, are scaled to length 1."""

    def __call__(self, inputs: jax.Array) -> jax.Array:  # type: ignore[override]  # narrower than nnx.Module's open signature
        """Maps [batch, seq, width] to [batch, seq, vocab_size]."""
        kernel = self.kernel[...]
        wide = kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32))
        unit = wide * jax.lax.rsqrt(jnp.maximum(jnp.sum(wide**2, axis=0, keepdims=True), 1e-24))
        dtype = self.dtype or inputs.dtype
        return inputs.astype(dtype) @ unit.astype(dtype)


class TiedHead(nnx.Module):
    """An output layer whose weights are the embedding's."""

    def __init__(self, config: DecoderConfig) -> None:
        self.dtype = jnp.dtype(config.dtype)

    def __call__(self, x: jax.Array, table: jax.Array) -> jax.Array:
        """Maps [batch, seq, width] and [vocab_size, width] to [batch, seq, vocab_size]."""
        return jnp.einsum("bsw,vw->bsv", x.astype(self.dtype), table.astype(self.dtype))


def block_linear(weight: Target, config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Linear:
    """Makes one of a block's weights, with the bias and the low-rank update that the configuration gives it."""
    inputs, outputs = config.sizes_of(weight)
    dtype, param_dtype = _dtypes(config)
    bias, lora = config.has_bias(weight), config.lora_of(weight)
    if lora is None:
        return nnx.Linear(inputs, outputs, use_bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    return LoraLinear(inputs, outputs, lora, use_bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


def head(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Makes the output layer."""
    if config.head == "tied":
        return TiedHead(config)
    dtype, param_dtype = _dtypes(config)
    kind = UnitHead if config.head == "unit" else nnx.Linear
    return kind(config.width, config.vocab_size, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


def norm(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Makes a norm of the residual stream."""
    dtype, param_dtype = _dtypes(config)
    kind = nnx.LayerNorm if config.norm == "layer" else nnx.RMSNorm
    return kind(config.width, epsilon=config.norm_epsilon, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


def embedding(rows: int, config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Embed:
    """Makes a table of `rows` vectors of the residual stream's width."""
    dtype, param_dtype = _dtypes(config)
    init = nnx.initializers.normal(0.02)
    return nnx.Embed(rows, config.width, dtype=dtype, param_dtype=param_dtype, embedding_init=init, rngs=rngs)


def _dtypes(config: DecoderConfig) -> tuple[jnp.dtype, jnp.dtype]:
    return jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
