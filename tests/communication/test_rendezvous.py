"""Where processes meet: all come, or an error names who does not."""

import socket
import threading
import time

import pytest

from spmdctx.communication.clusters import Cluster
from spmdctx.communication.launch.environment import free_port
from spmdctx.communication.meeting.place import forget_service_address
from spmdctx.communication.rendezvous import listen, meet
from spmdctx.errors import CommunicationError


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A folder of its own for the user's key."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def run(port, places, timeout_s, delay_s=0.0):
    """What became of each of these processes, (number, of how many): None, or its error."""
    found, met = {}, {}

    def one(place, number, count):
        time.sleep(delay_s * place)
        try:
            met[place] = meet(Cluster("a test", f"127.0.0.1:{port}", count, number), timeout_s)
            found[place] = None
        except CommunicationError as error:
            found[place] = str(error)

    threads = [threading.Thread(target=one, args=(place, *row)) for place, row in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for one in met.values():
        forget_service_address(one.service)
    return [found[place] for place in range(len(places))]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_all_go_on_when_all_have_come_and_the_port_is_free_again(order):
    port = free_port()
    assert run(port, [(number, 4) for number in order], 20, 0.1) == [None] * 4
    listen(port).close()


def test_a_process_alone_meets_nobody():
    assert run(free_port(), [(0, 1)], 1) == [None]


def test_who_does_not_come_is_named():
    first, third = run(free_port(), [(0, 4), (2, 4)], 1)
    assert "job of 4 processes did not come together" in first
    assert "without processes 1, 3" in first
    assert "Process 0 has not let the job begin" in third or "process 0 was not reached" in third


def test_without_process_0_the_others_say_so():
    (found,) = run(free_port(), [(1, 2)], 0.5)
    assert "process 0 was not reached" in found
    assert "process 1, told by a test" in found


def test_a_port_in_use_is_named():
    with listen(0) as taken:
        port = taken.getsockname()[1]
        (found,) = run(port, [(0, 2)], 5)
    assert f"Process 0 cannot listen on port {port}" in found
    assert "in use" in found


@pytest.mark.parametrize(
    ("places", "text"),
    [(((0, 3), (1, 3), (1, 3)), "Two processes say that they are process 1"), (((0, 3), (1, 2)), "different numbers of processes")],
)
def test_numbers_that_contradict_each_other_are_refused(places, text):
    assert text in run(free_port(), places, 5, 0.2)[0]


def test_process_0_warns_where_nothing_secret_keeps_strangers_out(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    with pytest.warns(RuntimeWarning, match="No secret keeps strangers out of this job.*SPMDCTX_TOKEN"):
        assert run(free_port(), [(0, 2), (1, 2)], 20) == [None, None]


def test_strangers_are_not_counted():
    port = free_port()

    def disturb():
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(b"GET / HTTP/1.1\r\n\r\n")

    stranger = threading.Thread(target=disturb)
    stranger.start()
    assert run(port, [(0, 2), (1, 2)], 20, 0.6) == [None, None]
    stranger.join()
