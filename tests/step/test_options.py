"""Options of a step: names, types, devices, meshes and topologies."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import spmdctx
from spmdctx.context.layers import current_context
from spmdctx.errors import ContextError, StrategyError
from spmdctx.machine.presets import PRESETS
from spmdctx.machine.topology import Preferences, as_asked
from spmdctx.step.options import step_options
from spmdctx.trace.scope.environment import environment

X = np.ones((8, 4), np.float32)


def forward(w, x):
    return x @ w


def resolved(mode="data_parallel", **options):
    return environment(step_options(options), current_context().with_checked({"parallel_mode": mode}))


def test_all_devices_are_used_by_default():
    around = resolved()
    assert around.settings.num_devices == 8
    assert around.devices == tuple(jax.devices())
    assert around.settings.topology == as_asked(PRESETS["cpu"], Preferences(allows_all_to_all=False, widens_gradients=True))


def test_stand_alone_uses_one_device_whatever_the_mesh():
    assert resolved("stand_alone", mesh={"data": 8}).settings.num_devices == 1


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "model": 4},
        AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2),
        AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2),
    ],
    ids=["mapping", "abstract", "explicit"],
)
def test_a_mesh_may_be_a_mapping_or_of_jax(mesh):
    around = resolved(mesh=mesh)
    assert around.settings.mesh.axes == (("data", 2), ("model", 4))
    explicit = not isinstance(mesh, dict) and mesh.axis_types[0] is AxisType.Explicit
    assert any("treated as Auto" in note for note in around.notes) is explicit


def test_a_mesh_brings_its_devices_in_its_order():
    devices = np.array(jax.devices()[::-1]).reshape(2, 4)
    step = spmdctx.parallel(forward, mesh=Mesh(devices, ("data", "model")), parallel_mode="data_parallel")
    result = step(jnp.ones((4, 4)), X)
    assert list(result.sharding.mesh.devices.flat) == list(devices.flat)


def test_devices_limit_the_step():
    step = spmdctx.parallel(forward, devices=jax.devices()[2:6], parallel_mode="data_parallel")
    assert step(jnp.ones((4, 4)), X).sharding.device_set == set(jax.devices()[2:6])


def test_a_topology_is_named_or_made():
    for given, machine in (("tpu-v5p", PRESETS["tpu-v5p"]), (PRESETS["h100"], PRESETS["h100"])):
        asked = as_asked(machine, Preferences(widens_gradients=True))
        assert resolved("auto_parallel", topology=given).settings.topology == asked


def test_gradients_are_reduced_in_their_own_type_where_the_context_says_so():
    context = current_context().replace(parallel_mode="auto_parallel", gradient_fp32_sync=False)
    assert not environment(step_options({}), context).settings.topology.preferences.widens_gradients


@pytest.mark.parametrize(
    ("mode", "options", "allowed"),
    [
        ("data_parallel", {}, False),
        ("semi_auto_parallel", {}, False),
        ("semi_auto_parallel", {"enable_alltoall": True}, True),
        ("auto_parallel", {}, True),
        ("auto_parallel", {"enable_alltoall": True}, True),
        ("auto_parallel", {"enable_alltoall": False}, False),
    ],
)
def test_all_to_all_needs_leave_unless_a_search_decides(mode, options, allowed):
    around = environment(step_options({}), current_context().with_checked({"parallel_mode": mode, **options}))
    assert around.settings.topology.preferences.allows_all_to_all is allowed


@pytest.mark.parametrize(
    ("kind", "platform", "device", "noted"),
    [
        ("TPU v5 lite", "tpu", "tpu-v5e", False),
        ("TPU v5", "tpu", "tpu-v5p", False),
        ("TPU v6 lite", "tpu", "tpu-v6e", False),
        ("NVIDIA H100 80GB HBM3", "gpu", "h100", False),
        ("NVIDIA B200", "gpu", "h100", True),
        ("TPU v9", "tpu", "tpu-v5p", True),
    ],
)
def test_the_topology_is_that_of_the_devices(kind, platform, device, noted):
    class Device:
        def __init__(self):
            self.device_kind, self.platform = kind, platform

    around = resolved(devices=[Device()])
    assert around.settings.topology.device == device
    assert bool(around.notes) is noted


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"paralel_mode": "data_parallel"}, ContextError, "paralel_mode"),
        ({"device_num": 0}, ContextError, "device_num"),
        ({"mesh": {"data": 0}}, ContextError, "at least one device"),
        ({"mesh": {"data": 2.0}}, TypeError, "must have an int"),
        ({"mesh": (2, 4)}, TypeError, "mesh must be"),
        ({"devices": []}, ContextError, "devices is empty"),
        ({"devices": 8}, TypeError, "devices must be a list"),
        ({"devices": "cpu"}, TypeError, "devices must be a list"),
        ({"devices": [0, 1]}, TypeError, "devices must hold devices of JAX"),
        ({"devices": [jax.devices()[0]] * 2}, ContextError, "devices holds a device twice"),
        ({"mesh": {"data": 10**30}}, ContextError, "mesh is too large"),
        ({"mesh": {f"axis{number}": 1 for number in range(40)}}, ContextError, "mesh is too large"),
        ({"memory_bytes": 10**400}, ContextError, "more than any device has"),
        *[({"mesh": {name: 8}}, StrategyError, "a name that XLA cannot take") for name in ("ä", "\\", "", "\ud800", "a\n", "数据")],
        ({"topology": "tpu-v1"}, ContextError, "tpu-v1"),
        ({"memory_bytes": -1}, ContextError, "memory_bytes must be positive"),
        ({"memory_bytes": "16GB"}, TypeError, "memory_bytes must be a number"),
        ({"strict": 1}, TypeError, "strict must be a bool"),
        ({"layerwise_parallel": [1]}, TypeError, "layerwise_parallel must be"),
    ],
)
def test_a_bad_option_is_refused_when_the_step_is_made(options, error, words):
    with pytest.raises(error, match=words):
        spmdctx.parallel(forward, **options)


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("auto_parallel", "parallel_mode='auto_parallel'"),
        ("dynamic_programing", "search_mode='dynamic_programming'"),
        ({"parallel_mode": "data_parallel"}, "write ** before"),
        (AbstractMesh((8,), ("data",)), "mesh="),
        (spmdctx.auto_parallel_context(device_num=2), "with spmdctx.auto_parallel_context"),
        (3, "such as parallel_mode="),
    ],
    ids=["a mode", "a search mode", "a dictionary", "a mesh", "a context", "a number"],
)
def test_an_option_without_its_name_is_refused_with_the_way_to_write_it(value, fix):
    for given in ((lambda x: x, value), *([(value,)] if isinstance(value, str | dict) else [])):
        with pytest.raises(TypeError, match=rf"(?s)by their names only.*fix: .*{re.escape(fix)}"):
            spmdctx.parallel(*given)


def test_devices_and_a_mesh_with_devices_contradict_each_other():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    with pytest.raises(ContextError, match="both given"):
        spmdctx.parallel(forward, mesh=mesh, devices=jax.devices())


def test_device_num_and_the_mesh_must_agree():
    step = spmdctx.parallel(forward, mesh={"data": 4}, device_num=8, parallel_mode="data_parallel")
    with pytest.raises(ContextError, match="device_num is 8, but the mesh has 4"):
        step.plan(jnp.ones((4, 4)), X)


def test_a_context_above_a_step_leaves_it_a_step_and_its_own_options_stronger():
    step = spmdctx.parallel(forward, parallel_mode="data_parallel")
    around = spmdctx.auto_parallel_context(parallel_mode="stand_alone", device_num=4)(step)
    assert isinstance(around, spmdctx.ParallelStep)
    assert (around.context.parallel_mode, around.context.device_num) == ("data_parallel", 4)
    assert around.plan(np.ones((4, 2), np.float32), X).mesh == {"data": 4}


@pytest.mark.parametrize(("value", "error"), [(0, ContextError), (4, ContextError), (True, TypeError), ("2", TypeError)])
def test_the_number_of_mesh_axes_is_checked(value, error):
    with pytest.raises(error, match="max_mesh_axes"):
        step_options({"max_mesh_axes": value})


def test_the_number_of_mesh_axes_limits_the_search():
    def step(x, w):
        return jnp.tanh(x @ w) @ w.T

    arguments = (jax.ShapeDtypeStruct((4096, 64), jnp.float32), jax.ShapeDtypeStruct((64, 4096), jnp.float32))
    for most in (1, 2, 3):
        plan = spmdctx.plan(step, *arguments, parallel_mode="auto_parallel", device_num=8, topology="tpu-v5e", max_mesh_axes=most)
        assert len(plan.mesh) <= most
        assert plan.gap is not None
