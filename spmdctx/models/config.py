"""Sizes of the decoder, and the published ones by name."""

from __future__ import annotations

from dataclasses import dataclass

from spmdctx.errors import ContextError


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a Llama-style decoder.

    Attributes:
        vocab_size: rows of the embedding and columns of the head.
        width: features of the residual stream.
        num_layers: blocks.
        num_heads: query heads, each of width / num_heads features.
        num_kv_heads: key and value heads; query heads share them in groups.
        hidden: features between the two halves of the feed-forward layer.
        max_seq: tokens per sequence the model is meant for.
        rope_theta: base of the rotary embedding's wavelengths.
        norm_epsilon: added to the mean square in RMSNorm.
        scan_layers: run the blocks by one scan over stacked parameters instead of one after the other.
        remat: recompute each block's activations in the backward pass.
        dtype: of activations and matrix products.
        param_dtype: of the parameters.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    max_seq: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    scan_layers: bool = False
    remat: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        for size, parts, name in (
            (self.width, self.num_heads, "width / num_heads"),
            (self.num_heads, self.num_kv_heads, "num_heads / num_kv_heads"),
            (self.width // self.num_heads, 2, "the head size / 2 (rotary pairs)"),
        ):
            if parts < 1 or size % parts:
                raise ContextError(f"{name} must be a whole number.", got=f"{size} / {parts}")

    @property
    def head_dim(self) -> int:
        """Features per head."""
        return self.width // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Numbers in the model, embedding and head included."""
        attention = 2 * self.width * self.head_dim * (self.num_heads + self.num_kv_heads)
        block = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.num_layers * block + 2 * self.vocab_size * self.width + self.width


PRESETS: dict[str, DecoderConfig] = {
    # Divisible by 2, 3, 6 and 8 wherever something can be split, so that it runs on any small number of devices.
    "tiny": DecoderConfig(vocab_size=768, width=192, num_layers=4, num_heads=12, num_kv_heads=6, hidden=384, max_seq=96),
    # Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023, and the published params.json files.
    "llama2-7b": DecoderConfig(vocab_size=32000, width=4096, num_layers=32, num_heads=32, num_kv_heads=32, hidden=11008, max_seq=4096),
    "llama2-13b": DecoderConfig(vocab_size=32000, width=5120, num_layers=40, num_heads=40, num_kv_heads=40, hidden=13824, max_seq=4096),
    "llama2-70b": DecoderConfig(vocab_size=32000, width=8192, num_layers=80, num_heads=64, num_kv_heads=8, hidden=28672, max_seq=4096),
}


def preset(name: str) -> DecoderConfig:
    """The configuration of that name (`llama2-7b`; underscores do too).

    Raises:
        ContextError: there is none.
    """
    config = PRESETS.get(name.lower().replace("_", "-"))
    if config is None:
        raise ContextError(f"There is no model {name!r}.", need=", ".join(PRESETS))
    return config
