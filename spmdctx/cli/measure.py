"""Measures the available devices as a Topology to plan with: matrix products, memory, and every collective."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmdctx.errors import UnsupportedError
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.collectives import collective_price
from spmdctx.machine.devices import default_topology
from spmdctx.machine.topology import Topology

AXIS = "devices"
_LEAST_S = 2e-3
"""The least duration of a measurement on CPUs; shorter runs are repeated."""
_LEAST_QUEUED_S = 0.05
"""The same on accelerators, which are given the next call while they run the last."""
_CPU_MEGABYTES, _MEGABYTES = 64, 1024
"""Sizes that no cache holds; on accelerators, also what takes longer than a call's launch."""


class MeasuredCollective(NamedTuple):
    """A collective over all devices, as `fixed_s + payload_bytes * s_per_byte`; the payload is counted as in `ir.collective.Collective`."""

    kind: str
    fixed_s: float
    s_per_byte: float


class Calibration(NamedTuple):
    """The measurements. `topology` holds them, with the figures that cannot be measured taken from the devices' preset."""

    topology: Topology
    collectives: tuple[MeasuredCollective, ...]
    notes: tuple[str, ...]


def calibrate(devices: Sequence[Any] | None = None, *, size: int = 8192, megabytes: int | None = None, repeats: int = 5) -> Calibration:
    """Measures devices.

    Args:
        devices: Those to measure together; all of `jax.devices()` unless given.
        size: Rows and columns of the matrix product, made smaller where it takes long (CPUs).
        megabytes: Size of the tensor that is copied, and the largest payload of a collective; 64 on CPUs, else 1024, unless given.
        repeats: Timings, of which the shortest counts.

    Raises:
        UnsupportedError: Devices that can only be compiled for.
    """
    used = list(jax.devices() if devices is None else devices)
    base, notes = default_topology(used[0])
    timer = _Timer(repeats, queues=used[0].platform != "cpu")
    megabytes = megabytes or (_CPU_MEGABYTES if used[0].platform == "cpu" else _MEGABYTES)
    half = jnp.float32 if used[0].platform == "cpu" else jnp.bfloat16
    try:
        narrow, wide = (_product_flops_per_s(used[0], dtype, size, timer) for dtype in (half, jnp.float32))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UnsupportedError("The devices cannot run, so they cannot be measured.", got=str(used[0])) from error
    stats = used[0].memory_stats() or {}
    measured = dataclasses.replace(
        base,
        device=f"{base.device}-measured",
        peak_flops_per_s=max(narrow, wide),
        float32_flops_per_s=wide,
        vector_flops_per_s=_vector_flops_per_s(used[0], megabytes, timer),
        memory_bytes=int(stats.get("bytes_limit", base.memory_bytes)),
        memory_bytes_per_s=_memory_bytes_per_s(used[0], megabytes, timer),
        source=f"measured by spmdctx calibrate on {len(used)} x {used[0].device_kind}; network and wiring as {base.device}",
    )
    rows = tuple(_collectives(used, megabytes, timer)) if len(used) > 1 else ()
    if not rows:
        notes = (*notes, "One device has nobody to talk to: the wires' figures are those of the preset.")
    return Calibration(_with_wires(measured, rows, len(used)), rows, notes)


class _Timer:
    """Seconds of a call that returns an array: the shortest of several measurements, each long enough to be timed.

    Where a device `queues` calls, the next one is launched while the last one runs, so that launches take no time of their own.
    """

    def __init__(self, repeats: int, *, queues: bool = False) -> None:
        self.repeats = repeats
        self.queues = queues
        self._least_s = _LEAST_QUEUED_S if queues else _LEAST_S

    def __call__(self, run: Callable[[], Any]) -> float:
        jax.block_until_ready(run())
        count, best = 1, float("inf")
        for _ in range(self.repeats):
            start = time.perf_counter()
            last = None
            for _ in range(count):
                last = run()
                if not self.queues:
                    # Each call is awaited: CPU devices that run ahead of each other can deadlock.
                    jax.block_until_ready(last)
            jax.block_until_ready(last)
            spent = time.perf_counter() - start
            best = min(best, spent / count)
            count = max(count, min(64, round(self._least_s / max(spent / count, 1e-7))))
        return best


