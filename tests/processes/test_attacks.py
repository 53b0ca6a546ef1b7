"""Jobs of two processes under attack: what strangers send changes no loss, and no end."""

import functools
import sys

import pytest

from benchmarks.attack_moves import ATTACKS, Attack, endless, garbage, hello, holds, says, sends, slow
from benchmarks.attacks import KILL_STEP, NUM_STEPS, run

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@functools.cache
def undisturbed():
    result = run(ATTACKS[0], 0.01)
    assert not result.faults
    return result.losses


def together(*moves):
    return lambda target: [move(target) for move in moves]


def test_a_meeting_under_attack_begins_the_undisturbed_job():
    moves = together(garbage, holds(200), sends(b"spmdctx 1 2\n", b"[" * 9999 + b"\n", keeps=True), says(hello(1, 3), hello(0, 2)))
    result = run(Attack("all at once", "meeting", moves, limit=256, own_port=True), 0.01)
    assert not result.faults
    assert result.losses == undisturbed()
    assert len(result.losses) == NUM_STEPS


def test_a_kill_in_the_midst_of_an_attack_ends_the_job_at_once():
    result = run(Attack("all at once", "running", together(garbage, holds(200), slow, endless), limit=512, dies=1))
    assert not result.faults
    assert [result.losses[step] for step in range(KILL_STEP)] == [undisturbed()[step] for step in range(KILL_STEP)]
