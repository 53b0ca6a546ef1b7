"""A Llama step of few layers on compile-only meshes: what its plan says it communicates, held against the compiled program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import spmdctx
from spmdctx.audit import AuditReport
from spmdctx.audit.match import TOLERANCE
from spmdctx.models import UNSPLIT, DecoderConfig, Split, abstract_program

BATCH, SEQ, DATA, MODEL = 16, 256, 2, 4
MESH = {"data": DATA, "model": MODEL}


@dataclass(frozen=True)
class Strategy:
    """How the step is split: strategies in the model, and options of the step."""

    split: Split
    options: dict[str, Any]


STRATEGIES = {
    "data_parallel": Strategy(UNSPLIT, {"parallel_mode": "data_parallel"}),
    "megatron": Strategy(Split("megatron", DATA, MODEL), {"parallel_mode": "semi_auto_parallel", "mesh": MESH}),
    "two pins per layer": Strategy(
        Split("pins", DATA, MODEL), {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation", "mesh": MESH}
    ),
}


def config(*, num_layers: int = 4, scan_layers: bool = False, dtype: str = "float32") -> DecoderConfig:
    """Sizes that fill whole TPU tiles on every device."""
    return DecoderConfig(
        vocab_size=2048,
        width=512,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=8,
        hidden=1408,
        max_seq=SEQ,
        scan_layers=scan_layers,
        remat=True,
        dtype=dtype,
    )


def audit(strategy: Strategy, devices: Sequence[Any], topology: str, sizes: DecoderConfig) -> AuditReport:
    """Plans the step, compiles it and holds one against the other."""
    step, arguments = abstract_program(sizes, BATCH, split=strategy.split)
    return spmdctx.parallel(step, devices=devices, topology=topology, **strategy.options).audit(*arguments)


def exact_share(report: AuditReport) -> float:
    """Share of the planned bytes whose collectives move those bytes within 10 %, whatever name the audit has for a difference."""
    found = sum(row.found_bytes for row in report.rows if abs(row.compiled_bytes - row.found_bytes) <= TOLERANCE * row.found_bytes)
    return found / report.planned_bytes
