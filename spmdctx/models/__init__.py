"""Models, training steps and text that the command line, the strategy files and the tests use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spmdctx.models.config import DecoderConfig, Lora
from spmdctx.models.presets import DECODERS as PRESETS
from spmdctx.models.presets import preset

if TYPE_CHECKING:
    from spmdctx.models.decoder import Decoder
    from spmdctx.models.generation import Generator
    from spmdctx.models.hand_strategies import UNSPLIT, RegionStrategy, Split, SplitKind
    from spmdctx.models.text import Tokenizer, WordTokenizer, batches, read_text, read_tokenizer
    from spmdctx.models.training import Batch, abstract_batch, abstract_program, create, pure_step, train_step

__all__ = [
    "PRESETS",
    "UNSPLIT",
    "Batch",
    "Decoder",
    "DecoderConfig",
    "Generator",
    "Lora",
    "RegionStrategy",
    "Split",
    "SplitKind",
    "Tokenizer",
    "WordTokenizer",
    "abstract_batch",
    "abstract_program",
    "batches",
    "create",
    "preset",
    "pure_step",
    "read_text",
    "read_tokenizer",
    "train_step",
]

_MODULES = {
    "decoder": "Decoder",
    "generation": "Generator",
    "hand_strategies": "UNSPLIT RegionStrategy Split SplitKind",
    "text": "Tokenizer WordTokenizer batches read_text read_tokenizer",
    "training": "Batch abstract_batch abstract_program create pure_step train_step",
}
_MODULE_OF = {name: f"spmdctx.models.{home}" for home, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Imports what a name stands for, and with it JAX; the command line lists models without it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'spmdctx.models' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
