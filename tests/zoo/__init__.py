"""The models of the acceptance matrix, each a whole training step in the flavors that come naturally to it."""

from __future__ import annotations

from types import ModuleType

from tests.zoo import cnn, encoder_decoder, gnn, gshard, lstm, mlp, moe, resnet50, ssm, tied, transformer, unet, vit
from tests.zoo.case import UNSPLIT, Case, Kind, Maker, Split

_MODELS: dict[str, ModuleType] = {
    "mlp": mlp,
    "transformer": transformer,
    "cnn": cnn,
    "encoder_decoder": encoder_decoder,
    "moe": moe,
    "lstm": lstm,
    "gnn": gnn,
    "tied": tied,
    "vit": vit,
    "resnet50": resnet50,
    "unet": unet,
    "ssm": ssm,
    "gshard": gshard,
}

# Flax's cells concatenate the weights of their gates, so that no split of the hidden units survives.
_WITHOUT_MODEL_SPLIT = {("lstm", "linen"), ("lstm", "nnx")}

CASES: tuple[Case, ...] = tuple(
    Case(name, flavor, getattr(module, f"make_{flavor}"), (name, flavor) not in _WITHOUT_MODEL_SPLIT)
    for name, module in _MODELS.items()
    for flavor in ("pytree", "linen", "nnx")
    if hasattr(module, f"make_{flavor}")
)

LARGE: dict[str, Maker] = {name: module.make_large for name, module in _MODELS.items() if hasattr(module, "make_large")}
"""Models at a published size, with abstract arguments: `make(split, dtype)`."""

DEVICE_COUNTS = (1, 2, 3, 6, 8)

__all__ = ["CASES", "DEVICE_COUNTS", "LARGE", "UNSPLIT", "Case", "Kind", "Split", "case"]


def case(name: str, flavor: str) -> Case:
    """One case of the zoo."""
    return next(one for one in CASES if (one.name, one.flavor) == (name, flavor))
