"""Workers that do not wait for each other: how late their values are, and what becomes of parts whose worker is lost."""

import random
from collections import Counter

import pytest

from spmdctx.server.state.progress import Done, Go, Progress, Replay


class Simulated:
    """Servers, and workers that ask, pull, push and die in any order."""

    def __init__(self, seed, workers, bound, deaths=0.0, guards=True):
        self.random = random.Random(seed)
        self.num_parts, self.num_steps, self.bound, self.deaths, self.guards = 3, 6, bound, deaths, guards
        self.progress = Progress(2, "async", bound)
        self.progress.start(0, 2, self.num_parts)
        self.applied = [[], []]
        self.late = Counter()
        self.mail = []
        self.running = {number: self.worker(number) for number in range(workers)}

    def push(self, server, task, pulled, answers):
        done = self.applied[server]
        late = len(done) - pulled
        if task in done:
            answers[server] = 0
        elif late > self.bound and self.guards:
            answers[server] = None
        else:
            self.late[late] += 1
            done.append(task)
            answers[server] = late

    def worker(self, number):
        self.progress.hello(number)
        kept = set()
        for step in range(self.num_steps):
            kept.add(step)
            yield from self.until_done(number, step, kept)
            kept = {own for own in kept if own >= self.progress.floor}

    def until_done(self, number, step, kept):
        at = step
        while True:
            yield
            reply = self.progress.ask(number, at)
            if isinstance(reply, Done):
                if at == step:
                    return
                at += 1
            elif isinstance(reply, Replay):
                at = reply.version
            elif isinstance(reply, Go):
                assert at in kept
                yield from self.compute(reply, at)

    def compute(self, go, step):
        answers, pulled = {}, []
        for server in range(2):
            yield
            pulled.append(len(self.applied[server]))
        for server in range(2):
            self.mail.append((server, (step, go.parts[0]), pulled[server], answers))
        while len(answers) < 2:
            yield
        yield
        if None not in answers.values():
            self.progress.pushed(go.generation, step, go.parts, {0: step}, max(answers.values()))

    def run(self):
        for _ in range(20000):
            if not self.running:
                return self
            if self.mail and self.random.random() < 0.4:
                self.push(*self.mail.pop(self.random.randrange(len(self.mail))))
                continue
            number = self.random.choice(list(self.running))
            if self.random.random() < self.deaths:
                self.progress.lost(number)
                self.running[number] = self.worker(number)
            elif next(self.running[number], "ended") == "ended":
                del self.running[number]
                self.progress.lost(number)
        raise AssertionError("the job hangs")


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_values_are_never_later_than_the_bound_without_losses(bound):
    late = Counter()
    for seed in range(60):
        done = Simulated(seed, 1 + seed % 5, bound, guards=False).run()
        late += done.late
        assert done.progress.version == done.progress.floor * done.num_parts == 18
        assert sum(done.progress.staleness.values()) == 18
    assert max(late) == bound


@pytest.mark.parametrize("bound", [0, 2, 5])
def test_each_part_is_applied_once_whatever_workers_are_lost(bound):
    for seed in range(60):
        done = Simulated(seed, 1 + seed % 4, bound, deaths=0.02).run()
        assert [sorted(own) for own in done.applied] == [[(step, part) for step in range(6) for part in range(3)]] * 2
        assert max(done.late) <= bound
        assert max(done.progress.staleness) <= bound


def test_as_many_parts_are_under_way_as_may_be_late():
    asked = Progress(1, "async", 1)
    asked.start(0, 1, 4)
    assert [asked.ask(worker, 0) is not None for worker in range(4)] == [True, True, False, False]
    asked.pushed(asked.generation, 0, [0], {0: 1.0})
    assert asked.ask(2, 0) is None
    asked.pushed(asked.generation, 0, [1], {0: 1.0})
    assert isinstance(asked.ask(2, 0), Go)


def test_a_worker_without_parts_goes_on_with_the_latest_results():
    progress = Progress(1, "async", 4)
    progress.start(0, 1, 2)
    assert [progress.ask(0, 0).parts, progress.ask(1, 0).parts] == [(0,), (1,)]
    assert progress.ask(2, 0) is None
    progress.pushed(progress.generation, 0, [0], {0: 7.0})
    assert progress.ask(2, 0).results == {0: 7.0}
    assert progress.ask(2, 1).parts == (0,)


def test_a_part_of_a_lost_worker_is_done_by_one_that_is_further():
    progress = Progress(1, "async", 4)
    progress.start(0, 1, 2)
    progress.ask(0, 0), progress.ask(1, 0)
    progress.pushed(progress.generation, 0, [1], {})
    progress.lost(0)
    assert progress.ask(1, 1) == Replay(0)
    assert progress.ask(1, 0) == Go(progress.generation, 1, (0,))
    progress.pushed(progress.generation, 0, [0], {})
    assert (progress.floor, progress.version) == (1, 2)


def test_a_job_goes_on_with_the_parts_that_a_saved_state_lacks():
    progress = Progress(1, "async", 4)
    progress.resume(5, 2, [(2, 1), (3, 0)])
    progress.start(5, 1, 2)
    progress.results[1] = {}
    assert isinstance(progress.ask(0, 1), Done)
    assert progress.ask(0, 2).parts == (0,)
    progress.pushed(progress.generation, 2, [0], {})
    assert (progress.floor, progress.done, progress.version) == (3, ((3, 0),), 6)
