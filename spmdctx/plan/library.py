"""The library of ready strategies: its folder, its models and device counts, and the places of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdctx.errors import PlanError, PlanFormatError
from spmdctx.wording.files import read_file
from spmdctx.wording.text_data import MOST_YAML_BYTES, read_yaml_text

ROWS_FILE = "rows.yaml"
_PLACES = (Path(__file__).parents[1] / "strategies", Path(__file__).parents[2] / "strategies")
"""The folder inside the installed package, and the one beside it in a checkout, which an editable install points to."""


@dataclass(frozen=True)
class Row:
    """One model on one number of devices.

    Attributes:
        model: name of the model.
        device_num: number of devices.
        hand: slices of the batch and of the weights, one pair per hand strategy.
        batch_size: sequences per step.
        seq: tokens per sequence.
        layers: number of layers, None for all that the model has.
        source: the origin of the hand strategies.
        pipeline_stages: number of stages; the slices of a hand strategy are those of one stage.
        micro_batch_num: micro-batches of a pipeline.
        scan_layers: whether the layers run by one scan, None as in all rows.
    """

    model: str
    device_num: int
    hand: tuple[tuple[int, int], ...]
    batch_size: int
    seq: int
    layers: int | None = None
    source: str = ""
    pipeline_stages: int = 1
    micro_batch_num: int = 1
    scan_layers: bool | None = None

    @property
    def has_pipeline(self) -> bool:
        """True if the model runs on several stages."""
        return self.pipeline_stages > 1

    @property
    def _suffix(self) -> str:
        return f"_pp{self.pipeline_stages}" if self.has_pipeline else ""

    @property
    def folder(self) -> Path:
        """The folder of the row's files, relative to the library's folder."""
        return Path(self.model) / str(self.device_num)

    def hand_file(self, data: int, model: int) -> Path:
        """Returns the path of the hand strategy with these slices, relative to the library's folder."""
        return self.folder / f"hand_dp{data}_mp{model}{self._suffix}.yaml"

    def hand_context_file(self, data: int, model: int) -> Path:
        """Returns the path of the context in which a hand strategy is used."""
        return self.folder / f"hand_dp{data}_mp{model}{self._suffix}.context.yaml"

    @property
    def searched_file(self) -> Path:
        """The path of the searched plan."""
        return self.folder / f"searched{self._suffix}.json"

    @property
    def searched_context_file(self) -> Path:
        """The path of the context in which the plan was searched."""
        return self.folder / f"searched{self._suffix}.context.yaml"


@dataclass(frozen=True)
class Library:
    """The library's table.

    Attributes:
        folder: the folder of the files.
        rows: models and device counts.
        program: options of the decoder that all rows share.
        search_mode: the search that made the plans.
        topology: the machine that they are for.
        max_device_memory: budget per device, as MindFormers writes it.
    """

    folder: Path
    rows: tuple[Row, ...]
    program: Mapping[str, Any]
    search_mode: str
    topology: str
    max_device_memory: str

    def row(self, model: str, device_num: int, pipeline_stages: int = 1) -> Row:
        """Returns the row of a model on a number of devices, and of as many stages.

        Raises:
            PlanError: there is no such row; the message names those that there are.
        """
        found = [row for row in self.rows if row.model == model and row.pipeline_stages == pipeline_stages]
        for row in found:
            if row.device_num == device_num:
                return row
        counts = ", ".join(str(row.device_num) for row in found)
        stages = f" and {pipeline_stages} pipeline stages" if pipeline_stages > 1 else ""
        raise PlanError(
            f"The library has no strategy for {model} on {device_num} devices{stages}.",
            need=f"{counts} devices" if found else f"one of {', '.join(dict.fromkeys(row.model for row in self.rows))}",
        )


def strategies_folder() -> Path:
    """Returns the library's folder: inside the package in a wheel, otherwise beside it.

    Raises:
        PlanError: the installation came without the library.
    """
    for place in _PLACES:
        if (place / ROWS_FILE).is_file():
            return place
    raise PlanError("The library of strategies is not installed.", need=f"{ROWS_FILE} in {' or '.join(map(str, _PLACES))}")


def read_library(folder: Path | None = None) -> Library:
    """Reads the table of a library, by default that of the shipped one.

    Raises:
        PlanError: there is no shipped library.
        PlanFormatError: the file is no such table.
        OSError: the file cannot be read.
    """
    folder = strategies_folder() if folder is None else folder
    path = folder / ROWS_FILE
    try:
        content = read_yaml_text(read_file(path, MOST_YAML_BYTES))
        rows = tuple(_row(entry) for entry in content.pop("rows"))
        return Library(folder, rows, **content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanFormatError(
            "The table of strategies does not have the parts of one.", where=str(path), got=f"{type(error).__name__}: {error}"
        ) from error


def _row(entry: Mapping[str, Any]) -> Row:
    hand = tuple((data, model) for data, model in entry["hand"])
    return Row(**{**entry, "hand": hand})
