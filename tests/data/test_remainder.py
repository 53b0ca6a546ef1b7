"""What becomes of a batch, given what each process has of it."""

from threading import Event

import pytest

from spmdctx.data.agreement import ENDED, FAILED, Agreement, Share
from spmdctx.data.remainder import Decision, decide
from spmdctx.errors import StrategyError

LOWER, UPPER = ((0, 4),), ((4, 8),)


def halves(first, second):
    return [Share(first, 4, LOWER), Share(second, 4, UPPER)]


@pytest.mark.parametrize(
    ("shares", "remainder", "want"),
    [
        (halves(4, 4), "error", ("use", 8, 8)),
        (halves(4, 3), "pad", ("pad", 7, 8)),
        (halves(1, 1), "drop", ("drop", 2, 8)),
        (halves(4, ENDED), "pad", ("pad", 4, 8)),
        (halves(4, ENDED), "drop", ("end", 4, 8)),
        ([Share(8, 8, ((0, 8),)), Share(ENDED, 8, ((0, 8),))], "drop", ("end", 8, 8)),
        (halves(ENDED, ENDED), "error", ("end", 0, 0)),
        (halves(0, 4), "drop", ("drop", 4, 8)),
        ([Share(3, 8, ((0, 8),))], "pad", ("pad", 3, 8)),
        # Both hold all rows, and each but a part of the pixels: rows count once.
        ([Share(5, 8, ((0, 8),)), Share(5, 8, ((0, 8),))], "pad", ("pad", 5, 8)),
        ([Share(3, 4, ((0, 2), (4, 6))), Share(4, 4, ((2, 4), (6, 8)))], "pad", ("pad", 7, 8)),
    ],
)
def test_all_processes_come_to_the_same(shares, remainder, want):
    assert decide(shares, remainder, 1) == Decision(*want)


@pytest.mark.parametrize(
    ("shares", "remainder", "words"),
    [
        (halves(4, 3), "error", "A batch has 7 rows, and the plan 8"),
        (halves(4, ENDED), "error", "Process 1 has no more batches, while others have"),
        ([Share(ENDED, 0, ()), Share(4, 4, UPPER)], "pad", "Process 0 has no batches"),
        ([Share(ENDED, 0, ()), Share(4, 4, UPPER)], "drop", "Process 0 has no batches"),
        ([Share(8, 8, ((0, 8),)), Share(ENDED, 8, ((0, 8),))], "pad", "Process 1 has no more batches"),
        (halves(4, FAILED), "drop", "Process 1 failed to read"),
        (halves(4, 0), "pad", "let the source leave out batches without rows"),
        ([Share(5, 8, ((0, 8),)), Share(8, 8, ((0, 8),))], "pad", "another number of rows than one that holds the same rows"),
        (
            [Share(4, 4, LOWER, ("0000000a11111111",)), Share(4, 4, LOWER, ("0000000a22222222",)), Share(4, 4, UPPER)],
            "pad",
            "Processes 0 and 1 hold the same part",
        ),
    ],
)
def test_what_cannot_go_on_is_an_error_in_all_processes(shares, remainder, words):
    with pytest.raises(StrategyError, match=words):
        decide(shares, remainder, 1)


class Mirror:
    """A key-value store in which process 1 says what process 0 says."""

    def __init__(self):
        self.content = {}

    def set(self, key, value):
        self.content[key] = value

    def get(self, key, timeout_s):
        return self.content.get(key.removesuffix("/1") + "/0")

    def delete(self, key):
        del self.content[key]


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    return Mirror()


@pytest.mark.parametrize("share", [Share(4, 4, LOWER), Share(3, 4, ((0, 2), (4, 6)), ("0000000b00000001", "-")), Share(ENDED, 0, ())])
def test_shares_are_exchanged_and_forgotten(store, share):
    agreement = Agreement(lambda: store)
    for _ in range(4):
        assert agreement.exchange(share, Event()) == [share, share]
    assert len(store.content) == 2
    agreement.restart()
    assert agreement.exchange(share, Event()) == [share, share]


def test_waiting_ends_when_the_loader_is_closed(store):
    stopped = Event()
    stopped.set()
    with pytest.raises(StrategyError, match="was closed while it waited"):
        Agreement(lambda: store).exchange(Share(4, 4, LOWER), stopped)
