"""`shard()`: marks in the trace, modules that keep type and paths, and arguments that are checked at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.extend import source_info_util

import spmdctx.context.layers as context
from spmdctx.errors import ContextWarning, StrategyError
from spmdctx.ir.layout import Layout
from spmdctx.ir.primitives import MARKER
from spmdctx.shard.decorate import shard
from spmdctx.trace.marker import mark, tracing_in

X = jnp.arange(32.0).reshape(4, 8)
W = jnp.arange(32.0).reshape(8, 4) / 32


@pytest.fixture(autouse=True)
def _semi_auto():
    with context.auto_parallel_context(parallel_mode="semi_auto_parallel"):
        yield


def marker_params(jaxpr):
    """Parameters of all markers in a jaxpr and the jaxprs inside it, in order."""
    found = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == MARKER:
            found.append(eqn.params)
        for value in eqn.params.values():
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                found += marker_params(value)
    return found


def marks_of(fn, *args):
    """(side, index, strategy) of all markers that tracing `fn` makes."""
    return [(p["side"], p["index"], p["strategy"]) for p in marker_params(jax.make_jaxpr(fn)(*args))]


MATMUL = shard(jnp.matmul, ((2, 4), (4, 1)), ((2, 1),))
MATMUL_MARKS = [("in", 0, (2, 4)), ("in", 1, (4, 1)), ("out", 0, (2, 1))]


# --- The marker -------------------------------------------------------------------------------------------------------


def test_a_function_is_marked_at_its_boundary_and_keeps_its_value():
    assert marks_of(MATMUL, X, W) == MATMUL_MARKS
    np.testing.assert_array_equal(jax.jit(MATMUL)(X, W), X @ W)


def test_a_marker_lowers_to_nothing():
    text = jax.jit(lambda x: mark(x, region=0, side="in", index=0, strategy=(2, 1), label="f")).lower(X).as_text()
    assert "return %arg0" in text
    assert "custom_call" not in text


def test_a_marker_keeps_weak_types_and_keys():
    def marked(x):
        return mark(x, region=0, side="in", index=0, strategy=None, label="f")

    keys = jax.random.split(jax.random.key(0), 4)
    assert jax.jit(marked)(keys).dtype == keys.dtype
    weak = jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)
    assert jax.make_jaxpr(marked)(weak).out_avals[0].weak_type


def test_a_marker_has_the_source_line_of_the_users_call():
    for fn, args in ((MATMUL, (X, W)), (shard(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), ((2, 1),)), (X,))):
        eqn = jax.make_jaxpr(lambda *args, fn=fn: fn(*args))(*args).eqns[0]
        assert "test_decorate.py" in source_info_util.summarize(eqn.source_info)


def test_cotangents_are_marked_as_such():
    def loss(x, w):
        return MATMUL(x, w).sum()

    found = marks_of(jax.grad(loss, argnums=(0, 1)), X, W)
    assert set(found[-2:]) == {("in_grad", 0, (2, 4)), ("in_grad", 1, (4, 1))}
    assert [entry for entry in found if entry[0] == "out_grad"] == [("out_grad", 0, (2, 1))]
    for ours, theirs in zip(jax.grad(loss, (0, 1))(X, W), jax.grad(lambda x, w: (x @ w).sum(), (0, 1))(X, W), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_cotangent_of_a_cotangent_is_marked_as_a_primal():
    square = shard(lambda x: (x**3).sum(), ((2, 1),))
    sides = {entry[0] for entry in marks_of(jax.grad(lambda x: jax.grad(square)(x).sum()), X)}
    assert sides >= {"in", "in_grad"}
    np.testing.assert_allclose(jax.grad(lambda x: jax.grad(square)(x).sum())(X), 6 * X)


@pytest.mark.parametrize(("in_axes", "expected"), [(0, (0, 2, 1)), (1, (2, 0, 1)), (2, (2, 1, 0))])
def test_vmap_adds_a_free_dimension(in_axes, expected):
    batched = jnp.moveaxis(jnp.ones((3, 4, 8)), 0, in_axes)
    found = marks_of(jax.vmap(shard(jnp.sin, ((2, 1),)), in_axes=in_axes), batched)
    assert found[0] == ("in", 0, expected)


def test_vmap_adds_a_free_dimension_to_layouts():
    layout = Layout((2, 4), ("dp", "mp"))("dp", "mp")
    (_, _, found), _ = marks_of(jax.vmap(shard(jnp.sin, (layout,))), jnp.ones((3, 4, 8)))
    assert found.strategy == (0, 2, 4)


def test_marks_survive_scan_and_remat():
    step = shard(lambda h, w: jnp.tanh(h @ w), ((2, 1), (1, 4)))

    def loss(ws, h):
        return jax.lax.scan(lambda c, w: (jax.checkpoint(step)(c, w), None), h, ws)[0].sum()

    weights = jnp.ones((3, 8, 8)) / 8
    found = marks_of(jax.grad(loss), weights, X)
    assert ("in", 1, (1, 4)) in found
    assert ("in_grad", 1, (1, 4)) in found
    plain = jax.grad(lambda ws, h: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), h, ws)[0].sum())
    small = X / 32  # a tanh that saturates has a derivative of rounding errors
    np.testing.assert_allclose(jax.grad(loss)(weights, small), plain(weights, small), rtol=1e-6)


def test_nested_regions_have_numbers_and_scopes_of_their_own():
    inner = shard(jnp.tanh, ((2, 1),))
    outer = shard(lambda x: inner(x) + 1, ((4, 1),))
    jaxpr = jax.make_jaxpr(outer)(X)
    assert [p["strategy"] for p in marker_params(jaxpr)] == [(4, 1), (2, 1), None, None]
    assert len({p["region"] for p in marker_params(jaxpr)}) == 2
    (tanh,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "tanh")
    assert str(tanh.source_info.name_stack).count("shard") == 2


def test_each_call_is_a_region():
    jaxpr = jax.make_jaxpr(lambda x, w: MATMUL(MATMUL(x, w), w.T))(X, W)
    assert len({p["region"] for p in marker_params(jaxpr)}) == 2


# --- Functions --------------------------------------------------------------------------------------------------------


def test_keyword_and_static_arguments_are_passed_on():
    total = shard(jnp.sum, ((4, 1),))
    assert marks_of(lambda x: total(x, axis=1), X) == [("in", 0, (4, 1)), ("out", 0, None)]


def test_scalars_are_not_marked_but_may_have_an_entry():
    add = shard(jnp.add, ((2, 1), None))
    assert marks_of(lambda x: add(x, 1.0), X) == [("in", 0, (2, 1)), ("out", 0, None)]


def ffn(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


PARAMS = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}


@pytest.mark.parametrize("in_strategy", [((2, 1),), (None, (2, 1)), (None, None, (2, 1))])
def test_parameters_of_a_function_are_found_by_argument_path(in_strategy):
    sharded = shard(ffn, in_strategy, parameter_plan={"params/up": (1, 4), "*/down": (4, 1)})
    found = marks_of(sharded, PARAMS, X)
    assert ("parameter", 0, (4, 1)) in found
    assert ("parameter", 1, (1, 4)) in found
    assert [entry[2] for entry in found if entry[0] == "in"] == [(2, 1)]


def test_an_nnx_module_among_the_arguments_keeps_its_identity_and_is_marked():
    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    sharded = shard(lambda model, x: model(x), (None, (2, 1)), parameter_plan={"model/scale": (4,)})
    assert ("parameter", 0, (4,)) in [(p["side"], p["index"], p["strategy"]) for p in _nnx_markers(sharded, model, X)]
    nnx.jit(sharded)(model, X)
    assert float(jnp.abs(model.mean[...]).sum()) > 0


def _nnx_markers(fn, model, *args):
    graph, state = nnx.split(model)
    return marker_params(jax.make_jaxpr(lambda state, *rest: fn(nnx.merge(graph, state), *rest))(state, *args))


@pytest.mark.parametrize(
    ("in_strategy", "out_strategy", "text"),
    [
        (((2, 1),), None, "in_strategy has 1 entries, but the call has 2 array arguments"),
        ((None, None), ((1, 1), None), "out_strategy has 2 entries, but the result has 1 arrays"),
    ],
)
def test_entries_and_arrays_must_match_in_number(in_strategy, out_strategy, text):
    with pytest.raises(StrategyError, match=text):
        jax.make_jaxpr(shard(jnp.matmul, in_strategy, out_strategy))(X, W)


def test_a_strategy_for_a_whole_tree_is_refused():
    with pytest.raises(StrategyError, match="not one free array: params/down, params/up"):
        jax.make_jaxpr(shard(ffn, ((1, 4), (2, 1))))(PARAMS, X)


def test_a_pattern_that_matches_nothing_is_warned_about():
    with pytest.warns(ContextWarning, match="'up' matches no parameter; there are params/down, params/up, x"):
        jax.make_jaxpr(shard(ffn, (None, (2, 1)), parameter_plan={"up": (1, 4), "params/*": None}))(PARAMS, X)


# --- Modules ----------------------------------------------------------------------------------------------------------


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(self.norm(self.up(x))))


PLAN = {"up/kernel": (1, 4), "down/kernel": (4, 1)}


def test_an_nnx_module_keeps_type_paths_and_values():
    model = NnxMLP(nnx.Rngs(0))
    sharded = shard(model, ((2, 1),), parameter_plan=PLAN)
    assert isinstance(sharded, NnxMLP)
    assert type(sharded).__name__ == "NnxMLP"
    assert sharded.up is model.up
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(sharded))]
    assert paths == [path for path, _ in nnx.to_flat_state(nnx.state(model))]


def test_a_sharded_nnx_module_marks_arguments_and_planned_parameters():
    found = [
        (p["side"], p["strategy"], p["label"])
        for p in _nnx_markers(lambda m, x: m(x), shard(NnxMLP(nnx.Rngs(0)), ((2, 1),), None, PLAN), X)
    ]
    assert found == [
        ("in", (2, 1), "NnxMLP"),
        ("parameter", (4, 1), "NnxMLP/down/kernel"),
        ("parameter", (1, 4), "NnxMLP/up/kernel"),
        ("out", None, "NnxMLP"),
    ]


def test_a_sharded_nnx_module_trains_as_the_plain_one():
    def train(model):
        @nnx.jit
        def step(model, x):
            return nnx.grad(lambda model, x: (model(x) ** 2).mean())(model, x)

        return step(model, X), nnx.state(model, nnx.Not(nnx.RngState))

    for plain, ours in zip(jax.tree.leaves(train(NnxMLP(nnx.Rngs(0)))), jax.tree.leaves(train(_sharded_nnx())), strict=True):
        np.testing.assert_array_equal(plain, ours)


def _sharded_nnx():
    return shard(NnxMLP(nnx.Rngs(0)), ((2, 1),), parameter_plan=PLAN)


def test_a_sharded_nnx_module_may_be_closed_over():
    model = shard(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), ((2, 1),), parameter_plan={"kernel": (1, 2)})
    before = model.kernel.get_raw_value()
    assert [entry[0] for entry in marks_of(model, X)] == ["in", "parameter", "out"]
    assert model.kernel.get_raw_value() is before


def test_two_equal_calls_of_shard_make_one_type():
    model = NnxMLP(nnx.Rngs(0))
    assert type(shard(model, ((2, 1),))) is type(shard(model, ((2, 1),)))
    assert type(shard(model, ((2, 1),))) is not type(shard(model, ((4, 1),)))


def test_a_sharded_nnx_module_lives_in_nnx_transforms():
    layer = shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), ((2, 1),), parameter_plan={"kernel": (1, 2)})

    @nnx.remat
    def forward(layer, x):
        return layer(x)

    def loss(layer):
        return forward(layer, X).sum()

    plain = nnx.grad(lambda layer: layer(X).sum())(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    np.testing.assert_array_equal(nnx.grad(loss)(layer)["kernel"][...], plain["kernel"][...])


class LinenMLP(linen.Module):
    features: int = 16

    @linen.compact
    def __call__(self, x, train=True):
        x = linen.Dense(self.features)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.Dense(8, name="out")(x)


class LinenParent(linen.Module):
    """A sharded child in setup, and one in a compact parent."""

    def setup(self):
        self.first = shard(linen.Dense(16), ((2, 1),), parameter_plan={"kernel": (1, 4)})
        self.second = linen.Dense(8)

    def __call__(self, x):
        return self.second(self.first(x))


class CompactParent(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = shard(linen.Dense(16), ((2, 1),), parameter_plan={"kernel": (1, 4)})(x)
        return linen.Dense(8)(x)


KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
LINEN_PLAN = {"Dense_0/kernel": (1, 4), "out/kernel": (4, 1)}


def test_a_linen_module_keeps_type_paths_values_and_randomness():
    plain = LinenMLP()
    sharded = shard(plain, ((2, 1),), parameter_plan=LINEN_PLAN)
    assert isinstance(sharded, LinenMLP)
    ours, theirs = jax.jit(sharded.init)(KEYS, X), jax.jit(plain.init)(KEYS, X)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    rngs = {"dropout": jax.random.key(2)}
    results = [jax.jit(lambda v, m=m: m.apply(v, X, rngs=rngs, mutable=["batch_stats"]))(theirs) for m in (sharded, plain)]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_sharded_linen_module_marks_arguments_and_planned_parameters():
    model = shard(LinenMLP(), ((2, 1),), parameter_plan=LINEN_PLAN)
    variables = LinenMLP().init(KEYS, X)
    found = marker_params(jax.make_jaxpr(lambda v, x: model.apply(v, x, train=False))(variables, X))
    assert {(p["side"], p["strategy"], p["label"]) for p in found} == {
        ("in", (2, 1), "LinenMLP"),
        ("parameter", (1, 4), "LinenMLP/Dense_0/kernel"),
        ("parameter", (4, 1), "LinenMLP/out/kernel"),
        ("out", None, "LinenMLP"),
    }


def test_linen_partitioning_boxes_stay_around_marked_parameters():
    init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
    model = shard(linen.Dense(4, kernel_init=init), ((2, 1),), parameter_plan={"kernel": (1, 2)})
    variables = jax.jit(model.init)(KEYS, X)
    assert isinstance(variables["params"]["kernel"], linen.Partitioned)
    assert ("parameter", 1, (1, 2)) in marks_of(model.apply, variables, X)


@pytest.mark.parametrize("parent", [LinenParent, CompactParent])
def test_a_sharded_linen_child_takes_the_place_of_the_plain_one(parent):
    variables = jax.jit(parent().init)(KEYS, X)
    names = ["first", "second"] if parent is LinenParent else ["Dense_0", "Dense_1"]
    assert list(variables["params"]) == names
    found = marks_of(parent().apply, variables, X)
    assert {entry[0] for entry in found} == {"in", "parameter", "out"}
    first, second = (variables["params"][name] for name in names)
    expected = (X @ first["kernel"] + first["bias"]) @ second["kernel"] + second["bias"]
    np.testing.assert_allclose(jax.jit(parent().apply)(variables, X), expected, rtol=1e-5)


# --- Arguments and modes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3, ((1,),)), TypeError, "a function or a module"),
        ((jnp.sin, (2, 1)), TypeError, r"use \(\(2, 1\),\) for a single tensor"),
        ((jnp.sin, [(2, 1)]), TypeError, "in_strategy must be a tuple"),
        ((jnp.sin, ([2, 1],)), TypeError, "tuple of ints, a Layout or None"),
        ((jnp.sin, ((2.0, 1),)), TypeError, "holds ints"),
        ((jnp.sin, ((True, 1),)), TypeError, "holds ints"),
        ((jnp.sin, ((0, 1),)), ValueError, "into 0 slices"),
        ((jnp.sin, ((2, -1),)), ValueError, "into -1 slices"),
        ((jnp.sin, None, ((2, 1),)), ValueError, "out_strategy is given without in_strategy"),
        ((jnp.sin, ((2, 1),), [(2, 1)]), TypeError, "out_strategy must be a tuple"),
        ((jnp.sin, (Layout((2,), ("dp",)),)), ValueError, "names no tensor dimensions"),
        ((jnp.sin, None, None, ((2, 1),)), TypeError, "parameter_plan maps path patterns"),
        ((jnp.sin, None, None, {1: (2, 1)}), TypeError, "a key 1 of type int"),
        ((jnp.sin, None, None, {"w": [2, 1]}), TypeError, r"parameter_plan\['w'\]"),
        ((jnp.sin, None, None, {"w": (0,)}), ValueError, "into 0 slices"),
        ((jnp.sin, ((2, 1),), None, None, 3), TypeError, "device must be str"),
        ((jnp.sin, ((2, 1),), None, None, None, "0"), TypeError, "level must be int"),
        ((jnp.sin, ((2, 1),), None, None, None, 0, 1), TypeError, "cross_batch must be bool"),
        ((jnp.sin, ((2, 1),), None, None, None, 0, False, 1.5), TypeError, "fusion must be int"),
        ((jnp.sin, ((2, 1),), None, None, None, 0, False, -1), StrategyError, "fusion is the number of a bucket"),
    ],
)
def test_arguments_are_checked_at_once(arguments, error, text):
    with pytest.raises(error, match=text):
        shard(*arguments)


@pytest.mark.parametrize("hint", [{"device": "Ascend"}, {"level": 1}])
def test_hints_without_effect_are_said_to_have_none(hint):
    with pytest.warns(ContextWarning, match=f"{next(iter(hint))}=.* has no effect"):
        shard(jnp.sin, ((2, 1),), **hint)


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "hybrid_parallel"])
def test_modes_that_do_not_split_by_strategy_warn(mode):
    with context.auto_parallel_context(parallel_mode=mode), pytest.warns(ContextWarning, match=f"shard\\(\\) of sin has no effect.*{mode}"):
        np.testing.assert_array_equal(shard(jnp.sin, ((2, 1),))(X), jnp.sin(X))


def test_the_mode_of_the_traced_step_counts_before_the_contexts():
    sharded = shard(jnp.sin, ((2, 1),))
    with tracing_in("data_parallel"), pytest.warns(ContextWarning, match="data_parallel"):
        jax.make_jaxpr(sharded)(X)
    with context.auto_parallel_context(parallel_mode="stand_alone"), tracing_in("auto_parallel"):
        assert len(marks_of(sharded, X)) == 2
