"""How far a job has come: which worker computes which part of which step, and what is done again after a loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_MOST_RESULT_BYTES = 256 << 20


class Setup(NamedTuple):
    """The worker is to divide the step for so many servers, whose arrays are those of a version; None: the step's own first ones."""

    num_servers: int
    version: int | None


class Go(NamedTuple):
    """The worker is to compute parts of its step from the arrays of a version."""

    generation: int
    version: int
    parts: tuple[int, ...]


class Save(NamedTuple):
    """The worker is to save what stays with workers, as it is in a version."""

    generation: int
    version: int


class Done(NamedTuple):
    """The step is done; its results by number."""

    version: int
    results: Mapping[int, Any]


class Replay(NamedTuple):
    """Servers have lost steps: the worker is to do those from this one on again."""

    version: int


class Leave(NamedTuple):
    """The job goes on without this worker."""


class Failed(NamedTuple):
    """The job cannot go on."""

    text: str


Reply = Setup | Go | Save | Done | Replay | Leave | Failed


class Summary(NamedTuple):
    """How far a job has come: its version and the parts of a step, the workers and servers that are there, and the step of each worker.

    `staleness` counts updates by how many others came between their pull and push.
    """

    mode: str
    version: int
    num_parts: int
    workers: int
    servers: int
    steps: Mapping[int, int]
    staleness: Mapping[int, int]
    num_bytes: int


@dataclass
class _Claim:
    """A part that is under way; in "async" `worker` is None where its worker was lost and servers may have it already."""

    worker: int | None
    version: int


