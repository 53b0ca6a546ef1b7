"""Models, training steps and text that the command line, the strategy files and the tests use."""

from spmdctx.models.config import DecoderConfig, Lora
from spmdctx.models.decoder import Decoder
from spmdctx.models.generation import Generator
from spmdctx.models.hand_strategies import UNSPLIT, RegionStrategy, Split, SplitKind
from spmdctx.models.presets import DECODERS as PRESETS
from spmdctx.models.presets import preset
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
