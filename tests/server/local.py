"""Servers in the process of the worker, with no engine: what a job must come to, whatever is lost on its way."""

import shutil
import tempfile
import threading
import weakref
from pathlib import Path

import jax
import pytest

from spmdctx.server.engine.client import NUM_WORKERS, WORKER
from spmdctx.server.engine.server import Pulled
from spmdctx.server.state.folder import SavedState, complete, load_held, shard_name, state_folder
from spmdctx.server.state.progress import Progress
from spmdctx.server.state.shard import Shard
from spmdctx.step.served import entry


def undisturbed(num_parts, num_steps, made, digest):
    """The losses, to the bit, and the digest of the last state of a job with no engine; `made` gives its step, first state and batches."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setenv(WORKER, "0")
        patch.setenv(NUM_WORKERS, str(num_parts))
        patch.setattr(entry, "Client", LocalClient)
        step, state, batch = made()
        losses = {}
        for number in range(num_steps):
            state, loss = step(state, batch(number))
            losses[number] = {float(loss).hex()}
        return losses, digest(state)


class LocalClient:
    """Stands for `Client`: one worker that computes all parts."""

    def __init__(self, job):
        self.job, self.kept_from, self.worker = job, 0, 0
        if not job.folder:
            self.job = job._replace(folder=tempfile.mkdtemp(prefix="spmdctx-test-"))
            weakref.finalize(self, shutil.rmtree, self.job.folder, ignore_errors=True)
        self._progress = Progress(job.num_servers)
        self._shards = []

    @property
    def num_servers(self):
        return self.job.num_servers

    def hello(self, fingerprint, num_parts):
        self._progress.hello(0)

    def ask(self, step):
        return self._progress.ask(0, step)

    def set_up(self, layout):
        folder = Path(self.job.folder)
        files = tuple(shard_name(number) for number in range(len(layout.specs)))
        complete(folder, SavedState(0, state_folder(folder, 0), layout.fingerprint, layout.num_parts, files), {})
        for spec in layout.specs:
            self._shards.append(Shard(spec, load_held(folder, 0, spec), 0))
        self._progress.start(0, len(layout.specs), layout.num_parts)

    def start_pull(self, go, version, slots):
        return [(shard, version, own) for shard, own in zip(self._shards, slots, strict=True) if own]

    def finish_pull(self, pulls):
        return [Pulled(*shard.pull(own, version)) for shard, version, own in pulls]

    def pull_rows(self, go, places):
        return [shard.pull_rows(own, go.version) for shard, own in zip(self._shards, places, strict=True)]

    def push(self, go, step, parts, versions):
        for part, values in parts.items():
            full = [shard.add(step, part, own) for shard, own in zip(self._shards, values, strict=True)]
        self._progress.pushed(go.generation, step, list(parts))
        assert all(full)
        self._renew()
        for number, shard in enumerate(self._shards):
            self._progress.applied(number, go.generation, shard.version, shard.results)

    def assign(self, go, values):
        for shard, own in zip(self._shards, values, strict=True):
            shard.assign(go.version, own)

    def rewind(self, version):
        """All servers are lost, and come back with a saved state."""
        self._shards = [Shard(shard.spec, load_held(Path(self.job.folder), version, shard.spec), version) for shard in self._shards]
        self._progress.rewind(version)

    def _renew(self):
        board, changed = {}, threading.Condition()

        def exchange(number, values, awaited):
            with changed:
                board.update(values)
                changed.notify_all()
                assert changed.wait_for(lambda: all(slot in board for slot in awaited), 30)
                return {slot: board[slot] for slot in awaited}

        def renew(shard):
            with jax.enable_x64(shard.spec.x64):  # a thread has a switch of its own
                shard.renew(exchange)

        threads = [threading.Thread(target=renew, args=(shard,)) for shard in self._shards]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    def latest(self, least, slots):
        wanted = slots(len(self._shards))
        return [shard.pull(own)[1] if own else [] for shard, own in zip(self._shards, wanted, strict=True)]
