"""Options: how a value is checked, and where it is stored.

Most options are a field of AutoParallelContext. Some share one storage: two names for one value, a flag and a string, a
dictionary and its entries. Their `store` function does this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmdctx.context.values import Check, DatasetStrategy, FusionEntry

State = dict[str, Any]
"""Maps the field names of AutoParallelContext to their values."""


@dataclass(frozen=True)
class Option:
    """One row of the table.

    Attributes:
        name: MindSpore's name.
        kind: Python type, as documentation.
        check: Turns a user's value into its normal form, or raises.
        default: What `get` starts from, in normal form.
        allowed: The allowed values, as documentation.
        modes: Parallel modes that use the option.
        meaning: What it does to a JAX step.
        built: Whether it acts in this version.
        quiet: A value that asks for nothing, so that it needs no warning where the option has no effect.
        store: Writes a checked value into the state; by default into the field of the option's name.
        in_plan: Whether the option belongs to the plan (not paths, not what differs between processes).
        same_as: The option that this one is another name of.
    """

    name: str
    kind: str
    check: Check
    default: Any
    allowed: str
    modes: tuple[str, ...]
    meaning: str
    built: bool = True
    quiet: Any = None
    store: Callable[[State, Any], None] | None = None
    in_plan: bool = True
    same_as: str = ""

    def write(self, state: State, value: Any) -> None:
        """Puts a checked value where it belongs."""
        if self.store is None:
            state[self.name] = value
        else:
            self.store(state, value)

    @property
    def choices(self) -> tuple[str, ...]:
        """The names among which a value is; empty for options of other kinds."""
        return getattr(self.check, "choices", ())

    @property
    def asks_nothing(self) -> Any:
        """The value that needs no warning where the option has no effect."""
        return self.default if self.quiet is None else self.quiet


def store_search_mode(state: State, value: str) -> None:
    """Stores search_mode under either of its names."""
    state["search_mode"] = value


def store_full_batch(state: State, value: bool) -> None:
    """Stores the flag, and changes the strategy if it is a string; leaves tuples alone."""
    state["full_batch"] = value
    if isinstance(state["dataset_strategy"], str):
        state["dataset_strategy"] = "full_batch" if value else "data_parallel"


def store_dataset_strategy(state: State, value: DatasetStrategy) -> None:
    """Stores the strategy; a string also changes the flag."""
    state["dataset_strategy"] = value
    if isinstance(value, str):
        state["full_batch"] = value == "full_batch"


def store_entries(field: str) -> Callable[[State, dict[str, Any]], None]:
    """Makes a function that stores the given entries of a dictionary and keeps the others."""

    def store(state: State, value: dict[str, Any]) -> None:
        state[field] = state[field]._replace(**value)

    return store


def store_entry(field: str, entry: str) -> Callable[[State, Any], None]:
    """Makes a function that stores one entry of a dictionary, which is an option of its own."""

    def store(state: State, value: Any) -> None:
        state[field] = state[field]._replace(**{entry: value})

    return store


def store_fusion_indices(state: State, value: tuple[int, ...]) -> None:
    """Stores buckets by index, which hold until comm_fusion says otherwise; none is what the option starts from."""
    state["all_reduce_fusion_config"] = value
    state["index_fusion"] = bool(value)


def store_comm_fusion(state: State, value: dict[str, Any]) -> None:
    """Stores the given kinds; an entry for all-reduces takes precedence over an earlier all_reduce_fusion_config."""
    state["comm_fusion"] = state["comm_fusion"]._replace(**value)
    entry: FusionEntry | None = value.get("allreduce")
    if entry is not None:
        state["index_fusion"] = entry.mode == "index"
        if entry.mode == "index":
            state["all_reduce_fusion_config"] = entry.config
