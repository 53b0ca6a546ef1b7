"""The published models by name."""

from __future__ import annotations

from dataclasses import replace

from spmdctx.errors import ContextError
from spmdctx.models.config import DecoderConfig, Lora

_LLAMA2_7B = DecoderConfig(vocab_size=32000, width=4096, num_layers=32, num_heads=32, num_kv_heads=32, hidden=11008, max_seq=4096)
_LLAMA2_13B = DecoderConfig(vocab_size=32000, width=5120, num_layers=40, num_heads=40, num_kv_heads=40, hidden=13824, max_seq=4096)
_BAICHUAN2_7B = replace(_LLAMA2_7B, vocab_size=125696, head="unit", norm_epsilon=1e-6)
_BAICHUAN2_13B = DecoderConfig(
    vocab_size=125696,
    width=5120,
    num_layers=40,
    num_heads=40,
    num_kv_heads=40,
    hidden=13696,
    max_seq=4096,
    positions="alibi",
    head="unit",
    norm_epsilon=1e-6,
)
_QWEN_7B = replace(_LLAMA2_7B, vocab_size=151936, max_seq=8192, bias="qkv", norm_epsilon=1e-6)
_QWEN_14B = replace(_QWEN_7B, vocab_size=152064, width=5120, num_layers=40, num_heads=40, num_kv_heads=40, hidden=13696)
_PANGU_ALPHA_2_6B = DecoderConfig(
    vocab_size=40000,
    width=2560,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    hidden=10240,
    max_seq=1024,
    positions="learned",
    norm="layer",
    feed_forward="gelu",
    bias="all",
    head="tied",
    query_layer=True,
)

DECODERS: dict[str, DecoderConfig] = {
    # Divisible by 2, 3, 6 and 8 wherever something can be split, so that it runs on any small number of devices.
    "tiny": DecoderConfig(vocab_size=768, width=192, num_layers=4, num_heads=12, num_kv_heads=6, hidden=384, max_seq=96),
    # Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023, and the published params.json files.
    "llama2-7b": _LLAMA2_7B,
    "llama2-13b": _LLAMA2_13B,
    "llama2-70b": DecoderConfig(vocab_size=32000, width=8192, num_layers=80, num_heads=64, num_kv_heads=8, hidden=28672, max_seq=4096),
    # Baichuan Inc., "Baichuan 2: Open Large-scale Language Models", 2023, and the published config.json files.
    "baichuan2-7b": _BAICHUAN2_7B,
    "baichuan2-13b": _BAICHUAN2_13B,
    # Bai et al., "Qwen Technical Report", 2023, and the published config.json files, whose intermediate_size counts gate and up.
    "qwen-7b": _QWEN_7B,
    "qwen-14b": _QWEN_14B,
    # Zeng et al., "PanGu-alpha", 2021, table 1; MindFormers' run_pangualpha_*.yaml, where num_layers counts the query layer too.
    "pangu-alpha-2.6b": _PANGU_ALPHA_2_6B,
    "pangu-alpha-13b": replace(_PANGU_ALPHA_2_6B, width=5120, num_layers=40, num_heads=40, num_kv_heads=40, hidden=20480),
}

_ATTENTION_LORA = Lora(rank=16, alpha=16.0, targets=("query", "key", "value", "out"))
_BAICHUAN2_LORA = Lora(rank=1, alpha=32.0, targets=("query", "key", "value"))
_QWEN_LORA = Lora(rank=64, alpha=16.0, targets=("query", "key", "value", "out", "gate", "up", "down"))

# Ranks, scales and targets of MindFormers' lora_llama2_*.yaml, finetune_baichuan2_*_lora.yaml and finetune_qwen_*_lora.yaml; there is
# none for LLaMA2-70B. Those of Qwen train embedding and head too; here everything but the updates is frozen.
DECODERS |= {
    f"{name}-lora": replace(DECODERS[name], lora=lora)
    for name, lora in (
        ("llama2-7b", _ATTENTION_LORA),
        ("llama2-13b", Lora(rank=8, alpha=16.0, targets=("query", "value"))),
        ("llama2-70b", _ATTENTION_LORA),
        ("baichuan2-7b", _BAICHUAN2_LORA),
        ("baichuan2-13b", _BAICHUAN2_LORA),
        ("qwen-7b", _QWEN_LORA),
        ("qwen-14b", _QWEN_LORA),
    )
}


def preset(name: str) -> DecoderConfig:
    """Returns the configuration of that name, such as `llama2-7b`; underscores are accepted too.

    Raises:
        ContextError: there is no such configuration.
    """
    config = DECODERS.get(name.lower().replace("_", "-"))
    if config is None:
        raise ContextError(f"There is no model {name!r}.", need=", ".join(DECODERS))
    return config
