"""No primitive of JAX is without a rule, a structural treatment, or a named reason to stay whole."""

import importlib
import sys

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.scipy
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental.custom_partitioning import custom_partitioning

from spmdctx._compat import without_high_primitives
from spmdctx.rules import RULES, rule_for
from spmdctx.rules.control_flow import CALLS, CONTROL_FLOW, call_body, call_operands
from spmdctx.rules.opaque import REASONS
from tests.rules.numeric_oracle import Equation, assert_fits, equation

MODULES = (
    *("jax.numpy", "jax.nn", "jax.random", "jax.scipy.linalg", "jax.scipy.special", "jax.scipy.stats", "jax.image", "jax.ffi"),
    *("jax.extend.core.primitives", "jax.experimental.pallas", "jax.experimental.sparse", "jax.experimental.checkify"),
    *("jax.experimental.shard_map", "jax.experimental.custom_partitioning", "jax.custom_batching", "jax.export", "jax.debug"),
    *("jax.experimental.multihost_utils", "jax.experimental.array_serialization", "jax.experimental.compute_on"),
    *("jax.experimental.shard_alike", "jax.experimental.fused", "jax.experimental.rnn", "jax.experimental.key_reuse"),
    *("jax.experimental.buffer_callback", "jax.experimental.scheduling_groups", "jax.experimental.pallas.tpu"),
)


SCALED_MATMUL = "([i, j, l], [i, k, l], [i, j, m], [i, k, m])->([i, j, k]) {i=2, j=8, k=4, l=64, m=2} blocked_propagation={l, m}"


def known_primitives():
    """Every primitive that some loaded module of JAX names, whether it is public or not."""
    for name in MODULES:
        importlib.import_module(name)
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.split(".")[0] == "jax" and module is not None]
    # Primitives of Mosaic's GPU kernels stand in kernels only, and are loaded where other tests need them.
    loaded = [module for name, module in modules if "mosaic" not in name]
    return sorted({item.name for module in loaded for item in list(vars(module).values()) if isinstance(item, jexc.Primitive)})


def walk(jaxpr):
    """All equations, also those of nested bodies."""
    for eqn in jaxpr.eqns:
        yield eqn
        for param in eqn.params.values():
            for body in param if isinstance(param, (tuple, list)) else [param]:
                if isinstance(body, (jexc.Jaxpr, jexc.ClosedJaxpr)):
                    yield from walk(body if isinstance(body, jexc.Jaxpr) else body.jaxpr)


def test_no_primitive_of_jax_lacks_a_rule_a_treatment_or_a_reason():
    names = known_primitives()
    assert len(names) > 300
    assert [name for name in names if name not in RULES and name not in CONTROL_FLOW] == []


def test_a_primitive_has_a_rule_or_is_control_flow_but_not_both():
    assert RULES.keys().isdisjoint(CONTROL_FLOW)


def test_what_has_a_reason_is_kept_whole_and_says_so():
    for name, reason in REASONS.items():
        rule = rule_for(name, ((4, 8),), ((4, 8),), {})
        assert rule.reason == reason
        assert str(rule) == "([1, 1])->([1, 1]) {}"


X = np.ones((4, 8), np.float32)
SQUARE = np.eye(4, dtype=np.float32)
INDEX = np.zeros((4,), np.int32)


def key():
    return jax.random.key(0)


