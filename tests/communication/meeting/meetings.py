"""A real meeting in one process: process 0 on a thread, the others and strangers by sockets."""

import socket
import threading
import time
from contextlib import suppress

from spmdctx.communication.clusters import Cluster
from spmdctx.communication.meeting import proof
from spmdctx.communication.meeting.key import Key
from spmdctx.communication.meeting.place import listen
from spmdctx.communication.rendezvous import gather, join

KEY = Key(b"k" * 32, "a test")
OTHER = Key(b"o" * 32, "another test")


class Meeting:
    """Process 0 of a job, which waits for the others; leaving the block closes all connections."""

    def __init__(self, num_processes=2, timeout_s=6.0):
        self.server = listen(0, "127.0.0.1")
        self.port = self.server.getsockname()[1]
        self.num_processes, self.timeout_s = num_processes, timeout_s
        self.first, self.links, self.held, self.error = None, [], [], None

    def __enter__(self):
        self._thread = threading.Thread(target=self._gather)
        self._thread.start()
        return self

    def __exit__(self, *_):
        for one in (self.server, *self.held):
            one.close()
        self._thread.join(30)
        for one in (self.first, *self.links):
            if one is not None:
                one.close()

    def _gather(self):
        try:
            self.first = gather(self.place(0), KEY, [self.server], self.timeout_s)
        except Exception as error:
            self.error = str(error)

    def place(self, number, num_processes=None):
        return Cluster("a test", f"127.0.0.1:{self.port}", num_processes or self.num_processes, number)

    def join(self, number, key=KEY, num_processes=None, timeout_s=10.0):
        """A process that joins: its connection."""
        self.links.append(join(self.place(number, num_processes), key, timeout_s).link)
        return self.links[-1]

    def own(self):
        """Process 0's own connection, once all have come."""
        self._thread.join(30)
        return self.first

    def call(self, *, greeted=True):
        """A stranger's connection, and the nonce that process 0 greets it with."""
        made = socket.create_connection(("127.0.0.1", self.port), 5)
        self.held.append(made)
        return made, proof.read_greeting(line_of(made)) if greeted else b""


def line_of(connection):
    """A line, or what comes before the end of the connection."""
    found = b""
    with suppress(ConnectionError):
        while not found.endswith(b"\n") and (data := connection.recv(1)):
            found += data
    return found


def is_closed(connection, seconds):
    """Whether the other side closes the connection within this time."""
    connection.settimeout(seconds)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def heard(link, count=1, seconds=10.0):
    """What is told on a connection: so many rows."""
    found = []
    reader = threading.Thread(target=lambda: [found.append(row) for row, _ in zip(link.rows(), range(count), strict=False)], daemon=True)
    reader.start()
    until = time.monotonic() + seconds
    while len(found) < count and reader.is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    return found