@dataclass
class Progress:
    """The progress of one job. In "sync" a version is a step; in "async" it is an update by one part.

    Attributes:
        num_servers: of the present layout.
        mode: "sync" or "async".
        max_staleness: updates by which values may be late, in "async".
        num_parts: of each step; set with the layout.
        version: what all servers have done.
        generation: counts layouts and rewinds; messages of others are void.
        ready: whether servers are there; where not, `setter` is the worker that divides the step for them.
        saved: the version from which a layout starts; None at the start of a job.
        results: of the steps that are done.
        staleness: how many updates were late by how much.
        floor: in "async", all parts of the steps before it are applied.
        steps: the step of each worker that has asked.
        num_bytes: that workers have pushed and pulled.
        unsaved: the version in which a worker, `saver` once it has asked, is to save what stays with workers.
    """

    num_servers: int
    mode: str = "sync"
    max_staleness: int = 0
    num_parts: int = 1
    version: int = 0
    generation: int = 0
    ready: bool = False
    busy: bool = False
    setter: int | None = None
    saved: int | None = None
    failure: str = ""
    results: dict[int, Mapping[int, Any]] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    floor: int = 0
    num_bytes: int = 0
    unsaved: int | None = None
    saver: int | None = None
    steps: dict[int, int] = field(default_factory=dict)
    workers: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    _claims: dict[tuple[int, int], _Claim] = field(default_factory=dict)
    _done: set[tuple[int, int]] = field(default_factory=set)
    _applied: dict[int, int] = field(default_factory=dict)

    def hello(self, worker: int) -> None:
        """A worker has started, maybe again: others may take what it had begun."""
        self.lost(worker)
        self.workers.add(worker)
        self.leaving.discard(worker)

    def lost(self, worker: int) -> None:
        """A worker is gone."""
        self.workers.discard(worker)
        self.steps.pop(worker, None)
        for task in [task for task, claim in self._claims.items() if claim.worker == worker]:
            if self.mode == "sync":
                del self._claims[task]
            else:
                # What it has sent may still arrive, so it counts as under way until another worker has done it.
                self._claims[task].worker = None
        if self.setter == worker:
            self.setter = None
        if self.saver == worker:
            self.saver = None

    def ask(self, worker: int, step: int) -> Reply | None:
        """Returns what a worker does in one of its steps, or None while it has to wait."""
        if self.failure:
            return Failed(self.failure)
        if worker in self.leaving:
            self.lost(worker)
            return Leave()
        self.workers.add(worker)
        if self.unsaved == self.version and self.saver in (None, worker) and step in (self.version - 1, self.version):
            self.saver = worker
            return Save(self.generation, self.version)
        if self.busy:
            return None
        if not self.ready:
            if self.setter not in (None, worker):
                return None
            self.setter = worker
            return Setup(self.num_servers, self.saved)
        self.steps[worker] = step
        return self._next_sync(worker, step) if self.mode == "sync" else self._next_async(worker, step)

    def _next_sync(self, worker: int, step: int) -> Reply | None:
        if step < self.version:
            return Done(self.version, self.results.get(step, {}))
        if step > self.version:
            return Replay(self.version)
        own = [part for (_, part), claim in self._claims.items() if claim.worker == worker]
        if not own:
            taken = {part for _, part in (*self._claims, *self._done)}
            free = [part for part in range(self.num_parts) if part not in taken]
            done_by_others = self.num_parts - len(free)
            idle = max(1, len(self.workers) - len({claim.worker for claim in self._claims.values()}))
            share = -(-len(free) // idle) if done_by_others or len(self.workers) > 1 else len(free)
            own = free[:share]
            self._claims.update({(step, part): _Claim(worker, self.version) for part in own})
        return Go(self.generation, self.version, tuple(own)) if own else None

    def _next_async(self, worker: int, step: int) -> Reply | None:
        for (at, part), claim in self._claims.items():
            if claim.worker == worker and at == step:
                return Go(self.generation, claim.version, (part,))
        left = min((at for (at, _), claim in self._claims.items() if claim.worker is None), default=step)
        if left < step:
            return Replay(left)
        free = [] if step < self.floor else [part for part in range(self.num_parts) if self._is_free(step, part)]
        if not free:
            return Done(self.version, self.results.get(step, self._newest_results)) if self.results else None
        others = [claim for task, claim in self._claims.items() if task != (step, free[0])]
        # All others that are under way may be applied before this one, and this one before each of them.
        late = [0, *(self.version - claim.version for claim in others if claim.worker is not None)]
        if max(late) + len(others) > self.max_staleness:
            return None
        self._claims[step, free[0]] = _Claim(worker, self.version)
        return Go(self.generation, self.version, (free[0],))

    @property
    def _newest_results(self) -> Mapping[int, Any]:
        return self.results[max(self.results)] if self.results else {}

    def _is_free(self, step: int, part: int) -> bool:
        claim = self._claims.get((step, part))
        return (step, part) not in self._done and (claim is None or claim.worker is None)

    def pushed(
        self, generation: int, step: int, parts: Iterable[int], results: Mapping[int, Any] | None = None, late: int | None = None
    ) -> None:
        """All servers have the values of some parts; in "async" they have applied them, `late` updates after their worker pulled."""
        if generation != self.generation or (self.mode == "sync" and step != self.version):
            return  # word of a step that is over may come late
        for part in parts:
            claim = self._claims.pop((step, part), None)
            if self.mode == "sync":
                self._done.add((step, part))
            elif self.apply(step, part):
                own = self.version - 1 - claim.version if claim is not None and late is None else late or 0
                self.staleness[own] = self.staleness.get(own, 0) + 1
                # A server that was lost has no results of what it had before: those of another update will do.
                self.results[step] = {**self._newest_results, **(results or {})}

    def results_before(self, version: int) -> dict[int, Mapping[int, Any]]:
        """Returns the results of the steps before a version; the oldest are dropped where all take too much memory."""
        total = 0
        for step in sorted(self.results, reverse=True):
            total += sum(getattr(value, "nbytes", 0) for value in self.results[step].values())
            if total > _MOST_RESULT_BYTES and step < version:
                del self.results[step]
        return {step: own for step, own in self.results.items() if step < version}

    def apply(self, step: int, part: int) -> bool:
        """Counts an update, in "async"; returns whether it is a new one."""
        if step < self.floor or (step, part) in self._done:
            return False
        self.version += 1
        self._done.add((step, part))
        while all((self.floor, own) in self._done for own in range(self.num_parts)):
            self._done.difference_update((self.floor, own) for own in range(self.num_parts))
            self.floor += 1
        return True

    @property
    def summary(self) -> Summary:
        """How far it has come."""
        servers = self.num_servers if self.ready else 0
        return Summary(
            mode=self.mode,
            version=self.version,
            num_parts=self.num_parts,
            workers=len(self.workers),
            servers=servers,
            steps=dict(self.steps),
            staleness=dict(self.staleness),
            num_bytes=self.num_bytes,
        )

    @property
    def num_under_way(self) -> int:
        """Parts that live workers compute."""
        return sum(claim.worker is not None for claim in self._claims.values())

    @property
    def done(self) -> tuple[tuple[int, int], ...]:
        """The parts that are done of steps that are not, by step and part."""
        return tuple(sorted(self._done))

    def resume(self, version: int, floor: int, done: Iterable[tuple[int, int]]) -> None:
        """Begins where a saved state ends, in "async"."""
        self.version, self.floor, self._done = version, floor, set(done)

    def applied(self, server: int, generation: int, version: int, results: Mapping[int, Any]) -> bool:
        """A server has renewed its arrays, in "sync". Returns whether all have come to a new version."""
        if generation != self.generation:
            return False
        self._applied[server] = version
        if results:
            self.results[version - 1] = {**self.results.get(version - 1, {}), **results}
        if len(self._applied) < self.num_servers or min(self._applied.values()) <= self.version:
            return False
        self.version = min(self._applied.values())
        self._claims, self._done = {}, set()
        return True

    def start(self, version: int, num_servers: int, num_parts: int) -> None:
        """Servers of a new layout are there, with arrays of this version."""
        self.num_servers, self.num_parts = num_servers, num_parts
        self.ready, self.busy, self.setter = True, False, None
        self.rewind(version)

    def rewind(self, version: int) -> None:
        """All servers go on from this version."""
        self.generation += 1
        self.version = version
        self.unsaved = self.saver = None
        self._claims, self._applied = {}, {}
        if self.mode == "sync":
            self._done = set()

    def save(self) -> None:
        """The next worker saves what stays with workers, as it is now."""
        self.unsaved, self.saver = self.version, None

    def saved_by_worker(self) -> None:
        """What stays with workers is saved."""
        self.unsaved = self.saver = None

    def reported(self, step: int, results: Mapping[int, Any]) -> None:
        """A worker has made results of a step that servers do not make."""
        if step < self.version:
            self.results[step] = {**self.results.get(step, {}), **results}

    def fail(self, text: str) -> None:
        """Ends the job with an error."""
        self.failure = self.failure or text

    def end_layout(self, num_servers: int, version: int) -> None:
        """The next worker divides the step for another number of servers."""
        self.num_servers, self.saved, self.ready, self.busy, self.setter = num_servers, version, False, False, None
        self.rewind(version)
