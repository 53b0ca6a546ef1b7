"""The machines known by name: the published figures of their chips and links, and how their compilers behave."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import replace
from typing import Any

from spmdctx.errors import ContextError, message, shown
from spmdctx.machine.topology import FILE_SUFFIXES, Compiler, Interconnect, Topology, read_topology

MIB, GIB = 2**20, 2**30

_V5E_GATHER_OVERLAP = 0.45
"""The share of weight gathers that hides on v5e, between ZeRO-3 and searched plans (`machine.xla.overlap`). On v5p and v6e none does.

Measured on: scheduled programs of eight models for v5e:2x4 (libtpu 0.0.42).
Checked by: benchmarks/speedup_table.py
"""

_GPU_SHARE = 0.75
"""The part of a GPU's memory that JAX takes for its arrays, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise. On a TPU the compiler
has the 16, 95 and 32 GB of the data sheets, less what it reserves: 15.75, 95.74 and 31.25 GiB.

Measured on: v5e, v5p and v6e (libtpu 0.0.42).
Checked by: tests/step/test_out_of_memory.py
"""

_GPU_PRODUCTS, _GPU_MEMORY, _GPU_VECTOR = 0.806, 0.88, 0.48
"""The parts of a data sheet's rates that large products, copies and element-wise arithmetic reach: 797 of 989 TFLOP/s on random values,
4.23 of 4.8 TB/s, 32.3 of 67 TFLOP/s, which counts a multiplication and an addition as one.

Measured on: one H200 by `spmdctx calibrate` (jax 0.11.2, CUDA 13). H100 and A100 are taken to be alike.
Checked by: benchmarks/device_fidelity.py
"""

_GPU_KERNELS: dict[str, Any] = {"kernel_s": 1.5e-6, "gathered_share": 0.7, "unaligned_share": 0.4}
"""What kernels of GPUs take besides their bytes at the memory's rate: the median excess of those that move little, and the rates of the
others.

Measured on: nine programs on one H200 by JAX's profiler (jax 0.11.2, CUDA 13). H100 and A100 are taken to be alike.
Checked by: benchmarks/device_kinds.py
"""

TPU = Compiler(
    version="libtpu 0.0.42",
    scatters_over_all=False,
    scatters_strictly=True,
    sinks_slices=True,
    narrows_matrix_operands=True,
    fuses_into_products=True,
    runs_barriers_in_order=True,
)
"""XLA on TPU. The memory that it uses on the chip, and the share of gathers that it hides, are measured for each chip below."""

GPU = Compiler(version="CUDA plugin 0.10.2")
"""XLA on GPU."""

CPU = Compiler(version="jaxlib 0.10.2", merges_partial_sums=False, combines_reductions=False, keeps_barriers=False)
"""XLA on CPU."""


def _fields(compiler: Compiler) -> dict[str, Any]:
    """Returns the fields of a topology that say how its compiler behaves."""
    found = dataclasses.asdict(compiler)
    del found["keeps_barriers"]  # known by the device's name
    return {"compiler_version": found.pop("version"), **found}


_RATED = {"h100": 989e12, "h200": 989e12, "a100": 312e12}
"""The data sheets' rates of GPUs in bfloat16, without sparsity; presets of other devices have theirs."""

