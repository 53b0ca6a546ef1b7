"""The arguments that choose the program, how it is planned, and the machine to compile for."""

from __future__ import annotations

import argparse

from spmdctx.cli.parser.values import given, positive, positive_number
from spmdctx.context.docs import add_context_arguments, offer
from spmdctx.machine.presets import PRESETS as MACHINES
from spmdctx.models.presets import DECODERS

DEFAULT_DEVICES = 8
"""CPU devices of a single process, where nothing else says how many."""

LEAST_BATCH_SIZE = 24
_BATCH_SIZE_HELP = f"sequences per step (default: the least multiple of the devices from {LEAST_BATCH_SIZE} on)"
_PROGRAM_HELP = "your own instead of a decoder: FUNCTION() returns (step, arguments) (default: none; of a module alone, `program`)"
_REMAT_HELP = "recompute activations in the backward pass (default: of models with a billion parameters or more)"
_STRATEGIES_HELP = (
    "shard() strategies of the model: megatron (default in semi_auto_parallel), pins (two weights per layer, the rest follows; "
    "default where sharding_propagation searches) or none (default otherwise)"
)
_STRATEGY_HELP = (
    "a ready strategy of the library for this model and --device-num, with its program and context; or a file: YAML strategies, or a plan "
    "(default: none)"
)
_TOPOLOGY_HELP = f"machine that costs are predicted for: {', '.join(MACHINES)}, or a file of calibrate (default: that of the devices)"
_CONTEXT_DEFAULTS = {
    "parallel_mode": "'auto_parallel'",
    "device_num": f"the devices that are there; on a CPU {DEFAULT_DEVICES}, or as many as JAX_NUM_CPU_DEVICES says",
}
_TARGET_HELP = "cpu, or a compile-only machine: tpu-v5e:2x4, tpu-v5p:2x2x2, tpu-v6e:2x4, h100:8 (default: %(default)s)"


def add_program_arguments(parser: argparse.ArgumentParser, *, only_decoders: bool = False) -> None:
    """Adds the arguments that choose the program and how it is planned; a command may be for decoders alone."""
    program = parser.add_argument_group("program")
    model = program.add_argument("--model", default="tiny", help=f"decoder to train: {', '.join(DECODERS)} (default: %(default)s)")
    offer(model, DECODERS)
    if only_decoders:
        parser.set_defaults(program=None)
    else:
        program.add_argument("--program", type=given, metavar="MODULE:FUNCTION", help=_PROGRAM_HELP)
    program.add_argument("--layers", type=positive, metavar="N", help="number of layers (default: the model's)")
    program.add_argument("--batch-size", type=positive, metavar="N", help=_BATCH_SIZE_HELP)
    program.add_argument("--seq", type=positive, metavar="N", help="tokens per sequence (default: the model's)")
    program.add_argument("--scan-layers", action=argparse.BooleanOptionalAction, help="run the layers by one scan (default: the model's)")
    program.add_argument("--remat", action=argparse.BooleanOptionalAction, help=_REMAT_HELP)
    program.add_argument("--dtype", choices=("float32", "bfloat16"), help="of activations (default: the model's)")
    planning = parser.add_argument_group("planning")
    planning.add_argument(
        "--config", type=given, metavar="FILE.yaml", help="options of a file, by MindFormers' keys or their own names (default: none)"
    )
    planning.add_argument("--strategies", choices=("auto", "none", "megatron", "pins"), default="auto", help=_STRATEGIES_HELP)
    planning.add_argument("--strategy", type=given, metavar="hand|searched|FILE", help=_STRATEGY_HELP)
    planning.add_argument("--model-parallel", type=positive, metavar="N", help="slices of the weights in them (default: 2 or 1)")
    offer(planning.add_argument("--topology", type=given, metavar="NAME", help=_TOPOLOGY_HELP), MACHINES)
    memory = planning.add_mutually_exclusive_group()
    memory.add_argument("--memory-gib", type=positive_number, metavar="N", help="memory budget per device (default: the machine's)")
    memory.add_argument("--memory-bytes", type=positive, metavar="N", help="the same in bytes")
    planning.add_argument("--strict", action="store_true", help="refuse ops without a sharding rule instead of replicating them")
    add_context_arguments(parser, _CONTEXT_DEFAULTS)


def add_target_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that chooses the machine to compile for."""
    parser.add_argument("--target", default="cpu", help=_TARGET_HELP)
