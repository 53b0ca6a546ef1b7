"""Workers that fall silent, come again, or are replaced by another process."""

from spmdctx.server.state.presence import LEASE_S, Presence


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def passed(presence, clock, seconds, *beating):
    found = []
    for _ in range(int(seconds / 0.5)):
        clock.now += 0.5
        for worker, life in beating:
            presence.beat(worker, life)
        found += presence.fall_silent()
    return found


def test_a_worker_falls_silent_once_and_comes_again():
    clock = Clock()
    presence = Presence(clock)
    assert presence.begin(0, "a")
    presence.begin(1, "b")
    assert passed(presence, clock, 2 * LEASE_S, (1, "b")) == [0]
    assert presence.is_silent(0)
    assert not presence.is_silent(1)
    assert presence.silence()[0] == 2 * LEASE_S
    assert presence.beat(0, "a")
    assert not presence.beat(0, "a")
    assert not presence.is_silent(0)


def test_another_process_takes_the_place_of_a_worker():
    presence = Presence(Clock())
    presence.begin(0, "a")
    assert not presence.begin(0, "a")
    assert presence.begin(0, "b")
    assert presence.is_over(0, "a")
    assert not presence.is_over(0, "b")
    assert not presence.beat(0, "a")


def test_nobody_is_silent_when_whoever_listens_was_held_up():
    clock = Clock()
    presence = Presence(clock)
    presence.begin(0, "a")
    clock.now += 10 * LEASE_S
    assert presence.fall_silent() == []
    presence.beat(0, "a")
    assert passed(presence, clock, 1, (0, "a")) == []


def test_a_worker_that_has_ended_is_not_awaited():
    clock = Clock()
    presence = Presence(clock)
    presence.begin(0, "a")
    presence.end(0)
    assert passed(presence, clock, 2 * LEASE_S) == []
    assert presence.silence() == {}


def test_a_worker_that_was_not_launched_has_no_lease():
    presence = Presence(Clock())
    assert not presence.is_over(0, "")
    assert not presence.is_silent(0)
    assert not presence.beat(0, "")
