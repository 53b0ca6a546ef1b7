"""Marks of parameters for servers: by patterns, modules of linen and nnx, and single variables."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spmdctx
from spmdctx.context.layers import current_context
from spmdctx.errors import ContextError, UnsupportedError

PARAMS = {"table": jnp.ones((8, 4)), "dense": {"kernel": jnp.ones((4, 2))}}
NO_MARK = "set_param_ps marks no parameter: servers hold all of them."


@spmdctx.parallel(parallel_mode="stand_alone")
def pytree_step(params, ids):
    value, grads = spmdctx.value_and_grad(lambda p: jnp.mean((p["table"][ids] @ p["dense"]["kernel"]) ** 2))(params)
    return jax.tree.map(lambda own, grad: own - grad, params, grads), value


def notes_of(step, *args):
    return [note for note in step.plan(*args).notes if "set_param_ps" in note]


def test_nothing_is_marked_without_a_parameter_server():
    with pytest.raises(ContextError, match="there is no parameter server"):
        spmdctx.set_param_ps("*/table")


@pytest.mark.parametrize(
    ("given", "error"), [(3, "takes path patterns"), ([], "takes path patterns"), (["a", 1], "takes path patterns"), (jnp.ones(2), "takes")]
)
def test_what_cannot_be_marked_is_refused(given, error):
    spmdctx.set_ps_context(enable_ps=True)
    with pytest.raises(TypeError, match=error):
        spmdctx.set_param_ps(given)
    with pytest.raises(TypeError, match="init_in_server must be a bool"):
        spmdctx.set_param_ps("*", init_in_server=1)
    assert current_context().servers.marked == ()


def test_patterns_of_all_parameters_leave_no_note():
    spmdctx.set_ps_context(enable_ps=True)
    assert notes_of(pytree_step, PARAMS, jnp.arange(4)) == [NO_MARK]
    spmdctx.set_param_ps("*/table", init_in_server=True)
    spmdctx.set_param_ps(["dense/*", "nowhere"])
    assert notes_of(pytree_step, PARAMS, jnp.arange(4)) == ["set_param_ps pattern 'nowhere' matches no argument."]
    servers = current_context().servers
    assert (servers.marked, servers.made_by_servers) == (("*/table", "dense/*", "nowhere"), ("*/table",))
    spmdctx.set_param_ps(["no*", "never"])
    several = notes_of(pytree_step, PARAMS, jnp.arange(4))
    assert several == ["3 patterns of set_param_ps match no argument. They are 'nowhere', 'no*', 'never'."]
    spmdctx.reset_ps_context()
    assert current_context().servers.marked == ()


def stays_of(step, *args):
    """The arrays that stay with workers, by the plan."""
    return step.plan(*args).local.arrays


def test_what_has_no_mark_stays_with_workers_unless_nothing_has_one():
    spmdctx.set_ps_context(enable_ps=True)
    assert stays_of(pytree_step, PARAMS, jnp.arange(4)) == ()
    spmdctx.set_param_ps("table")
    assert stays_of(pytree_step, PARAMS, jnp.arange(4)) == ("params/dense/kernel",)
    note = "1 array without a mark of set_param_ps, or of the optimizer for such, stay with workers: params/dense/kernel."
    assert notes_of(pytree_step, PARAMS, jnp.arange(4)) == [note]


def test_some_marked_and_others_not_are_refused_by_name_in_async():
    spmdctx.set_ps_context(enable_ps=True, update_mode="async")
    spmdctx.set_param_ps("table")
    with pytest.raises(UnsupportedError, match="1 without a mark: params/dense/kernel"):
        pytree_step.plan(PARAMS, jnp.arange(4))


class Recommender(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Dense(2, name="dense")(nn.Embed(8, 4, name="table")(ids))


@pytest.mark.parametrize(
    ("module", "patterns"), [(nn.Embed(8, 4, name="table"), ("table/*",)), (Recommender(), ("*",))], ids=["by name", "all"]
)
def test_a_linen_module_is_marked_by_its_name(module, patterns):
    spmdctx.set_ps_context(enable_ps=True)
    spmdctx.set_param_ps(module)
    assert current_context().servers.marked == patterns
    model = Recommender()
    variables = model.init(jax.random.key(0), jnp.arange(4))

    @spmdctx.parallel(parallel_mode="stand_alone")
    def step(variables, ids):
        value, grads = spmdctx.value_and_grad(lambda own: jnp.mean(model.apply(own, ids) ** 2))(variables)
        return jax.tree.map(lambda own, grad: own - grad, variables, grads), value

    if patterns == ("*",):
        assert notes_of(step, variables, jnp.arange(4)) == []
    else:
        assert stays_of(step, variables, jnp.arange(4)) == ("variables/params/dense/bias", "variables/params/dense/kernel")


class Network(nnx.Module):
    def __init__(self):
        self.table, self.dense = nnx.Embed(8, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    def __call__(self, ids):
        return self.dense(self.table(ids))


@spmdctx.parallel(parallel_mode="stand_alone")
def nnx_step(model, optimizer, ids):
    value, grads = spmdctx.value_and_grad(lambda own: jnp.mean(own(ids) ** 2))(model)
    optimizer.update(model, grads)
    return value


def test_nnx_modules_and_variables_carry_their_marks():
    spmdctx.set_ps_context(enable_ps=True)
    model = Network()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    assert notes_of(nnx_step, model, optimizer, jnp.arange(4)) == [NO_MARK]
    spmdctx.set_param_ps(model.table)
    spmdctx.set_param_ps(model.dense.bias)
    own = ("model/dense/kernel", "optimizer/opt_state/0/mu/dense/kernel", "optimizer/opt_state/0/nu/dense/kernel")
    assert stays_of(nnx_step, model, optimizer, jnp.arange(4)) == own
    spmdctx.set_param_ps(model)
    assert notes_of(nnx_step, model, optimizer, jnp.arange(4)) == []
