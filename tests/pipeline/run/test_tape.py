"""A tape runs its entries in order, keeps no array longer than it is read, and counts what entries say."""

import weakref

import jax.numpy as jnp
import pytest

from spmdctx.errors import UnsupportedError
from spmdctx.pipeline.run.routes import check_stages
from spmdctx.pipeline.run.tape import HandedOn, Tape, TaskRun
from spmdctx.pipeline.schedule.tasks import Kind


def test_values_are_let_go_after_the_last_entry_that_reads_them():
    alive = []

    def made(x):
        value = x + 1
        alive.append(weakref.ref(value))
        return (value,)

    tape = Tape()
    tape.run(made, ["x"], ["a"])
    tape.run(made, ["a"], ["b"])
    tape.run(lambda b: (b * 2, [one() is None for one in alive]), ["b"], ["c", "gone"])
    tape.run(lambda: [[one() is None for one in alive]], [], ["gone later"])
    c, gone, later = tape.finished(["x"], ["c", "gone", "gone later"])([jnp.ones(2)])
    assert c.tolist() == [6, 6]
    assert gone == [True, False]
    assert later == [True, True]


def test_results_that_nothing_reads_and_constants():
    calls = []
    tape = Tape()
    tape.constant("two", lambda: calls.append(1) or 2)
    tape.run(lambda x, two: (x * two, x), ["x", "two"], ["product", "unread"])
    program = tape.finished(["x"], ["product", "x"])
    assert program([3]) == [6, 3]
    assert program([4]) == [8, 4]
    assert calls == [1]


class _Pending:
    """An array that notes when it is waited for."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def block_until_ready(self):
        self.log.append(f"{self.name} is there")
        return self


@pytest.mark.parametrize("waits", [False, True])
def test_entries_run_one_after_the_other_where_their_collectives_could_meet_others(waits):
    log = []

    def made(name):
        def run(*_):
            log.append(f"{name} begins")
            return (_Pending(log, name),)

        return run

    tape = Tape(waits=waits)
    tape.run(made("forward"), ["x"], ["a"])
    tape.run(made("backward"), ["x"], ["b"])
    tape.finished(["x"], ["a", "b"])([1])
    begun = ["forward begins", "backward begins"]
    assert log == ([begun[0], "forward is there", begun[1], "backward is there"] if waits else begun)


def test_events_are_counted_by_each_run_anew():
    tape = Tape()
    for change in (1, 1, -1, 1):
        tape.run(lambda: (), [], [], TaskRun(Kind.FORWARD if change > 0 else Kind.BACKWARD, 0, 0, change))
    tape.run(lambda: (), [], [], HandedOn(0, 1, 2, 64))
    program = tape.finished([], [])
    for _ in range(2):
        program([])
        assert program.counts.in_flight == {0: 2}
        assert program.counts.moves == {(0, 1): 2}
        assert program.counts.bytes == {(0, 1): 64}


class Place:
    """A stage's devices, by their processes."""

    def __init__(self, *processes):
        device = type("Device", (), {})
        found = [device() for _ in processes]
        for one, process in zip(found, processes, strict=True):
            one.process_index = process
        self.mesh = type("Mesh", (), {"devices": type("Grid", (), {"flat": found})})


@pytest.mark.parametrize("stages", [[(0, 0), (0, 0)], [(0,), (1,)], [(0, 1), (2, 3)], [(0,), (0,), (1,), (1,)]])
def test_stages_of_whole_processes_or_of_parts_of_one(stages):
    check_stages([Place(*own) for own in stages])


@pytest.mark.parametrize("stages", [[(0, 0), (0, 1), (1, 1)], [(0, 1), (1, 2)], [(0, 1), (0, 1)]])
def test_stages_that_share_a_process_and_span_several_are_refused(stages):
    with pytest.raises(UnsupportedError, match="share a process"):
        check_stages([Place(*own) for own in stages])
