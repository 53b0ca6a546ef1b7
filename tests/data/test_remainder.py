"""What becomes of a batch, given what each process has of it."""

from concurrent.futures import ThreadPoolExecutor
from threading import Condition, Event

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


class Store:
    """A key-value store of three threads that stand for processes."""

    def __init__(self):
        self.content, self.sizes = {}, []
        self.changed = Condition()

    def set(self, key, value):
        with self.changed:
            assert self.content.setdefault(key, value) is value
            self.sizes.append(len(value))
            self.changed.notify_all()

    def get(self, key, timeout_s):
        with self.changed:
            self.changed.wait_for(lambda: key in self.content, timeout_s)
            return self.content.get(key)

    def delete(self, key):
        del self.content[key]


@pytest.fixture
def agreements():
    store = Store()
    made = [Agreement(lambda: store, process, 3) for process in range(3)]
    for other in made:
        other._number = made[0]._number  # as if each were the first of its own process
    return store, made


SHARES = [
    [Share(4, 4, LOWER, ("0000000b00000001", "-")), Share(4, 4, UPPER, ("0000000c00000001", "-")), Share(4, 4, UPPER)],
    [Share(4, 4, LOWER), Share(3, 4, ((4, 6), (6, 8))), Share(ENDED, 4, UPPER)],
    [Share(4, 4, LOWER), Share(ENDED, 0, ()), Share(ENDED, 0, ())],
    [Share(4, 4, LOWER), Share(4, 4, UPPER), Share(4, 4, UPPER)],
]


def test_shares_are_exchanged_and_forgotten(agreements):
    store, made = agreements
    with ThreadPoolExecutor(3) as pool:
        for shares in (*SHARES, *SHARES):
            found = list(pool.map(lambda one, share: one.exchange(share, Event()), made, shares))
            assert found == [[Share(8, 8, ((0, 8),))] if shares is SHARES[3] else shares] * 3
    assert len(store.content) == 2 * 3
    for one in made:
        one.restart()
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda one, share: one.exchange(share, Event()), made, SHARES[0])) == [SHARES[0]] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_reaches_all_processes(agreements, failing):
    _, made = agreements
    made[failing].tell_failure()
    with ThreadPoolExecutor(2) as pool:
        others = [one for process, one in enumerate(made) if process != failing]
        for shares in pool.map(lambda one: one.exchange(Share(4, 4, LOWER), Event()), others):
            with pytest.raises(StrategyError, match=f"Process {failing} failed to read"):
                decide(shares, "pad", 0)


@pytest.mark.parametrize("process", [0, 1])
def test_waiting_ends_when_the_loader_is_closed(agreements, process):
    stopped = Event()
    stopped.set()
    with pytest.raises(StrategyError, match="was closed while it waited"):
        agreements[1][process].exchange(Share(4, 4, LOWER), stopped)
