"""Damaged files: plans, strategy files of MindSpore, safetensors, files per rank and folders of checkpoints."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import spmdctx
from benchmarks.damaged_values import any_value, damaged_bytes, damaged_data
from spmdctx.checkpoint.blocks import block_of, layout_sharding
from spmdctx.checkpoint.layouts import layouts_of
from spmdctx.plan.file import plan_json

Input = tuple[str, Callable[[], str]]
"""What was done to an input, and what reads it: it returns what is wrong, or an empty string."""


def specials(path: Path, chance: random.Random, outside: Path) -> str:
    """Puts something that is no file at a path; returns what."""
    kind = chance.choice(("pipe", "folder", "socket", "device", "link out", "link to a pipe", "link to itself", "nothing"))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        former = Path.cwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(former)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link out":
        path.symlink_to(outside)
    elif kind == "link to a pipe":
        other = path.with_name(f"{path.name}.pipe")
        if not other.exists():
            os.mkfifo(other)
        path.symlink_to(other)
    elif kind == "link to itself":
        path.symlink_to(path.name)
    return kind


def small_step(w: jax.Array, v: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Updates two matrices."""
    grads = jax.grad(lambda w, v: (jnp.tanh(x @ w) @ v).sum(), argnums=(0, 1))(w, v)
    return w - 0.1 * grads[0], v - 0.1 * grads[1]


ARGUMENTS = (jnp.ones((16, 8)), jnp.ones((8, 16)), jnp.ones((8, 16)))
OPTIONS: dict[str, Any] = {"parallel_mode": "auto_parallel", "device_num": 8, "topology": "cpu"}


def plan_kind(folder: Path) -> Callable[[random.Random], Input]:
    """Plan files: damaged bytes, and content that no plan has under a right checksum."""
    plan = spmdctx.parallel(small_step, **OPTIONS).plan(*ARGUMENTS)
    text, path = plan_json(plan), folder / "plan.json"
    body = json.loads(text)

    def sealed(content: dict[str, Any]) -> bytes:
        content.pop("sha256", None)
        try:
            held = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
            content["sha256"] = hashlib.sha256(held.encode()).hexdigest()
        except ValueError:  # no checksum can be right
            content["sha256"] = ""
        return json.dumps(content).encode()

    def whole() -> str:
        return "" if spmdctx.Plan.load(path) == plan else "another plan was read"

    def used() -> str:
        found = spmdctx.Plan.load(path)
        str(found), repr(found), found.explain("*"), str(found.diff(plan)), str(plan.diff(found))
        found.save_html(folder / "page.html")
        found.save_mindspore(folder / "strategy.json", only_parameters=False, several_axes=True)
        found.save(folder / "again.json")
        return "" if spmdctx.Plan.load(folder / "again.json") == found else "saving changed the plan"

    def stepped() -> str:
        spmdctx.parallel(small_step, strategy_ckpt_load_file=str(path), **OPTIONS).plan(*ARGUMENTS)
        return ""

    def make(chance: random.Random) -> Input:
        way = chance.random()
        if way < 0.03:
            return specials(path, chance, path.with_name("page.html")), whole
        if path.is_symlink() or not path.is_file():
            specials(path, random.Random(0), path)
            path.is_dir() and path.rmdir()
            path.unlink(missing_ok=True)
        if way < 0.35:
            said, data = damaged_bytes(chance, text.encode())
            path.write_bytes(data)
            return said, whole
        said, content = damaged_data(chance, body, chance.choice((1, 1, 1, 2, 4)))
        path.write_bytes(sealed(content) if isinstance(content, dict) else json.dumps(content).encode())
        return f"sealed: {said}", stepped if way > 0.95 else used

    return make


