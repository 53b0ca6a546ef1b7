"""XLA writes some planned collectives as other ones, or in another type."""

from __future__ import annotations

from spmdctx.ir.collective import AS_PLANNED, COLLECTIVE_KINDS, Way

SLICED = "all_reduce and slice"
WIDENED = "float32 for bfloat16"
NARROWED = "bfloat16 for float32"

WAYS: tuple[Way, ...] = (
    *(Way(kind, kind, 1.0, (), AS_PLANNED) for kind in COLLECTIVE_KINDS),
    Way("reduce_scatter", "all_reduce", 1.0, (), SLICED),
    # TPU scatters some tensors in pieces that overlap by an eighth, and then passes the overlaps on.
    Way("reduce_scatter", "reduce_scatter", 1.125, (), "reduce_scatter of longer pieces"),
    # TPU gathers small tensors by reducing them, each device's shard padded with zeros.
    Way("all_gather", "all_reduce", 1.0, (), "all_reduce of padded shards"),
    # CPU communicates bfloat16 as float32; TPU gathers float32 as bfloat16 where only its matrix unit reads the result.
    *(Way(kind, kind, 2.0, ("float32",), WIDENED) for kind in COLLECTIVE_KINDS),
    Way("reduce_scatter", "all_reduce", 2.0, ("float32",), f"{SLICED}, {WIDENED}"),
    *(Way(kind, kind, 0.5, ("bfloat16", "float16"), NARROWED) for kind in COLLECTIVE_KINDS),
)
"""How a planned collective may appear in a compiled program, one for one; the first that fits counts."""
