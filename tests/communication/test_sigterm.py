"""SIGTERM asks for a stop, and never more than that is waited for."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmdctx.communication.sigterm import GRACE, SigtermCatcher
from spmdctx.communication.stopping import AGREEMENT
from spmdctx.errors import ContextError

STUCK = """
import hashlib
from spmdctx.communication.sigterm import CATCHER
assert CATCHER.begin()
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
"""
"""Its main thread computes outside of Python, where no handler of Python's runs."""


FORKED = """
import os, signal, time
from spmdctx.communication.sigterm import CATCHER
assert CATCHER.begin()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(1)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
time.sleep(0.1)
print(CATCHER._heard)
"""
FIRST = """
import os, sys, time
from spmdctx.communication.sigterm import CATCHER, end_when_told
print(os.getpid(), flush=True)
end_when_told()
if sys.argv[1] == "True":
    assert CATCHER.begin()
    CATCHER.end()
child = os.fork()
if child == 0:
    time.sleep(0.3)
    os.kill(1, 15)
    os._exit(0)
try:
    time.sleep(30)
except SystemExit as error:
    print(error.code)
"""
"""A process in the place of a container's first one, which no signal ends unless it has a handler."""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def catcher():
    made = SigtermCatcher()
    assert made.begin()
    yield made
    while made._users:
        made.end()


def test_the_next_place_is_the_last_one_after_sigterm(catcher):
    assert not AGREEMENT.passes()
    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 10
    while not AGREEMENT.passes() and time.monotonic() < end:
        time.sleep(0.01)
    assert time.monotonic() < end


def test_the_system_has_its_own_handler_back_at_the_end(catcher):
    assert catcher.begin()
    catcher.end()
    assert signal.getsignal(signal.SIGTERM) == catcher._handle
    catcher.end()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_a_handler_of_the_users_own_comes_first():
    former = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert not SigtermCatcher().begin()
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_forked_child_is_ended_by_sigterm_and_its_parent_hears_nothing():
    done = subprocess.run([sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(-signal.SIGTERM), "0"], done.stderr


def started(grace):
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        env={**os.environ, GRACE: grace, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    return process


def test_a_process_that_does_not_come_to_a_place_ends_after_its_grace():
    process = started("0.5")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "error: SIGTERM came 0.5 s ago, and no step has ended since; the process ends without saving." in err


def test_the_second_sigterm_ends_at_once():
    process = started("60")
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143


@pytest.mark.parametrize("catches", [False, True])
def test_the_first_process_of_a_container_ends_too(catches):
    words = ["unshare", "-Urfp", sys.executable, "-c", FIRST, str(catches)]
    if shutil.which("unshare") is None or subprocess.run([*words[:2], "true"], capture_output=True).returncode:
        pytest.skip("the system has no namespaces of processes for users")
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.communicate(timeout=60)[0].split() == ["1", "143"]


@pytest.mark.parametrize("text", ["", "soon", "-1", "0", "inf", "nan"])
def test_a_grace_that_is_no_time_is_refused(text, monkeypatch):
    monkeypatch.setenv(GRACE, text)
    with pytest.raises(ContextError, match=GRACE):
        SigtermCatcher().begin()
