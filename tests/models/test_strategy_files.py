"""The shipped strategies, each at full size, and how files are written and read."""

from __future__ import annotations

import warnings
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

import spmdctx
from spmdctx.cli.library import row_config
from spmdctx.cli.main import main
from spmdctx.context.layers import load_config
from spmdctx.errors import PlanFormatError
from spmdctx.models import Decoder, DecoderConfig, Split, abstract_program, preset
from spmdctx.models.hand_strategy_files import read_strategy, strategy_text
from spmdctx.pipeline.plan import PipelinePlan
from spmdctx.plan.library import Row, read_library

LIBRARY = read_library()
HAND = [(row, degrees) for row in LIBRARY.rows for degrees in row.hand]
WHOLE = [(row, degrees) for row, degrees in HAND if not row.has_pipeline]
PLANS = [row for row in LIBRARY.rows if not row.has_pipeline and (LIBRARY.folder / row.searched_file).is_file()]
PIPELINES = [row for row in LIBRARY.rows if row.has_pipeline]


MADE_WITH = "0.10."
"""JAX of the shipped plans."""


def _name(value: Any) -> str:
    if not isinstance(value, Row):
        return "{}x{}".format(*value)
    return f"{value.model} on {value.device_num}" + (f" in {value.pipeline_stages} stages" if value.has_pipeline else "")