LAYOUT = {"dev_matrix": [2, 4], "tensor_map": [1, 0], "tensor_shape": [16, 8], "field": 0}
STRATEGY: dict[str, Any] = {
    "current_stage": 0,
    "parallel_strategy_item": {"MatMul_w": {"stage": 0, "parallel_strategy": [[2, 1], [1, 4]]}},
    "parallel_layout_item": {
        "w": {**LAYOUT, "opt_weight_shard_step": 0, "opt_weight_shard_size": 0},
        "v": {**LAYOUT, "tensor_map": [-1, 0], "tensor_shape": [8, 16], "opt_weight_shard_step": 4, "opt_weight_shard_size": 2},
    },
}


def mindspore_kind(folder: Path) -> Callable[[random.Random], Input]:
    """MindSpore's strategy files, read as layouts and as pins of a step."""
    path = folder / "strategy.json"
    text = json.dumps(STRATEGY).encode()

    def used() -> str:
        for layout in layouts_of(path).values():
            count = math.prod(layout.device_matrix)
            for rank in (0, count - 1):
                if any(not 0 <= start <= stop <= size for (start, stop), size in zip(block_of(layout, rank), layout.shape, strict=True)):
                    return f"rank {rank} of {layout} has no block of it"
            if count <= 8:
                layout_sharding(layout, jax.devices())
        spmdctx.rank_list_for_transform(0, path, None)
        return ""

    def stepped() -> str:
        spmdctx.parallel(small_step, strategy_ckpt_load_file=str(path), **OPTIONS).plan(*ARGUMENTS)
        return ""

    def make(chance: random.Random) -> Input:
        if chance.random() < 0.3:
            said, data = damaged_bytes(chance, text)
        else:
            said, content = damaged_data(chance, STRATEGY, chance.choice((1, 1, 2, 3)))
            data = json.dumps(content).encode()
        path.write_bytes(data)
        return said, stepped if chance.random() < 0.1 else used

    return make


