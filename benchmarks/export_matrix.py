"""Exports every model of the test zoo as a module for JAX alone, and compares it with the step's own compiled program.

    python -m benchmarks.export_matrix [--backends cpu,tpu,gpu] [--models mlp,ssm] [--search-mode dynamic_programming]

counts collectives by kind, axes, bytes and repeats in both, on 8 devices. On CPU both run too, and their results are compared bit by bit.
TPU and GPU programs are compiled without chips; for GPU Triton's matrix products are off.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax

from spmdctx.lowering.compile_only import gpu_devices, tpu_devices
from tests.step.export.exported import compared
from tests.zoo import CASES

_BACKENDS = {"cpu": (jax.devices, "cpu"), "tpu": (lambda: tpu_devices("v5e:2x4"), "tpu-v5e"), "gpu": (lambda: gpu_devices(8), "h100")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per model and backend, then how many are equal."""
    parser = argparse.ArgumentParser(description="Compares exported modules with the steps that they were exported from.")
    parser.add_argument("--backends", default="cpu,tpu,gpu")
    parser.add_argument("--models", default="")
    parser.add_argument("--search-mode", default="dynamic_programming")
    given = parser.parse_args(arguments)
    chosen = [one for one in CASES if not given.models or one.name in given.models.split(",")]
    num_equal = num_run = 0
    with tempfile.TemporaryDirectory() as folder:
        for backend in given.backends.split(","):
            make, topology = _BACKENDS[backend]
            devices = make()
            for one in chosen:
                start, path = time.perf_counter(), Path(folder) / f"{one.name}.py"
                own, others, is_same = compared(one, path, devices, topology, runs=backend == "cpu", search_mode=given.search_mode)
                is_equal = own == others and is_same
                num_run, num_equal = num_run + 1, num_equal + is_equal
                counts = f"{sum(own.values())} and {sum(others.values())} collectives, {len(path.read_text().splitlines())} lines"
                verdict = "equal" if is_equal else "DIFFERENT"
                print(f"{backend:4} {one.name:16} {one.flavor:7} {verdict:9} {counts}, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{num_equal} of {num_run} equal")


if __name__ == "__main__":
    main()
