"""The library of strategies on the command line: its programs, its files, and the `--strategy` argument."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from spmdctx.api import parallel
from spmdctx.context.layers import ContextConfig, auto_parallel_context, load_config
from spmdctx.context.options import BY_NAME
from spmdctx.errors import PlanError
from spmdctx.models import UNSPLIT, DecoderConfig, Split, abstract_program, preset
from spmdctx.models.hand_strategy_files import context_text, read_strategy, strategy_text
from spmdctx.pipeline.plan import PipelinePlan
from spmdctx.plan.library import Library, Row, read_library
from spmdctx.plan.plan import Plan

PLAN_SUFFIX = ".json"


class Ready(NamedTuple):
    """A ready strategy and what it is for.

    Attributes:
        split: strategies for the decoder.
        config: the context to use it in.
        program: arguments of the command line that describe the program; those that the user gives come first.
    """

    split: Split
    config: ContextConfig
    program: dict[str, Any]


def row_config(library: Library, row: Row) -> DecoderConfig:
    """Returns the decoder of a row."""
    config = replace(preset(row.model), **library.program)
    own: dict[str, Any] = {"num_layers": row.layers, "scan_layers": row.scan_layers}
    return replace(config, **{name: value for name, value in own.items() if value is not None})


def hand_texts(library: Library, row: Row) -> Iterator[tuple[Path, str]]:
    """Yields path and text of the row's hand strategies and of all its contexts."""
    for data, model in row.hand:
        split = Split("megatron", data, model)
        source = f"{row.source}, of each of {row.pipeline_stages} pipeline stages" if row.has_pipeline else row.source
        yield row.hand_file(data, model), strategy_text(row.model, row_config(library, row), split, source)
        options = {"parallel_mode": 1, "device_num": row.device_num, "dataset_strategy": [[data, 1], [data, 1]]}
        degrees = {"data_parallel": data, "model_parallel": model, "pipeline_stage": row.pipeline_stages, "vocab_emb_dp": model == 1}
        degrees |= {"micro_batch_num": row.micro_batch_num} if row.has_pipeline else {}
        yield row.hand_context_file(data, model), context_text(options, degrees, "")
    yield row.searched_context_file, searched_context(library, row)


def searched_context(library: Library, row: Row, search_mode: str = "") -> str:
    """Returns the context of the row's search as text."""
    options = {"parallel_mode": 2, "search_mode": search_mode or library.search_mode, "device_num": row.device_num}
    if not row.has_pipeline:
        return context_text(options, {}, library.max_device_memory)
    degrees = {"pipeline_stage": row.pipeline_stages, "micro_batch_num": row.micro_batch_num}
    return context_text(options, degrees, library.max_device_memory)


def searched_plan(library: Library, row: Row, search_mode: str = "") -> Plan | PipelinePlan:
    """Searches the row's plan; a pipeline's has the stages of the row.

    Raises:
        InfeasibleError: no plan keeps to the library's memory budget.
    """
    config = load_config(yaml.safe_load(searched_context(library, row, search_mode)))
    step, arguments = abstract_program(row_config(library, row), row.batch_size, row.seq)
    with auto_parallel_context(**config.options):
        return parallel(step, topology=library.topology, memory_bytes=config.memory_bytes).plan(*arguments)


def searched_text(library: Library, row: Row, search_mode: str = "") -> tuple[Path, str]:
    """Returns path and text of the row's searched plan."""
    return row.searched_file, searched_plan(library, row, search_mode).to_json()


def ready_strategy(name: str, arguments: argparse.Namespace, device_num: int, pipeline_stages: int = 1) -> Ready:
    """Returns the strategy that `--strategy` names: "hand", "searched", or a file of either kind.

    With several `pipeline_stages`, it is that of a row with as many.

    Raises:
        PlanError: the library has no strategy, or several, for these arguments; or the file holds none.
        OSError: the file cannot be read.
    """
    if name not in ("hand", "searched"):
        return _from_file(Path(name))
    library = read_library()
    row = library.row(arguments.model.lower().replace("_", "-"), device_num, pipeline_stages)
    program = {**library.program, "layers": row.layers, "batch_size": row.batch_size, "seq": row.seq, "topology": library.topology}
    program |= {} if row.scan_layers is None else {"scan_layers": row.scan_layers}
    if name == "searched":
        config = load_config(library.folder / row.searched_context_file)
        path = library.folder / row.searched_file
        return Ready(UNSPLIT, replace(config, options={**config.options, "strategy_ckpt_load_file": str(path)}), program)
    data, model = _degrees(row, arguments.model_parallel)
    config = load_config(library.folder / row.hand_context_file(data, model))
    return Ready(read_strategy(library.folder / row.hand_file(data, model)), config, program)


def _from_file(path: Path) -> Ready:
    """Reads strategies or a plan; a plan tells the context and the machine for which it was made, but not the model."""
    if path.suffix == PLAN_SUFFIX:
        plan: Plan | PipelinePlan = Plan.load(path)
        if isinstance(plan, PipelinePlan):
            return _of_pipeline(path, plan)
        options = {name: value for name, value in plan.options if name in BY_NAME}
        options |= {"device_num": plan.logical_mesh.num_devices, "strategy_ckpt_load_file": str(path)}
        if plan.search_mode:
            options["search_mode"] = plan.search_mode
        return Ready(UNSPLIT, ContextConfig(options, memory_bytes=plan.memory_limit_bytes), {"topology": plan.topology})
    split = read_strategy(path)
    return Ready(split, ContextConfig({"parallel_mode": "semi_auto_parallel", "device_num": split.data * split.model}), {})


def _of_pipeline(path: Path, plan: PipelinePlan) -> Ready:
    schedule = plan.simulation.schedule
    options: dict[str, Any] = {"parallel_mode": plan.mode, "device_num": plan.num_devices, "strategy_ckpt_load_file": str(path)}
    options |= {"pipeline_stages": schedule.num_stages, "grad_accumulation_step": schedule.num_micro}
    if plan.search_mode:
        options["search_mode"] = plan.search_mode
    return Ready(UNSPLIT, ContextConfig(options), {"topology": plan.topology})


def _degrees(row: Row, model_parallel: int | None) -> tuple[int, int]:
    """Returns the row's hand strategy with that many slices of the weights, or the first if no number is given."""
    for data, model in row.hand:
        if model_parallel in (None, model):
            return data, model
    known = ", ".join(str(model) for _, model in row.hand)
    raise PlanError(
        f"The library has no hand strategy for {row.model} on {row.device_num} devices with {model_parallel} slices of the weights.",
        need=f"--model-parallel {known}",
    )
