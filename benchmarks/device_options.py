"""Every option of the context on the one device at hand (GPU, TPU or CPU), against `jax.jit` of the same step.

    JAX_PLATFORMS=cuda python -m benchmarks.device_options [--only REGEX]

Runs each set of options for three steps, by stand_alone and on a mesh of one device, and compares results and new state with the
plain step's on that device, in float32 with products at full precision. The audit must hold too. Prints a row per run; exits with 1
if one fails, or if an option of the context is in no set.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmdctx
from spmdctx.context.options import OPTIONS
from spmdctx.models import DecoderConfig
from spmdctx.models.training import create, train_step
from tests.zoo import UNSPLIT, case

CALLS = 3
TOLERANCE = 2e-4
"""AdamW magnifies the rounding of small gradients."""
CONFIG = DecoderConfig(vocab_size=512, width=128, num_layers=2, num_heads=4, num_kv_heads=2, hidden=256, max_seq=64)
SEARCHES = ("recursive_programming", "dynamic_programming", "sharding_propagation")
AUTO: dict[str, Any] = {"parallel_mode": "auto_parallel"}
DATA: dict[str, Any] = {"parallel_mode": "data_parallel"}
SEMI: dict[str, Any] = {"parallel_mode": "semi_auto_parallel"}
LEVELS = ("level1", "level2", "level3")
OF_STEPS = ("mesh",)
"""Names in a set that are options of a step."""
ACCEPTED_ONCE = ("group_ckpt_save_file", "optimizer_weight_shard_aggregated_save", "communi_parallel_mode", "strategy_ckpt_load_file")
"""Options whose default is the only value, or whose value is a file that another run writes."""

SETS: tuple[dict[str, Any], ...] = (
    {"parallel_mode": "stand_alone", "device_num": 1, "global_rank": 0},
    {"parallel_mode": "stand_alone", "grad_accumulation_step": 2},
    *({**mode} for mode in (DATA, SEMI, {"parallel_mode": "hybrid_parallel"})),
    *({**AUTO, "search_mode": search} for search in SEARCHES),
    {**AUTO, "auto_parallel_search_mode": "recursive_programming"},
    {**AUTO, "sharding_propagation": True},
    *({**mode, "mesh": {"data": 1, "model": 1}} for mode in (DATA, SEMI, AUTO)),
    {**DATA, "gradients_mean": True, "gradient_fp32_sync": False, "loss_repeated_mean": False},
    {**DATA, "parameter_broadcast": True},
    {**AUTO, "parameter_broadcast": True},
    {**SEMI, "full_batch": True},
    {**SEMI, "dataset_strategy": "full_batch"},
    {**AUTO, "dataset_strategy": "data_parallel"},
    *({**DATA, "enable_parallel_optimizer": True, "parallel_optimizer_config": {"optimizer_level": level}} for level in LEVELS),
    {**AUTO, "enable_parallel_optimizer": True, "optimizer_weight_shard_size": 1},
    {**DATA, "enable_parallel_optimizer": True, "grad_accumulation_step": 2},
    {**AUTO, "enable_alltoall": True, "mem_coeff": 0.5},
    {**DATA, "all_reduce_fusion_config": [2, 5]},
    {**AUTO, "all_reduce_fusion_config": [2, 5]},
    {**DATA, "comm_fusion": {"allreduce": {"mode": "size", "config": 1}}},
    {**DATA, "comm_fusion": {"allreduce": {"mode": "index", "config": [2, 5]}}},
    {**DATA, "comm_fusion": {"allgather": {"mode": "size", "config": 2}, "reducescatter": {"mode": "size", "config": 2}}},
    {**DATA, "comm_fusion": {"openstate": False}},
    {**AUTO, "grad_accumulation_step": 2},
    {**AUTO, "pipeline_stages": 1, "auto_pipeline": True, "pipeline_segments": 1},
    {**AUTO, "pipeline_config": {"pipeline_scheduler": "gpipe"}},
    {**AUTO, "strategy_ckpt_save_file": "{scratch}/strategies.json"},
    {**AUTO, "strategy_ckpt_config": {"save_file": "{scratch}/of_config.json", "only_trainable_params": False}},
)

Program = Callable[[], tuple[Any, tuple[Any, ...], Callable[[Any], Any]]]
"""Makes a step, its arguments, and what compiles it for one device without spmdctx."""


def decoder() -> tuple[Any, tuple[Any, ...], Callable[[Any], Any]]:
    """A decoder of nnx with AdamW, through `spmdctx.value_and_grad`."""
    from flax import nnx

    model, optimizer = create(CONFIG)
    tokens = np.random.default_rng(1).integers(CONFIG.vocab_size, size=(8, CONFIG.max_seq + 1)).astype(np.int32)
    return train_step, (model, optimizer, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}), nnx.jit


def zoo(name: str, flavor: str) -> Program:
    """A step of the zoo."""

    def program() -> tuple[Any, tuple[Any, ...], Callable[[Any], Any]]:
        one = case(name, flavor)
        step, args = one.make(UNSPLIT, np.float32)
        return step, args, one.jit

    return program


PROGRAMS: dict[str, Program] = {"decoder-nnx": decoder, "mlp-pytree": zoo("mlp", "pytree"), "cnn-linen": zoo("cnn", "linen")}


def results_of(program: Program, wrap: Callable[[Any, Callable[[Any], Any]], Any]) -> tuple[list[np.ndarray], Any, tuple[Any, ...]]:
    """Leaves of the last result and of the state after `CALLS` calls, the step, and its last arguments."""
    from flax import nnx

    fn, args, jit = program()
    step = wrap(fn, jit)
    result: Any = None
    for _ in range(CALLS):
        result = step(*args)
        if jit is not nnx.jit:
            args = (result[0], *args[1:])
    state = nnx.state(args[:2]) if jit is nnx.jit else None
    return (
        [np.asarray(leaf) for leaf in jax.tree.leaves((result, state)) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)],
        step,
        args,
    )


def compared(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Largest difference over the largest magnitude of its array; infinite if shapes or dtypes differ."""
    if [(leaf.shape, leaf.dtype) for leaf in found] != [(leaf.shape, leaf.dtype) for leaf in expected]:
        return float("inf")
    pairs = [(one.astype(np.float64), other.astype(np.float64)) for one, other in zip(found, expected, strict=True) if one.size]
    return max(float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-3)) for one, other in pairs)


