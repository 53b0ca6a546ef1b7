"""Processes that save are killed at random moments, on disks that are full or read-only at times: nothing complete is lost.

    python -m benchmarks.kills [--kills 40] [--seed 0]

Three kinds of saves take turns: the checkpoint manager, files per rank, and transforms into another split. Each writes one state after
the other into one folder, which lies on a disk of its own where the user may mount one (root). In turn the disk is left alone, filled up,
or made read-only for a while. Then comes kill -9. The next process finds what is there: a state that was completely saved or was being
saved when the kill came, with all of its numbers. It goes on from it. In the end each folder holds the same bytes as that of an undisturbed
run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KINDS, DISKS = ("manager", "ranks", "transform"), ("normal", "full", "read-only")
DISK_BYTES, PATIENCE_S = 64 << 20, 120.0


def worker(kind: str, folder: Path, last: int) -> None:
    """Finds the latest state, says which, and saves those that follow, up to `last`."""
    import spmdctx

    found, save = made(kind, folder)

    def say(*words: object) -> None:
        print(*words, flush=True)

    step = found()
    say("found", step)
    while step < last:
        say("begin", step + 1)
        try:
            save(step + 1)
        except spmdctx.CheckpointError as error:
            say("refused", step + 1, str(error).splitlines()[0])
            time.sleep(0.05)
            continue
        step += 1
        say("done", step)


def made(kind: str, folder: Path) -> tuple[Callable[[], int], Callable[[int], None]]:
    """Returns what finds the latest state, 0 if there is none, and what saves one."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import spmdctx

    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

    def state(step: int, spec: PartitionSpec) -> dict[str, Any]:
        chance = np.random.default_rng(step)
        leaves = {"w": chance.normal(size=(256, 512)).astype(np.float32), "h": chance.normal(size=(64, 64)).astype(jnp.bfloat16)}
        return jax.device_put({**leaves, "n": np.full((4, 4), step, np.int32)}, NamedSharding(mesh, spec))

    rows, columns = PartitionSpec("x"), PartitionSpec(None, "x")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state(0, rows))

    def step_of(found: Any) -> int:
        step = int(found["n"][0, 0])
        for name, leaf in state(step, rows).items():
            if not np.array_equal(np.asarray(found[name]), np.asarray(leaf)):
                raise AssertionError(f"{name} is not that of step {step}")
        return step

    if kind == "manager":
        checkpoints = spmdctx.CheckpointManager(folder / "saved", keep=2)

        def restored() -> int:
            found = checkpoints.restore(shapes)
            return step_of(found.state) if found.step else int(found.state is None)

        def save(step: int) -> None:
            checkpoints.save(step, state(step, rows))
            checkpoints.wait()

        return restored, save
    place = folder / "saved"

    def loaded() -> int:
        return step_of(spmdctx.load_distributed_checkpoint(shapes, place, verify=True).network) if place.is_dir() else 0

    if kind == "ranks":
        return loaded, lambda step: spmdctx.save_distributed_checkpoint(state(step, (rows, columns)[step % 2]), place) and None

    def moved(step: int) -> None:
        spmdctx.save_distributed_checkpoint(state(step, (rows, columns)[step % 2]), folder / "source")
        layouts = spmdctx.save_distributed_checkpoint(state(0, (columns, rows)[step % 2]), folder / "other")
        spmdctx.transform_checkpoints(folder / "source", place, "net", None, layouts, 2)

    return loaded, moved