ORDINARY = {
    "numpy": lambda: (
        jnp.sort(X),
        jnp.argsort(X),
        jnp.median(X),
        jnp.quantile(X, 0.5),
        jnp.percentile(X, 20.0),
        jnp.histogram(X),
        jnp.cov(X),
        jnp.roll(X, 1, 0),
        jnp.searchsorted(X[0], X[1]),
        jnp.unique(X, size=3),
        jnp.nonzero(X, size=3),
        jnp.kron(X, X),
        jnp.interp(X[0], X[0], X[0]),
        jnp.cross(X[:, :3], X[:, :3]),
        jnp.einsum("ij,kj->ik", X, X),
        jnp.tensordot(X, X, 2),
        jnp.cumprod(X),
        jnp.diff(X),
        jnp.tril(X),
        jnp.select([X > 0], [X]),
        jnp.where(X > 0, X, 0),
        jnp.convolve(X[0], X[0]),
        jnp.polyfit(jnp.arange(8.0), X[0], 2),
        jnp.fft.fft2(X),
        jnp.fft.irfft(X),
        jnp.packbits(X > 0),
        jnp.unwrap(X),
        jnp.bincount(INDEX, length=3),
        jnp.array_split(X, 2),
        jnp.tile(X, (2, 2)),
        jnp.repeat(X, 2, 0),
        jnp.pad(X, 1, "reflect"),
        jnp.flip(X),
        jnp.rot90(X),
        jnp.meshgrid(X[0], X[1]),
        jnp.trapezoid(X),
        jnp.linspace(0.0, X, 5),
        jnp.nanmean(X),
        jnp.var(X),
        jnp.round(X),
        jnp.frexp(X),
        jnp.ldexp(X, 2),
        jnp.gcd(INDEX, INDEX),
        jnp.bitwise_count(INDEX),
        jnp.piecewise(X, [X > 0], [1.0]),
        jnp.apply_along_axis(jnp.sum, 0, X),
        jnp.vectorize(jnp.sin)(X),
        jnp.insert(X, 1, 0.0, 0),
        jnp.delete(X, 1, 0),
        jnp.take_along_axis(X, INDEX[:, None], 1),
        jnp.put_along_axis(X, INDEX[:, None], 0, 1, inplace=False),
    ),
    "linalg": lambda: (
        jnp.linalg.inv(SQUARE),
        jnp.linalg.solve(SQUARE, X),
        jnp.linalg.qr(X),
        jnp.linalg.svd(X),
        jnp.linalg.eigh(SQUARE),
        jnp.linalg.eig(SQUARE),
        jnp.linalg.cholesky(SQUARE),
        jnp.linalg.det(SQUARE),
        jnp.linalg.slogdet(SQUARE),
        jnp.linalg.lstsq(X, X),
        jnp.linalg.pinv(X),
        jnp.linalg.matrix_power(SQUARE, 3),
        jnp.linalg.norm(X),
        jax.scipy.linalg.expm(SQUARE),
        jax.scipy.linalg.schur(SQUARE),
        jax.scipy.linalg.hessenberg(SQUARE),
        jax.scipy.linalg.lu(SQUARE),
        jax.scipy.linalg.sqrtm(SQUARE),
        jax.scipy.linalg.solve_triangular(SQUARE, X),
    ),
    "nn": lambda: (
        jax.nn.gelu(X),
        jax.nn.silu(X),
        jax.nn.softmax(X),
        jax.nn.log_softmax(X),
        jax.nn.logsumexp(X),
        jax.nn.one_hot(INDEX, 8),
        jax.nn.standardize(X),
        jax.nn.relu6(X),
        jax.nn.glu(X),
        jax.nn.dot_product_attention(X.reshape(1, 4, 2, 4), X.reshape(1, 4, 2, 4), X.reshape(1, 4, 2, 4), is_causal=True),
        jax.image.resize(X, (8, 8), "cubic"),
        lax.ragged_dot(X, np.ones((2, 8, 4), np.float32), np.array([2, 2])),
        lax.conv(X[None, None], X[None, None, :2, :2], (1, 1), "SAME"),
        lax.reduce_window(X, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
        lax.top_k(X, 2),
        lax.approx_max_k(X, 2),
        lax.associative_scan(jnp.add, X),
        lax.map(jnp.sin, X),
        jax.ops.segment_max(X, INDEX, 3),
        lax.reduce_precision(X, 5, 2),
        lax.optimization_barrier(X),
    ),
    "random": lambda: (
        jax.random.normal(key(), (4,)),
        jax.random.categorical(key(), X),
        jax.random.permutation(key(), X),
        jax.random.choice(key(), X, (2,)),
        jax.random.gamma(key(), X),
        jax.random.poisson(key(), X),
        jax.random.beta(key(), X, X),
        jax.random.truncated_normal(key(), -1.0, 1.0, (4,)),
        jax.random.bernoulli(key(), 0.5, (4,)),
        jax.random.dirichlet(key(), X),
        jax.random.randint(key(), (4,), 0, 9),
        jax.random.split(jax.random.PRNGKey(0), 3),
        jax.random.orthogonal(key(), 4),
        jax.random.binomial(key(), 5, X * 0.5),
        jax.random.t(key(), 3.0, (4,)),
        jax.random.bits(jax.random.key(0, impl="rbg"), (4,)),
    ),
    "gradients": lambda: (
        jax.grad(lambda x: jnp.sort(x).sum())(X),
        jax.grad(lambda x: jnp.cumsum(jnp.take(x, INDEX, axis=0)).sum())(X),
        jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum())(X),
        jax.grad(lambda x: lax.conv(x[None, None], x[None, None, :2, :2], (1, 1), "SAME").sum())(X),
        jax.grad(lambda x: jnp.pad(jnp.tile(x, (2, 1)), 1).prod())(X),
        jax.grad(lambda x: jnp.stack(jnp.split(x, 2)).max())(X),
        jax.grad(lambda x: jnp.take_along_axis(x, INDEX[:, None], 1).sum())(X),
        jax.grad(lambda x: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (1, 1), (2, 2)), (0, 0)).sum())(X),
        jax.grad(lambda x: jax.nn.logsumexp(jax.nn.silu(jnp.concatenate((x, x), 1))))(X),
        jax.grad(lambda a: jnp.linalg.solve(a, X).sum() + jnp.linalg.cholesky(a).sum() + jnp.linalg.slogdet(a)[1])(SQUARE),
        jax.grad(lambda x: lax.associative_scan(jnp.multiply, x).sum())(X),
    ),
    "scipy": lambda: (
        jax.scipy.special.betainc(X, X, X * 0.5),
        jax.scipy.special.zeta(X + 1, X),
        jax.scipy.special.gammainc(X, X),
        jax.scipy.special.i0e(X),
        jax.scipy.special.ndtri(X * 0.5),
        jax.scipy.special.polygamma(1, X),
        jax.scipy.special.expi(X),
        jax.scipy.special.xlogy(X, X),
        jax.scipy.stats.norm.logpdf(X),
        jax.scipy.stats.rankdata(X),
        jax.scipy.signal.convolve(X[0], X[1]),
        jax.scipy.ndimage.map_coordinates(X, [X, X], 1),
    ),
}


