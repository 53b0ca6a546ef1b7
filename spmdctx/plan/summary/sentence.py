"""Says in one sentence what a plan is, from what the axes of its mesh are for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from spmdctx.context.values import OPTIMIZER_LEVELS
from spmdctx.plan.data import PlanData
from spmdctx.plan.summary.flow import Origin
from spmdctx.plan.summary.strategy import Kept, Part, Strategy, Weight, slices, strategy_of
from spmdctx.wording import counted

_MOST = 0.5
_NEARLY_ALL = 0.9
_SOME = 0.1
_MOST_NAMES = 3

_WORDS = (
    ("embedding", re.compile(r"embed|wte|wpe|token_table|vocab", re.I)),
    ("experts", re.compile(r"expert|moe", re.I)),
    ("attention", re.compile(r"att(entio)?n|mha|(^|[/_.])(q|k|v|o|qkv|query|key|value|[qkvo]_?proj)([/_.]|$)", re.I)),
    ("MLP", re.compile(r"mlp|ffn|feed_?forward|(^|[/_.])(up|down|gate)(_proj)?([/_.]|$)", re.I)),
    ("head", re.compile(r"head|logits|classifier|unembed", re.I)),
)
"""What parts of models are called, and the paths that say so; the first that is found counts."""

_BEGIN = ("data", "one", "everything", "sequence", "height", "embedding", "expert", "attention", "head")
"""How sentences begin that do not begin with a name of the user's."""

_NO_NAMES = frozenset({"kernel", "weight", "weights", "bias", "scale", "embedding", "value", "w", "b"})


def sentence_of(plan: PlanData) -> str:
    """Returns what a plan is, such as "ZeRO-1 over 8 devices, embedding split by features, MLP tensor-parallel over 4"."""
    text = phrase_of(plan)
    # The name of a parameter stays as it is.
    return text[0].upper() + text[1:] if text.startswith(_BEGIN) else text


def phrase_of(plan: PlanData) -> str:
    """Returns what a plan is, as a part of a sentence."""
    if plan.logical_mesh.num_devices == 1:
        return "one device, nothing is split"
    strategy = strategy_of(dict(plan.logical_mesh.axes), plan.inputs, [plan.op_table], plan.collectives)
    return phrase(strategy, dict(plan.logical_mesh.axes), asks_for_first_stage(plan.options))


def asks_for_first_stage(options: Iterable[tuple[str, Any]]) -> bool:
    """Returns whether a context asks for the first stage of ZeRO only.

    Sums of gradients leave each device a part there, too, which alone would be the second stage.
    """
    own = dict(options)
    level = dict(own.get("parallel_optimizer_config", ())).get("optimizer_level", OPTIMIZER_LEVELS[0])
    return bool(own.get("enable_parallel_optimizer")) and level == OPTIMIZER_LEVELS[0]


def phrase(strategy: Strategy, sizes: Mapping[str, int], is_first_stage: bool = False) -> str:
    """Returns what a strategy is on a mesh with axes of these sizes; if `is_first_stage`, split optimizer state is ZeRO-1."""
    second = 2 if strategy.gradients >= _MOST and not is_first_stage else 1
    parts = [*_of_batch(strategy, sizes, second), *_of_weights(strategy, sizes), *_of_dims(strategy, sizes)]
    return ", ".join(parts) if parts else f"everything repeated on {counted(slices(sizes, sizes), 'device')}"


def _of_batch(strategy: Strategy, sizes: Mapping[str, int], of_states: int) -> Iterator[str]:
    """Says how the batch is split, and whether that splits the state, too: by ZeRO of stage 3, or of the stage `of_states`."""
    count = slices(strategy.rows, sizes)
    over = f"over {counted(count, 'device')}"
    for stage, own in ((3, strategy.parameters), (of_states, strategy.states)):
        whole, split = sum(one.num_bytes for one in own.values()), sum(one.split for one in own.values())
        if not whole or split < _SOME * whole:
            continue
        ways, is_all = slices(_main_way(own.values()), sizes), split >= _NEARLY_ALL * whole
        if is_all and ways == count:
            yield f"ZeRO-{stage} {over}"
            return
        kinds = "" if is_all else f" for {_joined(_kinds_split(strategy, own))}"
        yield f"data-parallel {over}"
        yield f"ZeRO-{stage}{kinds}{'' if ways == count else f' over {ways}'}"
        return
    if strategy.rows:
        yield f"data-parallel {over}"


