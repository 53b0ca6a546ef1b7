"""Nobody waits without end, and nothing fails, where servers are lost or end while somebody asks for them."""

import asyncio
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from spmdctx.server.engine import server as engine
from spmdctx.server.engine.client import Lost
from spmdctx.server.engine.scheduler import Scheduler
from spmdctx.server.engine.server import Server, Snapshot
from spmdctx.server.state.progress import Progress
from spmdctx.step.served.run import ServedRun


def scheduler():
    found = object.__new__(Scheduler)
    found._changed, found._progress, found._board = asyncio.Condition(), Progress(2), {}
    found._fleet = SimpleNamespace(servers=[], edition=3)
    return found


def test_an_exchange_that_a_rewind_interrupts_is_void():
    async def run():
        own = scheduler()
        own._progress.start(0, 2, 1)
        generation = own._progress.generation

        async def rewound():
            own._progress.rewind(0)
            own._board.clear()

        own._notify = rewound
        return await asyncio.wait_for(own.exchange(generation, (0, 1), {"v/1": 1}, ("v/2",)), 5)

    assert asyncio.run(run()) is None


@pytest.mark.parametrize("busy", [False, True])
def test_servers_are_awaited_only_while_they_are_started(busy):
    async def run():
        own = scheduler()
        own._progress.busy = busy
        return await asyncio.wait_for(own.servers(), 0.2)

    if busy:
        with pytest.raises(TimeoutError):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == (0, 3, [])


def server(order, tables=()):
    found = object.__new__(Server)
    found._changed, found._renewing, found._saving = asyncio.Condition(), asyncio.Lock(), asyncio.Lock()
    found._order, found._applied, found._floor = order, {(3, 0), (5, 1)}, 0
    found._shard = SimpleNamespace(saved=dict, tables=tables)
    return found


def test_a_server_that_has_not_loaded_again_says_so(monkeypatch):
    monkeypatch.setattr(engine, "_LOAD_S", 0.05)
    assert asyncio.run(asyncio.wait_for(server(None).snapshot(1, 2, 0), 5)) is None


@pytest.mark.parametrize("tables", [(), ("rows",)])
def test_rows_are_written_before_the_next_update(monkeypatch, tables):
    held = []

    async def run():
        own = server(SimpleNamespace(generation=1), tables)
        monkeypatch.setattr(engine, "_saved", lambda *_: held.append(own._renewing.locked()) or "file")
        return await own.snapshot(1, 2, 5)

    assert asyncio.run(run()) == Snapshot("file", ((5, 1),))
    assert held == [bool(tables)]


def test_who_reads_state_divides_the_step_if_servers_wait_for_that():
    run = object.__new__(ServedRun)
    asked, answers = [], [Lost(), 7]

    def latest(*_):
        answer = answers.pop(0)
        if isinstance(answer, Lost):
            raise answer
        return 4, [[answer]]

    run._client = SimpleNamespace(job=SimpleNamespace(mode="async"), latest=latest)
    captured = SimpleNamespace(in_avals=[jax.typeof(jnp.int32(0))])
    run._local = None
    run._step, run._number, run._until_done = SimpleNamespace(tables=None, local=None, captured=captured), 4, asked.append
    run._cut = SimpleNamespace(servers=[None], home={})
    assert run.read([0]) == {0: 7}
    assert asked == [3]


def test_rows_are_not_replaced_while_they_are_written():
    assigned = []

    async def run():
        own = server(SimpleNamespace(generation=1))
        own._shard.assign = lambda *given: assigned.append(given)
        async with own._saving:
            call = asyncio.ensure_future(own.assign(1, 2, {}))
            await asyncio.sleep(0.05)
            assert not assigned
        return await asyncio.wait_for(call, 5)

    assert asyncio.run(run())
    assert assigned == [(2, {})]
