"""The rewritten program against the original: the same numbers on eight devices, and the collectives of the bill."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdctx.lowering.rewrite.constrain import constrain
from spmdctx.trace.specs import make_mesh, named_sharding
from tests.road import MESH, ops, run, spread, trace

D, M = ("data",), ("model",)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape) * 0.3


X = normal(32, 64)
W = normal(64, 64, seed=1)
STACK = normal(3, 64, 64, seed=2)
ROWS_AND_COLUMNS = {0: (D, ()), 1: ((), M)}
KEPT = np.asarray(normal(64, 64, seed=3))


def layer(x, w):
    return jnp.tanh(x @ w)


@jax.custom_vjp
def wrong(x):
    return jnp.sin(x)


wrong.defvjp(lambda x: (wrong(x), x), lambda x, ct: (3.0 * ct * x,))


@jax.custom_jvp
def odd(x):
    return jnp.sin(x)


odd.defjvp(lambda primals, tangents: (odd(primals[0]), 7.0 * tangents[0]))


def repeated(x, w):
    return lax.scan(lambda c, _: (layer(c, w), c.sum()), x, None, length=5)


def counted(x, w):
    return lax.while_loop(lambda s: s[0] < 6, lambda s: (s[0] + 2, layer(s[1], w)), (0, x))


def converging(x, w):
    return lax.while_loop(lambda s: jnp.sum(s * s) > 0.1, lambda s: 0.2 * layer(s, w), x)


def chosen(x, w):
    return lax.cond(jnp.all(jnp.isfinite(x @ w)), lambda: layer(layer(x, w), w), lambda: x)


def switched(x, w):
    return lax.switch(jnp.argmax(x[0, :3]), [lambda x: layer(x, w), jnp.sin, lambda x: layer(layer(x, w), w)], x)


def gradient(x, w):
    return jax.grad(lambda w: jnp.sum(jax.checkpoint(lambda x: layer(x, w))(x) ** 2))(w)


def conditional_loop(x, w):
    return lax.scan(lambda c, i: (lax.cond(i % 2 == 0, lambda c: layer(c, w), lambda c: c, c), None), x, jnp.arange(4))[0]


CONSTRUCTS = {
    "nested jit": lambda x, w: jax.jit(lambda x: jax.jit(layer)(x, w).sum(1))(x),
    "jit called twice": lambda x, w: (inner := jax.jit(layer))(inner(x, w), w),
    "constants": lambda x, w: jax.jit(lambda x: layer(x @ KEPT, w))(x),
    "scan": repeated,
    "scan with constants": lambda x, w: lax.scan(lambda c, _: (layer(c @ KEPT, w), None), x, None, length=3),
    "empty scan": lambda x, w: lax.scan(lambda c, v: (layer(c, w), v), x, jnp.zeros((0, 4))),
    "scan in scan": lambda x, w: lax.scan(lambda c, _: repeated(c, w), x, None, length=2),
    "fori_loop": lambda x, w: lax.fori_loop(0, 5, lambda i, s: layer(s, w) + i, x),
    "while": counted,
    "while on data": converging,
    "cond": chosen,
    "cond in scan": conditional_loop,
    "switch": switched,
    "remat": lambda x, w: jax.checkpoint(layer)(x, w),
    "gradient of remat": gradient,
    "custom_jvp": lambda x, w: odd(x @ w),
    "gradient of custom_jvp": lambda x, w: jax.grad(lambda w: odd(x @ w).sum())(w),
    "custom_vjp": lambda x, w: wrong(x @ w),
    "gradient of custom_vjp": lambda x, w: jax.grad(lambda w: wrong(x @ w).sum())(w),
    "typed keys": lambda x, w: layer(x, w) * jax.random.bernoulli(jax.random.key(7), 0.5, x.shape),
    "keys through": lambda x, w: (jax.random.split(jax.random.key(0)), layer(x, w)),
    "inputs and literals as results": lambda x, w: (x, layer(x, w), 3.0, w),
    "dead code": lambda x, w: (jnp.cos(x) @ w, layer(x, w))[1],
    "dead loop": lambda x, w: (repeated(x, w), layer(x, w))[1],
    "dead carries": lambda x, w: lax.scan(lambda c, _: ((layer(c[0], w), jnp.sin(c[1])), c[0]), (x, x), None, length=3)[0][1],
    "dead while carry": lambda x, w: counted(x, w)[0],
    "one operand twice": lambda x, w: (x * x, x.T @ x),
}


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_eight_devices_compute_the_same_and_move_what_was_planned(name):
    run(CONSTRUCTS[name], X, W, pins=ROWS_AND_COLUMNS).check()


def test_scanned_weights_stay_split_in_both_directions():
    def loss(stack, x):
        return lax.scan(jax.checkpoint(lambda c, w: (layer(c, w), c.sum())), x, stack, reverse=True)[0].sum()

    found = run(jax.value_and_grad(loss), STACK, X, pins={0: ((), (), M), 1: (D, ())}, carried=[(1, 0)])
    assert found.lowered.in_shardings[0].spec == found.lowered.out_shardings[1].spec == P(None, None, "model")
    found.check()


@pytest.mark.parametrize(
    ("outside", "inside", "expected"),
    [
        ((), M, {}),
        (M, M, {}),
        (M, (), {("all_gather", M, 3 * 64 * 64 * 4): 1}),
    ],
    ids=["sliced", "kept", "gathered"],
)
def test_what_enters_a_loop_is_resharded_once_outside_of_it(outside, inside, expected):
    def step(x, stack):
        return lax.scan(lambda c, w: (c + w[:32], None), x, stack)[0]

    entering = ops(trace(step, X, STACK), "scan.enter")[1]
    found = run(step, X, STACK, pins={0: (D, ()), 1: ((), (), outside), entering: ((), inside)})
    gathers = {key: count for key, count in found.executed.items() if key[1] == M}
    assert gathers == expected
    found.check()


def test_slices_of_a_loops_input_take_the_planned_steps():
    def step(x, stack):
        return lax.scan(lambda c, w: (c + w @ w.T, None), x, stack)[0]

    x = normal(64, 64)
    entering = ops(trace(step, x, STACK), "scan.enter")[1]
    found = run(step, x, STACK, pins={1: ((), M, D), entering: ((), ())}, forced={entering.id: ((), M, D)})
    assert found.planned == {("all_gather", M, 4096): 3, ("all_gather", D, 16384): 3}
    found.check()


def test_weights_stored_split_are_gathered_where_they_are_used():
    found = run(lambda x, w: layer(x, w), X, W, pins={0: (D, ()), 1: (D, ())})
    assert found.executed == {("all_gather", D, 64 * 64 * 4): 1}
    found.check()


def test_a_batch_that_does_not_divide_stays_whole_and_the_result_right():
    run(layer, X[:30], W, pins={1: ((), M)}).check()


def test_raw_and_typed_keys_pass_through():
    def step(key, x):
        return jax.random.split(key, 2), x + jax.random.normal(key, x.shape)

    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        run(step, key, X, pins={1: (D, M)}).check()


def test_integers_booleans_and_weak_types_are_kept():
    def step(x, n, flags, scale):
        return jnp.where(flags, x * n, x), n + 1, scale * 2

    found = run(step, X, jnp.arange(64), X > 0, 2.0, pins={0: (D, M)})
    found.check()
    assert [value.weak_type for value in found.got] == [False, False, True]


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_shard_map_keeps_its_collectives(check_vma):
    mesh = make_mesh(MESH, jax.devices())

    def step(x, w):
        local = jax.shard_map(
            lambda x: lax.psum(x, "model"), mesh=mesh, in_specs=P("data", "model"), out_specs=P("data"), check_vma=check_vma
        )
        return layer(x, w)[:, :32] + local(x)

    program = trace(step, X, W)
    (op,) = ops(program, "shard_map")
    forced = {op.id: tuple(D if index in (0, 2) else M if index == 1 else () for index in range(4))}
    found = run(step, X, W, pins={0: (D, ())}, forced=forced)
    found.check()
    assert found.executed[("all_reduce", M, 8 * 32 * 4)] == 1


def rewritten(function, *args, pins):
    """The constrained program as a function."""
    program = trace(function, *args)
    closed = constrain(program, spread(program, pins), MESH, make_mesh(MESH, jax.devices()))
    return lambda *leaves: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves)


def test_a_wrong_custom_vjp_survives_a_gradient_taken_after_the_rewrite():
    step = rewritten(lambda x, w: wrong(x @ w).sum(), X, W, pins=ROWS_AND_COLUMNS)
    got = jax.jit(jax.grad(lambda w: step(X, w)[0]))(W)
    np.testing.assert_allclose(got, X.T @ (3.0 * (X @ W)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["nested jit", "scan", "cond", "remat", "custom_jvp", "custom_vjp"])
def test_a_program_can_be_differentiated_after_the_rewrite(name):
    step = rewritten(CONSTRUCTS[name], X, W, pins=ROWS_AND_COLUMNS)

    def loss(function, w):
        return sum(jnp.sum(value) for value in jax.tree.leaves(function(X, w)))

    got = jax.jit(jax.grad(lambda w: loss(step, w)))(W)
    np.testing.assert_allclose(got, jax.grad(lambda w: loss(CONSTRUCTS[name], w))(W), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["nested jit", "scan", "while", "remat", "custom_vjp"])
def test_a_program_can_be_batched_after_the_rewrite(name):
    step = rewritten(CONSTRUCTS[name], X, W, pins=ROWS_AND_COLUMNS)
    many = jnp.stack([X, -X, 2 * X])
    got = jax.jit(jax.vmap(step, in_axes=(0, None)))(many, W)
    want = jax.tree.leaves(jax.vmap(CONSTRUCTS[name], in_axes=(0, None))(many, W))
    for left, right in zip(got, want, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


def test_constraints_carry_the_users_source_lines():
    found = run(layer, X, W, pins={0: (D, ()), 1: (D, ())})
    gathers = [line for line in found.compiled.as_text().splitlines() if " all-gather(" in line]
    text = found.compiled.as_text()
    assert gathers
    assert "test_rewriter.py" in text
    assert 'rewriter.py"' not in text.replace("test_rewriter.py", "")


def test_the_users_own_constraints_are_not_repeated():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    pinned = NamedSharding(mesh, P(None, "model"))

    def step(x, w):
        return lax.with_sharding_constraint(layer(x, w), pinned)

    program = trace(step, X, W)
    (mark,) = ops(program, "sharding_constraint")
    found = run(step, X, W, pins={0: (D, ()), mark: ((), M)})
    found.check()
    assert found.lowered.out_shardings[0].spec == P(None, "model")


def test_every_argument_and_result_has_its_planned_sharding():
    found = run(lambda x, w: (layer(x, w), x.sum(0)), X, W, pins=ROWS_AND_COLUMNS)
    values = found.assignment.values
    graph = found.program.graph
    for value, sharding in zip(graph.inputs + graph.outputs, found.lowered.in_shardings + found.lowered.out_shardings, strict=True):
        assert sharding.is_equivalent_to(named_sharding(found.lowered.mesh, values[value]), len(graph.values[value].shape))
    for array, sharding in zip(found.got, found.lowered.out_shardings, strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)


def test_readers_of_a_value_that_one_of_them_reshards_share_its_constraint():
    mesh = make_mesh(MESH, jax.devices())

    def step(x, w):
        hidden = jnp.sin(x)
        return lax.with_sharding_constraint(hidden, NamedSharding(mesh, P("data"))) @ w, hidden * 2

    program = trace(step, X, W)
    (mark,) = ops(program, "sharding_constraint")
    split = (("data", "model"), ())
    pins = {0: split, 1: ((), M), ops(program, "sin")[0]: split, mark: (D, ()), ops(program, "mul")[0]: split}
    found = run(step, X, W, pins=pins)
    found.check()
    closed = constrain(program, found.assignment, MESH, mesh)
    (made,) = [eqn.outvars[0] for eqn in closed.jaxpr.eqns if eqn.primitive.name == "sin"]
    assert [eqn.primitive.name for eqn in closed.jaxpr.eqns if made in eqn.invars] == ["sharding_constraint"]


def test_a_gradient_is_reduced_after_its_transposition():
    """Reduced before, a compiler that lays its products out as it likes would have to copy it."""
    found = run(jax.grad(lambda w, x: layer(x, w).sum()), W, X, pins={1: (D, ())})
    found.check()
    assert [row.kind for row in found.bill.collectives] == ["all_reduce"]
    closed = constrain(found.program, found.assignment, MESH, make_mesh(MESH, jax.devices()))
    made_by = {var: eqn.primitive.name for eqn in closed.jaxpr.eqns for var in eqn.outvars}
    constrained = [made_by[eqn.invars[0]] for eqn in closed.jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]
    assert constrained[-1] == "transpose"
    assert constrained.count("dot_general") == 1


def test_a_gradient_of_a_moved_operand_is_not_held_before_its_transposition():
    def gradient(x, y):
        return jax.lax.dot_general(y, x, (((0,), (0,)), ((), ()))).T

    program = trace(gradient, X, X)
    (dot,), (turn,) = ops(program, "dot_general"), ops(program, "transpose")
    both = ("data", "model")
    (columns,) = dot.rule.results[0][1]
    forced = {dot.id: tuple(both if factor == columns else () for factor in range(len(dot.rule.sizes)))}
    found = run(gradient, X, X, pins={0: (both, ()), 1: ((), ()), dot: ((), both), turn: (both, ())}, forced=forced)
    found.check()
    assert [row.kind for row in found.bill.collectives] == ["all_to_all"]
    closed = constrain(program, found.assignment, MESH, make_mesh(MESH, jax.devices()))
    (made,) = [eqn.outvars[0] for eqn in closed.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert [eqn.primitive.name for eqn in closed.jaxpr.eqns if made in eqn.invars] == ["transpose"]
