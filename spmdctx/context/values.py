"""Values of context options: checks, normal (frozen, hashable) forms, and the forms that `get` returns."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from spmdctx.errors import ContextError, UnsupportedError, message, shown
from spmdctx.ir.layout import Layout

Check = Callable[[str, Any], Any]
"""Takes an option's name and the user's value; returns the normal form, or raises TypeError or ContextError."""

OPTIMIZER_LEVELS = ("level1", "level2", "level3")
DATASET_STRATEGIES = ("data_parallel", "full_batch")
PIPELINE_SCHEDULERS = ("gpipe", "1f1b", "zero_bubble_h1", "zero_bubble_v")
_SEQUENCE_SCHEDULERS = ("seqpipe", "seqvpp", "seqsmartvpp")


class FusionEntry(NamedTuple):
    """The fusion of one kind of collective: `config` is MB in size mode, gradient indices in index mode."""

    mode: str
    config: int | tuple[int, ...] | None


class CommFusion(NamedTuple):
    """The whole of comm_fusion."""

    openstate: bool
    allreduce: FusionEntry
    allgather: FusionEntry
    reducescatter: FusionEntry


class ParallelOptimizerConfig(NamedTuple):
    """The whole of parallel_optimizer_config; the threshold is in KB."""

    gradient_accumulation_shard: bool
    parallel_optimizer_threshold: int
    optimizer_weight_shard_size: int
    optimizer_level: str


class StrategyFiles(NamedTuple):
    """The whole of strategy_ckpt_config."""

    load_file: str
    save_file: str
    only_trainable_params: bool


class PipelineConfig(NamedTuple):
    """The whole of pipeline_config."""

    pipeline_interleave: bool
    pipeline_scheduler: str


DatasetStrategy = str | tuple[tuple[int, ...] | Layout, ...]


def plain(value: Any) -> Any:
    """Returns the value as `get` does, with dictionaries and lists in place of named tuples and tuples."""
    if isinstance(value, tuple):
        if hasattr(value, "_asdict"):
            return {name: plain(part) for name, part in value._asdict().items()}
        return [plain(part) for part in value]
    if isinstance(value, Layout):
        return {name: plain(part) for name, part in value.to_dict().items()}
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns a `fix` line that names the known word nearest to a wrong one, or an empty string if none is near."""
    by_lower = {name.lower(): name for name in known}
    found = get_close_matches(str(word).lower(), by_lower, n=1, cutoff=0.6)
    return f"did you mean {by_lower[found[0]]!r}?" if found else ""


def wrong_type(name: str, value: Any, need: str) -> TypeError:
    """Makes the error for a value of a wrong type."""
    return TypeError(message(f"{name} does not take values of type {type(value).__name__}.", got=shown(value), need=need))


def bad_value(name: str, value: Any, need: str, fix: str = "") -> ContextError:
    """Makes the error for a value of the right type that is not allowed."""
    return ContextError(f"{name} does not accept {shown(value)}.", need=need, fix=fix)


def is_int(value: Any) -> bool:
    """Returns whether the value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def boolean(name: str, value: Any) -> bool:
    """Accepts True or False; refuses 0, 1 and None."""
    if not isinstance(value, bool):
        raise wrong_type(name, value, "True or False")
    return value


def text(name: str, value: Any) -> str:
    """Accepts any string."""
    if not isinstance(value, str):
        raise wrong_type(name, value, "a string")
    return value


def integer(low: int, high: int | None = None, unit: str = "") -> Check:
    """Makes a check that accepts an int in [low, high]."""
    need = (f"an int >= {low}" if high is None else f"an int in [{low}, {high}]") + (unit and f" ({unit})")

    def check(name: str, value: Any) -> int:
        if not is_int(value):
            raise wrong_type(name, value, need)
        if value < low or (high is not None and value > high):
            raise bad_value(name, value, need)
        return int(value)

    return check


def positive_number(high: float = math.inf) -> Check:
    """Makes a check that accepts a float or int in (0, high] and keeps it as a float."""
    need = "a finite number > 0" if high == math.inf else f"a number in (0, {high:g}]"

    def check(name: str, value: Any) -> float:
        if not is_int(value) and not isinstance(value, float):
            raise wrong_type(name, value, need)
        if not 0 < value <= min(high, sys.float_info.max):  # an int may be too large for a float
            raise bad_value(name, value, need)
        return float(value)

    return check


_MAX_BYTES = 1 << 63


def memory_budget(value: Any) -> int | None:
    """Checks `memory_bytes`, a positive number of bytes or None for no budget."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(message("memory_bytes must be a number of bytes.", got=shown(value)))
    if not 0 < value < math.inf:
        raise ContextError("memory_bytes must be positive and finite.", got=shown(value))
    if value >= _MAX_BYTES:
        raise ContextError("memory_bytes is more than any device has.", got=shown(int(value)), need="less than 2**63")
    return int(value)


