"""Layouts: the block of a rank, as JAX places it, from strategy files, plans and sharded arrays."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx import CheckpointError, ContextError, PlanFormatError
from spmdctx.checkpoint.blocks import block_of, layout_sharding, overlap, within
from spmdctx.checkpoint.layouts import layouts_of, plan_layouts, slicing, state_layouts
from spmdctx.plan.mindspore.file import ParameterLayout, parse_mindspore, write_layouts
from tests.checkpoint.net import Net, forward

LAYOUTS = [
    ParameterLayout((8,), ((0,), ()), (16, 24)),
    ParameterLayout((2, 4), ((1,), (0,)), (16, 24)),
    ParameterLayout((2, 4), ((), (1,)), (16, 24)),
    ParameterLayout((2, 4), ((0, 1), ()), (16, 24)),
    ParameterLayout((2, 2, 2), ((2,), (0, 1)), (16, 24)),
    ParameterLayout((8,), ((), ()), (16, 24)),
    ParameterLayout((2, 4), ((1,), ()), (16, 24), 1, 4),
    ParameterLayout((8,), ((), ()), (16, 24), 2, 2),
    ParameterLayout((3,), ((), (0,)), (16, 24)),
    ParameterLayout((1,), ((), ()), (16, 24)),
    ParameterLayout((4,), (), ()),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_ranks_block_is_what_jax_places_on_its_device(layout):
    sharding = layout_sharding(layout, jax.devices())
    placed = sharding.devices_indices_map(layout.shape)
    for rank, device in enumerate(sharding.mesh.devices.flat):
        expected = tuple(part.indices(size)[:2] for part, size in zip(placed[device], layout.shape, strict=True))
        assert block_of(layout, rank) == expected
        assert device == jax.devices()[rank]


def test_the_optimizers_slices_are_cut_out_of_the_layouts():
    layout = ParameterLayout((2, 4), ((1,), ()), (16, 24), 1, 2)
    assert [block_of(layout, rank)[0] for rank in range(8)] == [(0, 4), (4, 8), (0, 4), (4, 8), (8, 12), (12, 16), (8, 12), (12, 16)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_of_a_strategy_file_are_read_as_they_were_written(tmp_path, layout):
    write_layouts({"net.w": layout}, tmp_path / "strategy.json")
    assert spmdctx.build_searched_strategy(tmp_path / "strategy.json") == {"net.w": layout}
    body = json.loads((tmp_path / "strategy.json").read_text())
    assert parse_mindspore(body, "").layouts == {"net.w": layout}


def test_layouts_of_arrays_are_where_they_lie():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    specs = [P("a", "b"), P(None, "a"), P(("b", "a")), P(("a", "b")), P()]
    state = {str(index): jax.device_put(jnp.ones((16, 24)), NamedSharding(mesh, spec)) for index, spec in enumerate(specs)}
    state |= {"local": jnp.ones((3, 5)), "number": 4, "scalar": jax.device_put(jnp.ones(()), NamedSharding(mesh, P()))}
    layouts = state_layouts(state)
    assert set(layouts) == set(state)
    for name, array in state.items():
        for rank, device in enumerate(jax.devices()):
            index = array.sharding.devices_indices_map(array.shape).get(device) if name not in ("local", "number") else None
            if index is not None:
                expected = tuple(part.indices(size)[:2] for part, size in zip(index, array.shape, strict=True))
                assert block_of(layouts[name], rank) == expected
    assert block_of(layouts["local"], 7) == ((0, 3), (0, 5))
    assert slicing(layouts).num_ranks == 8


def test_the_layouts_of_a_prediction_are_those_of_a_plan_of_its_forward_step(tmp_path):
    model, x = nnx.eval_shape(lambda: Net(nnx.Rngs(0))), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    step = spmdctx.parallel(forward, parallel_mode="auto_parallel", device_num=4, topology="tpu-v5e")
    layouts = step.infer_predict_layout(model, x)
    assert set(layouts) == {"model.up.kernel", "model.up.bias", "model.down.kernel", "model.down.bias"}
    for name, layout in layouts.items():
        path = name.split(".")[1:]
        sharding = step.in_shardings(model, x)[0][path[0]][path[1]].get_value()
        assert layout_sharding(layout, jax.devices()).is_equivalent_to(sharding, len(layout.shape))
    plan = step.plan(model, x)
    plan.save(tmp_path / "plan.json")
    assert layouts_of(tmp_path / "plan.json") == layouts_of(plan) == plan_layouts(plan) == layouts
    with pytest.raises(ContextError, match="semi_auto_parallel"):
        spmdctx.parallel(forward, parallel_mode="data_parallel", device_num=4).infer_predict_layout(model, x)


def test_what_is_no_strategy_is_refused(tmp_path):
    with pytest.raises(TypeError, match="strategy_filename"):
        spmdctx.build_searched_strategy(3)
    with pytest.raises(CheckpointError, match=r"gone\.json"):
        spmdctx.build_searched_strategy(str(tmp_path / "gone.json"))
    (tmp_path / "bad.json").write_text("no json")
    with pytest.raises(PlanFormatError, match=r"bad\.json"):
        spmdctx.build_searched_strategy(tmp_path / "bad.json")
    with pytest.raises(TypeError, match="A strategy is"):
        slicing(4)
    with pytest.raises(TypeError, match="build_searched_strategy"):
        slicing({"w": (8,)})
    with pytest.raises(CheckpointError, match="different numbers of devices"):
        slicing({"v": ParameterLayout((4,), ((0,),), (8,)), "w": ParameterLayout((8,), ((0,),), (8,))})
    with pytest.raises(CheckpointError, match="no layouts"):
        slicing({})
    with pytest.raises(CheckpointError, match="does not divide"):
        block_of(ParameterLayout((3,), ((0,),), (8,)), 0)
    with pytest.raises(CheckpointError, match="more devices"):
        layout_sharding(ParameterLayout((16,), ((0,),), (16,)), jax.devices())


def test_arrays_on_different_devices_have_no_layouts_together():
    one, other = (jax.sharding.Mesh(np.array(devices), ("a",)) for devices in (jax.devices()[:4], jax.devices()[4:]))
    state = [jax.device_put(jnp.ones(8), NamedSharding(mesh, P("a"))) for mesh in (one, other)]
    with pytest.raises(CheckpointError, match="different devices"):
        state_layouts(state)


def test_blocks_share_what_both_have():
    assert overlap(((0, 4), (2, 8)), ((2, 6), (0, 3))) == ((2, 4), (2, 3))
    assert overlap(((0, 4),), ((4, 8),)) is None
    assert overlap((), ()) == ()
    assert within(((2, 4), (2, 3)), ((0, 4), (2, 8))) == ((2, 4), (0, 1))
