"""Strategies for the decoder: tensor parallelism as in Megatron-LM, or only the pins from which it follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from flax import nnx

from spmdctx.shard import shard
from spmdctx.shard_call import Spec

M = TypeVar("M", bound=nnx.Module)
SplitKind = Literal["none", "megatron", "pins"]

ATTENTION = {"query/kernel": "-m", "key/kernel": "-m", "value/kernel": "-m", "out/kernel": "m-"}
FEED_FORWARD = {"gate/kernel": "-m", "up/kernel": "-m", "down/kernel": "m-"}
ATTENTION_PIN = {"query/kernel": "-m"}
FEED_FORWARD_PIN = {"gate/kernel": "-m"}


@dataclass(frozen=True)
class Split:
    """How `shard()` splits the decoder: `data` slices of the batch by `model` slices of the weights.

    Attributes:
        kind: "none": no strategies. "megatron": each attention and feed-forward layer, the embedding and the head are
            regions with all their strategies (Shoeybi et al., "Megatron-LM", 2019). "pins": two weights of each layer only,
            from which sharding propagation finds the rest.
        data: slices of the batch.
        model: slices of the weights.
    """

    kind: SplitKind = "none"
    data: int = 1
    model: int = 1

    def layer(self, module: M, weights: dict[str, str], pins: dict[str, str]) -> M:
        """A module from [batch, seq, features] to the same, the batch split and its weights by path."""
        if self.kind == "none":
            return module
        if self.kind == "pins":
            return shard(module, None, parameter_plan=self._plan(pins)) if pins else module
        whole = (self.slices("d--"),)
        return shard(module, whole, whole, self._plan(weights))

    def embedding(self, module: M) -> M:
        """Token embedding: the vocabulary split, partial rows summed."""
        if self.kind != "megatron":
            return module
        return shard(module, (self.slices("d-"),), (self.slices("d--"),), self._plan({"embedding": "m-"}))

    def head(self, module: M) -> M:
        """Output layer: the vocabulary split, and the logits with it."""
        if self.kind != "megatron":
            return module
        return shard(module, (self.slices("d--"),), (self.slices("d-m"),), self._plan({"kernel": "-m"}))

    def slices(self, word: str) -> tuple[int, ...]:
        """A strategy from a word: `d` data slices, `m` model slices, `-` whole."""
        return tuple({"d": self.data, "m": self.model, "-": 1}[letter] for letter in word)

    def _plan(self, words: dict[str, str]) -> dict[str, Spec]:
        return {path: self.slices(word) for path, word in words.items()}


UNSPLIT = Split()
