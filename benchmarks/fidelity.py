"""How true plans are: a four-layer Llama step compiled for TPU and GPU meshes that are not there, held against its plan.

    python -m benchmarks.fidelity [--target tpu-v5e] [--strategy megatron] [--scan] [--dtype bfloat16]

Needs libtpu and JAX's CUDA plugin; a target whose compiler is not installed is left out by name. Per target and strategy:
planned and compiled megabytes per device and step, the share of the planned bytes found, the share found in as many bytes
as planned, and the share of the compiled bytes that no plan foresaw. Exits with 1 where less than 95 % is found, or more
than 5 % was not planned.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

from spmdctx.audit import AuditReport
from spmdctx.audit.data import MAX_UNPLANNED_SHARE, MIN_FOUND_SHARE
from spmdctx.errors import UnsupportedError
from spmdctx.lowering.compile_only import gpu_devices, tpu_devices
from spmdctx.models import DecoderConfig
from tests.zoo.llama import BATCH, STRATEGIES, audit, config, exact_share

TARGETS = {"tpu-v5e": lambda: tpu_devices("v5e:2x4"), "h100": lambda: gpu_devices(8)}
PACKAGES = ("jax", "jaxlib", "flax", "libtpu", "jax-cuda12-plugin")


def main() -> int:
    """Prints the table; 0 where every row is within the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--strategy", choices=STRATEGIES, action="append")
    parser.add_argument("--scan", action="store_true", help="one scan over the layers instead of four in a row")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    arguments = parser.parse_args()
    sizes = config(scan_layers=arguments.scan, dtype=arguments.dtype)
    _print_head(sizes)
    rows = [_row(target, strategy, sizes) for target in arguments.target or TARGETS for strategy in arguments.strategy or STRATEGIES]
    return 0 if all(rows) else 1


def _print_head(sizes: DecoderConfig) -> None:
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}")
    layers = f"{sizes.num_layers} layers {'scanned' if sizes.scan_layers else 'unrolled'}, remat"
    shape = f"width {sizes.width}, hidden {sizes.hidden}, heads {sizes.num_heads}, vocabulary {sizes.vocab_size}"
    print(f"Llama step, AdamW: {layers}, {shape}, batch {BATCH} x {sizes.max_seq}, {sizes.dtype}; 8 devices\n")
    print(f"{'target':<8} {'strategy':<19} {'planned MB':>10} {'found':>7} {'exact':>7} {'compiled MB':>11} {'unplanned':>9} {'s':>6}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _row(target: str, strategy: str, sizes: DecoderConfig) -> bool:
    start = time.perf_counter()
    try:
        devices = TARGETS[target]()
    except UnsupportedError as error:
        print(f"{target:<8} {strategy:<19} left out: {error.summary}")
        return True
    report = audit(STRATEGIES[strategy], devices, target, sizes)
    print(
        f"{target:<8} {strategy:<19} {report.planned_bytes / 1e6:>10.2f} {report.found_share:>7.2%} {exact_share(report):>7.2%} "
        f"{report.compiled_bytes / 1e6:>11.2f} {report.unplanned_share:>9.2%} {time.perf_counter() - start:>6.1f}",
        flush=True,
    )
    return _is_true(report)


def _is_true(report: AuditReport) -> bool:
    return min(report.found_share, exact_share(report)) >= MIN_FOUND_SHARE and report.unplanned_share <= MAX_UNPLANNED_SHARE


if __name__ == "__main__":
    sys.exit(main())
