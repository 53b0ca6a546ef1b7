"""Servers that do not start, or are lost again and again while they load, end the job with one error that says what to look at."""

import asyncio
from types import SimpleNamespace

import pytest

from spmdctx.errors import CommunicationError
from spmdctx.server.engine import fleet as engine
from spmdctx.server.engine.fleet import Fleet, Job, Layout
from tests.server.engine.simulated import RayActorError, RayError, RayTaskError, Spec

ERRORS = SimpleNamespace(RayError=RayError, RayActorError=RayActorError, RayTaskError=RayTaskError)


class Server:
    """A server of which each call does what is told of it: it returns it, raises it, or never ends."""

    def __init__(self, life, *loads):
        self.lives, self.loads = life, list(loads)
        self.life = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: self.answer(self.lives)))
        self.load = SimpleNamespace(remote=lambda order: self.answer(self.loads.pop(0)))

    async def answer(self, said):
        if said is None:
            await asyncio.Event().wait()
        if isinstance(said, Exception):
            raise said
        return said


def loaded(monkeypatch, *servers):
    monkeypatch.setattr(engine, "ray", lambda: SimpleNamespace(exceptions=ERRORS))
    monkeypatch.setattr(engine, "Spares", lambda *_: SimpleNamespace(taken=lambda count: list(servers)))
    monkeypatch.setattr(engine, "_START_S", 0.1)
    monkeypatch.setattr(engine, "_AGAIN_S", 0.001)
    found = Fleet(Job(len(servers), "sync", 0, 10, "folder"), "scheduler")
    found.start(Layout([Spec(number, len(servers)) for number in range(len(servers))], 1, "step", 0))
    asyncio.run(asyncio.wait_for(found.load(0, 1), 10))
    return [found.life(number) for number in range(len(servers))]


@pytest.mark.parametrize(("life", "said"), [(None, "no answer in 0.1 s"), (RayActorError("its constructor\nfails"), "its constructor")])
def test_a_server_that_does_not_start_is_named(monkeypatch, life, said):
    with pytest.raises(CommunicationError, match="Server 1 cannot start") as caught:
        loaded(monkeypatch, Server("a", "a"), Server(life))
    text = str(caught.value)
    assert said in text
    assert "fails" not in text
    assert "ray status" in text
    assert "logs" in text


def test_a_server_that_is_lost_while_it_loads_is_asked_again_but_not_for_ever(monkeypatch):
    lost = RayActorError("lost")
    assert loaded(monkeypatch, Server("a", lost, lost, "b")) == ["b"]
    with pytest.raises(CommunicationError, match="Server 0 was lost 5 times while it loaded its arrays") as caught:
        loaded(monkeypatch, Server("a", *[lost] * 5))
    assert "memory" in str(caught.value)
    assert caught.value.__cause__ is lost


def test_a_server_that_cannot_load_is_not_asked_again(monkeypatch):
    with pytest.raises(RayTaskError):
        loaded(monkeypatch, Server("a", RayTaskError("a damaged file"), "b"))
