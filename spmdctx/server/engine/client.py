"""A worker's side: it asks the scheduler what to do, and exchanges arrays with servers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmdctx.errors import CommunicationError
from spmdctx.server import WORKER
from spmdctx.server.engine.fleet import Job, Layout
from spmdctx.server.engine.messages import WORKERS, Answer, Word
from spmdctx.server.engine.own import start_own
from spmdctx.server.engine.rays import answer, found_scheduler, ray
from spmdctx.server.engine.server import Pulled, Pushed
from spmdctx.server.program.rows import Rows
from spmdctx.server.state.progress import Done, Failed, Go, Leave, Replay, Save, Setup

NUM_WORKERS = "SPMDCTX_PS_NUM_WORKERS"
"""The number of workers of the job when this one was started."""

NUM_PARTS = "SPMDCTX_PS_NUM_PARTS"
"""The parts of a step that says nothing of them: the number of workers with which the job has first begun."""

JOB = "SPMDCTX_PS_JOB"
"""What `launch` was told of the job: the options of the parameter server by name, as JSON."""


class Lost(Exception):
    """A server was lost, or the job has another layout: what was under way is void."""


class Client:
    """The connection of this process to the servers of a job.

    Args:
        job: what a new job is told; a process that `launch` has started finds its job.
    """

    def __init__(self, job: Job) -> None:
        own = ray()
        self._ray, self.worker = own, int(os.environ.get(WORKER, "0"))
        if WORKER in os.environ:
            self._scheduler = found_scheduler()
        else:
            self._scheduler = start_own(job, self)
        self._is_launched = WORKER in os.environ
        self.traffic: Counter[str] = Counter()
        self._life: str = own.get_runtime_context().get_worker_id() if self._is_launched else ""
        self._servers: list[Any] = []
        self.generation = self._edition = -1
        self.kept_from = 0
        self._num_bytes = 0
        self.job: Job = self._get(self._scheduler.job.remote())

    def hello(self, fingerprint: str, num_parts: int) -> bool:
        """Tells of the step that this worker does; returns whether others are doing it already."""
        return bool(self._get(self._scheduler.hello.remote(self.worker, fingerprint, num_parts)))

    def ask(self, step: int) -> Setup | Go | Save | Done | Replay:
        """Returns what this worker does in a step, once there is something.

        Raises:
            CommunicationError: the job has failed.
            SystemExit: this worker leaves the job; or the job has failed, and whoever has launched it says why.
        """
        while True:
            said: Answer = self._get(self._scheduler.ask.remote(self.worker, step, self._life))
            self.kept_from, reply = said.kept_from, said.reply
            if isinstance(reply, Failed) and self._is_launched:
                raise SystemExit(1)
            if isinstance(reply, Failed):
                raise CommunicationError("The job of the parameter server cannot go on.", got=reply.text)
            if isinstance(reply, Leave):
                raise SystemExit(0)
            if isinstance(reply, Go | Save) and (reply.generation, said.edition) != (self.generation, self._edition):
                self.refresh()
                if (reply.generation, said.edition) != (self.generation, self._edition):
                    continue
            if reply is not None:
                return reply

    def refresh(self) -> None:
        """Learns of the servers of the present layout."""
        self.generation, self._edition, self._servers = self._get(self._scheduler.servers.remote())

    @property
    def num_servers(self) -> int:
        """Servers of the present layout."""
        return len(self._servers) or self.job.num_servers

    def set_up(self, layout: Layout) -> None:
        """Has servers started for a step."""
        self._get(self._scheduler.set_up.remote(layout))

    def start_pull(self, go: Go, version: int, slots: Sequence[Sequence[str]]) -> list[Any]:
        """Asks each server for arrays of a version; `finish_pull` waits for them."""
        return [server.pull.remote(go.generation, version, own) for server, own in zip(self._servers, slots, strict=True)]

    def finish_pull(self, pulls: Sequence[Any]) -> list[Pulled]:
        """Returns what servers send.

        Raises:
            Lost: a server was lost.
        """
        found = self._from_servers(pulls)
        self._count("pulled", num_bytes([one.values for one in found]))
        return found

    def start_kept(self, first: int, last: int) -> list[Any]:
        """Asks each server for what workers take of the steps from one up to another; `finish_kept` waits for it."""
        return [server.kept.remote(self.generation, first, last) for server in self._servers]

    def finish_kept(self, calls: Sequence[Any]) -> list[dict[str, Any]]:
        """Returns what all servers keep, by step and slot.

        Raises:
            Lost: a server was lost, or it keeps these steps no more.
        """
        found = self._from_servers(calls)
        if not found:
            raise Lost
        self._count("pulled", num_bytes(found))
        return [{slot: value for one in own for slot, value in one.items()} for own in zip(*found, strict=True)]

    def saved(self, generation: int, version: int, file: str) -> None:
        """Tells that what stays with workers is saved."""
        self._get(self._scheduler.saved.remote(WORKERS, generation, version, file))

    def report(self, step: int, results: Mapping[int, Any]) -> None:
        """Tells of results of a step that no server makes."""
        self._get(self._scheduler.reported.remote(step, results))

    def fail(self, text: str) -> None:
        """Ends the job with an error."""
        self._get(self._scheduler.fail.remote(text))

    def pull_rows(self, go: Go, places: Sequence[Mapping[int, Any]]) -> list[Mapping[int, Any]]:
        """Returns rows of tables in the version of a part, of each server those that are asked for, by the table's number.

        Raises:
            Lost: a server was lost.
        """
        pulls = [server.pull_rows.remote(go.generation, go.version, own) for server, own in zip(self._servers, places, strict=True)]
        found = self._from_servers(pulls)
        self._count("rows pulled", num_bytes(places) + num_bytes(found))
        return found

    def push(self, go: Go, step: int, parts: Mapping[int, Sequence[Mapping[str, Any]]], versions: Sequence[int]) -> None:
        """Sends parts of a step, each with the values for each server, computed from the versions that the servers had.

        Raises:
            Lost: a server was lost, or the values are too late.
        """
        pushes = [
            server.push.remote(go.generation, step, part, own, version)
            for part, values in parts.items()
            for server, own, version in zip(self._servers, values, versions, strict=True)
        ]
        found: list[Pushed] = self._from_servers(pushes)
        results = {number: value for one in found for number, value in one.results.items()}
        for own in (own for values in parts.values() for own in values):
            rows = num_bytes({slot: value for slot, value in own.items() if isinstance(value, Rows)})
            self._count("rows pushed", rows)
            self._count("pushed", num_bytes(own) - rows)
        exchanged, self._num_bytes = self._num_bytes, 0
        late = max(one.late for one in found)
        self._scheduler.pushed.remote(Word(go.generation, self._edition, step, list(parts), results, late, exchanged))

    def _count(self, what: str, count: int) -> None:
        self.traffic[what] += count
        self._num_bytes += count

    def assign(self, go: Go, values: Sequence[Mapping[str, Any]]) -> None:
        """Has servers take over arrays in place of theirs.

        Raises:
            Lost: a server was lost.
        """
        calls = [server.assign.remote(go.generation, go.version, own) for server, own in zip(self._servers, values, strict=True) if own]
        self._from_servers(calls)

    def latest(self, least: int, slots: Callable[[int], Sequence[Sequence[str]]]) -> tuple[int, list[list[Any]]]:
        """Returns arrays of each server as they are now, and their version; in "sync" all are of one.

        Args:
            least: the first version that will do.
            slots: returns those of each server, of so many.

        Raises:
            Lost: a server was lost, or has gone on meanwhile: it is to be asked again.
        """
        self.refresh()
        if not self._servers:
            raise Lost
        wanted = list(zip(self._servers, slots(len(self._servers)), strict=True))
        found = self._pulled(wanted, least, is_exact=False)
        versions = {one.version for one in found}
        if len(versions) > 1 and self.job.mode == "sync":
            found = self._pulled(wanted, max(versions), is_exact=True)
        given = iter(found)
        return max((one.version for one in found), default=least), [next(given).values if own else [] for _, own in wanted]

    def _pulled(self, wanted: Sequence[tuple[Any, Sequence[str]]], version: int, *, is_exact: bool) -> list[Pulled]:
        return self.finish_pull([server.pull.remote(self.generation, version, own, is_exact=is_exact) for server, own in wanted if own])

    def _from_servers(self, calls: Sequence[Any]) -> list[Any]:
        """Returns what servers answer.

        Raises:
            CommunicationError: one has failed.
            Lost: a server was lost, or what it was asked for is void.
        """
        try:
            found = answer(list(calls), "A server")
        except CommunicationError as error:
            if isinstance(error.__cause__, self._ray.exceptions.RayTaskError):
                raise
            self._edition = -1
            raise Lost from error
        if any(one is None or one is False for one in found):
            self._edition = -1
            raise Lost
        return list(found)

    def _get(self, call: Any) -> Any:
        return answer(call, "The scheduler")


def num_bytes(values: Any) -> int:
    """Returns the bytes of all arrays in mappings and sequences."""
    if isinstance(values, Mapping):
        return sum(map(num_bytes, values.values()))
    return sum(map(num_bytes, values)) if isinstance(values, list | tuple) else int(getattr(values, "nbytes", 0))
