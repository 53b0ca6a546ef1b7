"""Hand strategies for the decoder: tensor parallelism as in Megatron-LM, only the pins that imply it, or those of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from flax import nnx

from spmdctx.models.config import DecoderConfig, Target
from spmdctx.shard.decorate import shard

M = TypeVar("M", bound=nnx.Module)
SplitKind = Literal["none", "megatron", "pins"]
Slices = tuple[int, ...]

_ATTENTION_WEIGHTS: dict[Target, str] = {"query": "-m", "key": "-m", "value": "-m", "out": "m-"}
_FEED_FORWARD_WEIGHTS: dict[Target, str] = {"gate": "-m", "up": "-m", "down": "m-"}
BLOCKS = ("layers/*", "query_layer")
"""Paths of the blocks; the second is PanGu-alpha's."""


class RegionStrategy(NamedTuple):
    """The arguments of `shard()` for one module.

    Attributes:
        inputs: slices of each array argument; None leaves them free.
        outputs: slices of each array result.
        parameters: slices by parameter path.
    """

    inputs: tuple[Slices, ...] | None
    outputs: tuple[Slices, ...] | None
    parameters: Mapping[str, Slices]


@dataclass(frozen=True)
class Split:
    """The split of the decoder by `shard()`: `data` slices of the batch by `model` slices of the weights.

    Attributes:
        kind: "none": no strategies. "megatron": each attention and feed-forward layer, the embedding and the head are
            regions with all their strategies (Shoeybi et al., "Megatron-LM", 2019). "pins": two weights of each layer only,
            from which sharding propagation finds the rest.
        data: slices of the batch.
        model: slices of the weights.
        regions: strategies by module path, such as those of a file, in place of the kind's own.
        free: leave out the strategies of inputs and outputs.
    """

    kind: SplitKind = "none"
    data: int = 1
    model: int = 1
    regions: Mapping[str, RegionStrategy] | None = None
    free: bool = False

    def layer(self, module: M, path: str, config: DecoderConfig) -> M:
        """Returns the module, sharded if there is a strategy for its path."""
        region = self.regions_of(config).get(path)
        return module if region is None else shard(module, region.inputs, region.outputs, region.parameters)

    def regions_of(self, config: DecoderConfig) -> Mapping[str, RegionStrategy]:
        """Returns the strategies by module path: those of a file, or those of the kind for a decoder of these sizes."""
        if self.regions is not None:
            return self.regions
        own = self._pins(config) if self.kind == "pins" else self._megatron(config) if self.kind == "megatron" else {}
        return _without_arrays(own) if self.free else own

    def parameters_alone(self) -> Split:
        """Returns the same strategies for the parameters, with inputs and outputs left free."""
        if self.regions is None:
            return replace(self, free=True)
        return replace(self, regions=_without_arrays(self.regions))

    def slices(self, word: str) -> Slices:
        """Reads a strategy from a word: `d` data slices, `m` model slices, `-` whole."""
        return tuple({"d": self.data, "m": self.model, "-": 1}[letter] for letter in word)

    def _pins(self, config: DecoderConfig) -> dict[str, RegionStrategy]:
        first = {"attention": "query", "mlp": "gate" if config.feed_forward == "swiglu" else "up"}
        return {
            f"{block}/{part}": RegionStrategy(None, None, {f"{weight}/kernel": self.slices("-m")})
            for block in BLOCKS[: 1 + config.query_layer]
            for part, weight in first.items()
        }

    def _megatron(self, config: DecoderConfig) -> dict[str, RegionStrategy]:
        whole = (self.slices("d--"),)
        regions = {"embedding": RegionStrategy((self.slices("d-"),), whole, {"embedding": self.slices("m-")})}
        for block in BLOCKS[: 1 + config.query_layer]:
            sources = (self.slices("---"),) if block == "query_layer" else ()
            regions[f"{block}/attention"] = RegionStrategy(whole + sources, whole, self._weights(_ATTENTION_WEIGHTS, config))
            regions[f"{block}/mlp"] = RegionStrategy(whole, whole, self._weights(_FEED_FORWARD_WEIGHTS, config))
        logits = (self.slices("d-m"),)
        if config.head == "tied":
            return regions | {"head": RegionStrategy((*whole, self.slices("m-")), logits, {})}
        return regions | {"head": RegionStrategy(whole, logits, {"kernel": self.slices("-m")})}

    def _weights(self, words: Mapping[Target, str], config: DecoderConfig) -> dict[str, Slices]:
        """Returns the strategies of a layer's weights, with their biases and low-rank updates."""
        found = {}
        for weight in (name for name in config.weights if name in words):
            word = words[weight]
            inputs, outputs = word[0], word[1]
            found[f"{weight}/kernel"] = word
            if config.has_bias(weight):
                found[f"{weight}/bias"] = outputs
            if config.lora_of(weight) is not None:
                found |= {f"{weight}/lora_a": f"{inputs}-", f"{weight}/lora_b": f"-{outputs}"}
        return {path: self.slices(word) for path, word in found.items()}


def _without_arrays(regions: Mapping[str, RegionStrategy]) -> dict[str, RegionStrategy]:
    return {path: RegionStrategy(None, None, region.parameters) for path, region in regions.items() if region.parameters}


UNSPLIT = Split()