def split_state(seed: int = 0) -> dict[str, Any]:
    """Returns a state whose arrays are split over eight devices, or whole."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    chance = np.random.default_rng(seed)
    arrays = {
        "w": (chance.normal(size=(16, 8)).astype(np.float32), PartitionSpec("x")),
        "h": (chance.normal(size=(8, 8)).astype(jnp.bfloat16), PartitionSpec(None, "x")),
        "b": (chance.integers(0, 9, (8,)).astype(np.int32), PartitionSpec()),
    }
    return {name: jax.device_put(value, NamedSharding(mesh, spec)) for name, (value, spec) in arrays.items()}


def same(found: Any, state: dict[str, Any]) -> str:
    """Says which leaf of a state is not as it was."""
    wrong = [name for name in state if not np.array_equal(np.asarray(found[name]), np.asarray(state[name]))]
    return f"other values of {wrong}" if wrong else ""


def safetensors_kind(folder: Path) -> Callable[[random.Random], Input]:
    """Headers and data of safetensors files, ours with sums and those of others without."""
    state = split_state()
    spmdctx.save_distributed_checkpoint(state, folder / "saved")
    path = folder / "saved" / "rank_3" / "checkpoint3.safetensors"
    good = path.read_bytes()
    size = int.from_bytes(good[:8], "little")
    header, data = json.loads(good[8 : 8 + size]), good[8 + size :]
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)

    def read() -> str:
        return same(spmdctx.load_distributed_checkpoint(shapes, folder / "saved", verify=True).network, state)

    def put(text: bytes, content: bytes, length: int | None = None) -> None:
        path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + content)

    def ranges(chance: random.Random, own: dict[str, Any]) -> str:
        """Moves one range: overlaps, holes, negative and huge offsets."""
        name = chance.choice([name for name in own if name != "__metadata__"])
        start, stop = own[name]["data_offsets"]
        moved = chance.choice([1, -1, 4, 8, -8, 64, 10**18, -(10**18), 2**63, stop - start])
        own[name]["data_offsets"] = chance.choice([[start + moved, stop + moved], [start, stop + moved], [stop, start]])
        return f"range of {name} by {moved}"

    def lies(chance: random.Random, own: dict[str, Any]) -> str:
        name = chance.choice([name for name in own if name != "__metadata__"])
        key = chance.choice(["dtype", "shape"])
        odd = (
            ["F64", "I32", "BF16", "F8_E4M3", "F4", "f32", ""]
            if key == "dtype"
            else [[], [8], [2, 4], [16], [0], [-1], [2, 8, 1], [10**30]]
        )
        own[name][key] = chance.choice(odd)
        return f"{key} of {name} is {own[name][key]}"

    def make(chance: random.Random) -> Input:
        own = json.loads(json.dumps(header))
        is_ours = chance.random() < 0.5
        if not is_ours:
            del own["__metadata__"]
        way = chance.choice(["bytes", "ranges", "lies", "data", "header", "length", "twins", "raw"])
        if way == "bytes":
            said, found = damaged_bytes(chance, good)
            path.write_bytes(found)
            return f"bytes: {said}", read
        if way == "length":
            text = json.dumps(own).encode()
            put(text, data, chance.choice([0, 1, 2, len(text) - 1, len(text) + 1, 10**9, 2**63, 2**64 - 1]))
            return "length", read
        if way == "twins":
            name = chance.choice([name for name in own if name != "__metadata__"])
            text = json.dumps(own)[:-1] + f', "{name}": {json.dumps(own[chance.choice([key for key in own if key[0] != "_"])])}}}'
            put(text.encode(), data)
            return f"{name} twice", read
        if way == "raw":
            text = chance.choice(
                [b"[" * 10**5, b"{}", b"[]", b"null", b'{"__metadata__": [1]}', b'{"w": {"dtype": "F32"}}', b" " * 99, b"NaN"]
            )
            put(text, chance.choice([b"", data]))
            return f"header {text[:20]!r}", read
        said = ranges(chance, own) if way == "ranges" else lies(chance, own) if way == "lies" else way
        if way == "data" or (way == "header" and not is_ours):  # an own header without sums could say anything
            put(json.dumps(own).encode() if is_ours else good[8 : 8 + size], damaged_bytes(chance, data)[1])
        elif way == "header":
            said, own = damaged_data(chance, own)
            put(json.dumps(own).encode(), data)
        else:
            put(json.dumps(own).encode(), data)
        return f"{'ours' if is_ours else 'theirs'}: {said}", read

    return make


def _rearranged(chance: random.Random, root: Path, other: Path) -> str:
    """Drops, adds, renames, swaps, links or damages files of a folder."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    one, two = chance.choice(files), chance.choice(files)
    folders = [path for path in (root, *root.rglob("*")) if path.is_dir()]
    kind = chance.choice(("drop", "bytes", "swap", "rename", "special", "extra", "drop folder", "other", "rename folder", "twin"))
    said = f"{kind} {one.relative_to(root)}"
    if kind == "drop":
        one.unlink()
    elif kind == "bytes":
        what, data = damaged_bytes(chance, one.read_bytes())
        one.write_bytes(data)
        return f"{said}: {what}"
    elif kind == "swap":
        content = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(content)
    elif kind == "rename":
        one.rename(one.with_name(chance.choice((f"{one.name}x", f"x{one.name}", "[a]*?", "a\\b"))))
    elif kind == "special":
        outside = other / one.relative_to(root) if (other / one.relative_to(root)).is_file() else Path("/etc/hostname")
        return f"{said}: {specials(one, chance, outside)}"
    elif kind == "extra":
        place = chance.choice(folders)
        (place / chance.choice(("x.json", ".x", "files.9.json", "rank_9", "rank_٣", "7", "-1", "1e3", "commit", "[x]"))).mkdir(
            exist_ok=True
        )
        (place / "extra.safetensors").write_bytes(b"x")
    elif kind in ("drop folder", "rename folder"):
        own = chance.choice(folders[1:] or folders)
        if kind == "drop folder":
            shutil.rmtree(own)
        else:
            own.rename(own.with_name(chance.choice((f"{own.name}0", f"{own.name}.orbax-checkpoint-tmp", "rank_0x", "[1]"))))
        return f"{kind} {own.relative_to(root)}"
    elif kind == "other":  # the file of another checkpoint
        place = other / one.relative_to(root)
        if place.is_file():
            one.write_bytes(place.read_bytes())
    else:
        one.with_name(f"{one.name}.twin").write_bytes(one.read_bytes())
    return said