def choice(names: tuple[str, ...]) -> Check:
    """Makes a check that accepts one of the names exactly as written."""
    need = "one of " + ", ".join(map(repr, names))

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong_type(name, value, need)
        if value not in names:
            raise bad_value(name, value, need, nearest(value, names))
        return value

    check.choices = names  # type: ignore[attr-defined]  # Option.choices reads it
    return check


def refused_unless(default: Any, check: Check, reason: str) -> Check:
    """Makes a check that accepts the default; every other legal value raises an UnsupportedError that gives the reason."""

    def guarded(name: str, value: Any) -> Any:
        if check(name, value) != default:
            raise UnsupportedError(f"{name}={shown(value)} is not supported: {reason}.", need=f"{default!r}, or leave it unset")
        return default

    return guarded


def weight_shard_size(name: str, value: Any) -> int:
    """Accepts a group size > 0, or -1 for the whole group of replicas."""
    need = "an int > 0, or -1 for all replicas"
    if not is_int(value):
        raise wrong_type(name, value, need)
    if value < 1 and value != -1:
        raise bad_value(name, value, need)
    return int(value)


def dataset_strategy(name: str, value: Any) -> DatasetStrategy:
    """Accepts a string, or for each batch input a tuple of slices or a Layout of its dimensions."""
    need = "'data_parallel', 'full_batch', or a tuple of one tuple of ints >= 1, or one Layout, per batch input, such as ((8, 1), (8,))"
    if isinstance(value, str):
        if value not in DATASET_STRATEGIES:
            raise bad_value(name, value, need, nearest(value, DATASET_STRATEGIES))
        return value
    if not isinstance(value, tuple) or not all(isinstance(entry, tuple | Layout) for entry in value):
        raise wrong_type(name, value, need)
    for position, entry in enumerate(value):
        if isinstance(entry, Layout):
            if entry.alias_tensor_map is None:
                raise bad_value(f"{name}[{position}]", entry, "a Layout that was called", 'call it: layout("axis", "None")')
            continue
        for dim, slices in enumerate(entry):
            if not is_int(slices):
                raise wrong_type(f"{name}[{position}][{dim}]", slices, "an int >= 1")
            if slices < 1:
                raise bad_value(f"{name}[{position}][{dim}]", slices, "an int >= 1", "use 1 for a dimension that is not split")
    if not value:
        raise bad_value(name, value, need)
    return value


def dataset_strategy_from_lists(value: Any) -> Any:
    """Converts a dataset_strategy from JSON or YAML: lists to tuples, mappings to Layouts; leaves other values to the check."""
    if not isinstance(value, list | tuple):
        return value
    found = [
        tuple(entry) if isinstance(entry, list) else Layout.from_dict(entry) if isinstance(entry, Mapping) else entry for entry in value
    ]
    return tuple(found)


def fusion_indices(name: str, value: Any) -> tuple[int, ...]:
    """Accepts a list of ascending gradient indices; an empty one asks for no buckets."""
    need = "a list of ascending ints >= 0, such as [20, 35]"
    if not isinstance(value, list):
        raise wrong_type(name, value, need)
    for position, index in enumerate(value):
        if not is_int(index):
            raise wrong_type(f"{name}[{position}]", index, "an int >= 0")
    if len(set(value)) != len(value):
        raise bad_value(name, value, need, f"remove duplicates: {sorted(set(value))}")
    if (value and min(value) < 0) or sorted(value) != value:
        raise bad_value(name, value, need)
    return tuple(value)