class Run:
    """A process that saves, and what it has said so far."""

    def __init__(self, kind: str, folder: Path, last: int) -> None:
        command = [sys.executable, "-m", "benchmarks.kills", "--worker", kind, str(folder), str(last)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        self.rows: list[list[str]] = []
        self.errors = ""
        self._new: queue.Queue[list[str]] = queue.Queue()
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # the last one may be cut
                    self.rows.append(line.split(maxsplit=2))
                    self._new.put(self.rows[-1])

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self.errors = lines.read()

    def wait_for(self, word: str, count: int = 1) -> None:
        """Waits for so many rows that begin with a word, or the end of the process."""
        end = time.monotonic() + PATIENCE_S
        while count and time.monotonic() < end and (self.process.poll() is None or not self._new.empty()):
            with contextlib.suppress(queue.Empty):
                count -= self._new.get(timeout=0.05)[0] == word

    def end(self, number: int | None = None) -> None:
        """Ends the process by a signal, or waits for it."""
        if number is not None:
            self.process.send_signal(number)
        self.process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join()

    def last(self, word: str, other: int) -> int:
        """Returns the last state of which a row with this word tells."""
        return next((int(row[1]) for row in reversed(self.rows) if row[0] == word), other)


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[bool]:
    """Mounts a small disk at a folder; gives whether that was possible."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    is_own = os.geteuid() == 0 and subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode == 0
    try:
        yield is_own
    finally:
        if is_own:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def disturb(kind: str, folder: Path, chance: random.Random) -> None:
    """Fills the disk, or makes it read-only, for a moment."""
    if kind == "full":
        ballast = folder / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(chance.uniform(0.2, 1.0))
        ballast.unlink()
    elif kind == "read-only":
        for _ in range(200):  # no file may be open for writing at that moment
            if subprocess.run(["mount", "-o", "remount,ro", str(folder)], stderr=subprocess.DEVNULL, check=False).returncode == 0:
                break
            time.sleep(0.005)
        time.sleep(chance.uniform(0.2, 1.0))
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder by path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        kind, place, last = args.worker
        worker(kind, Path(place), int(last))
        return 0
    chance = random.Random(args.seed)
    faults: list[str] = []
    tally: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folders = {kind: Path(scratch, kind) for kind in KINDS}
        mounted = [stack.enter_context(disk(folder)) for folder in folders.values()]
        own = all(mounted)
        done = dict.fromkeys(KINDS, 0)
        for number in range(args.kills):
            kind, state = KINDS[number % 3], DISKS[number // 3 % 3] if own else DISKS[0]
            faults += [f"kill {number}, {kind}, {state}: {fault}" for fault in kill_once(kind, folders[kind], state, done, chance, tally)]
        for kind, folder in folders.items():
            faults += [f"in the end, {kind}: {fault}" for fault in finish(kind, folder, done, Path(scratch, f"calm-{kind}"))]
    for fault in faults:
        print(fault)
    print(f"{args.kills} kills, {'disks of their own' if own else 'no disks of their own'}: {dict(sorted(tally.items()))}")
    print(f"{len(faults)} faults")
    return 1 if faults else 0


def kill_once(kind: str, folder: Path, state: str, done: dict[str, int], chance: random.Random, tally: Counter[str]) -> list[str]:
    """Runs a process, disturbs its disk and kills it; returns what is wrong with what it found."""
    run = Run(kind, folder, 10**6)
    run.wait_for("found")
    if not run.rows:
        run.end(signal.SIGKILL)
        return [f"it found nothing: {run.errors[-600:]}"]
    run.wait_for("begin", chance.randint(1, 4))
    disturb(state, folder, chance)
    if state != "normal":
        run.wait_for("done", chance.randint(0, 1))
    time.sleep(chance.uniform(0, 0.25))
    is_ended = run.process.poll() is not None
    run.end(signal.SIGKILL)
    before, found = done[kind], run.last("found", -1)
    wrong = [f"it ended by itself: {run.errors[-600:]}"] if is_ended else []
    if not before <= found <= done.get(f"{kind} begun", before):
        wrong.append(f"it found state {found}, after {before} was saved and {done.get(f'{kind} begun', before)} begun")
    done[kind] = run.last("done", found)
    done[f"{kind} begun"] = max(run.last("begin", found), done[kind])
    tally[f"{kind} on a {state} disk"] += 1
    tally["killed while saving"] += done[f"{kind} begun"] > done[kind]
    tally["saves"] += sum(row[0] == "done" for row in run.rows)
    tally["refused saves"] += sum(row[0] == "refused" for row in run.rows)
    tally["begun states that were there"] += found > before
    return wrong


def finish(kind: str, folder: Path, done: dict[str, int], calm: Path) -> list[str]:
    """Saves two more states, and compares with a run that nothing disturbed."""
    last = done[f"{kind} begun"] + 2
    run = Run(kind, folder, last)
    run.end()
    wrong = [] if run.last("done", 0) == last else [f"it did not go on: {run.errors[-600:]}"]
    if not done[kind] <= run.last("found", -1):
        wrong.append(f"it found state {run.last('found', -1)}, and not {done[kind]}")
    if kind == "manager":  # whose files hold times; the next process compares all numbers
        again = Run(kind, folder, last)
        again.end()
        left = [path.name for path in (folder / "saved").iterdir() if not path.name.isdecimal()]
        return wrong + ([] if again.last("found", -1) == last else ["the last state is not there"]) + [f"{name} is left" for name in left]
    calm.mkdir()
    Run(kind, calm, last).end()
    one, other = contents(folder / "saved"), contents(calm / "saved")
    return wrong + [f"{name} differs" for name in sorted({*one, *other}) if one.get(name) != other.get(name)]


if __name__ == "__main__":
    sys.exit(main())