def ranks_kind(folder: Path) -> Callable[[random.Random], Input]:
    """Folders of files per rank, among them those that a killed save has left."""
    state, other = split_state(), split_state(1)
    spmdctx.save_distributed_checkpoint(state, folder / "good")
    spmdctx.save_distributed_checkpoint(other, folder / "other")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    place = folder / "damaged"

    def read() -> str:
        found = spmdctx.load_distributed_checkpoint(shapes, place, verify=True).network
        wrong = same(found, state)
        return wrong if wrong and same(found, other) else ""  # whole files of another checkpoint are no damage

    def mixed() -> str:
        return same(spmdctx.load_distributed_checkpoint(shapes, place, verify=True).network, state)

    def moved() -> str:
        spmdctx.transform_checkpoints(place, folder / "moved", "x", None, None)
        return ""

    def make(chance: random.Random) -> Input:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(folder / "moved", ignore_errors=True)
        shutil.copytree(folder / "good", place)
        if chance.random() < 0.2:
            names = chance.choice(
                [["../x"], ["/etc/passwd"], [3], "x", None, {"a": 1}, ["rank_0/x.safetensors"], ["a\0b"], [""], ["strategy.json"]]
            )
            (place / ".commit.json").write_text(json.dumps({"names": names} if chance.random() < 0.8 else any_value(chance)))
            return f"list {names}", mixed
        said = _rearranged(chance, place, folder / "other")
        if "other " in said or "link out" in said:
            return said, lambda: ""  # a whole file of another checkpoint, of the same form: its sums are right
        return said, moved if chance.random() < 0.2 else read

    return make


def folder_kind(folder: Path) -> Callable[[random.Random], Input]:
    """Folders of the checkpoint manager."""
    logging.disable(logging.CRITICAL)
    state, other = split_state(), split_state(1)
    for name, own in (("good", state), ("other", other)):
        with spmdctx.CheckpointManager(folder / name) as checkpoints:
            checkpoints.save(5, own, data={"batch": 5})
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    place = folder / "damaged [1]"
    manifest = json.loads((folder / "good/5/state/files.json").read_text())

    def read() -> str:
        with spmdctx.CheckpointManager(place) as checkpoints:
            found = checkpoints.restore(shapes)
            if found.step == 0:
                found.state  # noqa: B018  taken
                return ""  # no checkpoint is left
            return same(found.state, state) or ("" if (found.step, found.data) == (5, {"batch": 5}) else f"step {found.step} {found.data}")

    def make(chance: random.Random) -> Input:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder / "good", place)
        if chance.random() < 0.3:
            own = dict(manifest)
            name = chance.choice(list(own))
            odd = chance.choice(("../../../good/5/state/contents.json", "/etc/passwd", "..", "", "\0", "x/../../..", "a" * 5000, name))
            own[odd] = chance.choice([own[name], [1], {}, None, [-1, 0], ["1", 2], [10**40, 0], any_value(chance)])
            if chance.random() < 0.5 and odd != name:
                del own[name]
                if name != "contents.json" and chance.random() < 0.9:
                    own[name] = manifest[name]
            (place / "5/state/files.json").write_text(json.dumps(own))
            return f"manifest {odd[:40]!r} {str(own[odd])[:40]}", read
        if chance.random() < 0.15:
            return specials(
                place / "5" / "state" / chance.choice(("files.json", "contents.json", "manifest.ocdbt", "d")), chance, folder
            ), read
        return _rearranged(chance, place / "5", folder / "other" / "5"), read

    return make


KINDS: dict[str, Callable[[Path], Callable[[random.Random], Input]]] = {
    "plan": plan_kind,
    "mindspore": mindspore_kind,
    "safetensors": safetensors_kind,
    "ranks": ranks_kind,
    "folder": folder_kind,
}
