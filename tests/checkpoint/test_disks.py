"""Every writer on a disk that is full or read-only: one documented error, nothing left behind, and the former file as it was."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx.models import WordTokenizer
from tests.plan import small_plan


def state(step):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    return {"w": jax.device_put(np.full((64, 64), step, np.float32), NamedSharding(mesh, P("x")))}


def manage(folder, step):
    with spmdctx.CheckpointManager(folder) as checkpoints:
        checkpoints.save(step, state(step))


def transform(folder, step):
    spmdctx.save_distributed_checkpoint(state(step), folder.parents[1] / "source")
    spmdctx.transform_checkpoints(folder.parents[1] / "source", folder, "x")


def transform_rank(folder, step):
    spmdctx.save_distributed_checkpoint(state(step), folder.parents[1] / "source")
    files = {rank: folder.parents[1] / f"source/rank_{rank}/checkpoint{rank}.safetensors" for rank in range(2)}
    source = folder.parents[1] / "source/strategy.json"
    spmdctx.transform_checkpoint_by_rank(0, files, folder / "rank_0/x.safetensors", source)


WRITERS = {
    "plan": lambda folder, step: small_plan(gap=float(step)).save(folder / "plan.json"),
    "page": lambda folder, step: small_plan(gap=float(step)).save_html(folder / "plan.html"),
    "strategy": lambda folder, step: small_plan(gap=float(step)).save_mindspore(folder / "plan.json"),
    "tokenizer": lambda folder, step: WordTokenizer(("a",) * step).save(folder / "tokenizer.json"),
    "ranks": lambda folder, step: spmdctx.save_distributed_checkpoint(state(step), folder),
    "transform": transform,
    "transform of a rank": transform_rank,
    "manager": manage,
}


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def spoil(disk, how):
    if how == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        return
    with (disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("how", ["full", "read-only"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_takes_nothing_is_an_error_and_nothing_is_lost(disk, name, how):
    folder = disk / "out"
    WRITERS[name](folder, 1)
    before = contents(folder)
    spoil(disk, how)
    with pytest.raises(spmdctx.SpmdctxError, match=r"No space left|Read-only|NO_SPACE|RESOURCE_EXHAUSTED|ENOSPC"):
        WRITERS[name](folder, 2)
    assert contents(folder) == before
    if how == "full":
        (disk / "ballast").unlink()
        WRITERS[name](folder, 2)
