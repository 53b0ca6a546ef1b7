"""Stages that do not fit a device are planned again: with the room that is left for their programs, and on other meshes if need be."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from spmdctx.errors import InfeasibleError
from spmdctx.pipeline.search import within
from spmdctx.pipeline.search.reduced import Chosen
from spmdctx.pipeline.stages.memory import StageMemory


@dataclass(frozen=True)
class Settings:
    memory_bytes: int | None = None
    mesh: str | None = None


class Stages:
    """Two chunks on a mesh, whose programs take the bytes that a function gives for their room, and raise where it gives none."""

    def __init__(self, monkeypatch, taken, *, after=0):
        self.taken, self.after, self.asked = taken, after, []
        monkeypatch.setattr(within, "Staging", self.staging)
        monkeypatch.setattr(within, "best_completed", lambda staging, stages, budget: stages.found)
        monkeypatch.setattr(within, "memory_of", lambda found: found.memories)

    def made(self, size):
        """Two stages with 30 bytes beside their programs, of which the second one has 5 fewer."""
        chunks, memories = [], []
        for number in (0, 1):
            plan = SimpleNamespace(cost=SimpleNamespace(memory_bytes=size), safe_memory_bytes=size)
            name = f"backward{number}"
            chunks.append(SimpleNamespace(tasks={0: SimpleNamespace(name=name, planned=SimpleNamespace(plan=plan))}))
            peaks = {name: size + 30 - 5 * number, "after": self.after * size}
            memories.append(StageMemory(30, 0, {}, max(peaks.values()), peaks))
        step = SimpleNamespace(loss=SimpleNamespace(where="here"))
        found = SimpleNamespace(memories=memories, mesh="first", total_s=1.0, step=step, simulation=SimpleNamespace(in_flight=[1, 1]))
        schedule = SimpleNamespace(stage_of=[0, 1], num_stages=2, num_chunks=2)
        return SimpleNamespace(planned=chunks, schedule=schedule, places=(3,), found=found)

    def chosen(self, size):
        stages = self.made(size)
        return Chosen(SimpleNamespace(loss=None, given=Settings(), parts=()), stages, stages.found)

    def staging(self, loss, settings):
        def plan(places):
            assert places == (3,)
            self.asked.append((own.settings.memory_bytes, own.settings.mesh))
            size = self.taken(own.settings.memory_bytes, own.settings.mesh)
            if size is None:
                raise InfeasibleError("no plan in this room")
            return self.made(size)

        own = SimpleNamespace(settings=settings, given=settings, plan=plan)
        return own


def test_stages_that_fit_are_kept(monkeypatch):
    stages = Stages(monkeypatch, lambda room, mesh: room)
    own = stages.chosen(70)
    assert within.within(own, 100) is own
    assert stages.asked == []


def test_programs_get_the_room_that_the_fullest_stage_leaves(monkeypatch):
    stages = Stages(monkeypatch, lambda room, mesh: room)
    found = within.within(stages.chosen(90), 100)
    assert stages.asked == [(70, "first")]
    assert max(own.peak_bytes for own in found.found.memories) == 100


@pytest.mark.parametrize(("size", "after"), [(90, 1.5), (68, 1.5), (60, 2)])
def test_what_follows_the_loss_is_taken_to_shrink_as_chunks_do(monkeypatch, size, after):
    stages = Stages(monkeypatch, lambda room, mesh: room, after=after)
    found = within.within(stages.chosen(size), 100)
    assert [room for room, _ in stages.asked] == [int(100 / after)]
    assert max(own.peak_bytes for own in found.found.memories) <= 100


def test_plans_that_exceed_their_room_get_less_by_as_much(monkeypatch):
    stages = Stages(monkeypatch, lambda room, mesh: room + 5)
    within.within(stages.chosen(90), 100)
    assert [room for room, _ in stages.asked] == [70, 65]


def test_a_room_in_which_nothing_is_found_is_raised(monkeypatch):
    stages = Stages(monkeypatch, lambda room, mesh: 70 if room >= 75 and mesh else None)
    within.within(stages.chosen(90), 100)
    assert stages.asked == [(70, "first"), (70, None), (80, None), (80, "first")]


def test_other_meshes_are_tried_once_a_room_is_too_small(monkeypatch):
    stages = Stages(monkeypatch, lambda room, mesh: None if mesh == "first" else room)
    within.within(stages.chosen(90), 100)
    assert stages.asked == [(70, "first"), (70, None)]


def test_a_mesh_whose_plans_exceed_their_rooms_is_kept_while_it_has_plans(monkeypatch):
    stages = Stages(monkeypatch, lambda room, mesh: 95 if mesh and room > 50 else None)
    with pytest.raises(InfeasibleError):
        within.within(stages.chosen(90), 100)
    assert stages.asked == [(70, "first"), (45, "first"), (70, None), (80, None), (57, "first"), (51, "first"), (48, "first")]


@pytest.mark.parametrize(("size", "least", "rooms"), [(988, 975, [970, 979]), (1200, 1200, [970, 1000])])
def test_no_room_is_tried_that_is_of_no_use(monkeypatch, size, least, rooms):
    """Programs need a room of `least`, and always take more than that; rooms hardly differ, or exceed the budget."""
    stages = Stages(monkeypatch, lambda room, mesh: None if mesh == "first" and room < least else 990)
    with pytest.raises(InfeasibleError):
        within.within(stages.chosen(size), 1000)
    assert [room for room, mesh in stages.asked if mesh == "first"] == rooms


def test_a_stage_that_fits_in_no_room_is_named(monkeypatch):
    stages = Stages(monkeypatch, lambda room, mesh: None)
    with pytest.raises(InfeasibleError, match=r"Stage 0 of 2 needs .* more than memory_bytes=100") as caught:
        within.within(stages.chosen(90), 100)
    assert "no plan in this room" in str(caught.value.__cause__)
    assert [mesh for _, mesh in stages.asked] == ["first", None, None] + ["first"] * 4


class Rounds:
    """Three chunks on each of two stages, of which those in a room take 10 bytes and 1.1 s of a step each, and others 40 bytes and 1 s."""

    def __init__(self, monkeypatch, *, mesh="first"):
        self.asked, self.mesh = [], mesh
        monkeypatch.setattr(within, "Staging", self.staging)
        monkeypatch.setattr(within, "best_completed", lambda staging, stages, budget: stages.found)
        monkeypatch.setattr(within, "memory_of", lambda found: found.memories)

    def made(self, num_small, mesh):
        size = [10 if number < num_small else 40 for number in range(6)]
        chunks, memories = [], []
        for number in range(6):
            plan = SimpleNamespace(cost=SimpleNamespace(memory_bytes=size[number]), safe_memory_bytes=size[number])
            chunks.append(SimpleNamespace(tasks={0: SimpleNamespace(name=f"backward{number}", planned=SimpleNamespace(plan=plan))}))
        for stage in (0, 1):
            peak = sum(size[stage::2])
            memories.append(StageMemory(0, 0, {}, peak, {f"backward{number}": peak for number in range(stage, 6, 2)}))
        found = SimpleNamespace(memories=memories, mesh=mesh, total_s=6 + 0.1 * num_small, notes=[], step=None)
        schedule = SimpleNamespace(stage_of=[0, 1] * 3, num_stages=2, num_chunks=6)
        return SimpleNamespace(planned=chunks, schedule=schedule, places=(3,), found=found)

    def chosen(self):
        stages = self.made(0, "first")
        return Chosen(SimpleNamespace(loss=None, given=Settings(), parts=()), stages, stages.found)

    def staging(self, loss, settings):
        def plan(places):
            self.asked.append(own.num_limited)
            return self.made(6 if own.num_limited is None else own.num_limited, self.mesh)

        own = SimpleNamespace(settings=settings, given=settings, plan=plan)
        return own


@pytest.mark.parametrize(("budget", "asked", "num_small"), [(95, [None, 2], 2), (89, [None, 4], 4), (50, [None], 6)])
def test_as_few_rounds_of_chunks_as_need_be_keep_to_the_room(monkeypatch, budget, asked, num_small):
    rounds = Rounds(monkeypatch)
    found = within.within(rounds.chosen(), budget)
    assert rounds.asked == asked
    assert found.found.total_s == pytest.approx(6 + 0.1 * num_small)
    assert max(own.peak_bytes for own in found.found.memories) <= budget


def test_rounds_are_mixed_on_one_mesh_only(monkeypatch):
    rounds = Rounds(monkeypatch, mesh="second")
    within.within(rounds.chosen(), 95)
    assert rounds.asked == [None]
