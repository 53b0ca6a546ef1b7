"""`plan.export("rules")`: logical axis rules that Flax resolves to the plan's own shardings."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import spmdctx
from spmdctx.errors import UnsupportedError
from spmdctx.ir.graph import Role

SHAPES = {"up": (64, 256), "down": (256, 64), "square": (64, 64), "bias": (64,)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
X = jax.ShapeDtypeStruct((32, 64), "float32")
OPTIMIZER = optax.adam(1e-3)


def step(params, moments, x):
    def loss(params):
        hidden = jnp.tanh(x @ params["up"]) @ params["down"]
        return jnp.mean((hidden @ params["square"] + params["bias"]) ** 2)

    updates, moments = OPTIMIZER.update(jax.grad(loss)(params), moments)
    return optax.apply_updates(params, updates), moments


def planned(**options):
    return spmdctx.plan(step, PARAMS, jax.eval_shape(OPTIMIZER.init, PARAMS), X, **options)


def exported(plan, folder):
    plan.export("rules", folder / "rules.py")
    names = {}
    exec((folder / "rules.py").read_text(), names)
    return names


SMALL = {"parallel_mode": "auto_parallel", "search_mode": "recursive_programming", "memory_bytes": 250_000}
OPTIONS = [
    {"parallel_mode": "auto_parallel"},
    SMALL,
    {"parallel_mode": "semi_auto_parallel", "enable_parallel_optimizer": True},
    {"parallel_mode": "semi_auto_parallel", "mesh": {"rows": 2, "columns": 4}},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_flax_resolves_the_rules_to_the_plans_shardings(tmp_path, options):
    plan = planned(**options)
    names = exported(plan, tmp_path)
    assert names["MESH"] == plan.mesh
    parameters = [tensor for tensor in plan.inputs if tensor.role is Role.PARAMETER]
    assert {tensor.path for tensor in parameters} == set(names["PARAMETER_AXES"])
    for tensor in parameters:
        found = nn.logical_to_mesh_axes(names["PARAMETER_AXES"][tensor.path], names["LOGICAL_AXIS_RULES"])
        assert tuple(() if dim is None else (dim,) if isinstance(dim, str) else dim for dim in found) == tensor.sharding


def test_the_rules_are_pins_that_give_the_same_parameters(tmp_path):
    plan = planned(**SMALL)
    names = exported(plan, tmp_path)
    boxed = {
        name: nn.LogicallyPartitioned(PARAMS[name], names=names["PARAMETER_AXES"][path])
        for name in PARAMS
        for path in [next(path for path in names["PARAMETER_AXES"] if path.endswith(name))]
    }

    def boxed_step(boxes, moments, x):
        return step({name: box.value for name, box in boxes.items()}, moments, x)

    options = {"parallel_mode": "semi_auto_parallel", "mesh": names["MESH"], "rules": names["LOGICAL_AXIS_RULES"]}
    again = spmdctx.plan(boxed_step, boxed, jax.eval_shape(OPTIMIZER.init, PARAMS), X, **options)
    wanted = {tensor.path.split("/")[-1]: tensor.sharding for tensor in plan.inputs if tensor.role is Role.PARAMETER}
    assert {tensor.path.split("/")[1]: tensor.sharding for tensor in again.inputs if tensor.path.startswith("boxes")} == wanted


def test_what_rules_cannot_say_is_named(tmp_path):
    plan = planned(parallel_mode="semi_auto_parallel", enable_parallel_optimizer=True)
    said = exported(plan, tmp_path)["NOT_SAID"]
    assert any("moments/0/mu/up" in sentence and "its parameter params/up" in sentence for sentence in said)
    assert any("enable_parallel_optimizer" in sentence for sentence in said)


def test_a_saved_plan_can_say_its_rules_and_one_without_parameters_cannot(tmp_path):
    plan = planned(parallel_mode="auto_parallel")
    plan.save(tmp_path / "plan.json")
    own = exported(plan, tmp_path)
    assert exported(spmdctx.Plan.load(tmp_path / "plan.json"), tmp_path)["LOGICAL_AXIS_RULES"] == own["LOGICAL_AXIS_RULES"]
    with pytest.raises(UnsupportedError, match="needs parameters"):
        spmdctx.plan(jnp.sin, X, parallel_mode="auto_parallel", batch_argnums=0).export("rules", tmp_path / "none.py")


def test_parameters_of_one_path_are_refused():
    state = {"a/b": jnp.ones((8, 4)), "a": {"b": jnp.ones(8)}}
    plan = spmdctx.plan(lambda state, x: (state, x.sum()), state, jnp.ones(8), parallel_mode="data_parallel")
    with pytest.raises(UnsupportedError, match="the same path") as error:
        plan.export("rules", "rules.py")
    assert "a/b" in str(error.value)
