"""What strangers send to process 0: none of it joins, ends or holds up the meeting, and each is sent away."""

import asyncio
import gc
import itertools
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager, suppress

import pytest

from spmdctx.communication.clusters import Cluster
from spmdctx.communication.meeting import door, proof
from spmdctx.communication.meeting.place import listen
from spmdctx.communication.rendezvous import gather
from spmdctx.errors import CommunicationError
from tests.communication.meeting.meetings import KEY, OTHER, Meeting, heard, is_closed, line_of

NONCE = b"0" * 32
CALLER = proof.Caller(1, 2, NONCE)

LINES = {
    "nothing": b"\n",
    "random bytes": bytes(range(256)) * 4 + b"\n",
    "nested JSON": b"[" * 3000 + b"\n",
    "a row of JSON": b'{"hello": 1, "token": "x"}\n',
    "a long number": b"hello " + b"9" * 3000 + b"\n",
    "a negative number": b"hello -1 2 " + NONCE + b" " + b"0" * 64 + b"\n",
    "another alphabet": "hello \u0661 \u0662".encode() + b" " + NONCE + b" " + b"0" * 64 + b"\n",
    "no proof": b"hello 1 2 " + NONCE + b"\n",
    "an empty proof": b"hello 1 2 " + NONCE + b" " + b"0" * 64 + b"\n",
    "the words of an older version": b"spmdctx 1 2\n",
    "a forged end": b"0" * 64 + b" bye\n",
    "a forged failure": b"0" * 64 + b" failed no such file\n",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
    "a line without end": b"x" * 100_000,
}


def goes_on(meeting):
    """Process 1 still joins, and its end is still told to process 0, and nothing else."""
    start = time.monotonic()
    joined = meeting.join(1)
    assert time.monotonic() - start < 5
    own = meeting.own()
    joined.close()
    assert heard(own) == ["gone 1"]


@pytest.mark.parametrize("sent", LINES.values(), ids=LINES)
def test_garbage_closes_the_strangers_connection_and_no_other(sent):
    with Meeting() as meeting:
        stranger, _ = meeting.call()
        with suppress(ConnectionError):
            stranger.sendall(sent)
        assert is_closed(stranger, 2)
        goes_on(meeting)


def test_a_wrong_key_is_turned_away_at_every_step():
    with Meeting() as meeting:
        stranger, greeted = meeting.call()
        stranger.sendall(proof.hello(OTHER.secret, greeted, CALLER))
        assert is_closed(stranger, 2)
        with pytest.raises(CommunicationError, match="as if it had another key than another test"):
            meeting.join(1, OTHER, timeout_s=1)
        goes_on(meeting)


def test_rows_need_the_key_of_their_own_connection():
    with Meeting(3) as meeting:
        stranger, greeted = meeting.call()
        stranger.sendall(proof.hello(KEY.secret, greeted, proof.Caller(2, 3, NONCE)))
        assert line_of(stranger).startswith(b"welcome ")
        meeting.join(1)
        own = meeting.own()
        stranger.sendall(b"0" * 64 + b" failed a forged error\n" + proof.Seal(KEY.secret, "caller").sealed("failed another"))
        stranger.close()
        assert heard(own) == ["gone 2"]


def test_a_recorded_proof_opens_no_door_again():
    with Meeting(3, timeout_s=1.5) as meeting:
        process, greeted = meeting.call()
        spoken = proof.hello(KEY.secret, greeted, proof.Caller(1, 3, NONCE))
        process.sendall(spoken)
        assert line_of(process).startswith(b"welcome ")
        for _ in range(3):
            again, _ = meeting.call()
            again.sendall(spoken)
            assert is_closed(again, 2)
        process.close()


def test_a_place_is_taken_once():
    with Meeting(3, timeout_s=1.5) as meeting:
        first, greeted = meeting.call()
        caller = proof.Caller(1, 3, NONCE)
        first.sendall(proof.hello(KEY.secret, greeted, caller))
        assert line_of(first).startswith(b"welcome ")
        with pytest.raises(CommunicationError, match="Two processes say that they are process 1"):
            meeting.join(1)
        first.close()
        time.sleep(0.2)
        assert meeting.error is None


@pytest.mark.parametrize(
    ("number", "num_processes", "words"),
    [(1, 3, "told different numbers of processes: process 0 2, process 1 3"), (7, 2, "no process 7"), (0, 2, "no process 0")],
)
def test_a_place_that_is_none_is_refused_in_words(number, num_processes, words):
    with Meeting() as meeting:
        caller, greeted = meeting.call()
        said = proof.Caller(number, num_processes, NONCE)
        caller.sendall(proof.hello(KEY.secret, greeted, said))
        assert words in proof.read_answer(KEY.secret, greeted, said, line_of(caller))
        caller.close()
        goes_on(meeting)


