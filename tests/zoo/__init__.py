"""The models of the acceptance matrix, each a whole training step in the flavors that come naturally to it."""

from __future__ import annotations

from types import ModuleType

from tests.zoo import cnn, encoder_decoder, gnn, lstm, mlp, moe, tied, transformer
from tests.zoo.case import UNSPLIT, Case, Kind, Split

_MODELS: dict[str, ModuleType] = {
    "mlp": mlp,
    "transformer": transformer,
    "cnn": cnn,
    "encoder_decoder": encoder_decoder,
    "moe": moe,
    "lstm": lstm,
    "gnn": gnn,
    "tied": tied,
}

# Flax's cells concatenate the weights of their gates, so that no split of the hidden units survives.
_WITHOUT_MODEL_SPLIT = {("lstm", "linen"), ("lstm", "nnx")}

CASES: tuple[Case, ...] = tuple(
    Case(name, flavor, getattr(module, f"make_{flavor}"), (name, flavor) not in _WITHOUT_MODEL_SPLIT)
    for name, module in _MODELS.items()
    for flavor in ("pytree", "linen", "nnx")
    if hasattr(module, f"make_{flavor}")
)

DEVICE_COUNTS = (1, 2, 3, 6, 8)

__all__ = ["CASES", "DEVICE_COUNTS", "UNSPLIT", "Case", "Kind", "Split", "case"]


def case(name: str, flavor: str) -> Case:
    """One case of the zoo."""
    return next(one for one in CASES if (one.name, one.flavor) == (name, flavor))