def shapes(variables):
    return tuple(tuple(getattr(var.aval, "shape", ())) for var in variables)


@pytest.mark.parametrize("family", ORDINARY)
def test_what_ordinary_functions_emit_has_rules_and_is_not_kept_whole_by_name(family):
    program = without_high_primitives(jax.make_jaxpr(ORDINARY[family])())
    eqns = [eqn for eqn in walk(program.jaxpr) if eqn.primitive.name not in CONTROL_FLOW]
    assert len({eqn.primitive.name for eqn in eqns}) > 10
    for eqn in eqns:
        operands, results = shapes(eqn.invars), shapes(eqn.outvars)
        assert eqn.primitive.name in RULES
        assert eqn.primitive.name not in REASONS or not any((*operands, *results)), eqn
        rule = rule_for(eqn.primitive.name, operands, results, eqn.params)
        assert_fits(Equation(eqn.primitive.name, operands, results, (), (), rule))


def test_a_call_names_the_body_that_it_runs():
    def body_of(function, primitive):
        (eqn,) = [eqn for eqn in walk(jax.make_jaxpr(function)(SQUARE).jaxpr) if eqn.primitive.name == primitive]
        operands = call_operands(primitive, eqn.params, len(eqn.invars))
        body = call_body(primitive, eqn.params)
        inside = [var.aval.shape for var in getattr(body, "jaxpr", body).invars]
        assert [eqn.invars[index].aval.shape for index in operands] == inside
        assert [var.aval.shape for var in eqn.outvars] == [var.aval.shape for var in getattr(body, "jaxpr", body).outvars]
        return {own.primitive.name for own in walk(getattr(body, "jaxpr", body))}

    vmapped = jax.custom_batching.custom_vmap(jnp.sin)
    vmapped.def_vmap(lambda size, batched, x: (jnp.sin(x), True))
    composite = lax.composite(lambda x: jnp.cos(x), "test.cos")
    assert body_of(jax.jit(jnp.sin), "jit") == {"sin"}
    assert body_of(jax.checkpoint(jnp.sin), "remat2") == {"sin"}
    assert body_of(vmapped, "custom_vmap_call") == {"sin"}
    assert "cos" in body_of(composite, "composite")
    assert body_of(lambda x: linear_call(lambda r, y: y * r, lambda r, y: y * r, x, x), "linear_call") == {"mul"}
    assert "triangular_solve" in body_of(lambda a: jnp.linalg.solve(a, a), "custom_linear_solve")
    assert set(CALLS) < CONTROL_FLOW


