"""Rules of primitives that cannot be split at all, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from spmdctx.ir.rule import OpRule
from spmdctx.rules.builder import Shape, replicate
from spmdctx.rules.registry import rule


def _keep(reason: str, operands: tuple[Shape, ...], results: tuple[Shape, ...], _params: Mapping[str, Any]) -> OpRule:
    return replicate(operands, results, reason)


REASONS: dict[str, str] = {}
"""The reason why a primitive cannot be split, for each that is kept whole whatever its shapes; "<primitive> <reason>" is a sentence."""


def keep_whole(reason: str, *primitives: str) -> None:
    """Registers that `primitives` can't be split at all, and why."""
    rule(*primitives)(partial(_keep, reason))
    REASONS.update(dict.fromkeys(primitives, reason))


keep_whole("orders effects and holds no elements", "after_all", "create_token", "empty2")

keep_whole(
    "calls back into Python, which sees whole arrays",
    *("pure_callback", "io_callback", "debug_callback", "debug_print", "inspect_sharding", "buffer_callback"),
)

keep_whole(
    "calls foreign code, which sees whole arrays; wrap it in shard_map to split it",
    *("ffi_call", "cudnn_fusion", "rnn_fwd", "rnn_bwd", "call_tf"),
)

keep_whole(
    "runs a kernel that is written for whole arrays; wrap it in shard_map to split it",
    *("core_map", "mpmd_map", "call_hi_primitive", "call_hi_primitive_linearized", "fused_call"),
    *("tpu_custom_call", "custom_fusion", "fusible", "mosaic_gpu_p"),
)

keep_whole(
    "exists only inside a kernel",
    *("delay", "get_global", "jaxpr_call", "masked_load", "masked_swap", "multiple_of", "num_programs", "program_id"),
    *("reciprocal", "run_scoped", "semaphore_read", "semaphore_signal", "semaphore_wait"),
    *("add_dependency", "all_reduce_ffs", "all_reduce_population_count", "atomic_cas", "atomic_rmw", "barrier", "bitcast"),
    *("debug_barrier_p", "dma_start", "dma_wait", "einshape_lo", "elementwise_inline_asm_p", "emit_pipeline"),
    *("get_barrier_semaphore", "load", "masked_cummax", "masked_cummin", "masked_cumsum", "masked_sort", "matmul_acc_lhs"),
    *("matmul_pop", "matmul_push_rhs", "max_contiguous", "pack", "pack_dtype", "pack_elementwise", "parallel_loop"),
    *("pipeline_body", "prng_join", "prng_random_bits", "prng_seed", "prng_split", "remove_memory_space", "roll"),
    *("sc_fetch_and_add", "stochastic_round", "trace_value", "unique", "unpack", "unpack_dtype", "unpack_elementwise"),
)

keep_whole("exists only while JAX checks that no key is used twice", "consume", "assert_consumed_value")

keep_whole("exists only while JAX differentiates", "custom_lin", "custom_jvp_call_jaxpr")

keep_whole(
    "turns one process's arrays into the job's or back, which is no part of a step",
    *("host_local_array_to_global_array", "global_array_to_host_local_array"),
)

keep_whole("runs a program that was compiled for devices of its own", "call_exported")

keep_whole(
    "acts on a mutable array, which every device holds whole",
    *("get", "swap", "addupdate", "accum_grad_in_ref", "new_ref", "empty_ref", "freeze", "free_ref", "run_state"),
    *("create_linear", "pin", "unpin", "box_get", "box_set", "new_box", "log_extend", "log_read", "new_log"),
)

keep_whole(
    "is a scalar known when the program is compiled",
    *("platform_index", "dimension_size", "dim_as_value", "shape_assertion", "check", "unreachable"),
)

_SPARSE = {
    "bcoo": (
        "dot_general",
        "dot_general_sampled",
        "extract",
        "fromdense",
        "sort_indices",
        "spdot_general",
        "sum_duplicates",
        "todense",
        "transpose",
    ),
    "bcsr": ("dot_general", "extract", "fromdense", "todense"),
    "coo": ("fromdense", "matmat", "matvec", "spmm", "spmv", "todense"),
    "csr": ("fromdense", "matmat", "matvec", "spmm", "spmv", "todense"),
}

keep_whole(
    "acts on a sparse array, whose stored elements may belong to any block",
    *(f"{kind}_{name}" for kind, names in _SPARSE.items() for name in names),
    *("spsolve", "todense"),
)