@cache
def _shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Path and shape of every parameter, those of all blocks together under `layers/*`."""
    state = nnx.state(nnx.eval_shape(lambda: Decoder(replace(config, scan_layers=True), nnx.Rngs(0))), nnx.Param)
    shapes = {}
    for path, leaf in nnx.to_flat_state(state):
        stacked = path[0] == "layers"
        assert not stacked or leaf.shape[0] == config.num_blocks
        shapes["/".join(("layers/*", *path[1:]) if stacked else path)] = leaf.shape[stacked:]
    return shapes


def test_layers_one_by_one_have_the_paths_of_scanned_ones() -> None:
    for name in ("llama2-70b", "baichuan2-13b", "qwen-14b-lora", "pangu-alpha-13b"):
        short = replace(preset(name), num_layers=2)
        state = nnx.state(nnx.eval_shape(lambda short=short: Decoder(short, nnx.Rngs(0))), nnx.Param)
        paths = {"/".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
        for path, shape in paths.items():
            patterns = [known for known in _shapes(short) if fnmatchcase(path, known)]
            assert [_shapes(short)[known] for known in patterns] == [shape], (name, path)


@pytest.mark.parametrize(("row", "degrees"), HAND, ids=_name)
def test_a_hand_strategy_fits_every_parameter_of_the_whole_model(row: Row, degrees: tuple[int, int]) -> None:
    split = read_strategy(LIBRARY.folder / row.hand_file(*degrees))
    assert (split.data, split.model) == degrees
    assert split.data * split.model * row.pipeline_stages == row.device_num
    assert row.batch_size % (split.data * row.micro_batch_num) == 0
    shapes = dict(_shapes(replace(row_config(LIBRARY, row), scan_layers=True)))
    for module, region in (split.regions or {}).items():
        for parameter, slices in region.parameters.items():
            shape = shapes.pop(f"{module}/{parameter}")
            assert all(size % count == 0 for size, count in zip(shape, slices, strict=True)), (module, parameter)
    # What is left is stored whole: norms, and PanGu-alpha's tables of positions and queries.
    assert {path for path in shapes if "norm" not in path} <= {"positions/embedding", "query/embedding"}


@pytest.mark.parametrize(("row", "degrees"), WHOLE, ids=_name)
def test_a_hand_strategy_is_planned_at_full_width_as_it_says(row: Row, degrees: tuple[int, int]) -> None:
    split = read_strategy(LIBRARY.folder / row.hand_file(*degrees))
    config = load_config(LIBRARY.folder / row.hand_context_file(*degrees))
    assert (config.parallel_config["data_parallel"], config.parallel_config["model_parallel"]) == degrees
    step, arguments = abstract_program(row_config(LIBRARY, row), row.batch_size, row.seq, split=split)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = spmdctx.plan(step, *arguments, topology=LIBRARY.topology, **config.options)
    assert tuple(plan.mesh.values()) == tuple(size for size in degrees if size > 1)
    shardings = {tensor.path: tensor.sharding for tensor in plan.inputs}
    mesh = plan.logical_mesh
    for module, region in (split.regions or {}).items():
        for parameter, slices in region.parameters.items():
            path = f"model/{module}/{parameter}".replace("/*", "")
            assert tuple(mesh.num_slices(axes) for axes in shardings[path][-len(slices) :]) == slices, path
    if row.model.endswith("-lora"):
        assert not any(path.startswith("optimizer") and path.endswith("kernel") for path in shardings)


@pytest.mark.parametrize("row", LIBRARY.rows, ids=_name)
def test_the_context_of_a_search_is_read(row: Row) -> None:
    config = load_config(LIBRARY.folder / row.searched_context_file)
    pipeline = {"pipeline_stages": row.pipeline_stages, "grad_accumulation_step": row.micro_batch_num}
    own = {"parallel_mode": "auto_parallel", "search_mode": LIBRARY.search_mode, "device_num": row.device_num}
    assert config.options == {**own, **(pipeline if row.has_pipeline else {})}
    assert config.memory_bytes == 88 * 2**30


@pytest.mark.parametrize(("row", "degrees"), [(row, degrees) for row in PIPELINES for degrees in row.hand], ids=_name)
def test_a_hand_strategy_of_a_pipeline_is_planned_as_it_says(row: Row, degrees: tuple[int, int]) -> None:
    split = read_strategy(LIBRARY.folder / row.hand_file(*degrees))
    config = load_config(LIBRARY.folder / row.hand_context_file(*degrees))
    own = replace(row_config(LIBRARY, row), num_layers=row.pipeline_stages)
    step, arguments = abstract_program(own, row.batch_size, row.seq, split=split)
    plan: Any = spmdctx.plan(step, *arguments, topology=LIBRARY.topology, **config.options)
    schedule = plan.simulation.schedule
    assert (len(plan.stages), schedule.name, schedule.num_micro) == (row.pipeline_stages, "1f1b", row.micro_batch_num)
    assert tuple(size for _, size in plan.logical_mesh.axes) == degrees
    down = next(leaf for leaf in plan.inputs if leaf.path == "model/layers/0/mlp/down/kernel")
    assert tuple(plan.logical_mesh.num_slices(axes) for axes in down.sharding) == (degrees[1], 1)


@pytest.mark.parametrize("row", PIPELINES, ids=_name)
def test_a_searched_plan_of_a_pipeline_fits_the_whole_model(row: Row) -> None:
    plan = PipelinePlan.load(LIBRARY.folder / row.searched_file)
    schedule = plan.simulation.schedule
    assert (plan.num_devices, plan.search_mode, plan.topology) == (row.device_num, LIBRARY.search_mode, LIBRARY.topology)
    assert (schedule.num_stages, schedule.num_micro) == (row.pipeline_stages, row.micro_batch_num)
    assert plan.memory_bytes <= 88 * 2**30
    _, (model, _, _) = abstract_program(row_config(LIBRARY, row), row.batch_size, row.seq)
    parameters = {"/".join(("model", *map(str, path))): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model))}
    assert {leaf.path: leaf.shape for leaf in plan.inputs if leaf.path.startswith("model/")} == parameters


@pytest.mark.parametrize("row", PLANS, ids=_name)
def test_a_searched_plan_fits_the_whole_model(row: Row) -> None:
    plan = spmdctx.Plan.load(LIBRARY.folder / row.searched_file)
    mesh = plan.logical_mesh
    assert (mesh.num_devices, plan.search_mode, plan.topology) == (row.device_num, LIBRARY.search_mode, LIBRARY.topology)
    assert plan.cost.memory_bytes <= plan.memory_limit_bytes
    _, (model, _, batch) = abstract_program(row_config(LIBRARY, row), row.batch_size, row.seq)
    parameters = {"/".join(("model", *map(str, path))): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model))}
    assert {tensor.path: tensor.shape for tensor in plan.inputs if tensor.path.startswith("model/")} == parameters
    assert [tensor.shape for tensor in plan.inputs if tensor.path.startswith("batch/")] == [batch["inputs"].shape] * 2
    for tensor in plan.inputs:
        sizes = zip(tensor.shape, tensor.sharding, strict=True)
        assert all(size % mesh.num_slices(axes) == 0 for size, axes in sizes), tensor.path


@pytest.mark.skipif(not jax.__version__.startswith(MADE_WITH), reason="another JAX traces other programs")
@pytest.mark.parametrize("row", [row for row in PLANS if row.model in ("llama2-7b", "qwen-7b-lora")], ids=_name)
def test_a_searched_plan_is_what_would_be_searched(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["strategies", "--check", "--only", "searched", "--model", row.model, "--device-num", str(row.device_num)])
    assert code == 0, capsys.readouterr().out


TINY = DecoderConfig(vocab_size=48, width=24, num_layers=2, num_heads=6, num_kv_heads=6, hidden=40, max_seq=12, bias="qkv")


def test_a_strategy_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    split = Split("megatron", 2, 2)
    path = tmp_path / "hand.yaml"
    path.write_text(strategy_text("tiny", TINY, split))
    assert read_strategy(path).regions == split.regions_of(TINY)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        "model: [",
        "model: tiny",
        "{model: tiny, device_num: 4, data_parallel: 2, model_parallel: 2, strategies: {head: {kernel: [1, 2]}}}",
        "{model: tiny, device_num: 4, data_parallel: 2, model_parallel: 2, strategies: {head: {in_strategy: [1]}}}",
    ],
)
def test_a_file_that_holds_no_strategies_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "hand.yaml"
    path.write_text(text)
    with pytest.raises(PlanFormatError, match="holds no strategies"):
        read_strategy(path)
