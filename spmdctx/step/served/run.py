"""One worker's steps: it computes the parts that it is given, and does lost steps again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmdctx._compat import x64_is_on
from spmdctx.errors import CommunicationError, UnsupportedError
from spmdctx.server.alone import constant, part_results, pushed_to
from spmdctx.server.engine.client import Client, Lost
from spmdctx.server.engine.fleet import Layout
from spmdctx.server.initial import with_recipes
from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.crossing import Crossing, crossing_of
from spmdctx.server.program.cut import Cut, cut_step
from spmdctx.server.program.row_ids import RowReader, interleaved, places_on
from spmdctx.server.program.spec import fingerprint, is_key, raw, server_specs, typed
from spmdctx.server.program.worker import WorkerProgram
from spmdctx.server.remote import Origin, RemoteArray, fetched
from spmdctx.server.state.folder import row_pieces, save_shard
from spmdctx.server.state.progress import Done, Go, Replay, Save, Setup
from spmdctx.server.state.row_files import rows_of
from spmdctx.step.served.local import LocalRun

_LOST_S = 0.05
"""Seconds until the scheduler is asked again: it may not yet know that a server was lost."""


class Held(NamedTuple):
    """Arrays that this worker has pulled, the generation and version that they are of, and the version of each server."""

    generation: int
    version: int
    values: dict[int, Any]
    versions: tuple[int, ...]


class Part(NamedTuple):
    """The program of one part of the batch, what runs it, and what compiles it."""

    program: WorkerProgram
    call: Callable[..., Sequence[Any]]
    prepare: Callable[[], object]


class ServedRun:
    """The steps of this worker.

    Args:
        step: as it was captured.
        client: the connection to the servers.
        part: runs the program of one part.
        client: the connection to the servers.
        cut: of the step, for any number of servers.
        local: what stays with this worker; None for nothing.
    """

    def __init__(self, step: ServedStep, part: Part, client: Client, cut: Cut, local: LocalRun | None = None) -> None:
        self._step, self._part, self._client, self._local = step, part, client, local
        self._cut: Cut | None = None
        self._crossing: Crossing | None = None
        self._first: Sequence[Any] = ()
        self._held: Held | None = None
        self._ahead: tuple[int, int, Sequence[Any]] | None = None
        self._kept: dict[int, dict[int, Any]] = {}
        self._assigned: dict[int, dict[int, Any]] = {}
        self._number = 0
        self._reader = RowReader(step)
        self._take_cut(cut)
        if client.hello(fingerprint(step), step.loss.num_parts):
            # Others would wait for its first part.
            part.prepare()

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Does the next step, and returns its flat results."""
        step = self._number
        if step == 0:
            self._first = leaves
        elif replaced := self._replaced(leaves):
            self._check_replaced(replaced)
            self._assigned[step] = replaced
        self._kept[step] = {number: _own(leaf) for number, leaf in enumerate(leaves) if number not in self._carried}
        done = self._until_done(step)
        if step == 0:
            # Servers have the state: it need not lie here as well.
            self._first = [leaf if isinstance(leaf, RemoteArray) else None for leaf in leaves]
        self._number += 1
        for kept in (self._kept, self._assigned):
            for number in [number for number in kept if number < self._client.kept_from]:
                del kept[number]
        return self._results(done, leaves)

    def _replaced(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """Returns the arrays that the user has put in place of handles since the last step, by the number of the input.

        Raises:
            UnsupportedError: one is the handle of an earlier step, whose value servers have no more.
        """
        found = {}
        for number in sorted(self._carried):
            leaf = leaves[number]
            origin = leaf.origin if isinstance(leaf, RemoteArray) else None
            if origin is None or origin.owner is not self:
                found[number] = _own(leaf)
                continue
            if origin.steps != self._number:
                raise UnsupportedError(
                    "Servers hold the newest state alone, and the step got a handle that an earlier call has returned.",
                    where=self._step.captured.inputs[number].path,
                    got=f"{leaf.path} after {origin.steps} steps, and {self._number} are done",
                    fix="copy what may be needed again, such as jax.tree.map(np.asarray, state), and give the copy",
                )
            if origin.number != number:
                found[number] = _own(leaf.fetch())
        return found

    def _check_replaced(self, replaced: Mapping[int, Any]) -> None:
        if self._client.job.mode == "async":
            paths = [self._step.captured.inputs[number].path for number in replaced]
            raise UnsupportedError(
                "In async each worker is in a step of its own, and servers do not take over state that a script has replaced.",
                where=self._step.loss.where,
                got=", ".join(paths[:3]),
                fix='give the step what the last one has returned, or update_mode="sync"',
            )

    def _assign(self, go: Go, cut: Cut, step: int) -> None:
        """Has servers take over what the user has replaced; what was pulled before is void.

        Raises:
            Lost: a server was lost.
        """
        values = {number: np.asarray(raw(jnp.asarray(fetched(leaf)))) for number, leaf in self._assigned.get(step, {}).items()}
        if values:
            own = [{f"in/{one}": values[one] for one in server.held if one in values} for server in cut.servers]
            by_rows = values.keys() & self._by_rows
            for server, given in enumerate(own):
                given.update({f"in/{one}": values[one][server :: len(own)] for one in sorted(by_rows)})
            self._client.assign(go, own)
            self._held = self._ahead = None

    @property
    def traffic(self) -> Mapping[str, int]:
        """The bytes that this worker has pushed and pulled, of rows of tables and of other arrays."""
        return self._client.traffic

    @property
    def _carried(self) -> set[int]:
        return {leaf.carried_from for leaf in self._step.captured.outputs if leaf.carried_from is not None}

    def _until_done(self, step: int) -> Done:
        at = step
        while True:
            reply = self._client.ask(at)
            if isinstance(reply, Setup):
                self._set_up(reply)
            elif isinstance(reply, Replay):
                at = reply.version
                if at not in self._kept:
                    raise CommunicationError("Servers have lost steps whose batches this worker has no more.", got=f"step {at}")
            elif isinstance(reply, Go):
                try:
                    self._compute(reply, at)
                except Lost:
                    self._held = self._ahead = None
                    time.sleep(_LOST_S)
            elif isinstance(reply, Save):
                self._save(reply)
            elif at == step:
                return reply
            else:
                at += 1

    def _save(self, reply: Save) -> None:
        assert self._local is not None, "what stays with workers is saved by workers that have it"
        try:
            self._bring(self._local, reply.version)
        except Lost:
            time.sleep(_LOST_S)
            return
        self._local.save(reply.generation, reply.version)

    def _bring(self, local: LocalRun, version: int) -> None:
        local.bring(version, self._cut_for(self._client.num_servers).taken, self._kept, self._assigned)

    def _cut_for(self, num_servers: int) -> Cut:
        if self._cut is None or len(self._cut.servers) != num_servers:
            return self._take_cut(cut_step(self._step, num_servers))
        return self._cut

    def _take_cut(self, cut: Cut) -> Cut:
        self._cut = cut
        self._crossing = crossing_of(self._step, cut) if self._client.job.mode == "async" else None
        return cut

    def _set_up(self, reply: Setup) -> None:
        cut, avals = self._cut_for(reply.num_servers), self._step.captured.in_avals
        specs = with_recipes(server_specs(self._step, cut, x64=x64_is_on()), self._step, self._first)
        if reply.version is None:
            for number, server in enumerate(cut.servers):
                own = {self._step.captured.inputs[one].path: raw(jnp.asarray(self._first[one])) for one in server.held}
                recipes = {slot for table in specs[number].tables for slot in table.recipes}
                for slot, piece in row_pieces(specs[number]).items():
                    if slot in recipes:
                        continue
                    own[piece.name] = rows_of(self._first[int(slot[3:])], avals[int(slot[3:])], piece)
                save_shard(Path(self._client.job.folder), 0, number, own)
            if self._local is not None:
                self._local.begin(self._first)
        own_layout = Layout(specs, self._step.loss.num_parts, fingerprint(self._step), reply.version or 0, self._local is not None)
        self._client.set_up(own_layout)

    def _compute(self, go: Go, step: int) -> None:
        """Computes parts of a step, pushes them, and pulls what the next step reads.

        Raises:
            Lost: a server was lost.
        """
        client = self._client
        cut = self._cut_for(client.num_servers)
        pulled = sorted({*cut.pulled, *(self._crossing.pulled if self._crossing is not None else ())})
        slots = [[f"in/{number}" for number in pulled if cut.home.get(number, 0) == server] for server in range(len(cut.servers))]
        self._assign(go, cut, step)
        self._held = held = self._arrays(go, slots)
        values = {**self._kept[step], **held.values}
        if self._local is not None:
            self._bring(self._local, go.version)
            values |= self._local.values
        pushes = {part: self._pushed(cut, values, part, go) for part in go.parts}
        client.push(go, step, pushes, held.versions)
        if client.job.mode == "sync":
            # The next version comes while the scheduler is asked: this worker may get parts of one that was lost first.
            self._ahead = (go.generation, go.version + 1, client.start_pull(go, go.version + 1, slots))
            if self._local is not None:
                self._local.start(go.generation)

    def _arrays(self, go: Go, slots: Sequence[Sequence[str]]) -> Held:
        """Returns what servers hold in a version."""
        held, ahead = self._held, self._ahead
        is_sync = self._client.job.mode == "sync"
        if is_sync and held is not None and held.generation == go.generation and {*held.versions} == {go.version}:
            return held
        self._held = self._ahead = None
        if ahead is not None and ahead[:2] == (go.generation, go.version):
            return self._pulled(ahead[2], go, slots)
        return self._pulled(self._client.start_pull(go, go.version if self._client.job.mode == "sync" else 0, slots), go, slots)

    def _pulled(self, pulls: Sequence[Any], go: Go, slots: Sequence[Sequence[str]]) -> Held:
        found = self._client.finish_pull(pulls)
        names = [slot for own in slots for slot in own]
        arrays = [value for one in found for value in one.values]
        inputs = self._step.captured.in_avals
        values = {}
        for slot, value in zip(names, arrays, strict=True):
            number = int(slot.partition("/")[2])
            values[number] = typed(value, inputs[number])
        return Held(go.generation, go.version, values, tuple(one.version for one in found))

    def _pushed(self, cut: Cut, values: dict[int, Any], part: int, go: Go) -> list[dict[str, Any]]:
        """Computes one part, and returns what each server gets."""
        reader, count = self._reader, len(cut.servers)
        rows = reader.rows(values, part)
        if rows.ids:
            values = {**values, **reader.gathered(rows, self._client.pull_rows(go, [places_on(rows, one, count) for one in range(count)]))}
        made = part_results(self._part.program, self._part.call, values, part, self._step.loss.num_parts, rows.places)
        crossing = {} if self._crossing is None else self._crossing.run(made, values)
        gives = part == 0 or self._crossing is not None
        own = [{**pushed_to(cut, one, made, values, gives=gives), **crossing} for one in range(count)]
        return [{**own[one], **reader.pushed(rows, made, one, count)} for one in range(count)]

    def _results(self, done: Done, leaves: Sequence[Any]) -> list[Any]:
        """Returns the results of a step: handles for its state, and what servers say of the rest."""
        captured, cut = self._step.captured, self._cut_for(self._client.num_servers)
        results = {**done.results, **self._results_here(done)}
        found: list[Any] = []
        for number, (leaf, aval) in enumerate(zip(captured.outputs, captured.jaxpr.out_avals, strict=True)):
            if leaf.carried_from is not None:
                found.append(self._handle(leaf.carried_from, captured.in_avals[leaf.carried_from]))
            elif number in cut.constants:
                found.append(constant(cut, number, leaves))
            elif number in results:
                found.append(typed(jnp.asarray(results[number]), aval))
            else:
                raise CommunicationError("The results of a step that was done before are not kept.", got=f"result {leaf.path}")
        return found

    def _results_here(self, done: Done) -> Mapping[int, Any]:
        """Returns the results of the last step that workers make, if no worker has told of them yet."""
        local, step = self._local, self._number - 1
        if local is None or self._step.local is None or done.results.keys() >= set(self._step.local.results):
            return {}
        while not local.results(step) and step >= self._client.kept_from:
            try:
                self._client.refresh()
                self._bring(local, step + 1)
            except Lost:
                time.sleep(_LOST_S)
                self._until_done(step)
        return local.results(step)

    def _handle(self, number: int, aval: Any) -> RemoteArray:
        path, origin = self._step.captured.inputs[number].path, Origin(self, number, self._number)
        return RemoteArray(aval, path, origin, lambda: self.read([number])[number])

    def read(self, numbers: Sequence[int]) -> dict[int, Any]:
        """Returns arrays as servers have them now, after all steps that this worker has seen; in "sync" all are of one version."""
        client, is_sync = self._client, self._client.job.mode == "sync"
        least, asks = self._number if is_sync else 0, is_sync
        while True:
            if asks:
                self._until_done(self._number - 1)
            try:
                version, pieces = client.latest(least, lambda count: self._slots(numbers, count))
                return self._joined(numbers, pieces) | self._here(numbers, version)
            except Lost:
                # Servers may be there only when this worker has divided the step for them.
                asks = True
                time.sleep(_LOST_S)

    def _slots(self, numbers: Sequence[int], num_servers: int) -> list[list[str]]:
        """Returns what to ask each server for."""
        home = self._cut_for(num_servers).home
        served = [number for number in numbers if number not in self._stays]
        return [
            [f"in/{number}" for number in served if number in self._by_rows or home.get(number, 0) == server]
            for server in range(num_servers)
        ]

    def _here(self, numbers: Sequence[int], version: int) -> dict[int, Any]:
        """Returns those of some arrays that stay with this worker, of a version.

        If their update reads arguments of the step, and servers are ahead of this worker, they are of its own step.
        """
        own, local = self._stays.intersection(numbers), self._local
        if not own or local is None:
            return {}
        least = max(self._number, self._client.kept_from)
        self._bring(local, max(least, version) if not local.reads_arguments else least)
        return {number: jnp.copy(local.values[number]) for number in own}  # who reads it may donate it

    @property
    def _stays(self) -> frozenset[int]:
        return frozenset() if self._step.local is None else frozenset(self._step.local.held)

    def _joined(self, numbers: Sequence[int], pieces: Sequence[Sequence[Any]]) -> dict[int, Any]:
        """Returns whole arrays of what servers have given."""
        avals, slots = self._step.captured.in_avals, self._slots(numbers, len(pieces))
        given = [dict(zip(own, values, strict=True)) for own, values in zip(slots, pieces, strict=True)]
        found = {}
        for number in [one for one in numbers if one not in self._stays]:
            values = [own[f"in/{number}"] for own in given if f"in/{number}" in own]
            whole = interleaved(values) if number in self._by_rows else values[0]
            found[number] = typed(jnp.asarray(whole), avals[number])
        return found

    @property
    def _by_rows(self) -> frozenset[int]:
        return frozenset() if self._step.tables is None else frozenset(self._step.tables.held)


def _own(leaf: Any) -> Any:
    """Returns an array that the user may change, donate or have placed anywhere, as one that stays."""
    if isinstance(leaf, np.ndarray):
        return np.array(leaf)
    return np.asarray(leaf) if isinstance(leaf, jax.Array) and not is_key(leaf.dtype) else leaf
