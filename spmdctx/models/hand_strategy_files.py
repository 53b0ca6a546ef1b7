"""Hand strategies as YAML files: the arguments of `shard()` for each module, and the context in which to use them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from spmdctx.errors import PlanFormatError
from spmdctx.models.config import DecoderConfig
from spmdctx.models.hand_strategies import RegionStrategy, Slices, Split
from spmdctx.wording.files import read_file
from spmdctx.wording.text_data import MOST_YAML_BYTES, read_yaml_text

_PARTS = ("model", "device_num", "data_parallel", "model_parallel", "strategies")


def strategy_text(model: str, config: DecoderConfig, split: Split, source: str = "") -> str:
    """Returns the strategies of a decoder as the text of their file."""
    header = f"# Slices per dimension, by module and parameter path.{f' Degrees: {source}.' if source else ''}\n"
    content = {
        "model": model,
        "device_num": split.data * split.model,
        "data_parallel": split.data,
        "model_parallel": split.model,
        "strategies": {path: _region_data(region) for path, region in split.regions_of(config).items()},
    }
    return header + str(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=200))


def read_strategy(path: Path) -> Split:
    """Reads the strategies of a file for `Decoder`, `create` or `abstract_program`.

    Raises:
        PlanFormatError: the file holds no strategies.
        OSError: the file cannot be read.
    """
    try:
        content = read_yaml_text(read_file(path, MOST_YAML_BYTES))
        if not isinstance(content, Mapping) or set(content) != set(_PARTS):
            raise PlanFormatError("The file holds no strategies.", where=str(path), need=f"the keys {', '.join(_PARTS)}")
        regions = {name: _region(entry) for name, entry in content["strategies"].items()}
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, PlanFormatError):
            raise
        raise PlanFormatError("The file holds no strategies.", where=str(path), got=f"{type(error).__name__}: {error}") from error
    return Split("megatron", content["data_parallel"], content["model_parallel"], regions)


def context_text(options: Mapping[str, Any], degrees: Mapping[str, int], max_device_memory: str) -> str:
    """Returns the text of a context file with MindFormers' keys.

    Args:
        options: the section `parallel`.
        degrees: the section `parallel_config`.
        max_device_memory: the budget per device, or "" for none.
    """
    content: dict[str, Any] = {"use_parallel": True, "parallel": dict(options)}
    if degrees:
        content["parallel_config"] = dict(degrees)
    if max_device_memory:
        content["context"] = {"max_device_memory": max_device_memory}
    return str(yaml.safe_dump(content, sort_keys=False, default_flow_style=None))


def _region_data(region: RegionStrategy) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if region.inputs is not None:
        data["in_strategy"] = [list(slices) for slices in region.inputs]
    if region.outputs is not None:
        data["out_strategy"] = [list(slices) for slices in region.outputs]
    if region.parameters:
        data["parameter_plan"] = {path: list(slices) for path, slices in region.parameters.items()}
    return data


def _region(entry: Mapping[str, Any]) -> RegionStrategy:
    unknown = set(entry) - {"in_strategy", "out_strategy", "parameter_plan"}
    if unknown:
        raise ValueError(f"unknown key {min(unknown)!r}")
    plan = {path: tuple(slices) for path, slices in entry.get("parameter_plan", {}).items()}
    return RegionStrategy(_all_slices(entry.get("in_strategy")), _all_slices(entry.get("out_strategy")), plan)


def _all_slices(entries: Any) -> tuple[Slices, ...] | None:
    return None if entries is None else tuple(tuple(entry) for entry in entries)