def _main_way(own: Iterable[Kept]) -> tuple[str, ...]:
    """Returns the axes that split most of the bytes that are split."""
    ways: Counter[tuple[str, ...]] = Counter()
    for one in own:
        ways.update(one.ways)
    return max(ways, key=lambda axes: ways[axes])


def _kinds_split(strategy: Strategy, own: Mapping[str, Kept]) -> Sequence[str]:
    """Returns the parts of the model most of whose bytes are split, the largest first."""
    tables = {one.path for one in strategy.weights if one.is_table}
    sums: dict[str, tuple[int, int]] = {}
    for path, one in own.items():
        name = _kind(path, is_table=path in tables)
        before = sums.get(name, (0, 0))
        sums[name] = before[0] + one.num_bytes, before[1] + one.split
    largest = sorted(sums, key=lambda name: -sums[name][1])
    return [name for name in largest if sums[name][1] >= _MOST * sums[name][0]] or largest[:1]


def _of_weights(strategy: Strategy, sizes: Mapping[str, int]) -> Iterator[str]:
    """Says which weights are split where they are used, the largest first."""
    groups: dict[str, list[Weight]] = {}
    for weight in strategy.weights:
        groups.setdefault(_kind(weight.path, is_table=weight.is_table), []).append(weight)
    told: dict[str, list[str]] = {}
    for name in sorted(groups, key=lambda name: -sum(one.num_bytes for one in groups[name])):
        how = _how(groups[name], sizes)
        if how:
            told.setdefault(how, []).append(name)
    for how, names in told.items():
        is_said = names == ["experts"] and how.startswith("expert-parallel")
        yield how if is_said else f"{_joined(names)} {how}"


def _how(weights: Sequence[Weight], sizes: Mapping[str, int]) -> str:
    """Returns how most of the bytes of some weights are split, empty if most are whole where they are used."""
    ways: dict[tuple[str, ...], int] = {}
    for weight in weights:
        axes = tuple(sorted({axis for own in weight.parts.values() for axis in own}))
        ways[axes] = ways.get(axes, 0) + weight.num_bytes
    axes = max(ways, key=lambda way: ways[way])
    if not axes:
        return ""
    count = slices(axes, sizes)
    over = "" if count == slices(sizes, sizes) else f" over {count}"
    parts = {part for weight in weights for part in weight.parts}
    if parts == {Part.EXPERT}:
        return f"expert-parallel over {count}"
    if Part.EXPERT in parts:
        return f"split by expert and by features{over}"
    if any(weight.is_table for weight in weights):
        what = [name for part, name in ((Part.VOCABULARY, "vocabulary"), (Part.OUTPUT, "features")) if part in parts]
        return f"split by {' and '.join(what)}{over}"
    return f"tensor-parallel over {count}"


def _of_dims(strategy: Strategy, sizes: Mapping[str, int]) -> Iterator[str]:
    """Says which other dimensions of the batch are split, in products or only where they are stored."""
    for origin, name in ((Origin.SEQUENCE, "sequence"), (Origin.SPACE, "height and width")):
        axes = [axis for axis, shares in strategy.shares.items() if shares.get(origin, 0.0) >= _SOME]
        if axes:
            yield f"{name} split over {slices(axes, sizes)}"
        elif strategy.beside.get(origin):
            yield f"{name} of the batch stored over {slices(strategy.beside[origin], sizes)}"


def _kind(path: str, *, is_table: bool) -> str:
    """Returns what a parameter is part of, in the words of its path."""
    if is_table:
        return "embedding"
    for name, pattern in _WORDS:
        if pattern.search(path):
            return name
    parts = [re.sub(r"\d+", "*", part) for part in path.split("/")]
    own = [part for part in parts if part not in _NO_NAMES and part.strip("*_")]
    return own[-1] if own else parts[-1]


def _joined(names: Iterable[str]) -> str:
    """Returns names as one enumeration."""
    own = list(names)
    if len(own) > _MOST_NAMES:
        own = [*own[:_MOST_NAMES], f"{len(own) - _MOST_NAMES} more"]
    return own[0] if len(own) == 1 else f"{', '.join(own[:-1])} and {own[-1]}"