def _product_flops_per_s(device: Any, dtype: Any, size: int, timer: _Timer) -> float:
    if device.platform == "cpu":
        size = min(size, 512)
    # Zeros and ones take less power, and so run faster, than what training multiplies.
    square = jax.device_put(jax.random.normal(jax.random.key(0), (size, size), dtype), device)
    product = jax.jit(lambda x: x @ x)
    return 2 * size**3 / timer(lambda: product(square))


def _memory_bytes_per_s(device: Any, megabytes: int, timer: _Timer) -> float:
    values = jax.device_put(jnp.ones((megabytes * 2**18,), jnp.float32), device)
    shifted = jax.jit(lambda x: x + 1)
    return float(2 * values.nbytes / timer(lambda: shifted(values)))


def _vector_flops_per_s(device: Any, megabytes: int, timer: _Timer) -> float:
    """Measures a chain of multiply-adds that is long enough to outweigh memory traffic."""
    length = 256
    values = jax.device_put(jnp.full((megabytes * 2 ** (12 if device.platform == "cpu" else 16),), 0.5, jnp.float32), device)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(length):
            x = x * x + 0.25
        return x

    compiled = jax.jit(chain)
    return float(2 * length * values.size / timer(lambda: compiled(values)))


_BODY_OF_KIND: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all_reduce": lambda x: lax.psum(x, AXIS),
    "all_gather": lambda x: lax.all_gather(x, AXIS, tiled=True),
    "reduce_scatter": lambda x: lax.psum_scatter(x, AXIS, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
    "collective_permute": lambda x: lax.ppermute(
        x, AXIS, [(index, (index + 1) % lax.axis_size(AXIS)) for index in range(lax.axis_size(AXIS))]
    ),
}


def _collectives(devices: Sequence[Any], megabytes: int, timer: _Timer) -> Iterator[MeasuredCollective]:
    """Measures each collective at a small and at a large payload, and yields the line through both."""
    mesh = Mesh(np.array(devices, dtype=object), (AXIS,), axis_types=(AxisType.Auto,))
    count = len(devices)
    for kind, body in _BODY_OF_KIND.items():
        spec = PartitionSpec(AXIS)
        run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        points = []
        for payload in (2**10 * count, megabytes * 2**20 // 4 // count * count):
            # Floats of one device: of an all_gather's operand its share of the payload, else the whole payload.
            local = payload // 4 // count * (1 if kind == "all_gather" else count)
            whole = jax.device_put(jnp.ones((local * count,), jnp.float32), NamedSharding(mesh, spec))
            points.append((4 * local * (count if kind == "all_gather" else 1), timer(partial(run, whole))))
        (small, short_s), (large, long_s) = points
        s_per_byte = max(long_s - short_s, 0.01 * long_s) / (large - small)
        yield MeasuredCollective(kind, max(short_s - small * s_per_byte, 1e-9), s_per_byte)


def _with_wires(measured: Topology, rows: Sequence[MeasuredCollective], num_devices: int) -> Topology:
    """Sets the link bandwidth and latency nearest to the measurements: the medians over the collectives."""
    if not rows:
        return measured
    mesh = LogicalMesh.of({AXIS: num_devices})
    unit = dataclasses.replace(measured, latency_s=1.0, link_bytes_per_s=1.0, network_latency_s=1.0, network_bytes_per_s=1.0)
    latencies, rates = [], []
    for row in rows:
        fixed, per_byte = collective_price(row.kind, (AXIS,), mesh, unit)
        latencies.append(row.fixed_s / fixed)
        rates.append(per_byte / row.s_per_byte)
    latency_s, link = statistics.median(latencies), statistics.median(rates)
    return dataclasses.replace(
        measured,
        latency_s=latency_s,
        link_bytes_per_s=link,
        network_latency_s=max(latency_s, measured.network_latency_s),
        network_bytes_per_s=min(link, measured.network_bytes_per_s),
    )
