"""Sizes and options of the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spmdctx.errors import ContextError

Target = Literal["query", "key", "value", "out", "gate", "up", "down"]
BLOCK_WEIGHTS: tuple[Target, ...] = ("query", "key", "value", "out", "gate", "up", "down")
"""Weights of a block, attention before feed-forward; the GELU layer has no gate."""


@dataclass(frozen=True)
class Lora:
    """Low-rank updates of frozen weights: W + (alpha / rank) A B with A [inputs, rank], B [rank, outputs] (Hu et al., 2021).

    Attributes:
        rank: columns of A and rows of B.
        alpha: scale of the update, times `rank`.
        targets: the weights of each block that are updated.
    """

    rank: int
    alpha: float
    targets: tuple[Target, ...]

    def __post_init__(self) -> None:
        unknown = [name for name in self.targets if name not in BLOCK_WEIGHTS]
        if self.rank < 1 or unknown:
            got = ", ".join(unknown) or f"rank {self.rank}"
            raise ContextError(
                "Low-rank updates need a rank and weights of a block.", got=got, need=f"rank >= 1; {', '.join(BLOCK_WEIGHTS)}"
            )


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder; the defaults are Llama's.

    Attributes:
        vocab_size: rows of the embedding and columns of the head.
        width: features of the residual stream.
        num_layers: layers, the query layer included.
        num_heads: query heads, each of width / num_heads features.
        num_kv_heads: key and value heads; query heads share them in groups.
        hidden: features between the two halves of the feed-forward layer.
        max_seq: tokens per sequence for which the model is meant; with learned positions no more are possible.
        positions: "rotary" turns queries and keys (Su et al., 2021), "alibi" adds a bias that grows with the distance (Press et
            al., 2021), "learned" adds a table to the embedding.
        norm: "rms", or "layer" with mean and bias.
        feed_forward: "swiglu" has a gate (Shazeer, 2020), "gelu" has none.
        bias: which weights of a block have one: "none", "qkv" (query, key and value) or "all".
        head: "own" weights; "unit", whose columns are scaled to length 1 (Baichuan 2's NormHead); or "tied", the embedding's.
        query_layer: whether the last layer uses learned queries, one per position, instead of its input (PanGu-alpha). It comes
            after the last norm.
        lora: low-rank updates; all other parameters are frozen then.
        rope_theta: base of the rotary embedding's wavelengths.
        norm_epsilon: added to the mean square or the variance in the norms.
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
    positions: Literal["rotary", "alibi", "learned"] = "rotary"
    norm: Literal["rms", "layer"] = "rms"
    feed_forward: Literal["swiglu", "gelu"] = "swiglu"
    bias: Literal["none", "qkv", "all"] = "none"
    head: Literal["own", "unit", "tied"] = "own"
    query_layer: bool = False
    lora: Lora | None = None
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
            (self.width // self.num_heads, 2 if self.positions == "rotary" else 1, "the head size / 2 (rotary pairs)"),
        ):
            if parts < 1 or size % parts:
                raise ContextError(f"{name} must be a whole number.", got=f"{size} / {parts}")
        if self.num_blocks < 1:
            raise ContextError("There is no block.", got=f"num_layers {self.num_layers}", need="1, or 2 with a query layer")

    @property
    def head_dim(self) -> int:
        """Features per head."""
        return self.width // self.num_heads

    @property
    def num_blocks(self) -> int:
        """Layers below the query layer, all alike."""
        return self.num_layers - self.query_layer

    @property
    def weights(self) -> tuple[Target, ...]:
        """The weights of a block."""
        return tuple(name for name in BLOCK_WEIGHTS if name != "gate" or self.feed_forward == "swiglu")

    def sizes_of(self, weight: Target) -> tuple[int, int]:
        """Returns the inputs and outputs of a block's weight."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        outputs = {"query": heads, "key": kv_heads, "value": kv_heads, "gate": self.hidden, "up": self.hidden}
        inputs = {"out": heads, "down": self.hidden}
        return inputs.get(weight, self.width), outputs.get(weight, self.width)

    def has_bias(self, weight: Target) -> bool:
        """Returns whether a block's weight has a bias."""
        return self.bias == "all" or (self.bias == "qkv" and weight in ("query", "key", "value"))

    def lora_of(self, weight: Target) -> Lora | None:
        """Returns the low-rank update of a block's weight, or None if it has none."""
        return self.lora if self.lora is not None and weight in self.lora.targets else None

    @property
    def num_parameters(self) -> int:
        """Numbers in the model, embedding, head and low-rank updates included."""
        norm = self.width * (2 if self.norm == "layer" else 1)
        weights = sum(inputs * outputs for inputs, outputs in map(self.sizes_of, self.weights))
        biases = sum(self.sizes_of(name)[1] for name in self.weights if self.has_bias(name))
        tables = self.max_seq * self.width * ((self.positions == "learned") + self.query_layer)
        vocabulary = self.vocab_size * self.width * (1 if self.head == "tied" else 2)
        return self.num_layers * (weights + biases + 2 * norm) + vocabulary + tables + norm + self.num_lora_parameters

    @property
    def num_lora_parameters(self) -> int:
        """Numbers in the low-rank updates: all that is trained where there are any."""
        if self.lora is None:
            return 0
        return self.num_layers * sum(sum(self.sizes_of(name)) * self.lora.rank for name in self.weights if self.lora_of(name))