def entries(name: str, value: Any, known: Mapping[str, Check]) -> dict[str, Any]:
    """Accepts a dictionary whose keys are all known and whose values pass the check of their key."""
    if not isinstance(value, dict):
        raise wrong_type(name, value, "a dict with keys among " + ", ".join(map(repr, known)))
    for key in value:
        if key not in known:
            need = "keys among " + ", ".join(map(repr, known))
            raise ContextError(f"{name} has no key {shown(key)}.", need=need, fix=nearest(key, known))
    return {key: known[key](f"{name}[{key!r}]", part) for key, part in value.items()}


def fusion_entry(modes: tuple[str, ...]) -> Check:
    """Makes a check that accepts {"mode": ..., "config": ...} for one kind of collective."""

    def check(name: str, value: Any) -> FusionEntry:
        parts = entries(name, value, {"mode": choice(modes), "config": lambda _, config: config})
        for key in ("mode", "config"):
            if key not in parts:
                raise ContextError(f"{name} lacks the key {key!r}.", got=shown(value), need="both 'mode' and 'config'")
        where, mode, config = f"{name}['config']", parts["mode"], parts["config"]
        if mode == "index":
            indices = fusion_indices(where, config)
            if not indices:
                raise bad_value(where, config, "at least one index, such as [20, 35]", "mode 'auto' asks for no buckets by index")
            return FusionEntry(mode, indices)
        if mode == "auto" and config is None:
            return FusionEntry(mode, None)
        return FusionEntry(mode, integer(1, unit="MB")(where, config))

    return check


_FUSION_CHECKS: dict[str, Check] = {
    "openstate": boolean,
    "allreduce": fusion_entry(("auto", "size", "index")),
    "allgather": fusion_entry(("auto", "size")),
    "reducescatter": fusion_entry(("auto", "size")),
}
_OPTIMIZER_CHECKS: dict[str, Check] = {
    "gradient_accumulation_shard": boolean,
    "parallel_optimizer_threshold": integer(0, unit="KB"),
    "optimizer_weight_shard_size": weight_shard_size,
    "optimizer_level": choice(OPTIMIZER_LEVELS),
}


def pipeline_scheduler(name: str, value: Any) -> str:
    """Accepts the name of a schedule; refuses those that cut sequences."""
    if value in _SEQUENCE_SCHEDULERS:
        raise UnsupportedError(
            f"{name}={value!r} is not supported: it cuts the sequences of a micro-batch, which must then be computed one after the other.",
            need="one of " + ", ".join(map(repr, PIPELINE_SCHEDULERS)),
        )
    return str(choice(PIPELINE_SCHEDULERS)(name, value))


_PIPELINE_CHECKS: dict[str, Check] = {"pipeline_interleave": boolean, "pipeline_scheduler": pipeline_scheduler}
_STRATEGY_FILE_CHECKS: dict[str, Check] = {"load_file": text, "save_file": text, "only_trainable_params": boolean}


def comm_fusion(name: str, value: Any) -> dict[str, Any]:
    """Checks the given entries of comm_fusion; the others keep their values."""
    return entries(name, value, _FUSION_CHECKS)


def parallel_optimizer_config(name: str, value: Any) -> dict[str, Any]:
    """Checks the given entries of parallel_optimizer_config."""
    return entries(name, value, _OPTIMIZER_CHECKS)


def strategy_ckpt_config(name: str, value: Any) -> dict[str, Any]:
    """Checks the given entries of strategy_ckpt_config."""
    return entries(name, value, _STRATEGY_FILE_CHECKS)


def pipeline_config(name: str, value: Any) -> dict[str, Any]:
    """Checks the given entries of pipeline_config."""
    return entries(name, value, _PIPELINE_CHECKS)
