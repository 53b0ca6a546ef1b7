"""grain's loaders as sources, their state with the batches."""

import json

import grain
import numpy as np
import pytest

import spmdctx

ROWS = 8


class Numbers:
    """A data source of grain's."""

    def __repr__(self):
        return "Numbers()"

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return {"x": np.full(4, index, np.float32)}


def loader():
    sampler = grain.samplers.IndexSampler(30, shuffle=True, seed=3, num_epochs=2, shard_options=grain.sharding.NoSharding())
    return grain.DataLoader(data_source=Numbers(), sampler=sampler, operations=[grain.transforms.Batch(ROWS)], worker_count=0)


def dataset():
    return grain.MapDataset.source(Numbers()).shuffle(seed=3).batch(ROWS).to_iter_dataset()


@pytest.mark.parametrize("source", [loader, dataset])
def test_batches_and_state_of_grain(source):
    step = spmdctx.parallel(lambda scale, batch: (batch["x"] * scale).sum(), parallel_mode="data_parallel")
    step.plan(np.float32(1), {"x": np.ones((ROWS, 4), np.float32)})
    want = [batch["x"][:, 0].tolist() for batch in source()]
    with spmdctx.data.shard(source(), step, remainder="pad", prefetch=3) as batches:
        seen = [next(batches)["x"][: batches.rows, 0].tolist() for _ in range(2)]
        state = json.loads(json.dumps(batches.get_state()))
    with spmdctx.data.shard(source(), step, remainder="pad") as batches:
        batches.set_state(state)
        seen += [batch["x"][: batches.rows, 0].tolist() for batch in batches]
    assert seen == want
    assert batches.padded_rows == sum(ROWS - len(rows) for rows in want)
