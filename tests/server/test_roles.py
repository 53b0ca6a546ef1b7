"""Processes that are started one by one with MS_ROLE, and jobs on a cluster that runs already."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import jax.numpy as jnp
import pytest

import spmdctx
from benchmarks import ps_work
from benchmarks.ps_jobs import ROOT, Running
from spmdctx.errors import ContextError
from spmdctx.server import WORKER, node, roles
from spmdctx.server.engine import rays
from spmdctx.server.engine.fleet import Job
from tests.server import local, tables

STEPS, LIMIT_S = 12, 200
GIVEN = {"MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118", "MS_SERVER_NUM": "2", "MS_WORKER_NUM": "3"}


def test_the_variables_say_the_role():
    assert roles.role_of({}) is None
    assert roles.role_of({**GIVEN, WORKER: "0"}) is None
    assert roles.role_of(GIVEN) == roles.Role("MS_WORKER", "127.0.0.1", 8118, 2, 3, "")
    assert roles.role_of({**GIVEN, "MS_NODE_ID": "a"}).node == "a"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"MS_ROLE": "MS_SERVER"}, "MS_ROLE is no role of a parameter server.*MS_SCHED, MS_PSERVER, MS_WORKER"),
        ({"MS_SCHED_PORT": "", "MS_WORKER_NUM": ""}, "no MS_SCHED_PORT, MS_WORKER_NUM.*spmdctx launch"),
        ({"MS_SERVER_NUM": "0"}, "MS_SERVER_NUM is a number from 1"),
        ({"MS_SCHED_PORT": "x"}, "MS_SCHED_PORT is a number from 1"),
    ],
)
def test_variables_that_are_missing_or_bad_are_named(changed, said, monkeypatch):
    for name, value in {**GIVEN, **changed}.items():
        monkeypatch.setenv(name, value)
    spmdctx.set_ps_context(enable_ps=True)
    step = spmdctx.parallel(lambda own: own + 1, parallel_mode="stand_alone")
    with pytest.raises(ContextError, match=f"(?s){said}"):
        step(jnp.ones(2))
    spmdctx.reset_ps_context()
    assert step(1.0) == 2.0, "a step without servers has no role"


def test_machines_that_differ_need_a_folder_and_a_name_that_is_known():
    role = roles.role_of({**GIVEN, "MS_ROLE": "MS_SCHED", "MS_SCHED_HOST": "192.0.2.77"})
    with pytest.raises(ContextError, match="a folder that all of them see"):
        roles.take_role(role, Job(1, "sync", 4, 10, ""))
    with pytest.raises(ContextError, match="MS_SCHED_HOST names no machine"):
        roles.ip_of("no such host")


def test_a_node_ends_with_the_process_that_has_started_it():
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, {node.__file__!r}, 'sleep', '60']); print('on', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as parent:
        parent.stdout.readline()
        end = time.monotonic() + 10
        while "sleep" not in (shown := subprocess.check_output(["ps", "-o", "comm", "-s", str(parent.pid)], text=True)):
            assert time.monotonic() < end, shown
            time.sleep(0.05)
        parent.kill()
    while "sleep" in subprocess.run(["ps", "-o", "comm", "-s", str(parent.pid)], capture_output=True, text=True, check=False).stdout:
        assert time.monotonic() < end, "the node goes on"
        time.sleep(0.05)


def test_a_node_ends_where_signals_of_the_keyboard_are_ignored():
    """As below a shell that runs its command in the background."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        command = [sys.executable, node.__file__, "sleep", "60"]
        with subprocess.Popen(command, start_new_session=True) as process:
            end = time.monotonic() + 10
            while "sleep" not in subprocess.check_output(["ps", "-o", "comm", "-s", str(process.pid)], text=True):
                assert time.monotonic() < end
                time.sleep(0.05)
            process.terminate()
            assert process.wait(10) == 256 - signal.SIGTERM
    finally:
        signal.signal(signal.SIGINT, former)


@pytest.fixture(scope="module")
def undisturbed():
    """The losses and the last state of a job with no engine, whose steps have two parts."""
    return local.undisturbed(2, STEPS, ps_work.made, tables.digest)


def free_port():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def test_processes_of_all_roles_train_as_one_job(tmp_path, undisturbed):
    pytest.importorskip("ray", reason="Ray is an extra")
    own = {**GIVEN, "MS_SCHED_PORT": str(free_port()), "MS_SERVER_NUM": "1", "MS_WORKER_NUM": "2"}
    environment = {**os.environ, **own, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.server.by_role", str(STEPS), str(tmp_path)]
    started = {}
    with ExitStack() as stack:
        for name in ("MS_SCHED", "MS_PSERVER", "MS_WORKER", "MS_WORKER "):
            variables = {**environment, "MS_ROLE": name.strip()}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, cwd=ROOT)
            stack.callback(process.wait)
            stack.callback(process.send_signal, signal.SIGKILL)
            started[name] = process
        said = {name: process.communicate(timeout=LIMIT_S)[0].splitlines() for name, process in started.items()}
        assert {process.returncode for process in started.values()} == {0}, said
    assert said["MS_SCHED"] == said["MS_PSERVER"] == []
    steps = [f"STEP {number} {loss}" for number, losses in undisturbed[0].items() for loss in losses]
    for name in ("MS_WORKER", "MS_WORKER "):
        assert said[name] == [*steps, f"STATE {undisturbed[1]}"]


def test_a_job_joins_a_cluster_by_its_address(tmp_path, undisturbed, monkeypatch):
    pytest.importorskip("ray", reason="Ray is an extra")
    monkeypatch.setenv("RAY_AUTH_MODE", "token" if rays.has_token(os.environ) else "disabled")
    role = roles.role_of({**GIVEN, "MS_SCHED_PORT": str(free_port())})
    options = ["--head", "--node-ip-address", role.host, "--port", str(role.port), "--include-dashboard=false", "--num-cpus", "2"]
    with roles.Node(role, [*options, "--object-store-memory", str(100 << 20)]) as head:
        head.await_port()
        monkeypatch.delenv("RAY_AUTH_MODE")
        job = ["--servers", "1", "--workers", "2", "--address", role.address, "--folder", tmp_path, "--timeout", str(LIMIT_S)]
        with Running([*job, "-m", "benchmarks.ps_work", str(STEPS)]) as running:
            assert running.finish() == 0, running.other
        head.check()
    assert (running.losses, set(running.states)) == (undisturbed[0], {undisturbed[1]})
    assert running.other == []
