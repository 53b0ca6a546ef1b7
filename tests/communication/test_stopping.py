"""Processes agree on where they stop: at the first place that nobody has passed, however far each is."""

import asyncio
import random
import threading
import time

import pytest

from spmdctx.communication.meeting.hub import Hub
from spmdctx.communication.stopping import Agreement


class Job:
    """Agreements of several processes and a hub, whose rows are delivered in any order between processes."""

    def __init__(self, count, seed):
        self.chance, self.hub, self.parts = random.Random(seed), Hub(count), [Agreement() for _ in range(count)]
        self.rows = [[] for _ in range(2 * count)]
        for number, part in enumerate(self.parts):
            part.connect(lambda text, number=number: self.rows[number].append(text))
            self.hub._members[number] = Member(number, lambda text, number=number: self.rows[count + number].append(text))

    def deliver(self):
        """Delivers one row, of any connection that has one."""
        full = [index for index, rows in enumerate(self.rows) if rows]
        if not full:
            return False
        index = self.chance.choice(full)
        text, count = self.rows[index].pop(0), len(self.parts)
        if index < count:
            self.hub._take(self.hub._members[index], text)
        else:
            word, _, rest = text.partition(" ")
            self.parts[index - count].hear(word, rest)
        return True


class Member:
    """What the hub knows of a process."""

    def __init__(self, process, told):
        self.process, self.told = process, told
        self.writer = self.sent = self

    def sealed(self, text):
        return text

    def write(self, text):
        self.told(text)


@pytest.mark.parametrize("seed", range(20))
def test_all_stop_at_one_place_that_none_has_passed(seed):
    count, chance = 4, random.Random(seed)
    job = Job(count, seed)
    passed, stopped = [0] * count, [None] * count
    asked = chance.randrange(30)
    for turn in range(10_000):
        if turn == asked:
            job.parts[chance.randrange(count)].request()
        if chance.random() < 0.5:
            job.deliver()
            continue
        number = chance.randrange(count)
        part = job.parts[number]
        # Processes are never more than one step apart, as if each step had a collective.
        if stopped[number] is None and not part._is_asked and passed[number] <= min(passed):
            passed[number] += 1
            if part.passes():
                stopped[number] = passed[number]
        if None not in stopped:
            break
    assert len(set(stopped)) == 1
    assert stopped[0] is not None


@pytest.mark.parametrize("seed", range(5))
def test_a_process_that_has_left_is_not_waited_for(seed):
    job = Job(3, seed)
    job.parts[0].request()
    job.deliver()
    job.rows[2].append("bye")
    while job.deliver():
        pass
    assert [part.passes() for part in job.parts[:2]] == [True, True]


def test_two_requests_are_one():
    job = Job(2, 0)
    job.parts[0].request()
    job.parts[1].request()
    while job.deliver():
        pass
    assert [part.passes() for part in job.parts] == [True, True]
    while job.deliver():
        pass
    assert [part.passes() for part in job.parts] == [False, False]


def test_a_process_alone_stops_at_its_next_place():
    alone = Agreement()
    assert not alone.passes()
    alone.request()
    assert alone.passes()
    assert not alone.passes()


def test_whoever_waits_for_a_hub_that_is_gone_goes_on():
    part, said, done = Agreement(), [], []
    part.connect(said.append)
    part.hear("stop", "")
    thread = threading.Thread(target=lambda: done.append(part.passes()))
    thread.start()
    time.sleep(0.05)
    assert (said, done) == (["at 0"], [])
    part.disconnect()
    thread.join(10)
    assert done == [False]


def test_a_hub_that_nobody_has_asked_takes_no_places():
    async def told():
        hub = Hub(1)
        hub._take(Member(0, pytest.fail), "at 3")

    asyncio.run(told())
