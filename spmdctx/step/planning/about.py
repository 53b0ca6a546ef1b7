"""What a plan was made for and by: names, versions, and figures of the step and the machine that its file does not hold."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from spmdctx.ir.graph import Op
from spmdctx.ir.primitives import KERNELS, MATRIX_PRODUCTS
from spmdctx.machine.presets import rated_flops_per_s
from spmdctx.plan.data import About
from spmdctx.trace.build.program import ManualRegion, Program
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.scope.settings import Settings

_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
"""The packages that compile for GPUs; jaxlib compiles for CPUs, and the package that a TPU's topology names for TPUs."""


def about_of(program: Program, captured: Captured, settings: Settings) -> About:
    """Returns what the plan of a captured step was made for and by."""
    topology = settings.topology
    return About(
        step=captured.name,
        model=captured.model,
        versions=versions(topology.compiler.version),
        region_flops=sum(map(flops_of_region, program.manual)),
        device_bytes=topology.memory_bytes,
        rated_flops_per_s=rated_flops_per_s(topology),
    )


@cache
def versions(compiler: str) -> tuple[tuple[str, str], ...]:
    """Returns the versions of spmdctx, jax, jaxlib and the package that a topology's `compiler`, such as "jaxlib 0.10.2", is."""
    name = compiler.partition(" ")[0]
    names = dict.fromkeys(("jax", "jaxlib", *(_PLUGINS if name == "CUDA" else (name,))))
    known = [(one, _version(one)) for one in names]
    return ("spmdctx", str(sys.modules["spmdctx"].__version__)), *((one, number) for one, number in known if number)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def flops_of_region(region: ManualRegion) -> int:
    """Returns the operations of the matrix products inside a shard_map, whose body each device runs, on all devices."""
    devices = math.prod(size for _, size in region.mesh_axes)
    inner = sum(map(flops_of_region, region.body.manual))
    return region.repeats * devices * (flops_of_products(region.body.graph.ops) + inner)


def flops_of_products(ops: Iterable[Op]) -> int:
    """Returns the operations of the matrix products among some ops."""
    return sum(op.flops * op.repeats for op in ops if op.primitive in MATRIX_PRODUCTS or op.primitive in KERNELS)
