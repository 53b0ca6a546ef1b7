"""Logical axis rules: the names in Flax's metadata become pins."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spmdctx
from spmdctx.errors import ContextError, StrategyError

MESH = {"data": 2, "model": 4}
X = jnp.ones((32, 64))


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        up = self.param("up", nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp")), (64, 256))
        down = self.param("down", nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed")), (256, 64))
        hidden = nn.with_logical_constraint(jnp.tanh(x @ up), ("batch", "mlp"))
        return hidden @ down


class Layer(nnx.Module):
    def __init__(self, *names):
        self.w = nnx.Param(jnp.ones((64, 256)))
        self.w.set_metadata(out_sharding=names)

    def __call__(self, x):
        return jnp.mean((x @ self.w) ** 2)


def linen_step(variables, x):
    return jax.grad(lambda variables: jnp.mean(Dense().apply(variables, x) ** 2))(variables)


def linen_variables():
    return jax.eval_shape(Dense().init, jax.random.key(0), X)


def layer_step(layer, x):
    return nnx.value_and_grad(lambda layer: layer(x))(layer)[0]


def split_of(plan, path):
    return next(tensor.sharding for tensor in plan.inputs if tensor.path.endswith(path))


def planned(fn, *args, **options):
    if "parallel_mode" not in options:
        options |= {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation"}
    return spmdctx.plan(fn, *args, **{"mesh": MESH, **options})


@pytest.mark.parametrize("rules", [{"mlp": "model"}, [("mlp", "model"), ("embed", None)], (("mlp", ("model",)),)])
def test_names_of_linen_metadata_are_pins(rules):
    plan = planned(linen_step, linen_variables(), X, rules=rules)
    assert split_of(plan, "up/value") == ((), ("model",))
    assert split_of(plan, "down/value") == (("model",), ())


def test_constraints_by_logical_names_inside_of_the_step_are_pins():
    def step(x):
        return nn.with_logical_constraint(jnp.sin(x), ("batch", "embed"))

    plan = planned(step, X, rules={"batch": ("data", "model"), "embed": None})
    assert plan.outputs[0].sharding == (("data", "model"), ())


class Heads(nn.Module):
    @nn.compact
    def __call__(self, x):
        names = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "heads", "kv"))
        return nn.with_logical_constraint(nn.DenseGeneral((4, 16), kernel_init=names)(x), ("batch", "heads", None))


def test_a_kernel_with_more_names_than_its_initial_matrix_spoils_nothing():
    def step(variables, x):
        return Heads().apply(variables, x), Heads().init(jax.random.key(0), x)

    plan = planned(step, jax.eval_shape(Heads().init, jax.random.key(0), X), X, rules={"heads": "model", "batch": "data"})
    assert split_of(plan, "kernel/value") == ((), ("model",), ())
    assert plan.outputs[0].sharding == (("data",), ("model",), ())
    assert not any("without the mesh" in note for note in plan.notes)


def test_names_of_nnx_metadata_are_pins():
    plan = planned(layer_step, Layer("embed", "mlp"), X, rules={"mlp": "model", "embed": "data"})
    assert split_of(plan, "w") == (("data",), ("model",))
    assert split_of(planned(layer_step, Layer(None, "model"), X, rules={"mlp": "model"}), "w") == ((), ("model",))


def test_flaxs_own_context_counts_without_rules():
    with nn.logical_axis_rules([("mlp", "model")]):
        plan = planned(linen_step, linen_variables(), X)
    assert split_of(plan, "up/value") == ((), ("model",))


def test_rules_of_one_axis_need_no_mesh():
    plan = planned(linen_step, linen_variables(), X, rules={"mlp": "tensor"}, mesh=None)
    assert plan.mesh == {"tensor": 8}
    assert split_of(plan, "up/value") == ((), ("tensor",))


def test_a_mesh_that_is_set_gives_the_axes():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        plan = planned(linen_step, linen_variables(), X, rules={"mlp": "model", "embed": "data"}, mesh=None)
    assert plan.mesh == MESH
    assert split_of(plan, "up/value") == (("data",), ("model",))


def test_notes_say_which_rules_and_names_do_nothing():
    plan = planned(linen_step, linen_variables(), X, rules={"heads": "model", "mlp": "model"})
    assert any("name 'heads'" in note for note in plan.notes)
    assert any("none for the name 'embed'" in note for note in plan.notes)


def by_option(rules, **options):
    return planned(linen_step, linen_variables(), X, rules=rules, **options)


def by_context(rules, **options):
    with nn.logical_axis_rules(rules):
        return planned(linen_step, linen_variables(), X, **options)


FORMS = {"rules=": by_option, "logical_axis_rules": by_context}


@pytest.mark.parametrize("form", FORMS)
def test_an_axis_that_the_mesh_does_not_have_splits_nothing_and_is_noted(form):
    plan = FORMS[form]([("batch", ("pod", "data")), ("mlp", ("model", "extra")), ("embed", "fsdp")])
    assert split_of(plan, "up/value") == ((), ("model",))
    (note,) = [note for note in plan.notes if "has no axes" in note]
    assert all(text in note for text in ("(data 2, model 4)", "pod, extra, fsdp", "'mlp': ('model', 'extra')", "'embed': 'fsdp'")), note
    assert not any("without the mesh" in note for note in plan.notes)


def test_names_without_rules_are_one_note():
    notes = [note for note in planned(linen_step, linen_variables(), X).notes if "metadata" in note]
    assert len(notes) == 1
    assert "of 2 tensors names embed, mlp" in notes[0]
    assert "rules=" in notes[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("rules", "axes", "reason"),
    [
        ({"batch": "data", "mlp": "model"}, ("data",), "the rule of the batch"),
        ({"batch": None, "mlp": "model"}, (), "the rule of the batch"),
        ({"mlp": "data"}, ("model",), "the batch takes the axes that no strategy uses"),
        ({"embed": "data", "mlp": "model"}, ("data", "model"), "the batch takes all axes, as nothing says how it is split"),
    ],
)
def test_the_batch_follows_the_rules_where_propagation_has_no_other_word(form, rules, axes, reason):
    plan = FORMS[form](tuple(rules.items()), parallel_mode="semi_auto_parallel")
    batch = next(tensor for tensor in plan.inputs if tensor.role.value == "batch")
    assert (batch.sharding, batch.reason) == ((axes, ()), reason)


def test_a_dataset_strategy_outweighs_the_rule_of_the_batch():
    plan = by_option({"batch": "data", "mlp": "model"}, parallel_mode="semi_auto_parallel", dataset_strategy=((4, 1),))
    assert split_of(plan, "x")[0] == ("model",)


def test_an_axis_goes_to_the_first_rule_of_a_tensor():
    plan = planned(linen_step, linen_variables(), X, rules=[("mlp", "model"), ("embed", "model")])
    assert split_of(plan, "up/value") == ((), ("model",))
    assert any("that of 'embed' is whole" in note for note in plan.notes)
    with pytest.raises(StrategyError, match="two dimensions of a variable"):
        planned(layer_step, Layer("embed", "mlp"), X, rules={"mlp": "model", "embed": "model"})


def test_a_dimension_that_does_not_divide_is_noted():
    plan = planned(linen_step, linen_variables(), X, rules={"mlp": "model"}, mesh={"data": 2, "model": 3})
    assert any("does not divide" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("rules", "mesh", "error", "text"),
    [
        ({"mlp": "tensor"}, MESH, ContextError, "mesh does not have: tensor"),
        ({"mlp": "a", "embed": "b"}, None, ContextError, "no mesh says"),
        ({"mlp": ("model", "model")}, MESH, ContextError, "twice"),
        ({"": "model"}, MESH, ContextError, "empty name"),
        ({"mlp": 3}, MESH, TypeError, "must give a mesh axis"),
        ("mlp", MESH, TypeError, "mapping or a list of pairs"),
        ([("mlp",)], MESH, TypeError, "must be a pair"),
    ],
)
def test_bad_rules_are_refused(rules, mesh, error, text):
    with pytest.raises(error, match=text):
        planned(linen_step, linen_variables(), X, rules=rules, mesh=mesh)


def test_a_step_with_rules_runs_as_on_one_device():
    variables = Dense().init(jax.random.key(0), X)
    step = spmdctx.parallel(linen_step, parallel_mode="semi_auto_parallel", mesh=MESH, rules={"mlp": "model", "batch": "data"})
    for own, other in zip(jax.tree.leaves(step(variables, X)), jax.tree.leaves(linen_step(variables, X)), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
