"""XLA's combiners of collectives have options with other names, and count in other ways, on each backend.

What XLA does: a combiner makes one collective of several up to a threshold in bytes and a number of operands. It counts all bytes of the
    operands for all_reduces and of the results for all_gathers. For reduce_scatters TPU counts the operands, of which it combines at most
    some 9 MB, and GPU counts what one device keeps. TPU combines no all_gathers, whatever its options say; CPU's combiner has no
    options. Each backend refuses options that it does not know.
Seen in: libtpu 0.0.42 for v5e:2x4 and CUDA plugin 0.10.2 for 8 x H100: 20 parameters of 1 MiB become 6 and 3 all_reduces at 4 and 8 MB on
    both (benchmarks/RESULTS.md, "Collectives as the context says").
Switch: none: the tables below have a row for each backend.
Priced by: nothing
Written or prevented by: lowering.compile_options
Checked by: tests/lowering/test_compile_options.py, benchmarks/collective_options.py
"""

from __future__ import annotations

UNLIMITED = 1 << 40
"""A threshold that no program reaches: XLA combines everything that it can."""

MANY_OPERANDS = 100_000
"""A number of operands that no combined collective reaches."""

BYTE_THRESHOLDS: dict[tuple[str, str], str] = {
    ("tpu", "all_reduce"): "xla_jf_crs_combiner_threshold_in_bytes",
    ("tpu", "reduce_scatter"): "xla_tpu_ars_combiner_threshold_in_bytes",
    ("gpu", "all_reduce"): "xla_gpu_all_reduce_combine_threshold_bytes",
    ("gpu", "reduce_scatter"): "xla_gpu_reduce_scatter_combine_threshold_bytes",
    ("gpu", "all_gather"): "xla_gpu_all_gather_combine_threshold_bytes",
}
"""The option by (backend, kind); other pairs have none."""

COUNT_THRESHOLDS = {"tpu": "xla_jf_crs_combiner_threshold_count", "gpu": "xla_gpu_collective_combine_threshold_count"}
"""The option that limits the operands of a combined collective; beside a threshold in bytes it must not matter."""
