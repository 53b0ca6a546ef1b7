"""Run on two processes of four devices: what each reads, and what the batches hold. Writes one file per process into a folder."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import spmdctx
from spmdctx import communication
from spmdctx.step.processes import to_host

ROWS, HEIGHT, WIDTH = 8, 16, 32


class Counted:
    """An array on a slow medium, which counts what is read of it."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.reads, self.pixels = [], 0

    def __getitem__(self, index):
        block = self.array[index]
        self.reads.append([(part.start, part.stop) for part in index])
        self.pixels += block.size
        return block


def forward(scale, image, label):
    return jnp.mean((image * scale).sum(axis=(1, 2)) * label)


def whole(seed, rows=ROWS):
    image = np.random.default_rng(seed).normal(size=(rows, HEIGHT, WIDTH)).astype(np.float32)
    return image, np.arange(rows, dtype=np.float32) + seed


def step_of(strategy, **options):
    step = spmdctx.parallel(forward, parallel_mode="semi_auto_parallel", dataset_strategy=strategy, **options)
    step.plan(np.float32(2), *[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in whole(0)])
    return step


def same(found, want):
    return all(np.array_equal(to_host(array), leaf) for array, leaf in zip(found, want, strict=True))


def halves(mine):
    """(1, 2, 4) on 2 x 4 devices: each process reads the upper or the lower half of the images, in four blocks."""
    step, images = step_of(((1, 2, 4), (1,))), [Counted(whole(seed)[0]) for seed in range(3)]
    batches = [(image, whole(seed)[1]) for seed, image in enumerate(images)]
    results, equal = [], True
    for seed, batch in enumerate(spmdctx.data.shard(batches, step)):
        equal &= same(batch, whole(seed))
        results.append(abs(float(step(np.float32(2), *batch)) - float(forward(2, *whole(seed)))) < 1e-3)
    for image in images:
        rows = {tuple(read[1]) for read in image.reads}
        assert len(image.reads) == len({str(read) for read in image.reads}) == 4, image.reads
        assert rows == {(mine * 8, mine * 8 + 8)}, rows
    return {"pixels": [image.pixels for image in images], "equal": equal, "results": all(results)}


def shuffled_halves(mine):
    """The same of rows in any order, with a short batch at the end."""
    image, label = whole(0, rows=20)
    counted, step = Counted(image), step_of(((1, 2, 4), (1,)))
    batches = spmdctx.data.shard(spmdctx.data.arrays((counted, label), ROWS, shuffle=5), step, remainder="pad")
    seen, equal = [], True
    for found, labels in batches:
        order = to_host(labels).astype(int)
        equal &= bool(np.array_equal(to_host(found), image[order]))
        seen += order[: batches.rows].tolist()
    return {"pixels": counted.pixels, "equal": equal, "seen": sorted(seen) == list(range(20)), "padded": batches.padded_rows}


def own_parts(mine):
    """data_parallel: each process gives its own four rows of eight."""
    step = step_of("data_parallel")
    batches = [tuple(leaf[mine * 4 : mine * 4 + 4] for leaf in whole(seed)) for seed in range(3)]
    loader = spmdctx.data.shard(batches, step)
    equal = [same(batch, whole(seed)) for seed, batch in enumerate(loader)]
    (again,) = [step.shard_batch(batches[1])]
    return {"equal": equal, "rows": loader.rows, "shard_batch": same(again, whole(1))}


def whole_batches(mine):
    """full_batch: each process gives the whole."""
    step = step_of("full_batch")
    equal = [same(batch, whole(seed)) for seed, batch in enumerate(spmdctx.data.shard([whole(0), whole(1)], step))]
    return {"equal": equal, "shard_batch": same(step.shard_batch(whole(1)), whole(1))}


def uneven(mine, remainder):
    """Process 0 has 4, 4 and 3 rows, process 1 has 4, 2."""
    sizes = ((4, 4, 3), (4, 2))[mine]
    step = step_of("data_parallel")
    batches = [tuple(leaf[mine * 4 : mine * 4 + size] for leaf in whole(seed)) for seed, size in enumerate(sizes)]
    loader = spmdctx.data.shard(batches, step, remainder=remainder)
    rows, sums = [], []
    try:
        for image, label in loader:
            rows.append(loader.rows)
            sums.append(to_host(label).tolist())
            float(step(np.float32(2), image, label))
    except spmdctx.StrategyError as error:
        return {"rows": rows, "error": str(error)}
    return {"rows": rows, "labels": sums, "dropped": loader.dropped_rows, "padded": loader.padded_rows}


def unlike(mine):
    """Whole batches that differ between processes, or of which one process has fewer."""
    step, found = step_of(((4, 1, 1), (1,))), []
    for source in ([whole(mine)], [whole(0)] * (2 + mine)):
        loader = spmdctx.data.shard(source, step, whole=True)
        try:
            count = sum(1 for _ in loader)
        except spmdctx.StrategyError as error:
            count = str(error)
        found.append(count)
    return found


def alone(mine):
    """Devices of one process: the others need not know of it."""
    step = spmdctx.parallel(forward, parallel_mode="data_parallel", devices=jax.local_devices())
    step.plan(np.float32(2), *[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in whole(0)])
    return len(list(spmdctx.data.shard([whole(0)] * (2 + mine), step)))


def same_rows(mine):
    """The model axis spans the processes, so that both hold all rows: what each reads is the same."""
    step = spmdctx.parallel(forward, parallel_mode="semi_auto_parallel", mesh={"model": 2, "data": 4}, dataset_strategy=((4, 1, 1), (4,)))
    step.plan(np.float32(2), *[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in whole(0)])
    error = ""
    try:
        next(spmdctx.data.shard([whole(mine)], step))
    except spmdctx.StrategyError as found:
        error = str(found)
    steps = (step, step_of("data_parallel"), step_of("full_batch"), step_of(((1, 2, 4), (1,))))
    shards = [spmdctx.data.process_shard(one) for one in steps]
    (batch,) = spmdctx.data.shard([whole(7)], step)
    return {"shards": [list(own[:3]) for own in shards], "ranges": shards[3].ranges, "error": error, "equal": same(batch, whole(7))}


def failing(mine):
    """Process 1 cannot read its second batch."""

    def source():
        yield tuple(leaf[mine * 4 : mine * 4 + 4] for leaf in whole(0))
        if mine:
            raise FileNotFoundError("part-00001 is not there")
        yield tuple(leaf[:4] for leaf in whole(1))

    loader = spmdctx.data.shard(source(), step_of("data_parallel"))
    next(loader)
    try:
        next(loader)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main():
    communication.init("gloo")
    mine = jax.process_index()
    assert (jax.process_count(), len(jax.local_devices())) == (2, 4)
    found = {
        "halves": halves(mine),
        "shuffled": shuffled_halves(mine),
        "own": own_parts(mine),
        "whole": whole_batches(mine),
        "same_rows": same_rows(mine),
        "unlike": unlike(mine),
        "alone": alone(mine),
        "failing": failing(mine),
        **{remainder: uneven(mine, remainder) for remainder in ("error", "pad", "drop")},
    }
    Path(sys.argv[1], f"{mine}.json").write_text(json.dumps(found))
    communication.release()


if __name__ == "__main__":
    main()
