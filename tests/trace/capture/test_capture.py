"""Capture: flat leaves with paths, roles and carried state, of pytrees, linen and nnx."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.custom_batching import custom_vmap

from spmdctx.errors import ContextError, UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.trace.build.build import Argument, build
from tests.trace.capture import capture

PARAMS = {"w": jnp.ones((4, 4)), "b": jnp.zeros(4)}
BATCH = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 4))}
ADAM = optax.adam(1e-3)


def train_step(params, opt_state, batch):
    def loss(params):
        return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, opt_state = ADAM.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(self.norm(self.first(x))))


def nnx_step(model, optimizer, batch):
    value, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))(model)
    optimizer.update(model, gradients)
    return value


def make_nnx():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def paths(captured, role):
    return [leaf.path for leaf in captured.inputs if leaf.role is role]


def roles(captured):
    return {leaf.path: leaf.role for leaf in captured.inputs}


def test_a_pytree_step_has_parameters_optimizer_state_and_batch():
    captured = capture(train_step, (PARAMS, ADAM.init(PARAMS), BATCH))
    assert paths(captured, Role.PARAMETER) == ["params/b", "params/w"]
    assert paths(captured, Role.OPTIMIZER)[:3] == ["opt_state/0/count", "opt_state/0/mu/b", "opt_state/0/mu/w"]
    assert paths(captured, Role.BATCH) == ["batch/x", "batch/y"]
    assert captured.carried == tuple((index, index) for index in range(7))
    assert captured.outputs[-1].path == "out/2"
    assert captured.outputs[-1].carried_from is None


def test_keyword_arguments_keep_their_names():
    captured = capture(train_step, (PARAMS,), {"batch": BATCH, "opt_state": ADAM.init(PARAMS)})
    assert paths(captured, Role.BATCH) == ["batch/x", "batch/y"]
    assert len(captured.carried) == 7


def test_variadic_arguments_are_numbered_after_their_name():
    captured = capture(lambda first, *others: first + sum(others), (jnp.ones(3), jnp.ones(3), jnp.ones(3)))
    assert [leaf.path for leaf in captured.inputs] == ["first", "others/0", "others/1"]


def test_a_forward_step_takes_all_but_the_first_argument_as_batch():
    captured = capture(lambda params, x: x @ params["w"], (PARAMS, BATCH["x"]))
    assert paths(captured, Role.BATCH) == ["x"]
    assert captured.carried == ()


def test_a_result_of_the_batch_shape_does_not_make_the_batch_a_state():
    captured = capture(lambda params, x: jnp.tanh(x) * params["b"], (PARAMS, BATCH["x"]))
    assert roles(captured)["x"] is Role.BATCH


def test_a_matrix_product_of_equal_shapes_is_no_next_value():
    captured = capture(lambda w, x: x @ w, (jnp.ones((4, 4)), jnp.ones((4, 4))))
    assert captured.carried == ()
    assert roles(captured)["x"] is Role.BATCH


def test_a_matrix_product_inside_a_call_of_any_kind_is_no_next_value():
    product = custom_vmap(lambda w, x: x @ w)
    product.def_vmap(lambda _size, _batched, w, x: (x @ w, True))
    assert capture(product, (jnp.ones((4, 4)), jnp.ones((4, 4)))).carried == ()


def test_bare_arrays_that_are_updated_element_by_element_are_carried():
    def step(w, velocity, x):
        velocity = 0.9 * velocity + jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - velocity, velocity

    captured = capture(step, (jnp.ones((4, 4)), jnp.zeros((4, 4)), jnp.ones((4, 4))))
    assert captured.carried == ((0, 0), (1, 1))
    assert roles(captured) == {"w": Role.PARAMETER, "velocity": Role.OPTIMIZER, "x": Role.BATCH}


def test_state_that_comes_back_inside_another_container_is_carried():
    def step(state, batch):
        return {"metrics": batch["x"].mean(), "state": jax.tree.map(lambda x: x + 1, state)}

    captured = capture(step, (PARAMS, BATCH))
    assert captured.carried == ((1, 0), (2, 1))


@pytest.mark.parametrize(
    ("options", "batch"), [({"batch_argnums": 0}, ["params/b", "params/w"]), ({"batch_argnames": "batch"}, ["batch/x", "batch/y"])]
)
def test_batch_arguments_that_are_named_are_the_batch(options, batch):
    captured = capture(lambda params, batch: batch["x"] @ params["w"], (PARAMS, BATCH), **options)
    assert paths(captured, Role.BATCH) == batch


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_random_keys_are_no_batch(make_key):
    captured = capture(lambda params, x, key: params["b"] + x + jax.random.normal(key, (4,)), (PARAMS, BATCH["x"], make_key(0)))
    assert roles(captured)["key"] is Role.KEY
    assert paths(captured, Role.BATCH) == ["x"]


def test_scalars_are_no_batch_leaves_and_keep_their_weak_type():
    captured = capture(lambda params, x, rate, flag: (params["b"] + x) * rate + flag, (PARAMS, BATCH["x"], 0.5, True))
    assert roles(captured)["rate"] is Role.ARGUMENT
    assert [(leaf.dtype, aval.weak_type) for leaf, aval in zip(captured.inputs, captured.in_avals, strict=True)][-2:] == [
        ("float32", True),
        ("bool", False),
    ]


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["function", "jax.jit"])
def test_abstract_arguments_are_enough(wrap):
    state, batch = jax.eval_shape(lambda: ((PARAMS, ADAM.init(PARAMS)), BATCH))
    captured = capture(wrap(train_step), (*state, batch))
    assert [leaf.shape for leaf in captured.inputs[-2:]] == [(8, 4), (8, 4)]


def test_static_arguments_become_part_of_the_program():
    captured = capture(
        lambda x, power, *, flip: -(x**power) if flip else x, (BATCH["x"], 3), {"flip": True}, static_argnums=1, static_argnames="flip"
    )
    assert [leaf.path for leaf in captured.inputs] == ["x"]
    assert [eqn.primitive.name for eqn in captured.jaxpr.eqns] == ["integer_pow", "neg"]


def test_paths_count_static_arguments():
    captured = capture(lambda size, x: x * size, (2, BATCH["x"]), static_argnums=0)
    assert [leaf.path for leaf in captured.inputs] == ["x"]


def test_options_of_jax_jit_hold():
    step = jax.jit(lambda x, power: x**power, static_argnums=1, donate_argnums=0)
    captured = capture(step, (BATCH["x"], 2))
    assert [(leaf.path, leaf.donated) for leaf in captured.inputs] == [("x", True)]


def test_options_of_nnx_jit_hold():
    step = nnx.jit(lambda model, x, scale: model(x) * scale, static_argnames="scale", donate_argnums=0)
    captured = capture(step, (nnx.Linear(4, 4, rngs=nnx.Rngs(0)), BATCH["x"], 2))
    assert [(leaf.path, leaf.donated) for leaf in captured.inputs] == [("model/bias", True), ("model/kernel", True), ("x", False)]


def test_shardings_of_jax_jit_stay_in_the_program():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    step = jax.jit(lambda x: x + 1, in_shardings=jax.NamedSharding(mesh, jax.P("data")))
    captured = capture(step, (BATCH["x"],))
    assert [eqn.primitive.name for eqn in captured.jaxpr.eqns] == ["jit"]


def test_donated_arguments_are_marked():
    captured = capture(train_step, (PARAMS, ADAM.init(PARAMS), BATCH), donate_argnames="params")
    assert [leaf.path for leaf in captured.inputs if leaf.donated] == ["params/b", "params/w"]


def test_closed_over_arrays_are_constants():
    table = jnp.arange(4.0)
    captured = capture(lambda x: x + table, (BATCH["x"],))
    assert [const.shape for const in captured.jaxpr.consts] == [(4,)]


def test_leaves_of_flax_linen_know_their_roles():
    model = nn.Dense(4)
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), BATCH["x"])["params"], tx=ADAM)

    def step(state, batch):
        gradients = jax.grad(lambda params: jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2))(state.params)
        return state.apply_gradients(grads=gradients)

    captured = capture(step, (state, BATCH))
    assert paths(captured, Role.PARAMETER) == ["state/params/bias", "state/params/kernel"]
    assert "state/opt_state/0/mu/kernel" in paths(captured, Role.OPTIMIZER)
    assert paths(captured, Role.STATE) == ["state/step"]
    assert paths(captured, Role.BATCH) == ["batch/x", "batch/y"]


def test_a_linen_state_is_no_batch_even_where_it_is_not_carried():
    model = nn.Dense(4)
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), BATCH["x"])["params"], tx=ADAM)
    captured = capture(lambda batch, state: state.apply_fn({"params": state.params}, batch["x"]), (BATCH, state))
    assert paths(captured, Role.BATCH) == ["batch/x", "batch/y"]


@pytest.mark.parametrize(
    ("init", "names"),
    [
        (nn.with_partitioning(nn.initializers.ones, (None, "model")), (None, "model")),
        (nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp")), ("embed", "mlp")),
    ],
    ids=["partitioned", "logical"],
)
def test_boxes_of_linen_give_partition_names(init, names):
    model = nn.Dense(4, kernel_init=init)
    variables = jax.eval_shape(model.init, jax.random.key(0), BATCH["x"])
    captured = capture(lambda variables, x: model.apply(variables, x), (variables, BATCH["x"]))
    assert {leaf.path.split("/")[2]: leaf.metadata for leaf in captured.inputs[:2]} == {"bias": None, "kernel": names}


def test_an_nnx_step_is_split_into_roles():
    captured = capture(nnx_step, (*make_nnx(), BATCH))
    assert "model/first/kernel" in paths(captured, Role.PARAMETER)
    assert "optimizer/opt_state/0/mu/first/kernel" in paths(captured, Role.OPTIMIZER)
    assert paths(captured, Role.STATE) == ["model/norm/mean", "model/norm/var"]
    assert paths(captured, Role.KEY) == ["model/dropout/rngs/count", "model/dropout/rngs/key"]
    assert paths(captured, Role.BATCH) == ["batch/x", "batch/y"]


def test_only_nnx_variables_that_change_are_results():
    model = Net(nnx.Rngs(0))
    captured = capture(lambda model, x: model(x), (model, BATCH["x"]))
    assert [leaf.path for leaf in captured.outputs] == ["model/dropout/rngs/count", "model/norm/mean", "model/norm/var", "out"]
    assert [captured.inputs[source].path for _, source in captured.carried] == [leaf.path for leaf in captured.outputs[:3]]


def test_donated_nnx_variables_are_all_results():
    captured = capture(lambda model, x: model(x), (nnx.Linear(4, 4, rngs=nnx.Rngs(0)), BATCH["x"]), donate_argnums=0)
    assert [leaf.path for leaf in captured.outputs] == ["model/bias", "model/kernel", "out"]


def test_capture_leaves_nnx_objects_as_they_are():
    model, optimizer = make_nnx()
    before = jax.tree.leaves(nnx.state((model, optimizer)))
    capture(nnx_step, (model, optimizer, BATCH))
    after = jax.tree.leaves(nnx.state((model, optimizer)))
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_nnx_objects_may_be_abstract():
    captured = capture(nnx_step, (*nnx.eval_shape(make_nnx), jax.eval_shape(lambda: BATCH)))
    assert len(captured.carried) > 10


def test_a_variable_that_two_objects_share_is_one_leaf():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    tied = nnx.Linear(4, 4, rngs=nnx.Rngs(1))
    tied.kernel = model.kernel
    captured = capture(lambda a, b, x: b(a(x)), (model, tied, BATCH["x"]))
    assert [leaf.path for leaf in captured.inputs] == ["a/bias", "a/kernel", "b/bias", "x"]


def test_sharding_metadata_of_nnx_gives_partition_names():
    with nnx.use_eager_sharding(False):
        model = nnx.Linear(4, 8, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": (None, "model")})
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    captured = capture(lambda model, optimizer, x: model(x), (model, optimizer, BATCH["x"]))
    named = {leaf.path: leaf.metadata for leaf in captured.inputs if leaf.metadata is not None}
    assert named == dict.fromkeys(["model/kernel", "optimizer/opt_state/0/mu/kernel", "optimizer/opt_state/0/nu/kernel"], (None, "model"))


def test_functional_nnx_states_are_pytrees():
    graphdef, state = nnx.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    captured = capture(lambda state, x: nnx.merge(graphdef, state)(x), (state, BATCH["x"]))
    assert [leaf.path for leaf in captured.inputs] == ["state/bias/value", "state/kernel/value", "x"]
    assert captured.owned == (False, False, False)


@pytest.mark.parametrize("bind", [lambda model: model.__call__, lambda model: model, lambda model: functools.partial(Net.__call__, model)])
def test_a_bound_nnx_object_is_an_argument(bind):
    captured = capture(bind(Net(nnx.Rngs(0))), (BATCH["x"],))
    assert "self/first/kernel" in paths(captured, Role.PARAMETER)
    assert paths(captured, Role.BATCH) == ["x"]


def test_positions_do_not_count_a_bound_nnx_object():
    captured = capture(Net(nnx.Rngs(0)), (BATCH["x"],), donate_argnums=0)
    assert [leaf.path for leaf in captured.inputs if leaf.donated] == ["x"]


def test_guesses_about_arguments_are_noted():
    captured = capture(lambda params, x, key: params["b"] + x + jax.random.normal(key, (4,)), (PARAMS, BATCH["x"], jax.random.PRNGKey(0)))
    assert captured.notes == (
        "key: uint32[2] is taken as a raw PRNG key.",
        "x: taken as the batch, and params not, as no argument comes back as a result; batch_argnums= says it otherwise.",
    )


@pytest.mark.parametrize("options", [{}, {"batch_argnames": "batch"}])
def test_a_training_step_needs_no_guess(options):
    assert capture(train_step, (PARAMS, ADAM.init(PARAMS), BATCH), **options).notes == ()


def test_a_search_is_traced_to_the_bottom():
    """Newer versions of JAX trace it to a primitive that only their lowering takes apart."""
    program = build(
        capture(jnp.searchsorted, (jnp.ones(8), jnp.ones(4))).jaxpr, [Argument("sorted", Role.ARGUMENT), Argument("x", Role.BATCH)]
    )
    primitives = {op.primitive for op in program.graph.ops}
    assert "gather" in primitives
    assert "call_hi_primitive" not in primitives


def test_the_trace_is_timed():
    assert capture(lambda x: x, (jnp.ones(3),)).trace_s > 0


def test_a_leaf_that_is_no_array_is_refused_with_its_path():
    with pytest.raises(TypeError, match="Argument 'batch/name' is no array"):
        capture(lambda params, batch: params["b"], (PARAMS, {"name": "x"}))


def test_a_mutable_reference_is_refused():
    with pytest.raises(UnsupportedError, match="Argument 'cell' is a mutable array reference"):
        capture(lambda cell: cell[...], (jax.new_ref(jnp.ones(3)),))


def test_an_unhashable_static_argument_is_refused():
    with pytest.raises(TypeError, match="Static argument 1 is not hashable"):
        capture(lambda x, shape: x, (jnp.ones(3), [1]), static_argnums=1)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="A step must be a function"):
        capture(3, ())


@pytest.mark.parametrize("option", ["batch_argnames", "donate_argnames", "static_argnames"])
def test_a_name_that_is_no_argument_is_refused(option):
    with pytest.raises(ContextError, match=f"(?s){option} names no argument.*among x, flag"):
        capture(lambda x, *, flag=True: x, (jnp.ones(3),), **{option: "flg"})
    capture(lambda x, **rest: x, (jnp.ones(3),), **{option: "flg"})
    capture(lambda x, *, flag=True: x, (jnp.ones(3),), **{option: "flag"})


@pytest.mark.parametrize("option", ["batch_argnums", "donate_argnums", "static_argnums"])
def test_a_position_out_of_range_is_refused(option):
    with pytest.raises(ContextError, match=f"{option} is out of range"):
        capture(lambda x: x, (jnp.ones(3),), **{option: 2})


@pytest.mark.parametrize("value", ["x", 1.0, (True,)])
def test_positions_must_be_ints(value):
    with pytest.raises(TypeError, match="donate_argnums must be int"):
        capture(lambda x: x, (jnp.ones(3),), donate_argnums=value)


def test_numpy_arguments_get_the_dtype_that_jax_gives_them():
    captured = capture(lambda x, n: x * n, (np.zeros((8, 4)), np.int64(3)))
    assert [leaf.dtype for leaf in captured.inputs] == ["float32", "int32"]


def _branching(params, batch):
    return params["w"] if batch[0].max() > params["w"].sum() else params["b"]


def test_an_error_of_the_trace_names_the_users_arguments_and_function():
    params = {"b": jnp.ones(4), "w": jnp.ones(4)}
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        capture(_branching, (params, [jnp.ones(4)]))
    text = str(caught.value)
    assert "params/w and batch/0" in text or "batch/0 and params/w" in text
    assert f"_branching at {__file__}" in text


def test_an_error_of_the_trace_names_variables_of_nnx_objects():
    def step(model, x):
        return jnp.ones(model.kernel[...].astype(int)[0, 0])

    with pytest.raises(TypeError, match="model/kernel"):
        capture(step, (nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones(4)))
