"""The choice among counts and schedules: as good as planning all of them, with few planned, and facts that leave others out."""

import math
import random

import pytest

from spmdctx.errors import InfeasibleError, UnsupportedError
from spmdctx.pipeline.schedule.named import Scheduler
from spmdctx.pipeline.schedule.simulate import simulate
from spmdctx.pipeline.schedule.tasks import Costs, cost_of
from spmdctx.pipeline.search.counts import Candidate, Choices, best_of
from spmdctx.pipeline.search.fitting import fit_promising
from spmdctx.pipeline.search.schedules import INTERLEAVED, Tried, plan_deeper, plan_schedules, shown

EVERY = [Scheduler("1f1b"), Scheduler("gpipe"), Scheduler("zero_bubble_h1"), Scheduler("1f1b", 2), Scheduler("zero_bubble_v")]


class Model:
    """A line of layers with seconds of their passes, and a network; stands for the planner of stages."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.num_layers, self.parts = 2 * draw.choice([4, 8]), draw.random() < 0.5
        self.num_micro = draw.choice([4, 6, 8, 12])
        uneven, heavy = draw.choice([0.0, 0.2]), draw.choice([1.0, 2.0])
        self.layers = []
        for _ in range(self.num_layers):
            forward, back = draw.uniform(1 - uneven, 1 + uneven), heavy * draw.uniform(0.9, 1.1)
            self.layers.append(Costs(forward, 2 * back, back if self.parts else 2 * back, back if self.parts else 0.0))
        self.hop = draw.choice([0.0, 0.1, 2.0])
        # The step without a pipeline is sometimes faster than stages that never wait, and sometimes too large.
        total = self.num_micro * sum(own.forward + own.backward for own in self.layers)
        self.single = Candidate(1, total * draw.choice([0.1, 0.3, 0.6, 1.0]), 0.0, draw.choice([1, 10**6]))
        self.room = draw.choice([10**5, 40, 12])
        self.planned, self.fits = [], []

    def costs(self, num_chunks):
        count = self.num_layers // num_chunks
        parts = (self.layers[first : first + count] for first in range(0, self.num_layers, count))
        return [Costs(*map(sum, zip(*own, strict=True))) for own in parts]

    def tried(self, stages, scheduler):
        self.planned.append((stages, scheduler))
        costs = self.costs(scheduler.num_chunks(stages))

        def simulated(own):
            schedule = own.schedule(stages, self.num_micro, costs)
            return simulate(schedule, cost_of(costs), lambda *_: self.hop)

        found = simulated(scheduler)
        size = 16 // scheduler.num_chunks(stages)
        candidate = Candidate(stages, found.makespan_s, 0.0, size * max(found.in_flight), shown(scheduler))
        return Tried(candidate, sum(found.busy_s) / stages, self.parts, lambda own: simulated(own).makespan_s)

    def fitted(self, candidate):
        self.fits.append(candidate.name)
        return candidate

    def counts(self):
        return [count for count in (2, 4) if count <= self.num_micro]

    def can(self, stages, scheduler):
        return scheduler != EVERY[3] or self.num_micro % stages == 0


def choices_of(model):
    """Returns what is planned of a model, beside its step without a pipeline; what does not fit takes more memory by any plan."""
    choices = Choices([model.single], {}, {})
    best_s, planned = choices.best_s(model.room), []
    for count in model.counts():
        found = plan_schedules(choices, count, model.num_micro, lambda own, count=count: model.tried(count, own), best_s, None)
        planned += [own.candidate for own in found]
    fit_promising(choices, planned, model.fitted, model.room, is_binding=False)
    return choices


@pytest.mark.parametrize("seed", range(200))
def test_the_choice_is_that_of_planning_every_count_and_schedule(seed):
    model = Model(seed)
    choices = choices_of(model)
    every = [model.single]
    every += [model.tried(count, own).candidate for count in model.counts() for own in EVERY if model.can(count, own)]
    found, want = best_of(choices.candidates, model.room), best_of(every, model.room)
    assert (found.memory_bytes <= model.room) == (want.memory_bytes <= model.room)
    if want.memory_bytes <= model.room:
        assert found.seconds == pytest.approx(want.seconds, rel=1e-12)
    assert not choices.refused


def test_what_cannot_be_faster_is_not_planned():
    every = planned = 0
    for seed in range(50):
        model = Model(seed)
        choices = choices_of(model)
        assert len(choices.skipped) + len(model.planned) == len(EVERY) * len(model.counts())
        every += len(EVERY) * len(model.counts())
        planned += len(model.planned)
    assert planned < 0.75 * every


def test_a_schedule_that_the_user_set_is_the_only_one():
    model, choices, given = Model(0), Choices([], {}, {}), Scheduler("gpipe", 2)
    (found,) = plan_schedules(choices, 2, model.num_micro, lambda own: model.tried(2, own), math.inf, given)
    assert model.planned == [(2, given)]
    assert found.candidate.schedule == shown(given)
    assert not choices.skipped


def test_schedules_that_cannot_be_planned_are_refused_by_name():
    model, choices = Model(1), Choices([], {}, {})
    model.parts = True

    def plan(own):
        if own.num_chunks(2) > 2:
            raise UnsupportedError("The loss has 3 equations.")
        return model.tried(2, own)

    found = plan_schedules(choices, 2, 8, plan, math.inf, None)
    assert choices.refused == {f"2 stages by {shown(own)}": "The loss has 3 equations." for own in EVERY[3:]}
    assert found

    def never(own):
        raise InfeasibleError("Stage 0 is too large.")

    choices = Choices([], {}, {})
    assert plan_schedules(choices, 2, 8, never, math.inf, None) == []
    assert choices == Choices([], {"2 stages": "Stage 0 is too large."}, {})


@pytest.mark.parametrize(
    ("estimates", "planned", "skipped"),
    [
        ({2: 12.0, 3: 11.0, 5: 9.0, 8: 10.0}, [5], []),
        # The estimate of two chunks was 20 % too high, so others are, too.
        ({2: 12.0, 3: 11.5, 5: 11.95}, [3], []),
        ({2: 10.0, 3: 9.98, 4: 10.5}, [], ["4 stages by interleaved 1f1b in 3 chunks"]),
        ({2: 10.0}, [], []),
    ],
)
def test_of_more_chunks_the_most_promising_schedule_is_planned_if_it_promises_to_pay(estimates, planned, skipped):
    best, asked = Candidate(4, 10.0, 0.0, 1, shown(INTERLEAVED)), []

    def plan(scheduler):
        asked.append(scheduler.rounds)
        return Tried(Candidate(4, 9.0, 0.0, 1, shown(scheduler)), 0.0, False, lambda own: 0.0)

    choices = Choices([best], {}, {})
    found = plan_deeper(choices, best, best, {Scheduler("1f1b", rounds): seconds for rounds, seconds in estimates.items()}, plan)
    assert asked == planned
    assert list(choices.skipped) == skipped
    names = [f"interleaved 1f1b in {rounds} chunks" for rounds in planned]
    assert ([] if found is None else [found.candidate.schedule]) == names


def test_a_schedule_of_more_chunks_that_cannot_be_planned_says_why():
    def plan(scheduler):
        raise InfeasibleError("Too large.")

    best = Candidate(2, 10.0, 0.0, 1, shown(INTERLEAVED))
    choices = Choices([best], {}, {})
    plan_deeper(choices, best, best, {INTERLEAVED: 10.0, Scheduler("1f1b", 4): 5.0}, plan)
    assert choices == Choices([best], {"2 stages by interleaved 1f1b in 4 chunks": "Too large."}, {})
