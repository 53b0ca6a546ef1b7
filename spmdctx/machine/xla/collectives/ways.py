"""XLA writes some planned collectives as other ones, or in another type.

What XLA does: every backend may write a reduce_scatter as an all_reduce and a slice. TPU scatters some tensors in pieces that overlap by an
    eighth, and then passes the overlaps on. It gathers small tensors by reducing shards padded with zeros, and float32 as bfloat16 if only
    its matrix unit reads the result. It reduces bools and integers of one or two bytes as uint32, in single elements or whole tiles.
    CPU communicates bfloat16 as float32, float8 and float4 as float16, and float8_e8m0fnu as float32.
Seen in: jax 0.10.2, libtpu 0.0.42 for v5e:2x4, CUDA plugin 0.10.2 for 8 x H100, and CPU. How often: not measured.
Switch: none: all backends
Priced by: machine.xla.reductions and machine.xla.narrowing tell which of these are foreseen; the others are not priced.
Written or prevented by: nothing; audit.match finds them.
Checked by: tests/audit/test_match.py, tests/audit/test_collectives_tpu.py, benchmarks/fidelity.py
"""

from __future__ import annotations

from collections.abc import Iterable

from spmdctx.ir.collective import AS_PLANNED, COLLECTIVE_KINDS, Way
from spmdctx.ir.graph import NARROW_FLOATS

SLICED = "all_reduce and slice"
WIDENED = "float32 for bfloat16"
NARROWED = "bfloat16 for float32"

_SHORT = frozenset({"bool", "int8", "uint8", "int16", "uint16"})
"""Types that TPU reduces as uint32, padded to tiles."""

_SCALES = "float8_e8m0fnu"
"""The type of scales of blocks, which has an exponent only."""

WAYS: tuple[Way, ...] = (
    *(Way(kind, kind, 1.0, (), AS_PLANNED) for kind in COLLECTIVE_KINDS),
    Way("reduce_scatter", "all_reduce", 1.0, (), SLICED),
    # TPU scatters some tensors in pieces that overlap by an eighth, and then passes the overlaps on.
    Way("reduce_scatter", "reduce_scatter", 1.125, (), "reduce_scatter of longer pieces"),
    # CPU communicates bfloat16 as float32; TPU gathers float32 as bfloat16 where only its matrix unit reads the result.
    *(Way(kind, kind, 2.0, ("float32",), WIDENED) for kind in COLLECTIVE_KINDS),
    Way("reduce_scatter", "all_reduce", 2.0, ("float32",), f"{SLICED}, {WIDENED}"),
    # TPU gathers small tensors by reducing them, each device's shard padded with zeros.
    Way("all_gather", "all_reduce", 1.0, (), "all_reduce of padded shards"),
    *(Way(kind, kind, 0.5, ("bfloat16", "float16"), NARROWED) for kind in COLLECTIVE_KINDS),
)
"""The ways in which a planned collective may appear in a compiled program, one for one.

`audit.match` pairs as many collectives as can be; among equally many pairs, earlier ways are preferred.
"""


def ways_of(dtypes: Iterable[str]) -> tuple[Way, ...]:
    """Returns the ways in which a program with values of these types may be written; those of short types need one."""
    found = set(dtypes)
    narrow = {dtype for dtype in found if dtype.startswith(NARROW_FLOATS)}
    halves, quarters = narrow - {_SCALES}, narrow & {_SCALES}
    padded = (Way("all_reduce", "all_reduce", 1.0, ("uint32",), "uint32 in padded tiles", is_padded=True),) if found & _SHORT else ()
    return (*WAYS, *padded, *(_wider(2.0, "float16") if halves else ()), *(_wider(4.0, "float32") if quarters else ()))


def _wider(ratio: float, dtype: str) -> tuple[Way, ...]:
    name = f"{dtype} for a type of one byte"
    sliced = Way("reduce_scatter", "all_reduce", ratio, (dtype,), f"{SLICED}, {name}")
    return (*(Way(kind, kind, ratio, (dtype,), name) for kind in COLLECTIVE_KINDS), sliced)