PRESETS: dict[str, Topology] = {
    "tpu-v5e": Topology(
        device="tpu-v5e",
        peak_flops_per_s=197e12,
        memory_bytes=int(15.75 * GIB),
        memory_bytes_per_s=819e9,
        latency_s=1e-6,
        link_bytes_per_s=45e9,
        devices_per_host=256,
        network_bytes_per_s=3.125e9,
        network_latency_s=25e-6,
        interconnect=Interconnect.TORUS,
        torus_dims=2,
        ring_side=16,
        vector_flops_per_s=6.1e12,
        matrix_tile=128,
        source="cloud.google.com/tpu/docs/v5e; links: jax-ml.github.io/scaling-book/tpus",
        **_fields(replace(TPU, scratch_bytes=96 * MIB, gather_overlap=_V5E_GATHER_OVERLAP)),
    ),
    "tpu-v5p": Topology(
        device="tpu-v5p",
        peak_flops_per_s=459e12,
        memory_bytes=int(95.74 * GIB),
        memory_bytes_per_s=2765e9,
        latency_s=1e-6,
        link_bytes_per_s=90e9,
        devices_per_host=8960,
        network_bytes_per_s=6.25e9,
        network_latency_s=25e-6,
        interconnect=Interconnect.TORUS,
        torus_dims=3,
        ring_side=4,
        vector_flops_per_s=14.3e12,
        matrix_tile=128,
        source="cloud.google.com/tpu/docs/v5p; links: jax-ml.github.io/scaling-book/tpus",
        **_fields(replace(TPU, scratch_bytes=48 * MIB)),
    ),
    "tpu-v6e": Topology(
        device="tpu-v6e",
        peak_flops_per_s=918e12,
        memory_bytes=int(31.25 * GIB),
        memory_bytes_per_s=1638e9,
        latency_s=1e-6,
        link_bytes_per_s=90e9,
        devices_per_host=256,
        network_bytes_per_s=12.5e9,
        network_latency_s=25e-6,
        interconnect=Interconnect.TORUS,
        torus_dims=2,
        ring_side=16,
        vector_flops_per_s=7.2e12,
        matrix_tile=256,
        source="cloud.google.com/tpu/docs/v6e; links: jax-ml.github.io/scaling-book/tpus",
        **_fields(replace(TPU, scratch_bytes=96 * MIB)),
    ),
    "h100": Topology(
        device="h100",
        peak_flops_per_s=_RATED["h100"] * _GPU_PRODUCTS,
        memory_bytes=int(80e9 * _GPU_SHARE),
        memory_bytes_per_s=3350e9 * _GPU_MEMORY,
        latency_s=2e-6,
        link_bytes_per_s=450e9,
        devices_per_host=8,
        network_bytes_per_s=50e9,
        network_latency_s=10e-6,
        vector_flops_per_s=67e12 * _GPU_VECTOR,
        float32_flops_per_s=494e12 * _GPU_PRODUCTS,
        matrix_tile=16,
        source="NVIDIA H100 SXM data sheet; DGX H100: one 400 Gb/s ConnectX-7 per GPU",
        **_GPU_KERNELS,
        **_fields(GPU),
    ),
    "h200": Topology(
        device="h200",
        peak_flops_per_s=_RATED["h100"] * _GPU_PRODUCTS,
        memory_bytes=112_583_507_968,
        memory_bytes_per_s=4800e9 * _GPU_MEMORY,
        latency_s=2e-6,
        link_bytes_per_s=450e9,
        devices_per_host=8,
        network_bytes_per_s=50e9,
        network_latency_s=10e-6,
        vector_flops_per_s=67e12 * _GPU_VECTOR,
        float32_flops_per_s=494e12 * _GPU_PRODUCTS,
        matrix_tile=16,
        source="NVIDIA H200 SXM data sheet; memory: JAX's own limit on one; DGX H200: one 400 Gb/s ConnectX-7 per GPU",
        **_GPU_KERNELS,
        **_fields(GPU),
    ),
    "a100": Topology(
        device="a100",
        peak_flops_per_s=_RATED["a100"] * _GPU_PRODUCTS,
        memory_bytes=int(80e9 * _GPU_SHARE),
        memory_bytes_per_s=2039e9 * _GPU_MEMORY,
        latency_s=2e-6,
        link_bytes_per_s=300e9,
        devices_per_host=8,
        network_bytes_per_s=25e9,
        network_latency_s=10e-6,
        vector_flops_per_s=19.5e12 * _GPU_VECTOR,
        float32_flops_per_s=156e12 * _GPU_PRODUCTS,
        matrix_tile=16,
        source="NVIDIA A100 80GB SXM data sheet; DGX A100: one 200 Gb/s ConnectX-6 per GPU",
        **_GPU_KERNELS,
        **_fields(GPU),
    ),
    "cpu": Topology(
        device="cpu",
        peak_flops_per_s=100e9,
        memory_bytes=16 * GIB,
        memory_bytes_per_s=20e9,
        latency_s=20e-6,
        link_bytes_per_s=5e9,
        devices_per_host=64,
        network_bytes_per_s=1.25e9,
        network_latency_s=50e-6,
        source="nominal figures for virtual CPU devices, not a machine",
        **_fields(CPU),
    ),
}


def rated_flops_per_s(machine: Topology | str) -> float | None:
    """Returns the rate of matrix products that a device's data sheet gives, None if there is none: of CPUs, and of users' machines."""
    device = (machine if isinstance(machine, str) else machine.device).removesuffix("-measured")
    if device.startswith("tpu") and device in PRESETS:
        return PRESETS[device].peak_flops_per_s
    return _RATED.get(device)


def topology(name: str | os.PathLike[str] | Topology) -> Topology:
    """Returns a preset ("tpu-v5e", "tpu-v5p", "tpu-v6e", "h100", "h200", "a100", "cpu"), the topology in a file, or the one given.

    Args:
        name: A preset, the path of a JSON or YAML file with the fields of a Topology (`spmdctx calibrate` writes one), or a Topology.

    Raises:
        ContextError: No preset has that name, or the file holds no topology.
        OSError: The file cannot be read.
        TypeError: `name` is none of these.
    """
    if isinstance(name, Topology):
        return name
    if not isinstance(name, str | os.PathLike):
        raise TypeError(message("topology must be the name of a preset, a path or a Topology.", got=type(name).__name__))
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is not None:
        return preset
    if os.fspath(name).endswith(FILE_SUFFIXES):
        return read_topology(name)
    raise ContextError(
        f"There is no topology preset called {shown(name)}.",
        need=", ".join(PRESETS),
        fix="or pass a cost.Topology, or the path of a .json or .yaml file",
    )