def test_who_is_lost_before_the_job_begins_may_come_again():
    with Meeting(3, timeout_s=1.5) as meeting:
        first, greeted = meeting.call()
        first.sendall(proof.hello(KEY.secret, greeted, proof.Caller(1, 3, NONCE)))
        assert line_of(first).startswith(b"welcome ")
        first.close()
        time.sleep(0.2)
        caller, greeted = meeting.call()
        again = proof.Caller(1, 3, NONCE)
        caller.sendall(proof.hello(KEY.secret, greeted, again))
        assert proof.read_answer(KEY.secret, greeted, again, line_of(caller)) == ""


def test_a_meeting_that_fails_leaves_no_task_to_the_garbage_collector(monkeypatch, caplog):
    close = asyncio.Runner.close

    def collect_and_close(runner):
        gc.collect()
        close(runner)

    monkeypatch.setattr("asyncio.Runner.close", collect_and_close)
    with Meeting(3, timeout_s=0.5) as meeting:
        caller, greeted = meeting.call()
        caller.sendall(proof.hello(KEY.secret, greeted, proof.Caller(1, 3, NONCE)))
        assert line_of(caller).startswith(b"welcome ")
        assert meeting.own() is None
        assert is_closed(caller, 5)
    assert not caplog.records


def test_a_slow_sender_has_a_limit(monkeypatch):
    monkeypatch.setattr(door, "HELLO_S", 0.5)
    with Meeting() as meeting:
        silent, _ = meeting.call()
        slow, _ = meeting.call()
        with suppress(ConnectionError):
            for letter in b"hello 1 2 0":
                slow.sendall(bytes([letter]))
                time.sleep(0.1)
        assert is_closed(slow, 1)
        assert is_closed(silent, 1)
        goes_on(meeting)


def test_half_open_connections_give_way_to_others():
    with Meeting() as meeting:
        silent = [meeting.call(greeted=False)[0] for _ in range(150)]
        goes_on(meeting)
        assert sum(is_closed(one, 0.02) for one in silent) == len(silent)


def test_few_wait_at_the_door_at_once(monkeypatch):
    monkeypatch.setattr(door, "CALLERS", 8)
    with Meeting() as meeting:
        silent = [meeting.call()[0] for _ in range(40)]
        time.sleep(0.2)
        assert [is_closed(one, 0.02) for one in silent] == [True] * 34 + [False] * 6
        goes_on(meeting)


def test_a_full_table_of_files_holds_the_meeting_up_for_moments_only():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    flood = "import socket, sys, time\ntime.sleep(0.3)\n"
    flood += "held = [socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5) for _ in range(200)]\ntime.sleep(60)"
    with Meeting() as meeting, strangers_run(flood, meeting.port):
        meeting.call()
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit_that_leaves(12), before[1]))
        try:
            time.sleep(1)
            goes_on(meeting)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_meeting_for_which_no_file_is_left_is_a_clear_error(monkeypatch):
    def full(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("asyncio.Runner.__enter__", full)
    with Meeting() as meeting:
        assert meeting.own() is None
        assert "Process 0 cannot open what it needs" in meeting.error
        assert "Too many open files" in meeting.error


def test_a_forked_child_does_not_hide_that_its_process_is_gone():
    with Meeting() as meeting:
        joined = meeting.join(1)
        own = meeting.own()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX and Python warn of threads; this child uses none
            child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        try:
            joined.close()
            assert heard(own, seconds=5) == ["gone 1"]
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_an_interrupted_meeting_gives_its_port_back():
    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    server = listen(0, "127.0.0.1")
    port = server.getsockname()[1]
    try:
        with pytest.raises(KeyboardInterrupt):
            gather(Cluster("a test", f"127.0.0.1:{port}", 2, 0), KEY, [server], 30)
    finally:
        signal.signal(signal.SIGALRM, previous)
    time.sleep(0.3)
    listen(port, "127.0.0.1").close()


def limit_that_leaves(count):
    """The limit of open files below which so many numbers are free."""
    taken = {int(name) for name in os.listdir("/dev/fd")}
    return next(itertools.islice((number for number in itertools.count() if number not in taken), count, None))


@contextmanager
def strangers_run(script, port):
    """A script of strangers in a process of its own, killed at the end."""
    process = subprocess.Popen([sys.executable, "-S", "-c", script, str(port)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_connections_that_are_reset_change_nothing():
    with Meeting() as meeting:
        for _ in range(50):
            stranger, _ = meeting.call(greeted=False)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.close()
        goes_on(meeting)
