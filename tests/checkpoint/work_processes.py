"""Checkpoints of one process, restored by several, and saved by them again: run by `spmdctx launch` in a folder."""

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx import communication

communication.init("gloo")
folder, process = Path(sys.argv[1]), jax.process_index()
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
W = np.arange(24 * 8, dtype=np.float32).reshape(24, 8)


def shapes(spec):
    """A state split in another way than the saved one, and what each process has for itself."""
    return {
        "w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=NamedSharding(mesh, spec)),
        "local": jnp.zeros(3, jnp.int32),
        "host": np.zeros(2),
        "number": 0,
        "key": jax.random.key(0),
    }


def holds(state):
    """Whether this process's parts are those of what was saved."""
    parts = all(np.array_equal(shard.data, W[shard.index]) for shard in state["w"].addressable_shards)
    rest = np.array_equal(state["local"], [4, 5, 6]) and np.array_equal(state["host"], [0.5, 1.5]) and state["number"] == 7
    return bool(parts and rest and state["key"] == jax.random.key(3))


found = {}
with spmdctx.CheckpointManager(folder / "one") as checkpoints:
    step, state, data, _ = checkpoints.restore(shapes(P("b", "a")))
found["from one process"] = [step, holds(state), data]
loaded = spmdctx.load_distributed_checkpoint(shapes(P(None, ("a", "b"))), folder / "one ranks")
found["from files of one process"] = [holds(loaded.network), loaded.reads.needed_bytes]

spmdctx.save_distributed_checkpoint(state, folder / "ranks")
found["files"] = sorted(path.parent.name for path in (folder / "ranks").rglob("*.safetensors"))
for failing in (0, 1):
    with pytest.MonkeyPatch.context() as patch:
        if process == failing:
            patch.setattr(os, "fsync", lambda _: os.open("/none/there", os.O_RDONLY))
        try:
            spmdctx.save_distributed_checkpoint({**state, "number": 8}, folder / "ranks")
        except spmdctx.CheckpointError as error:
            found[f"failing {failing}"] = str(error)
with spmdctx.CheckpointManager(folder / "several", keep=2) as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(step, state, data={"batch": step, "own": process if step == 3 else 0})
    checkpoints.wait()
    found["steps"] = [list(checkpoints.steps()), checkpoints.latest_step()]
    restored = checkpoints.restore(shapes(P("a")))
    found["from several"] = [restored.step, holds(restored.state), restored.data]
    if process == 1:
        largest = max((folder / "several" / "2").rglob("d/*"), key=lambda path: path.stat().st_size)  # of the arrays
        largest.write_bytes(largest.read_bytes()[:-1])
    multihost_utils.sync_global_devices("cut")
    try:
        checkpoints.restore(shapes(P("a")), step=2)
    except spmdctx.CheckpointError as error:
        found["damaged"] = str(error)
(folder / f"{process}.json").write_text(json.dumps(found))
