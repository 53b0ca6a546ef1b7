"""Where process 0 listens, and where JAX's service does."""

import os
import socket
import stat
from pathlib import Path

import pytest

from spmdctx.communication.clusters import Cluster
from spmdctx.communication.meeting import place
from spmdctx.communication.meeting.place import bind_address, forget_service_address, is_in_reach, new_service_address, open_listeners
from spmdctx.errors import CommunicationError, ContextError


def cluster(address):
    return Cluster("a test", address, 2, 0)


def found(monkeypatch, addresses, own):
    """Has a name mean these addresses, of which some are this machine's."""
    rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: rows)
    monkeypatch.setattr(place, "_is_own", lambda one: one in own)


@pytest.mark.parametrize(
    ("address", "addresses", "own", "expected"),
    [
        ("127.0.0.1:4000", ["127.0.0.1"], ["127.0.0.1"], "127.0.0.1:4000"),
        ("[::1]:4000", ["::1"], ["::1"], "[::1]:4000"),
        ("head:4000", ["10.0.0.7"], ["10.0.0.7"], "10.0.0.7:4000"),
        ("head:4000", ["fd00::7"], ["fd00::7"], "[fd00::7]:4000"),
        ("head:4000", ["10.0.0.7", "fd00::7"], ["10.0.0.7", "fd00::7"], "head:4000"),
        ("head:4000", ["10.0.0.7", "10.0.0.8"], ["10.0.0.8"], "10.0.0.8:4000"),
        ("head:4000", ["127.0.1.1"], ["127.0.1.1"], "[::]:4000"),
        ("service:4000", ["10.96.0.1"], [], "[::]:4000"),
    ],
    ids=["loopback", "loopback by IPv6", "a name", "a name by IPv6", "both", "one is another machine's", "own name on loopback", "no own"],
)
def test_process_0_listens_at_the_jobs_address(monkeypatch, address, addresses, own, expected):
    found(monkeypatch, addresses, own)
    assert bind_address({}, cluster(address)) == expected


def test_the_user_may_say_where_it_listens():
    stated = {"JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0"}
    assert bind_address(stated, cluster("service:4000")) == "127.0.0.1:0"
    (server,) = open_listeners(stated, cluster("service:4000"))
    with server:
        assert server.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ContextError, match="JAX_COORDINATOR_BIND_ADDRESS is no address"):
        bind_address({"JAX_COORDINATOR_BIND_ADDRESS": "10.0.0.1"}, cluster("service:4000"))


def test_a_port_in_use_leaves_no_socket_open():
    (taken,) = open_listeners({}, cluster("127.0.0.1:4000"), port=0)
    with taken, pytest.raises(CommunicationError, match="in use"):
        open_listeners({}, cluster(f"127.0.0.1:{taken.getsockname()[1]}"))


def test_on_one_machine_jaxs_service_has_a_folder_that_only_the_user_enters():
    service = new_service_address({}, cluster("127.0.0.1:4000"))
    folder = Path(service.removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert is_in_reach(service)
    forget_service_address(service)
    assert not folder.exists()
    assert not is_in_reach(service)


def test_elsewhere_it_has_the_jobs_address(monkeypatch, tmp_path):
    assert new_service_address({}, cluster("head:4000")) == "head:4000"
    assert new_service_address({"JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:1"}, cluster("127.0.0.1:4000")) == "127.0.0.1:4000"
    long = tmp_path / ("d" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", os.fspath(long))
    assert new_service_address({}, cluster("127.0.0.1:4000")) == "127.0.0.1:4000"
    assert not [*long.iterdir()]
