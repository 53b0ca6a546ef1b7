"""How far a job has come: which worker computes which part of which step, and what is done again after a loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Setup(NamedTuple):
    """The worker is to divide the step for so many servers, whose arrays are those of a version; None: the step's own first ones."""

    num_servers: int
    version: int | None


class Go(NamedTuple):
    """The worker is to compute parts of its step from the arrays of a version."""

    generation: int
    version: int
    parts: tuple[int, ...]


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


Reply = Setup | Go | Done | Replay | Leave | Failed


@dataclass
class _Claim:
    worker: int
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
        self._claims = {task: claim for task, claim in self._claims.items() if claim.worker != worker}
        if self.setter == worker:
            self.setter = None

    def ask(self, worker: int, step: int) -> Reply | None:
        """Returns what a worker does in one of its steps, or None while it has to wait."""
        if self.failure:
            return Failed(self.failure)
        if worker in self.leaving:
            self.lost(worker)
            return Leave()
        self.workers.add(worker)
        if self.busy:
            return None
        if not self.ready:
            if self.setter not in (None, worker):
                return None
            self.setter = worker
            return Setup(self.num_servers, self.saved)
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
        taken = {part for at, part in (*self._claims, *self._done) if at == step}
        free = [part for part in range(self.num_parts) if part not in taken]
        if not free:
            return Done(self.version, self.results.get(step, self.results.get(max(self.results, default=-1), {})))
        # All others that are under way may be applied before the oldest one.
        if any(self.version - claim.version + len(self._claims) > self.max_staleness for claim in self._claims.values()):
            return None
        self._claims[step, free[0]] = _Claim(worker, self.version)
        return Go(self.generation, self.version, (free[0],))

    def pushed(self, generation: int, step: int, parts: Iterable[int], results: Mapping[int, Any] | None = None) -> None:
        """All servers have the values of some parts; in "async" they have applied them."""
        if generation != self.generation or (self.mode == "sync" and step != self.version):
            return  # word of a step that is over may come late
        for part in parts:
            claim = self._claims.pop((step, part), None)
            if self.mode == "async" and (step, part) not in self._done:
                late = self.version - claim.version if claim is not None else 0
                self.staleness[late] = self.staleness.get(late, 0) + 1
                self.version += 1
                self.results[step] = results or {}
            self._done.add((step, part))

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
        self._claims, self._applied = {}, {}
        if self.mode == "sync":
            self._done = set()

    def fail(self, text: str) -> None:
        """Ends the job with an error."""
        self.failure = self.failure or text

    def end_layout(self, num_servers: int, version: int) -> None:
        """The next worker divides the step for another number of servers."""
        self.num_servers, self.saved, self.ready, self.busy, self.setter = num_servers, version, False, False, None
        self.rewind(version)