def row_of(program: Program, options: dict[str, Any], expected: list[np.ndarray], scratch: str) -> tuple[str, bool]:
    """What one set of options gives, and whether it is right."""
    context = {name: _placed(value, scratch) for name, value in options.items() if name not in OF_STEPS}
    of_step = {name: options[name] for name in OF_STEPS if name in options}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with spmdctx.auto_parallel_context(**context):
                found, step, args = results_of(program, lambda fn, _: spmdctx.parallel(fn, **of_step))
                audit = step.audit(*args)
    except Exception as error:  # a set that fails is a row too
        return f"{type(error).__name__}: {str(error).splitlines()[0]}", False
    difference = compared(found, expected)
    right = difference <= TOLERANCE and audit.ok
    return f"{difference:.1e}  audit {'ok' if audit.ok else 'NO'}", right


def _placed(value: Any, scratch: str) -> Any:
    if isinstance(value, dict):
        return {name: _placed(one, scratch) for name, one in value.items()}
    return value.replace("{scratch}", scratch) if isinstance(value, str) else value


def missing() -> list[str]:
    """Options of the context that no set has."""
    used = {name for options in SETS for name in options}
    return sorted({option.name for option in OPTIONS} - used - set(ACCEPTED_ONCE))


def main() -> int:
    """Runs the sets that the arguments choose."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX", help="programs and options whose text it matches")
    arguments = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    device = jax.devices()[0]
    print(f"{datetime.date.today()}  {device.device_kind}, Python {platform.python_version()}, jax {jax.__version__}", flush=True)
    failed = count = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, program in PROGRAMS.items():
            chosen = [options for options in SETS if re.search(arguments.only, f"{name} {options}")]
            if not chosen:
                continue
            expected, _, _ = results_of(program, lambda fn, jit: jit(fn))
            for options in chosen:
                start = time.perf_counter()
                text, right = row_of(program, options, expected, scratch)
                count, failed = count + 1, failed + (not right)
                print(f"{'' if right else 'WRONG '}{name:12} {time.perf_counter() - start:5.1f} s  {text:40} {options}", flush=True)
    left = missing()
    print(f"{count} runs, {failed} wrong; options in no set: {', '.join(left) or 'none'}")
    return int(bool(failed or left))


if __name__ == "__main__":
    sys.exit(main())
