"""Decoders, and models of the test zoo at sizes that keep a chip busy, few layers deep, for the judge's benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from spmdctx.models import UNSPLIT, DecoderConfig, Split, abstract_program, pure_step
from tests.zoo import encoder_decoder, gshard, mlp, moe, transformer, unet, vit
from tests.zoo.case import Shapes

Program = tuple[Callable[..., Any], tuple[Any, ...]]

_CONSTANTS: dict[str, tuple[ModuleType, dict[str, int]]] = {
    "mlp": (mlp, {"BATCH": 8192, "WIDTH": 2048, "HIDDEN": 8192, "CLASSES": 1024}),
    "transformer": (
        transformer,
        {"BATCH": 32, "SEQ": 256, "WIDTH": 1024, "HEADS": 16, "HEAD_DIM": 64, "HIDDEN": 4096, "VOCAB": 4096},
    ),
    "encoder_decoder": (
        encoder_decoder,
        {"BATCH": 32, "SEQ": 512, "WIDTH": 1024, "HEADS": 16, "HEAD_DIM": 64, "HIDDEN": 4096, "VOCAB": 8192},
    ),
    "moe": (moe, {"BATCH": 32, "SEQ": 256, "WIDTH": 512, "HIDDEN": 2048, "EXPERTS": 16, "CAPACITY": 40, "CLASSES": 1024}),
}
_LARGE: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "vit": (vit, {"batch": 64, "layers": 2, "heads": 16}),
    "gshard": (gshard, {"batch": 32, "layers": 2, "vocab": 8192, "experts": 16, "capacity": 160}),
    "unet": (unet, {"batch": 32, "image": 64}),
}
ZOO = (*_CONSTANTS, *_LARGE)
"""Names of the models."""


def decoder_program(config: DecoderConfig, batch: int, seq: int | None = None, split: Split = UNSPLIT) -> Program:
    """A decoder's training step and its abstract arguments."""
    _, (model, optimizer, inputs) = abstract_program(config, batch, seq, split=split)
    step, state = pure_step(model, optimizer)
    return step, (state, inputs)


def zoo_program(model: str, split: Any, own_sizes: Mapping[str, int] | None = None) -> Program:
    """The training step and its abstract arguments; `split` is a `tests.zoo.Split`, or what stands in for one.

    The modules' sizes are set for this process; `own_sizes` replace some of them.
    """
    if model in _LARGE:
        module, changes = _LARGE[model]
        large: Any = module
        large.LARGE = replace(large.LARGE, **{**changes, **(own_sizes or {})})
        made: Program = large.make_large(split, jnp.bfloat16)
        return made
    module, sizes = _CONSTANTS[model]
    # Others take the transformer's attention weights, at its sizes.
    for own in (module, transformer):
        for name, size in {**sizes, **(own_sizes or {}), "Numbers": Shapes}.items():
            if hasattr(own, name):
                setattr(own, name, size)
    made = module.make_pytree(split, jnp.bfloat16 if model in ("transformer", "encoder_decoder") else jnp.float32)
    return made
