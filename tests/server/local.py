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
from spmdctx.server.state.folder import WORKERS_FILE, SavedState, complete, load_held, save_shard, shard_name, state_folder
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

    worker = 0

    def __init__(self, job):
        self.job, self.kept_from = job, 0
        if not job.folder:
            self.job = job._replace(folder=tempfile.mkdtemp(prefix="spmdctx-ps-"))
            weakref.finalize(self, shutil.rmtree, self.job.folder, ignore_errors=True)
        self._progress = Progress(job.num_servers)
        self._shards = []
        self._layout = None

    @property
    def generation(self):
        return self._progress.generation

    @property
    def num_servers(self):
        return self.job.num_servers

    def hello(self, fingerprint, num_parts):
        self._progress.hello(self.worker)

    def ask(self, step):
        return self._progress.ask(self.worker, step)

    def set_up(self, layout):
        folder, self._layout = Path(self.job.folder), layout
        self._complete(0)
        for spec in layout.specs:
            self._shards.append(Shard(spec, load_held(folder, 0, spec), 0))
        self._progress.start(0, len(layout.specs), layout.num_parts)

    def _complete(self, version):
        layout, folder = self._layout, Path(self.job.folder)
        files = (*map(shard_name, range(len(layout.specs))), *([WORKERS_FILE] if layout.is_local else []))
        complete(folder, SavedState(version, state_folder(folder, version), layout.fingerprint, layout.num_parts, files), {})
        self.kept_from = version

    def refresh(self):
        pass

    def start_kept(self, first, last):
        return [(shard, first, last) for shard in self._shards]

    def finish_kept(self, calls):
        found = [shard.kept(first, last) for shard, first, last in calls]
        return [{slot: value for one in own for slot, value in one.items()} for own in zip(*found, strict=True)]

    def saved(self, generation, version, file):
        for number, shard in enumerate(self._shards):
            values = {path: shard.saved()[slot] for slot, path in shard.spec.held.items()}
            save_shard(Path(self.job.folder), version, number, values)
            shard.forget(version)
        self._complete(version)
        self._progress.saved_by_worker()

    def report(self, step, results):
        self._progress.reported(step, results)

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
        if not all(full):
            return
        self._renew()
        for number, shard in enumerate(self._shards):
            self._progress.applied(number, go.generation, shard.version, shard.results)
        if self._layout.is_local and self._progress.version % self.job.save_every == 0:
            self._progress.save()

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
        values = [shard.pull(own)[1] if own else [] for shard, own in zip(self._shards, wanted, strict=True)]
        return self._progress.version, values
