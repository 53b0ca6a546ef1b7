"""What `spmdctx.data.shard` costs over `jax.device_put` by hand, and what reading ahead gains.

    python -m benchmarks.data_loading [--batches 60]
    spmdctx launch -n 2 --devices-per-process 4 -m benchmarks.data_loading

Batches by hand and by `data.shard` are made in turn in one process, so that both see the same machine; the fastest and the median
of each are printed. Then three loops train with a source that waits for its medium, and the pixels that half of the devices hold
are counted. On several processes it is the time that they take to agree on a batch.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np

import spmdctx
from spmdctx import communication
from spmdctx.data.blocks import part_of

Batch = dict[str, Any]
READ_S = 0.03


def tokens(rows: int, length: int) -> Batch:
    return {"tokens": np.ones((rows, length), np.int32), "targets": np.ones((rows, length), np.int32)}


def images(rows: int) -> Batch:
    return {"image": np.ones((rows, 224, 224, 3), np.float32), "label": np.ones((rows,), np.int32)}


def total(scale: Any, batch: Batch) -> Any:
    return scale * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(batch))


def planned(batch: Batch, strategy: Any) -> Any:
    step = spmdctx.parallel(total, parallel_mode="semi_auto_parallel", dataset_strategy=strategy)
    step.plan(np.float32(1), batch)
    return step


def overhead(name: str, batch: Batch, strategy: Any, count: int) -> None:
    """Seconds per batch: by hand, and by data.shard with nothing read ahead."""
    step = planned(batch, strategy)
    shardings = step.in_shardings(np.float32(1), batch)[1]
    ours = spmdctx.data.shard(forever(batch), step, prefetch=0)
    times: dict[str, list[float]] = {"hand": [], "shard": []}
    ways: dict[str, Callable[[], Any]] = {"hand": lambda: jax.device_put(batch, shardings), "shard": lambda: next(ours)}
    for number in range(count + 5):
        for way in sorted(ways, reverse=number % 2 == 0):
            start = time.perf_counter()
            jax.block_until_ready(ways[way]())
            if number >= 5:
                times[way].append(time.perf_counter() - start)
    ours.close()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(batch)) / 2**20
    print(f"| {name} | {size:.2f} MiB | {spread(times['hand'])} | {spread(times['shard'])} |")


def spread(seconds: list[float]) -> str:
    """The fastest and the median."""
    return f"{min(seconds) * 1e3:.2f} ({statistics.median(seconds) * 1e3:.2f}) ms"


def forever(batch: Batch) -> Iterator[Batch]:
    while True:
        yield batch


def slow(batch: Batch, count: int) -> Iterator[Batch]:
    """A source that waits for its medium."""
    for _ in range(count):
        time.sleep(READ_S)
        yield batch


def reading_ahead(count: int) -> None:
    """Seconds per step of a training loop: the source by hand, and data.shard without and with reading ahead."""
    batch = tokens(64, 256)
    step = planned(batch, ((8, 1), (8, 1)))
    shardings = step.in_shardings(np.float32(1), batch)[1]
    ways: dict[str, Callable[[], Iterable[Batch]]] = {
        "by hand": lambda: (jax.device_put(one, shardings) for one in slow(batch, count)),
        "data.shard, prefetch=0": lambda: spmdctx.data.shard(slow(batch, count), step, prefetch=0),
        "data.shard, prefetch=2": lambda: spmdctx.data.shard(slow(batch, count), step),
    }
    print(f"\nReading a batch takes {READ_S * 1e3:.0f} ms of waiting, and so does a step, as one on an accelerator would.\n")
    print("| loop | time per step |\n|---|---|")
    for name, make in ways.items():
        start = time.perf_counter()
        for one in make():
            step(np.float32(1), one).block_until_ready()
            time.sleep(READ_S)
        print(f"| {name} | {(time.perf_counter() - start) / count * 1e3:.1f} ms |")


def agreements(count: int) -> None:
    """Seconds per batch where every process gives its rows, and where each gives whole batches."""
    batch = tokens(64, 256)
    own = jax.tree.map(lambda leaf: leaf[: 64 // jax.process_count()], batch)
    step = planned(batch, ((8, 1), (8, 1)))
    for name, given, whole in (("own rows", own, False), ("whole batches", batch, True)):
        times = []
        for _ in spmdctx.data.shard([given] * count, step, whole=whole, prefetch=0):
            times.append(time.perf_counter())
        if jax.process_index() == 0:
            print(f"{name}: {spread([after - before for before, after in itertools.pairwise(times)])} a batch")
    communication.release()


def shares() -> None:
    """The share of an image that the first half of the devices holds, as the processes of a job would."""
    shape = (8, 1024, 1024)
    print("\n| dataset_strategy | blocks of 4 of 8 devices | their pixels |\n|---|---|---|")
    for strategy in ((1, 2, 4), (1, 4, 2), (8, 1, 1), (1, 1, 8), (1, 1, 1)):
        step = spmdctx.parallel(lambda scale, image: scale * image.sum(), parallel_mode="semi_auto_parallel", dataset_strategy=(strategy,))
        (_, sharding) = step.in_shardings(np.float32(1), jax.ShapeDtypeStruct(shape, np.float32))
        held = {bounds for bounds, devices in part_of(sharding, shape).blocks if any(device.id < 4 for device in devices)}
        pixels = sum(np.prod([stop - start for start, stop in bounds]) for bounds in sorted(held))
        print(f"| {strategy} | {len(held)} | {100 * pixels / np.prod(shape):.0f} % |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=60, help="batches per measurement")
    count = parser.parse_args().batches
    communication.init()
    print(
        f"{datetime.date.today()}  {platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, {len(jax.devices())} CPU devices\n"
    )
    if jax.process_count() > 1:
        agreements(count)
        return
    print("| batch | size | device_put by hand | data.shard |\n|---|---|---|---|")
    overhead("tokens [32, 512], rows split", tokens(32, 512), ((8, 1), (8, 1)), count)
    overhead("tokens [256, 4096], rows split", tokens(256, 4096), ((8, 1), (8, 1)), count)
    overhead("images [32, 224, 224, 3], rows split", images(32), ((8, 1, 1, 1), (8,)), count)
    overhead("images [32, 224, 224, 3], (1, 2, 4, 1)", images(32), ((1, 2, 4, 1), (1,)), count)
    overhead("images [32, 224, 224, 3], whole", images(32), "full_batch", count)
    reading_ahead(count)
    shares()


if __name__ == "__main__":
    main()
