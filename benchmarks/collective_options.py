"""What enable_alltoall and the fusion of collectives do to compiled programs, on compile-only TPU and GPU meshes and on CPU.

    python -m benchmarks.collective_options all-to-all cpu,tpu,gpu [--models moe,gshard] [--modes semi_auto_parallel,...] [--allow]

compiles every model of the test zoo on 8 devices and counts its all-to-alls. For GPU Triton's matrix products are off: XLA 0.10.2 finds
no tiles for some of the zoo's odd sizes.
"""

from __future__ import annotations

import argparse
import os
import re
import time
import warnings
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import numpy as np

import spmdctx
from spmdctx.lowering.compile_only import gpu_devices, tpu_devices
from tests.zoo import CASES, Case

_BACKENDS = {"cpu": (jax.devices, "cpu"), "tpu": (lambda: tpu_devices("v5e:2x4"), "tpu-v5e"), "gpu": (lambda: gpu_devices(8), "h100")}
_MODES = ("data_parallel", "semi_auto_parallel", "auto_parallel:sharding_propagation", "auto_parallel:dynamic_programming")


def count(one: Case, backend: str, mode: str, allowed: bool) -> tuple[int, int]:
    """All-to-alls in the plan, and in the compiled program."""
    name, _, search = mode.partition(":")
    split = one.split("strategies" if name == "semi_auto_parallel" else "none", 8)
    step, args = one.make(split, np.float32)
    devices, topology = _BACKENDS[backend]
    options: dict[str, Any] = {"search_mode": search} if search else {}
    if name == "semi_auto_parallel":
        options["dataset_strategy"] = one.dataset_strategy(split, args)
    parallel = spmdctx.parallel(step, parallel_mode=name, devices=devices(), topology=topology, enable_alltoall=allowed, **options)
    others = {"xla_gpu_enable_triton_gemm": False} if backend == "gpu" else None
    text = parallel.lower(*args).compile(compiler_options=others).as_text() or ""
    planned = sum(row.kind == "all_to_all" for row in parallel.plan(*args).collectives)
    return planned, len(re.findall(r" (?:ragged-)?all-to-all(?:-start)?\(", text))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per model, mode and backend."""
    parser = argparse.ArgumentParser(description="Counts all-to-alls in the compiled programs of the test zoo.")
    parser.add_argument("what", choices=["all-to-all"])
    parser.add_argument("backends")
    parser.add_argument("--models", default="")
    parser.add_argument("--modes", default=",".join(_MODES))
    parser.add_argument("--allow", action="store_true")
    given = parser.parse_args(arguments)
    chosen = {one.name: one for one in reversed(CASES) if not given.models or one.name in given.models.split(",")}
    # What models and options warn of is not what is measured.
    warnings.simplefilter("ignore")
    for backend in given.backends.split(","):
        for name, one in reversed(chosen.items()):
            for mode in given.modes.split(","):
                start = time.perf_counter()
                planned, compiled = count(one, backend, mode, given.allow)
                print(
                    f"{backend:4} {name:16} {mode:36} planned {planned}  compiled {compiled}  {time.perf_counter() - start:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
