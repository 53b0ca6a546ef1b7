"""Explains stages of a pipeline in words: what each holds, why it is cut there, and what would move the cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spmdctx.pipeline.cut.reasons import CutReason, OtherPlace
from spmdctx.pipeline.data import PipelineData
from spmdctx.wording import bytes_text, mesh_text, place_text, seconds_text
from spmdctx.wording.reports import Report

MAX_SHOWN = 6
_STAGE = re.compile(r"\s*stage[\s_]*(\d+)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class StageExplanation(Report):
    """The answer of `PipelinePlan.explain`; it prints itself.

    Attributes:
        pattern: what was asked.
        stages: the stages that match.
        told: of each other match, the explanation of one of its programs.
    """

    pattern: str
    stages: tuple[int, ...]
    told: tuple[str, ...]
    plan: PipelineData

    kind = "stage_explanation"

    def _figures(self) -> dict[str, Any]:
        return {"pattern": self.pattern, "stages": self.stages, "text": str(self).splitlines()}

    def __bool__(self) -> bool:
        return bool(self.stages or self.told)

    def __str__(self) -> str:
        if not self:
            last = len(self.plan.stages) - 1
            return f"Nothing in the plan matches {self.pattern!r}.\n  Patterns are stages, 'stage 0' to 'stage {last}', or parts of paths."
        return "\n".join([*(line for stage in self.stages for line in _lines(self.plan, stage)), *self.told])


def explained(plan: PipelineData, pattern: str) -> StageExplanation:
    """Explains a stage, or what the programs of all stages say of a pattern."""
    asked = _STAGE.fullmatch(pattern)
    if asked is not None:
        stage = int(asked[1])
        return StageExplanation(pattern, (stage,) if stage < len(plan.stages) else (), (), plan)
    told = []
    for number, planned in enumerate(plan.stages):
        for name, own in (*planned.tasks.items(), *planned.after.items()):
            found = own.explain(pattern)
            if found:
                told.append(f"stage {number}, {name}\n{found}")
    return StageExplanation(pattern, (), tuple(told), plan)


def _lines(plan: PipelineData, number: int) -> Iterator[str]:
    stage, count = plan.stages[number], len(plan.stages)
    chunks = ", ".join(map(str, stage.chunks))
    yield f"stage {number} of {count}: {'chunk' if len(stage.chunks) == 1 else 'chunks'} {chunks} on {mesh_text(plan.logical_mesh)}"
    own = [plan.chunk_reasons[chunk] for chunk in stage.chunks]
    yield _labelled("holds", _some(_grouped([leaf for one in own for leaf in one.leaves])))
    yield _labelled("source", _some([place_text(source) for one in own for source in one.sources if source]))
    seconds = [one.forward_s + one.backward_s for one in plan.stages]
    share = seconds[number] * count / sum(seconds)
    passes = f"{seconds_text(stage.forward_s)} forward, {seconds_text(stage.backward_s)} backward a micro-batch"
    yield _labelled("takes", f"{passes}, {share:.2f} of the mean of all stages")
    beside = [f"stage {other} {seconds_text(seconds[other])}" for other in (number - 1, number + 1) if 0 <= other < count]
    yield _labelled("beside", ", ".join(beside))
    kept = f"{bytes_text(stage.kept_bytes)} for what is in flight ({stage.in_flight})"
    yield _labelled("memory", f"{bytes_text(stage.memory_bytes)} at the peak: state {bytes_text(stage.state_bytes)}, {kept}")
    for chunk in stage.chunks:
        for cut, words in ((chunk - 1, "begins"), (chunk, "ends")):
            if 0 <= cut < len(plan.cut_reasons):
                yield from _cut_lines(plan.cut_reasons[cut], words, _chunk_name(stage.chunks, chunk))


def _chunk_name(chunks: Sequence[int], chunk: int) -> str:
    return f"chunk {chunk} " if len(chunks) > 1 else ""


def _cut_lines(cut: CutReason, words: str, name: str) -> Iterator[str]:
    """Tells where a chunk begins or ends, and what the next places would cost."""
    place = f"{name}behind {place_text(cut.before)}, before {place_text(cut.after)}"
    yield _labelled(words, f"{place}: {bytes_text(int(cut.crossing_bytes))} of a micro-batch cross each way")
    for other in cut.others:
        yield _labelled("", _other_text(cut, other))


def _other_text(cut: CutReason, other: OtherPlace) -> str:
    side = "later" if other.is_later else "earlier"
    text = f"{side}, behind {place_text(other.source)}: {bytes_text(int(other.crossing_bytes))} would cross"
    if other.longest_s > cut.limit_s:
        over = other.longest_s - cut.limit_s
        text += f", and the longest chunk would take {seconds_text(other.longest_s)} where {seconds_text(cut.limit_s)} is the limit"
        if over < other.between_s:
            return f"{text}; it wins if the equations between took {over / other.between_s:.0%} less"
        return f"{text}; no speed of the equations between makes it win"
    if other.crossing_bytes > cut.crossing_bytes:
        return f"{text}; it wins if fewer than {bytes_text(int(cut.crossing_bytes))} crossed there"
    return f"{text}; it is as good within the limit"


def _labelled(label: str, text: str) -> str:
    return f"  {label:<9} {text}"


def _some(names: Sequence[str]) -> str:
    """Returns the first distinct names, and how many more there are."""
    distinct = list(dict.fromkeys(names))
    if not distinct:
        return "nothing"
    more = f" and {len(distinct) - MAX_SHOWN} more" if len(distinct) > MAX_SHOWN else ""
    return ", ".join(distinct[:MAX_SHOWN]) + more


def _grouped(paths: Sequence[str]) -> list[str]:
    """Returns paths with those of one parent as one, such as `params/layers/3/*` or, of a list, `params/layers/2..5`."""
    parents: dict[str, list[str]] = {}
    for path in paths:
        parents.setdefault(path.rpartition("/")[0], []).append(path)
    return [_together(parent, own) for parent, own in parents.items()]


def _together(parent: str, paths: Sequence[str]) -> str:
    numbers = sorted(int(name) for path in paths if (name := path.rpartition("/")[2]).isdigit())
    if len(paths) == 1:
        return paths[0]
    if len(numbers) == len(paths) == numbers[-1] - numbers[0] + 1:
        return f"{parent}/{numbers[0]}..{numbers[-1]}"
    return f"{parent}/* ({len(paths)})"