@pytest.mark.parametrize(
    ("notation", "shapes", "text"),
    [
        ("... j, ... j -> ... j", ((4, 8, 2), (4, 8, 2)), "([i, j, k], [i, j, k])->([i, j, k]) {i=4, j=8, k=2}"),
        ("i k, k j -> i j", ((4, 8), (8, 2)), "([i, j], [j, k])->([i, k]) {i=4, j=8, k=2} reduction={j}"),
    ],
)
def test_custom_partitioning_has_the_rule_that_its_author_gave(notation, shapes, text):
    @custom_partitioning
    def kernel(x, y):
        return x @ y if "k" in notation else x + y

    reduction = {"reduction_factors": ("k",)} if "k" in notation else {}
    kernel.def_partition(partition=lambda *_: None, sharding_rule=notation, **reduction)
    eqn = equation(kernel, *(np.ones(shape, np.float32) for shape in shapes), primitive="custom_partitioning")
    assert str(eqn.rule) == text


def test_custom_partitioning_without_a_readable_rule_says_so():
    assert "without a sharding_rule" in rule_for("custom_partitioning", ((4,),), ((4,),), {"sharding_rule": None}).reason


@pytest.mark.parametrize(("layout", "query", "key"), [(0, (2, 16, 8, 4), (2, 32, 4, 4)), (1, (2, 8, 16, 4), (2, 4, 32, 4))])
def test_attention_kernels_split_batch_and_key_heads(layout, query, key):
    nothing = (0,)
    operands = (query, key, key, (1, 8, 16, 32), (2,), (2,), nothing, nothing, nothing, nothing)
    params = {"layout": layout, "variadic_args": (True, False)}
    rule = rule_for("dot_product_attention_fwd_wrapper", operands, (query, (2, 8, 16)), params)
    assert [size for size, free in zip(rule.sizes, rule.splittable, strict=True) if free] == [2, 4]
    assert rule.operands[3] == ((), (1, 2), (), ())
    assert rule.results[1] == ((0,), (1, 2), ())
    packed = rule_for("dot_product_attention_fwd_wrapper", (*operands[:6], (2, 4), (2, 4), nothing, nothing), (query, (6, 8, 16)), params)
    assert [size for size, free in zip(packed.sizes, packed.splittable, strict=True) if free] == [4]


@pytest.mark.parametrize(
    ("primitive", "operands", "results", "text"),
    [
        ("sharding_constraint", ((4, 8),), ((4, 8),), "([i, j])->([i, j]) {i=4, j=8}"),
        ("device_put", ((4,), (8,)), ((4,), (8,)), "([i], [j])->([i], [j]) {i=4, j=8}"),
        ("tie", ((4,), (8,)), ((8,),), "([i], [j])->([j]) {i=4, j=8}"),
        ("dce_sink", ((4,),), (), "([i])->() {i=4}"),
        ("from_edtype", ((4,),), ((4, 2),), "([i])->([i, 1]) {i=4}"),
        ("scaled_matmul", ((2, 8, 64), (2, 4, 64), (2, 8, 2), (2, 4, 2)), ((2, 8, 4),), SCALED_MATMUL),
    ],
)
def test_annotations_and_kernels_read_like_this(primitive, operands, results, text):
    assert str(rule_for(primitive, operands, results, {})) == text
