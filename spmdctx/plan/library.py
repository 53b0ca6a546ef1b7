"""The library of ready strategies: where its folder is, which models and device counts it has, and where their files are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spmdctx.errors import PlanError, PlanFormatError

ROWS_FILE = "rows.yaml"
_PLACES = (Path(__file__).parents[1] / "strategies", Path(__file__).parents[2] / "strategies")
"""Inside the installed package, and beside it in a checkout, which an editable install points to."""


@dataclass(frozen=True)
class Row:
    """One model on one number of devices.

    Attributes:
        model: name of the model.
        device_num: devices.
        hand: slices of the batch and of the weights, one pair per hand strategy.
        batch_size: sequences per step.
        seq: tokens per sequence.
        layers: layers, None for all that the model has.
        source: where the hand strategies come from.
    """

    model: str
    device_num: int
    hand: tuple[tuple[int, int], ...]
    batch_size: int
    seq: int
    layers: int | None = None
    source: str = ""

    @property
    def folder(self) -> Path:
        """Where the row's files are, in the library's folder."""
        return Path(self.model) / str(self.device_num)

    def hand_file(self, data: int, model: int) -> Path:
        """The hand strategy with these slices, in the library's folder."""
        return self.folder / f"hand_dp{data}_mp{model}.yaml"

    def hand_context_file(self, data: int, model: int) -> Path:
        """The context that a hand strategy is used in."""
        return self.folder / f"hand_dp{data}_mp{model}.context.yaml"

    @property
    def searched_file(self) -> Path:
        """The searched plan."""
        return self.folder / "searched.json"

    @property
    def searched_context_file(self) -> Path:
        """The context that the plan was searched in."""
        return self.folder / "searched.context.yaml"


@dataclass(frozen=True)
class Library:
    """The library's table.

    Attributes:
        folder: where the files are.
        rows: models and device counts.
        program: options of the decoder that all rows share.
        search_mode: what searched the plans.
        topology: the machine they are for.
        max_device_memory: budget per device, as MindFormers writes it.
    """

    folder: Path
    rows: tuple[Row, ...]
    program: Mapping[str, Any]
    search_mode: str
    topology: str
    max_device_memory: str

    def row(self, model: str, device_num: int) -> Row:
        """The row of a model on a number of devices.

        Raises:
            PlanError: there is none; the message names those there are.
        """
        found = [row for row in self.rows if row.model == model]
        for row in found:
            if row.device_num == device_num:
                return row
        counts = ", ".join(str(row.device_num) for row in found)
        raise PlanError(
            f"The library has no strategy for {model} on {device_num} devices.",
            need=f"{counts} devices" if found else f"one of {', '.join(dict.fromkeys(row.model for row in self.rows))}",
        )


def strategies_folder() -> Path:
    """The library's folder: in a wheel inside the package, otherwise beside it.

    Raises:
        PlanError: the installation came without it.
    """
    for place in _PLACES:
        if (place / ROWS_FILE).is_file():
            return place
    raise PlanError("The library of strategies is not installed.", need=f"{ROWS_FILE} in {' or '.join(map(str, _PLACES))}")


def read_library(folder: Path | None = None) -> Library:
    """Reads the table of a library, by default of the one that is shipped.

    Raises:
        PlanError: there is no shipped library.
        PlanFormatError: the table is none.
        OSError: it cannot be read.
    """
    folder = strategies_folder() if folder is None else folder
    path = folder / ROWS_FILE
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        rows = tuple(_row(entry) for entry in content.pop("rows"))
        return Library(folder, rows, **content)
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanFormatError(
            "The table of strategies does not have the parts of one.", where=str(path), got=f"{type(error).__name__}: {error}"
        ) from error


def _row(entry: Mapping[str, Any]) -> Row:
    hand = tuple((data, model) for data, model in entry["hand"])
    return Row(**{**entry, "hand": hand})
