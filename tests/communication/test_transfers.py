"""Where processes accept arrays: ports of their own, on loopback if the job is on one machine."""

import jax
import pytest

from spmdctx.communication import transfers
from spmdctx.communication.clusters import Cluster, ports_of


@pytest.fixture
def told(monkeypatch):
    """What JAX is told, and the environment that XLA reads."""
    found = {}
    monkeypatch.setattr(jax.config, "read", lambda name: found.get(name, ""))
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    monkeypatch.delenv("NPROC", raising=False)
    return found


def test_processes_of_a_job_never_try_the_same_port():
    tried = [set(ports_of(Cluster("a test", "127.0.0.1:4000", 3, process))) for process in range(3)]
    assert all(len(one & other) == 0 for one in tried for other in tried if one is not other)
    assert all(min(own) >= 61440 and max(own) < 65536 for own in tried)


def test_a_process_of_one_machine_accepts_arrays_on_loopback(told):
    transfers.enable_transfers(Cluster("a test", "localhost:4000", 2, 1))
    host, _, port = told["jax_cross_host_transfer_socket_address"].rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) >= 61440
    assert transfers.can_transfer()


def test_a_port_in_use_is_passed_over_and_the_user_s_own_settings_stay(told, monkeypatch):
    cluster = Cluster("a test", "127.0.0.1:4001", 2, 0)
    first, second, *_ = ports_of(cluster)
    monkeypatch.setattr(transfers, "_is_free", lambda host, port: port != first)
    transfers.enable_transfers(cluster)
    assert told["jax_cross_host_transfer_socket_address"] == f"127.0.0.1:{second}"
    told["jax_cross_host_transfer_socket_address"] = "own:1"
    transfers.enable_transfers(cluster)
    assert told["jax_cross_host_transfer_socket_address"] == "own:1"


def test_one_process_is_told_nothing(told):
    transfers.enable_transfers(Cluster("a test", "127.0.0.1:4000", 1, 0))
    assert not told
