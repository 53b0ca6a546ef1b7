"""What Ray raises reaches users as one of our errors, with Ray's as its cause."""

import io
from types import SimpleNamespace

import pytest

from spmdctx.errors import CheckpointError, CommunicationError
from spmdctx.server.engine import rays
from spmdctx.server.engine.client import Client, Lost
from spmdctx.server.engine.job import _Running
from spmdctx.server.engine.rays import answer

ray = pytest.importorskip("ray", reason="Ray is an extra")
errors = ray.exceptions


def failed(cause):
    return errors.RayTaskError("method", "Traceback ...", cause).as_instanceof_cause()


GONE = [errors.ActorDiedError(), errors.RayActorError(), errors.RaySystemError("the head is lost"), errors.GetTimeoutError("late")]
AWAY = [errors.ActorUnavailableError("a network that is cut", None)]


@pytest.fixture(
    params=[*GONE, *AWAY, failed(KeyError("x")), failed(CheckpointError("A file is damaged."))], ids=lambda one: type(one).__name__
)
def raised(request, monkeypatch):
    def get(call):
        raise request.param

    monkeypatch.setattr(rays, "ray", lambda: SimpleNamespace(get=get, exceptions=errors))
    return request.param


def test_each_error_of_an_actor_is_one_of_ours(raised):
    with pytest.raises((CommunicationError, CheckpointError)) as caught:
        answer(None, "The scheduler")
    assert not isinstance(caught.value, errors.RayError)
    assert caught.value.__cause__ is raised
    text = str(caught.value)
    if isinstance(raised, CheckpointError):
        assert text == "A file is damaged."
    elif isinstance(raised, errors.RayTaskError):
        assert "The scheduler of the parameter server has failed." in text
        assert "KeyError: 'x'" in text
    else:
        assert "cannot be reached" in text or "is gone" in text
        assert "submit the job again" in text


def test_a_server_that_is_lost_is_no_error_but_one_that_fails_is(raised):
    own = object.__new__(Client)
    own._ray, own._edition = ray, 3
    expected = (CommunicationError, CheckpointError) if isinstance(raised, errors.RayTaskError) else Lost
    with pytest.raises(expected):
        own._from_servers([1])
    assert own._edition == (3 if isinstance(raised, errors.RayTaskError) else -1)


def test_whoever_has_launched_a_job_gets_no_error_of_the_engine(raised):
    job = object.__new__(_Running)
    job._scheduler, job._said, job._streams = SimpleNamespace(said=SimpleNamespace(remote=lambda *_: None)), 0, {"out": io.StringIO()}
    with pytest.raises((CommunicationError, CheckpointError)):
        job._write(0.0)


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
@pytest.mark.parametrize(
    "error", [ConnectionError("refused"), OSError(28, "No space left"), RuntimeError("a version"), errors.RaySystemError("x")]
)
def test_a_cluster_that_is_not_there_or_cannot_start_is_named(monkeypatch, address, error):
    def init(**_):
        raise error

    own = SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=errors)
    monkeypatch.setattr(rays, "ray", lambda: own)
    with pytest.raises(CommunicationError, match="Ray cannot be started" if address is None else "There is no cluster of Ray") as caught:
        rays.connect(address)
    assert caught.value.__cause__ is error
