"""The names of the combiner options of XLA's backends."""

from __future__ import annotations

UNLIMITED = 1 << 40
"""A threshold that no program reaches: everything that can be combined is."""

_AUTO_MB = 64

_MANY = 100_000

_THRESHOLDS: dict[tuple[str, str], str] = {
    ("tpu", "all_reduce"): "xla_jf_crs_combiner_threshold_in_bytes",
    ("tpu", "reduce_scatter"): "xla_tpu_ars_combiner_threshold_in_bytes",
    ("gpu", "all_reduce"): "xla_gpu_all_reduce_combine_threshold_bytes",
    ("gpu", "reduce_scatter"): "xla_gpu_reduce_scatter_combine_threshold_bytes",
    ("gpu", "all_gather"): "xla_gpu_all_gather_combine_threshold_bytes",
}
"""The option by (backend, kind); what is not here has none."""

_COUNTS = {"tpu": "xla_jf_crs_combiner_threshold_count", "gpu": "xla_gpu_collective_combine_threshold_count"}
"""How many operands a combined collective may have; beside a threshold in bytes it must not matter."""

_NAMES = {"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reducescatter"}
