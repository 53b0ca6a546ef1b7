"""Configuration files: reads context options from MindFormers' YAML (use_parallel, parallel, parallel_config, context) or plain ones."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from spmdctx.context.options import LATER_OPTIONS, PARALLEL_MODES, checked
from spmdctx.context.values import dataset_strategy_from_lists, is_int, memory_budget, nearest, wrong_type
from spmdctx.errors import ContextError, message, shown
from spmdctx.wording.files import read_file
from spmdctx.wording.text_data import MOST_YAML_BYTES, read_yaml_text
from spmdctx.wording.user_warnings import warn_user

_SECTIONS = ("use_parallel", "parallel", "parallel_config")
_MODE_NUMBERS = ("data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel")
_DEGREES = ("data_parallel", "model_parallel", "context_parallel", "pipeline_stage")
_MODEL_KEYS = (
    *_DEGREES,
    "expert_parallel",
    "micro_batch_num",
    "pp_interleave_num",
    "use_seq_parallel",
    "seq_split_num",
    "vocab_emb_dp",
    "gradient_aggregation_group",
    "optimizer_shard",
    "recompute",
    "mem_coeff",
    "auto_pipeline",
)
_COUNT_KEYS = (*_DEGREES, "expert_parallel", "micro_batch_num", "pp_interleave_num", "seq_split_num", "gradient_aggregation_group")
_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}


@dataclass(frozen=True)
class ContextConfig:
    """The content of a configuration.

    Attributes:
        options: Context options, as `set_auto_parallel_context` takes them.
        parallel_config: MindFormers' degrees (data_parallel, model_parallel, ...), which belong to the model's strategies.
        micro_batch_interleave_num: Parts for `MicroBatchInterleaved`, which the user puts around the loss.
        memory_bytes: The budget per device (`context: max_device_memory`), or None.
    """

    options: Mapping[str, Any]
    parallel_config: Mapping[str, Any] = field(default_factory=dict)
    memory_bytes: int | None = None
    micro_batch_interleave_num: int = 1


def load_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> ContextConfig:
    """Reads a configuration and checks it; sets nothing.

    In a file with MindFormers' keys the other sections (model, dataset, callbacks, ...) are not looked at. Keys of later
    MindSpore versions in `parallel`, and unknown ones in `parallel_config`, are left out with a ContextWarning.

    Args:
        source: Path of a YAML file, or a mapping.

    Raises:
        ContextError: an unknown name, a bad value, or a file that is no such configuration.
        TypeError: a value of a wrong type.
        FileNotFoundError: no such file.
    """
    where = "" if isinstance(source, Mapping) else os.fspath(source)
    content = source if isinstance(source, Mapping) else _read_yaml(where)
    try:
        if any(key in content for key in _SECTIONS):
            config = _from_mindformers(content)
        else:
            config = ContextConfig({name: _with_tuples(name, value) for name, value in content.items()})
        checked(config.options, also=_SECTIONS)
    except (ContextError, TypeError) as error:
        if where:
            error.add_note(f"  in {where}")
        raise
    return config


def _read_yaml(path: str) -> Mapping[str, Any]:
    try:
        content = read_yaml_text(read_file(path, MOST_YAML_BYTES))
    except ValueError as error:
        raise ContextError("The configuration is no valid YAML.", where=path, got=str(error)) from None
    if not isinstance(content, dict):
        raise ContextError(
            "The configuration holds no options.", where=path, got=type(content).__name__, need="a mapping such as `device_num: 8`"
        )
    return content


def _with_tuples(name: str, value: Any) -> Any:
    """Converts a dataset_strategy from lists and mappings, since YAML has neither tuples nor Layouts."""
    return dataset_strategy_from_lists(value) if name == "dataset_strategy" else value


def _section(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise wrong_type(name, section, "a mapping")
    return dict(section)


def _from_mindformers(content: Mapping[str, Any]) -> ContextConfig:
    use_parallel = content.get("use_parallel", True)
    if not isinstance(use_parallel, bool):
        raise wrong_type("use_parallel", use_parallel, "True or False")
    model = _model_part(_section(content, "parallel_config"))
    memory_bytes = _memory_bytes(_section(content, "context").get("max_device_memory"))
    parts = content.get("micro_batch_interleave_num", 1)
    _check_count("micro_batch_interleave_num", parts)
    if not use_parallel:
        return ContextConfig({"parallel_mode": "stand_alone"}, model, memory_bytes)
    if parts > 1:
        warn_user(f"micro_batch_interleave_num={parts} acts where the loss is wrapped: spmdctx.MicroBatchInterleaved(loss, {parts})")
    options = _parallel_part(_section(content, "parallel"))
    mode = options.setdefault("parallel_mode", "data_parallel")
    degrees = math.prod(model.get(name, 1) for name in _DEGREES)
    if mode in ("semi_auto_parallel", "hybrid_parallel") and degrees > 1:
        options.setdefault("device_num", degrees)
    steps = _section(content, "runner_config").get("gradient_accumulation_steps")
    if model.get("pipeline_stage", 1) > 1:
        options.setdefault("pipeline_stages", model["pipeline_stage"])
        if "pp_interleave_num" in model:
            options.setdefault("pipeline_segments", model["pp_interleave_num"])
        if "micro_batch_num" in model:
            if steps not in (None, model["micro_batch_num"]):
                _left_out("runner_config.gradient_accumulation_steps", "a pipeline takes parallel_config.micro_batch_num", steps)
            steps = model["micro_batch_num"]
    if "optimizer_shard" in model:
        options.setdefault("enable_parallel_optimizer", model["optimizer_shard"])
    for name in ("mem_coeff", "auto_pipeline"):
        if name in model:
            options.setdefault(name, model[name])
    if steps is not None:
        options.setdefault("grad_accumulation_step", steps)
    return ContextConfig(options, model, memory_bytes, parts)


def _parallel_part(section: dict[str, Any]) -> dict[str, Any]:
    """Returns the `parallel` section as options."""
    for name in [name for name in section if name in LATER_OPTIONS]:
        _left_out(f"parallel.{name}", "it belongs to MindSpore versions after 2.0", section.pop(name))
    options = {name: _with_tuples(name, value) for name, value in section.items()}
    if "parallel_mode" in options:
        options["parallel_mode"] = _mode_name(options["parallel_mode"])
    if options.get("full_batch") is True and isinstance(options.get("dataset_strategy"), tuple):
        _left_out("parallel.dataset_strategy", "full_batch is True", options.pop("dataset_strategy"))
    if options.get("full_batch") is True and options.get("parallel_mode", "data_parallel") == "data_parallel":
        _left_out("parallel.full_batch", "data_parallel gives each device its part of the batch", options.pop("full_batch"))
    return options


def _mode_name(mode: Any) -> Any:
    """Converts MindFormers' number or spelling of a mode; other values are left to the option's own check."""
    if is_int(mode):
        if not 0 <= mode < len(_MODE_NUMBERS):
            known = ", ".join(f"{number} ({name})" for number, name in enumerate(_MODE_NUMBERS))
            raise ContextError(f"parallel.parallel_mode does not accept {shown(mode)}.", need=known)
        return _MODE_NUMBERS[mode]
    return mode.lower() if isinstance(mode, str) and mode.lower() in PARALLEL_MODES else mode


def _model_part(section: dict[str, Any]) -> dict[str, Any]:
    """Returns the known keys of `parallel_config` with checked counts."""
    for name in [name for name in section if name not in _MODEL_KEYS]:
        _left_out(f"parallel_config.{name}", nearest(name, _MODEL_KEYS) or "no such key is known", section.pop(name))
    for name in _COUNT_KEYS:
        _check_count(f"parallel_config.{name}", section.get(name, 1))
    return section


def _check_count(name: str, value: Any) -> None:
    if not is_int(value):
        raise wrong_type(name, value, "an int >= 1")
    if value < 1:
        raise ContextError(f"{name} does not accept {shown(value)}.", need="an int >= 1")


def _left_out(name: str, reason: str, value: Any) -> None:
    warn_user(f"{name}={shown(value)} is left out: {reason}")


def _memory_bytes(value: Any) -> int | None:
    """Converts MindFormers' "58GB" to bytes."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(message("context.max_device_memory does not take this type.", got=shown(value), need="a string such as '58GB'"))
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B)\s*", value.upper())
    if found is None:
        raise ContextError(f"context.max_device_memory does not accept {shown(value)}.", need="a string such as '58GB'")
    return memory_budget(math.floor(Decimal(found[1]) * _UNITS[found[2]]))
