"""The actor of one server: it takes what workers push, renews its arrays when all is there, and saves them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax

from spmdctx.server.engine.rays import join_job, ray
from spmdctx.server.program.spec import ServerSpec
from spmdctx.server.state.folder import Updates, load_held, row_pieces, save_shard
from spmdctx.server.state.shard import Shard

_LOAD_S = 5.0


class Order(NamedTuple):
    """What a server is to be: its program, the version to load, and how it saves."""

    spec: ServerSpec
    folder: str
    version: int
    generation: int
    save_every: int
    mode: str
    max_staleness: int = 0
    updates: Updates = Updates(0, ())
    """In "async", what the arrays have had."""


class Pulled(NamedTuple):
    """Arrays of a version."""

    version: int
    values: list[Any]


class Pushed(NamedTuple):
    """What a server says of a part; in "async" the results of its update, and how many updates came between pull and push."""

    results: Mapping[int, Any]
    late: int = 0


class Snapshot(NamedTuple):
    """A file of saved arrays, and the parts that these have had, by step and part."""

    file: str
    applied: tuple[tuple[int, int], ...]


class _Void(Exception):
    """The generation of an exchange is over."""


class Server:
    """One server, or a spare one; all methods are called by way of Ray.

    Args:
        scheduler: the name of the job's.
    """

    def __init__(self, scheduler: str) -> None:
        self._scheduler, self._life = join_job(scheduler)
        self._changed = asyncio.Condition()
        self._renewing = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._order: Order | None = None
        self._shard: Shard | None = None
        self._floor, self._applied = 0, set[tuple[int, int]]()
        self._tasks: set[asyncio.Task[None]] = set()

    async def life(self) -> str:
        """Returns what tells this process from the next one."""
        return self._life

    async def watch(self, life: str) -> None:
        """Never returns while this process is the one that was meant: whoever waits for it learns of the server's end."""
        if life == self._life:
            await asyncio.Event().wait()

    async def load(self, order: Order) -> str:
        """Takes over the arrays of a version; whatever was under way is void. Returns what tells this process from the next."""
        self._order = None
        async with self._changed:
            self._changed.notify_all()
        async with self._renewing, self._saving:
            self._shard = await asyncio.to_thread(_loaded, order, self._shard)
            self._order = order
            self._floor, self._applied = order.updates.floor, set(order.updates.done)
        async with self._changed:
            self._changed.notify_all()
        return self._life

    async def push(self, generation: int, step: int, part: int, values: Mapping[str, Any], pulled: int = 0) -> Pushed | None:
        """Takes one part of a step, whose worker has pulled a version; None if it has to be computed again, or not at all."""
        order, shard = self._order, self._shard
        if order is None or shard is None or order.generation != generation:
            return None
        if order.mode == "async":
            return await self._update(order, shard, (step, part), values, pulled)
        if step < shard.version:
            return Pushed({})
        if step > shard.version:
            return None
        if await asyncio.to_thread(shard.add, step, part, values):
            self._start(self._renew(order, shard, step))
        return Pushed({})

    async def pull(self, generation: int, version: int, slots: Sequence[str], *, is_exact: bool = True) -> Pulled | None:
        """Returns arrays of a version once they are there; None if the generation is over, or they are there no more.

        Args:
            generation: in which the version counts.
            version: that is awaited.
            slots: of the arrays.
            is_exact: a later version is not taken.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is(generation) or self._version >= version)
        shard, order = self._shard, self._order
        if shard is None or order is None or not self._is(generation):
            return None
        found = shard.pull(slots, version if is_exact and order.mode == "sync" else None)
        return None if found is None else Pulled(*found)

    async def assign(self, generation: int, version: int, values: Mapping[str, Any]) -> bool:
        """Takes over arrays of a version, once or again; returns False if the generation is over."""
        shard = self._shard
        if shard is None or not self._is(generation):
            return False
        async with self._saving:  # rows of tables change in place
            await asyncio.to_thread(shard.assign, version, values)
        return True

    async def pull_rows(self, generation: int, version: int, places: Mapping[int, Any]) -> dict[int, Any] | None:
        """Returns rows of tables of a version, by the table's number; None if the generation is over, or they are there no more."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is(generation) or self._version >= version)
        shard, order = self._shard, self._order
        if shard is None or order is None or not self._is(generation):
            return None
        return await asyncio.to_thread(shard.pull_rows, places, version if order.mode == "sync" else None)

    async def kept(self, generation: int, first: int, last: int) -> list[dict[str, Any]] | None:
        """Returns what workers take of the steps from one up to another, once these are done; None if it is there no more."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is(generation) or self._version >= last)
        shard = self._shard
        return None if shard is None or not self._is(generation) else await asyncio.to_thread(shard.kept, first, last)

    async def forget(self, version: int) -> None:
        """Drops what is kept for workers of the steps before a version."""
        if self._shard is not None:
            self._shard.forget(version)

    async def save(self, generation: int, version: int) -> str | None:
        """Saves the arrays of a version, and returns the name of the file; None if they are those of another."""
        order, shard = self._order, self._shard
        if order is None or shard is None or order.generation != generation or shard.version != version:
            return None
        async with self._saving:
            values = await asyncio.to_thread(shard.saved)
            return await asyncio.to_thread(_saved, order, shard, version, values)

    async def snapshot(self, generation: int, version: int, floor: int) -> Snapshot | None:
        """Saves the arrays as they are under the name of a version, with the parts of steps from `floor` on that they have had.

        None if the generation is over.
        """
        async with self._changed:
            # Who asks may have to have this process load first.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._order is not None), _LOAD_S)
        async with self._renewing:
            order, shard = self._order, self._shard
            if order is None or shard is None or order.generation != generation:
                return None
            values = await asyncio.to_thread(shard.saved)
            self._floor = max(self._floor, floor)
            self._applied = {task for task in self._applied if task[0] >= floor}
            applied = tuple(sorted(self._applied))
            if shard.tables:  # rows change in place: they are written before the next update
                return Snapshot(await self._written(order, shard, version, values), applied)
        return Snapshot(await self._written(order, shard, version, values), applied)

    async def _written(self, order: Order, shard: Shard, version: int, values: Mapping[str, Any]) -> str:
        async with self._saving:
            return await asyncio.to_thread(_saved, order, shard, version, values)

    def _is(self, generation: int) -> bool:
        return self._order is not None and self._order.generation == generation

    @property
    def _version(self) -> int:
        return -1 if self._shard is None else self._shard.version

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew(self, order: Order, shard: Shard, step: int) -> None:
        async with self._renewing:
            if shard.version != step or not self._is(order.generation):
                return
            try:
                await asyncio.to_thread(shard.renew, self._exchange(order, step))
            except _Void:
                return
            except Exception as error:
                self._scheduler.fail.remote(f"Server {order.spec.server} cannot renew its arrays: {error}")
                return
            version, values, results = shard.version, shard.values, shard.results
            async with self._changed:
                self._changed.notify_all()
            self._scheduler.applied.remote(order.spec.server, order.generation, version, results)
            # Rows change in place: they are saved before the next update, and when no worker needs those of the version before.
            if version % order.save_every == 0 and shard.tables and await self._scheduler.reached.remote(order.generation, version):
                await self._save(order, shard, version, await asyncio.to_thread(shard.saved))
        if version % order.save_every == 0 and not shard.tables:
            self._start(self._save(order, shard, version, values))

    async def _update(self, order: Order, shard: Shard, task: tuple[int, int], values: Mapping[str, Any], pulled: int) -> Pushed | None:
        async with self._renewing:
            late = max(0, shard.version - pulled)
            if not self._is(order.generation) or self._shard is not shard:
                return None
            if task[0] < self._floor or task in self._applied:
                return Pushed(dict(shard.results))
            if late > order.max_staleness:
                return None
            await asyncio.to_thread(shard.update, values)
            self._applied.add(task)
            return Pushed(dict(shard.results), late)

    async def _save(self, order: Order, shard: Shard, version: int, values: Mapping[str, Any]) -> None:
        async with self._saving:
            try:
                file = await asyncio.to_thread(_saved, order, shard, version, values)
            except Exception as error:
                self._scheduler.fail.remote(f"Server {order.spec.server} cannot save its arrays: {error}")
                return
        self._scheduler.saved.remote(order.spec.server, order.generation, version, file)

    def _exchange(self, order: Order, step: int) -> Any:
        def exchange(number: int, values: dict[str, Any], awaited: tuple[str, ...]) -> Mapping[str, Any]:
            found = ray().get(self._scheduler.exchange.remote(order.generation, (step, number), values, awaited))
            if found is None:
                raise _Void
            return dict(found)

        return exchange


def _loaded(order: Order, former: Shard | None) -> Shard:
    spec = order.spec
    jax.config.update("jax_enable_x64", spec.x64)
    return Shard(spec, load_held(Path(order.folder), order.version, spec), order.version, former)


def _saved(order: Order, shard: Shard, version: int, values: Mapping[str, Any]) -> str:
    named = {slot: piece.name for slot, piece in row_pieces(shard.spec).items()} | dict(shard.spec.held)
    return save_shard(Path(order.folder), version, order.spec.server, {path: values[slot] for slot, path in named.items()})
