"""A checkpoint of 1 GiB from 8 devices loaded by 4 and by 3: bytes read, host memory and time, against orbax's own restore.

    python -m benchmarks.reshard_checkpoints [--folder FOLDER] [--repeats 3] [--mib 1024] [--json]

Every measurement runs in a process of its own. Bytes are counted twice: by spmdctx, and by the kernel (rchar of /proc/self/io),
which counts orbax's reads the same way. Memory is the peak resident size above that before the work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20
SHAPE = (6144, 3072)  # 72 MiB of float32, which 8, 4 and 3 divide
SPLITS = {8: "2 x 4", 4: "2 x 2", 3: "3"}


def main() -> int:
    """Saves once, measures each way to load, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the files go (default: a temporary folder)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mib", type=int, default=1024, help="least size of the checkpoint, which is made of tensors of 72 MiB")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(WORK[arguments.child[0]](arguments.folder, *map(int, arguments.child[1:]))))
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        _child(folder, "save", -(-arguments.mib // 72))
        rows = [row for count in (4, 3) for row in _rows(folder, count, arguments.repeats)]
    print(json.dumps(rows, indent=1) if arguments.json else _table(rows))
    return 0


def _rows(folder: Path, count: int, repeats: int) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {"load_distributed_checkpoint": [], "orbax": []}
    for _ in range(repeats):  # in turn, so that a busy moment meets both
        found["load_distributed_checkpoint"].append(_child(folder, "load", count))
        found["orbax"].append(_child(folder, "orbax", count))
    found["transform_checkpoint_by_rank"] = [_child(folder, "transform", count, rank) for rank in range(count)]
    return [{"way": way, "devices": count, **_joined(way, runs)} for way, runs in found.items()]


def _joined(way: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of repeated runs the middle time; of the ranks of one checkpoint the sum of bytes and times, and the largest memory."""
    merge = sum if way == "transform_checkpoint_by_rank" else statistics.median
    merged: dict[str, Any] = {name: merge([run[name] for run in runs]) for name in ("needed", "counted", "rchar", "seconds")}
    return {**merged, "peak": max(run["peak"] for run in runs), "shard": max(run["shard"] for run in runs)}


def _child(folder: Path, *work: object) -> dict[str, Any]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "benchmarks.reshard_checkpoints", "--folder", str(folder), "--child", *map(str, work)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _shardings(count: int, names: list[str]) -> dict[str, Any]:
    """Rows and columns in turn, as the weights of a decoder under Megatron's strategies; on 2 axes the other axis splits too."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sizes = tuple(map(int, SPLITS[count].split(" x ")))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(sizes), ("a", "b")[-len(sizes) :])
    other = mesh.axis_names[0] if len(sizes) > 1 else None
    specs = [PartitionSpec("b", other) if index % 2 else PartitionSpec(other, "b") for index in range(len(names))]
    return {name: NamedSharding(mesh, spec) for name, spec in zip(names, specs, strict=True)}


def _save(folder: Path, count: int) -> dict[str, Any]:
    import jax
    import numpy as np

    import spmdctx

    names = [f"w{index:02}" for index in range(count)]
    shardings = _shardings(8, names)
    state = {}
    for index, name in enumerate(names):
        value = np.random.default_rng(index).standard_normal(SHAPE, np.float32)
        state[name] = jax.device_put(value, shardings[name])
    spmdctx.save_distributed_checkpoint(state, folder / "ranks")
    with spmdctx.CheckpointManager(folder / "orbax") as checkpoints:
        checkpoints.save(1, state)
    (folder / "names.json").write_text(json.dumps(names))
    return {}


class _Meter:
    """Seconds, bytes that the kernel counted, and the peak of resident memory above that at the start."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self._memory, self._read, self._start = _status("VmRSS"), _rchar(), time.perf_counter()

    def stop(self) -> dict[str, Any]:
        seconds = time.perf_counter() - self._start
        return {"seconds": seconds, "rchar": _rchar() - self._read, "peak": _status("VmHWM") - self._memory}


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _targets(folder: Path, count: int) -> tuple[dict[str, Any], int]:
    import jax
    import numpy as np

    shardings = _shardings(count, json.loads((folder / "names.json").read_text()))
    jax.block_until_ready(jax.device_put(np.ones(count * 8), next(iter(shardings.values())).mesh.devices.flat[0]))
    return {name: jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=own) for name, own in shardings.items()}, len(shardings)


def _load(folder: Path, count: int) -> dict[str, Any]:
    import jax

    import spmdctx

    state, number = _targets(folder, count)
    meter = _Meter()
    found, reads = spmdctx.load_distributed_checkpoint(state, folder / "ranks")
    jax.block_until_ready(found)
    return {**meter.stop(), "needed": reads.needed_bytes, "counted": reads.read_bytes, "shard": number * 72 * MIB // count}


def _orbax(folder: Path, count: int) -> dict[str, Any]:
    import jax
    import orbax.checkpoint as ocp

    state, number = _targets(folder, count)
    handler = ocp.PyTreeCheckpointer()
    meter = _Meter()
    how = ocp.checkpoint_utils.construct_restore_args(state)
    jax.block_until_ready(handler.restore(folder / "orbax" / "1" / "state", args=ocp.args.PyTreeRestore(state, restore_args=how)))
    stopped = meter.stop()
    return {**stopped, "needed": number * 72 * MIB, "counted": stopped["rchar"], "shard": number * 72 * MIB // count}


def _transform(folder: Path, count: int, rank: int) -> dict[str, Any]:
    import spmdctx
    from spmdctx.checkpoint.layouts import state_layouts

    state, number = _targets(folder, count)
    target, source = state_layouts(state), folder / "ranks" / "strategy.json"
    files = {own: folder / "ranks" / f"rank_{own}" / f"checkpoint{own}.safetensors" for own in range(8)}
    spmdctx.rank_list_for_transform(rank, source, target)
    meter = _Meter()
    reads = spmdctx.transform_checkpoint_by_rank(rank, files, folder / "out.safetensors", source, target)
    return {**meter.stop(), "needed": reads.needed_bytes, "counted": reads.read_bytes, "shard": number * 72 * MIB // count}


WORK: dict[str, Any] = {"save": _save, "load": _load, "orbax": _orbax, "transform": _transform}


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| to | way | needed | read / needed, counted | the kernel's count | peak memory | largest device's part | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratios = f"{row['counted'] / row['needed']:.4f} | {row['rchar'] / row['needed']:.4f}"
        sizes = f"{row['peak'] / MIB:.0f} MiB | {row['shard'] / MIB:.0f} MiB"
        lines.append(f"| {row['devices']} | {row['way']} | {row['needed'] / MIB:.0f} MiB | {ratios} | {sizes} | {row['seconds']:.2f} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
