"""Small programs whose ops have every kind of rule, by family: kernels of one position, one group per device, dims of 1."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.shard_alike import shard_alike
from jax.experimental.xla_metadata import set_xla_metadata

from tests.rules import kernel_programs as kernels
from tests.rules.sweep import Small

INTS = np.arange(32, dtype=np.int32).reshape(4, 8)
WORDS = np.arange(32, dtype=np.uint32).reshape(4, 8)
BOOLS = INTS % 3 == 0
KEYS = jax.random.split(jax.random.key(0), 4)
STACK = np.random.default_rng(0).normal(size=(4, 3, 3)).astype(np.float32)
POSITIVE = STACK @ STACK.transpose(0, 2, 1) + 4 * np.eye(3, dtype=np.float32)
LINALG = lax.linalg


def ints(limit, *shape):
    return np.random.default_rng(1).integers(0, limit, size=shape).astype(np.int32)


def known(names):
    """The functions of `jax.lax` with these names, as far as this version has them."""
    return [found for name in names.split() if (found := getattr(lax, name, None)) is not None]


def each(functions, *args):
    """One program that applies all of the functions."""
    return Small(lambda *given: [function(*given) for function in functions], args)


_UNARY = (
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp "
    "exp2 expm1 floor is_finite lgamma log log1p log2 logistic neg one_minus_square round rsqrt sign sin sinh sqrt "
    "square tan tanh stop_gradient"
)
_BINARY = "add atan2 div eq ge gt igamma igammac le lt max min mul ne nextafter pow rem sub igamma_grad_a complex"
_BITS = "bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic shift_right_logical"

ELEMENTWISE = [
    each(known(_UNARY), (4, 8)),
    each(known(_UNARY)[:4], (1, 8)),
    each(known(_BINARY), (4, 8), (4, 8)),
    Small(lambda x, y: [x + y, x * y, lax.select(x > 0.5, x, x * 2)], ((4, 8), (1, 8))),
    Small(lambda x, y: [jnp.where(x > y, x, 0.0), jnp.clip(x, 0.2, y)], ((8, 3), (8, 1))),
    each(known(_BITS), INTS, INTS + 1),
    each([*known("clz population_count bitwise_not"), lambda n: lax.integer_pow(n, 2), lambda n: n.astype(jnp.float32)], INTS),
    Small(lambda z: [lax.real(z), lax.imag(z), lax.conj(z)], (INTS.astype(np.complex64),)),
    Small(lambda x: [lax.clamp(0.2, x, 0.7), lax.reduce_precision(x, 5, 2), jnp.copy(x), lax.exp(x)], ((4, 8),)),
    Small(lambda x, y: [lax.betainc(x + 1, y, x), lax.polygamma(jnp.ones_like(x), y), lax.zeta(x + 1.5, y)], ((4, 8), (4, 8))),
    Small(lambda x: [lax.bitcast_convert_type(x, jnp.int32), lax.bitcast_convert_type(x, jnp.uint8)], ((4, 8),)),
    Small(lambda x: lax.bitcast_convert_type(x, jnp.int32), (np.arange(32, dtype=np.uint8).reshape(8, 1, 4),)),
    Small(lambda x, y: lax.optimization_barrier((x, y)), ((4, 8), (8,))),
    Small(lambda x, n: [jax.nn.softmax(x * n), jax.nn.gelu(x)], ((4, 8), ())),
]


def dot(*numbers):
    return lambda x, y: lax.dot_general(x, y, numbers)


def ragged(contracting, batch, ragged_dims, groups):
    numbers = lax.RaggedDotDimensionNumbers((contracting, batch), ragged_dims, groups)
    return lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)


_SIZES = np.array([4, 0, 1, 3], np.int32)
CONTRACTION = [
    Small(dot(((1,), (0,)), ((), ())), ((8, 8), (8, 4))),
    Small(dot(((1,), (0,)), ((), ())), ((1, 8), (8, 3))),
    Small(dot(((1,), (0,)), ((), ())), ((8, 1), (1, 8))),
    Small(dot(((2,), (1,)), ((0,), (0,))), ((4, 1, 8), (4, 8, 2))),
    Small(dot(((3, 1), (0, 2)), ((), ())), ((8, 2, 3, 4), (4, 4, 2))),
    Small(dot(((3,), (3,)), ((2, 0), (0, 1))), ((2, 8, 4, 8), (4, 2, 1, 8))),
    Small(dot(((), ()), ((), ())), ((8,), (8,))),
    Small(lax.ragged_dot, ((8, 8), (4, 8, 4), _SIZES)),
    Small(ragged(((2,), (1,)), ((), ()), [1], [0]), ((2, 8, 8), (4, 8, 4), np.stack([_SIZES, _SIZES[::-1]]))),
    Small(ragged(((0,), (0,)), ((), ()), [0], []), ((8, 8), (8, 4), _SIZES)),
    Small(
        lambda x, y, left, right: lax.scaled_dot(x, y, lhs_scale=left, rhs_scale=right),
        (
            *(np.ones(shape, jnp.float8_e4m3fn) for shape in ((8, 64), (64, 4))),
            np.ones((8, 2), jnp.bfloat16),
            np.ones((2, 4), jnp.bfloat16),
        ),
    ),
]


def convolution(batch, groups, features_in, features_out, window, **options):
    """A convolution of `batch` images, and its gradients with respect to both operands: these have batch groups, or dilated operands."""

    def program(x, kernel, cotangent):
        result, pull = jax.vjp(conv, x, kernel)
        return result, *pull(cotangent)

    def conv(x, kernel):
        given = {"window_strides": (1,) * len(window), "padding": "SAME", **options}
        return lax.conv_general_dilated(x, kernel, feature_group_count=groups, **given)

    x, kernel = (batch, groups * features_in, *([5] * len(window))), (groups * features_out, features_in, *window)
    struct = jax.eval_shape(conv, jax.ShapeDtypeStruct(x, np.float32), jax.ShapeDtypeStruct(kernel, np.float32))
    return Small(program, (x, kernel, struct.shape))


def batch_grouped(window):
    def program(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1,) * len(window), "SAME", batch_group_count=4)

    return Small(program, ((8, 4, *([5] * len(window))), (8, 4, *window)))


NHWC = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
CONVOLUTION = [
    *(
        convolution(*sizes, window)
        for window in ((1,), (3,))
        for sizes in ((8, 1, 4, 8), (1, 1, 8, 4), (2, 2, 4, 4), (1, 4, 2, 2), (2, 8, 1, 1), (1, 2, 1, 4), (4, 4, 1, 2), (2, 2, 4, 1))
    ),
    convolution(2, 2, 2, 4, (1, 1), window_strides=(2, 1)),
    convolution(2, 4, 1, 2, (3, 1), rhs_dilation=(2, 1)),
    convolution(1, 2, 4, 2, (3, 3), lhs_dilation=(2, 2), padding=((1, 1), (1, 1))),
    convolution(2, 1, 4, 2, (3, 3), window_strides=(2, 2)),
    *(batch_grouped(window) for window in ((1,), (3,), (1, 3))),
    Small(lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=2, **NHWC), ((2, 5, 3, 8), (1, 1, 4, 8))),
]


def pool(init, reducer, window=(1, 2, 1), strides=(1, 1, 1), padding="SAME"):
    return lambda x: lax.reduce_window(x, init, reducer, window, strides, padding)


def pool_tangent(tangents, x):
    return jax.jvp(pool(-jnp.inf, lax.max), (x,), (tangents,))[1]


def pool_gradient(cotangent, x):
    return jax.vjp(pool(-jnp.inf, lax.max), x)[1](cotangent)[0]


REDUCTION = [
    *(
        Small(lambda x: [lax.reduce_sum(x, (1,)), lax.reduce_max(x, (0, 2)), lax.reduce_min(x, (0,)), lax.reduce_prod(x, (2,))], (shape,))
        for shape in ((4, 8, 2), (1, 8, 3))
    ),
    Small(lambda x: [lax.reduce_and(x, (0,)), lax.reduce_or(x, (1,)), lax.reduce_sum(x.astype(int), (0, 1))], (BOOLS,)),
    Small(lambda x: [lax.reduce_xor(x, (0,)), lax.argmax(x, 1, jnp.int32), lax.argmin(x, 0, jnp.int32)], (INTS % 7,)),
    Small(lambda x: [lax.argmax(x, 0, jnp.int32), lax.argmin(x, 1, jnp.int32)], ((8, 1),)),
    Small(lambda x: lax.reduce(x, np.float32(0), jnp.hypot, (0,)), ((8, 4),)),
]
WINDOWS = [
    Small(lambda x: [pool(0.0, lax.add)(x), pool(-jnp.inf, lax.max, padding="VALID")(x), pool(jnp.inf, lax.min)(x)], ((4, 8, 2),)),
    Small(
        lambda x: [pool(1.0, lax.mul)(x), pool(0.0, lax.add, (1, 1, 1))(x), pool(0.0, lax.add, (1, 8, 1), padding="VALID")(x)], ((1, 8, 4),)
    ),
    Small(pool_gradient, ((4, 6, 2), (4, 6, 2))),
    Small(pool_tangent, ((4, 6, 2), (4, 6, 2))),
    Small(lambda x: jax.vjp(pool(0.0, lax.add, (1, 3, 1), (1, 2, 1), "VALID"), x)[1](x[:, :2])[0], ((4, 5, 2),)),
]
ORDERING = [
    Small(lambda x: [lax.sort(x, dimension=1), lax.sort((x, x * 2), dimension=0, num_keys=1)[1]], ((4, 8),)),
    Small(
        lambda x: [lax.cumsum(x, 1), lax.cumprod(x, 0), lax.cummax(x, 1, reverse=True), lax.cummin(x, 0), lax.cumlogsumexp(x, 1)], ((4, 8),)
    ),
    Small(lambda x: [lax.cumsum(x, 1), lax.cumsum(x, 0)], ((8, 1),)),
    Small(lambda x: [lax.top_k(x, 2), lax.top_k(x, 1, axis=0), lax.approx_max_k(x, 3)], ((4, 8),)),
]
BATCHED = [
    Small(
        lambda a: [LINALG.cholesky(a, symmetrize_input=False), LINALG.lu(a), LINALG.qr(a), LINALG.eigh(a, symmetrize_input=False)],
        (POSITIVE,),
    ),
    Small(lambda a: [LINALG.eig(a), LINALG.svd(a), LINALG.schur(a), LINALG.hessenberg(a)], (STACK,)),
    Small(lambda a: [LINALG.svd(a, compute_uv=False), LINALG.tridiagonal(a @ a.mT)], (STACK,)),
    Small(lambda a, taus: [LINALG.householder_product(a, taus), LINALG.ormqr(a, taus, a)], (STACK, (4, 3))),
    Small(lambda a, c: LINALG.symmetric_product(a, c, beta=0.5, symmetrize_output=False), (STACK, POSITIVE)),
    Small(lambda p: LINALG.lu_pivots_to_permutation(p, 4), (np.tile(np.array([1, 1, 3, 3], np.int32), (8, 1)),)),
    Small(lambda a, b: LINALG.triangular_solve(a, b, left_side=True, lower=True), (POSITIVE, (4, 3, 8))),
    Small(lambda a, b: LINALG.triangular_solve(a, b, lower=True), (POSITIVE[:1], (1, 8, 3))),
    Small(lambda d, b: LINALG.tridiagonal_solve(d * 0, d, d * 0, b), ((8, 4), (8, 4, 2))),
    Small(lambda a: jnp.linalg.geqrf(a) if hasattr(jnp.linalg, "geqrf") else LINALG.qr(a, pivoting=True), (STACK,)),
    Small(lambda x: [lax.fft(x, "RFFT", (3,)), lax.fft(x.astype(jnp.complex64), "FFT", (3,))], (STACK,)),
    Small(lambda x: lax.fft(x, "IRFFT", (8, 6)), (np.ones((4, 8, 4), np.complex64),)),
]


def rows(x, starts):
    return jax.vmap(lambda x, start: lax.dynamic_slice(x, (start, 0), (3, 4)))(x, starts)


def write_rows(x, update, starts):
    return jax.vmap(lambda x, update, start: lax.dynamic_update_slice(x, update, (start, 0)))(x, update, starts)


def embedding(table, tokens, cotangent):
    result, pull = jax.vjp(lambda table: table[tokens], table)
    return result, pull(cotangent)[0]


_INTO = lax.ScatterDimensionNumbers(update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
_DISTINCT = np.random.default_rng(1).permutation(32)[:8].reshape(4, 2, 1).astype(np.int32)
INDEXING = [
    Small(embedding, ((8, 4), ints(8, 4, 2), (4, 2, 4))),
    Small(embedding, ((8, 1), ints(8, 1, 8), (1, 8, 1))),
    Small(lambda x, i: [jnp.take(x, i, axis=0), jnp.take(x, i + 9, axis=0, mode="fill"), x[:, i % 4]], ((8, 4), ints(8, 8))),
    Small(lambda x, i, j: x[i, j], ((4, 8, 2), ints(4, 8), ints(8, 8))),
    Small(lambda x, i: [jnp.take_along_axis(x, i, -1), x.at[jnp.arange(4)[:, None], i].add(1.0)], ((4, 8), ints(8, 4, 2))),
    Small(rows, ((4, 8, 4), ints(5, 4))),
    Small(
        lambda x, i, u: [getattr(lax, f"scatter{kind}")(x, i, u, _INTO) for kind in ("_add", "_mul", "_min", "_max", "_sub", "")],
        ((32, 4), _DISTINCT, (4, 2, 4)),
    ),
    *(
        Small(lambda x, u, i: [x.at[i].set(u), x.at[i].add(u), x.at[i].max(u), x.at[i].mul(u)], ((rows, 4), (4,), np.int32(rows - 1)))
        for rows in (8, 1)
    ),
    Small(write_rows, ((4, 8, 4), (4, 2, 4), ints(7, 4))),
    Small(write_rows, ((4, 8, 4), (4, 1, 4), ints(7, 4))),
    Small(lambda x, i, u: x.at[:, i].add(u), ((4, 8, 2), ints(8, 4), (4, 4, 2))),
    Small(lambda x, i: jax.ops.segment_sum(x, i, 4), ((8, 4), ints(4, 8))),
    Small(lambda x, i: x.at[i].apply(jnp.sin), ((8, 4), np.array([5, 2, 7, 0], np.int32))),
]
MOVING = [
    Small(
        lambda x: [lax.broadcast_in_dim(x, (2, 4, 8), (1, 2)), lax.transpose(x, (1, 0)), x[:, None], lax.rev(x, (1,)), jnp.tile(x, (2, 1))],
        ((4, 8),),
    ),
    Small(lambda x: [lax.broadcast_in_dim(x, (4, 8), (0, 1)), lax.squeeze(x, (1,)), lax.rev(x, (1,)), lax.tile(x, (1, 8))], ((4, 1),)),
    Small(lambda x: jnp.broadcast_to(x, (4, 8)), ((),)),
    Small(lambda x, y: [lax.concatenate((x, y), 1), lax.concatenate((x, x), 0), jnp.stack((x, x), 1)], ((4, 8), (4, 3))),
    Small(lambda x: [lax.pad(x, 0.0, ((0, 0, 0), (1, 3, 0))), lax.pad(x, 0.0, ((0, 0, 1), (-1, 1, 0)))], ((4, 8),)),
    Small(
        lambda x: [lax.slice(x, (0, 2), (4, 6)), lax.slice(x, (1, 0), (2, 8), (1, 2)), lax.split(x, (3, 5), 1), jnp.unstack(x, axis=0)],
        ((4, 8),),
    ),
    Small(lambda x: [lax.slice(x, (0, 0), (1, 8)), lax.pad(x, 0.0, ((0, 1, 0), (0, 0, 0)))], ((1, 8),)),
    Small(lambda x, i: [lax.dynamic_slice(x, (0, i), (4, 4)), lax.dynamic_slice(x, (i, 0), (1, 8))], ((4, 8), np.int32(3))),
    *(
        Small(lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), ((4, 8), update, np.int32(2)))
        for update in ((4, 1), (1, 1), (1, 8), (2, 2))
    ),
    *(
        Small(lambda x, target=target: lax.reshape(x, target), (source,))
        for source, target in (
            ((8, 4, 2), (32, 2)),
            ((32, 2), (8, 8)),
            ((4, 8), (4, 1, 2, 4)),
            ((2, 12), (6, 4)),
            ((64,), (8, 8)),
            ((6, 4), (4, 6)),
            ((1, 8), (8, 1)),
            ((6, 1, 20), (1, 12, 1, 10)),
        )
    ),
    Small(lambda x: [x + lax.iota(jnp.float32, 8), x * lax.broadcasted_iota(jnp.float32, (4, 8), 0)], ((4, 8),)),
]


def bits(key):
    return jax.random.bits(key, (4, 2))


RANDOM = [
    Small(lambda key: [bits(key), jax.random.split(key, (8, 4)), jax.random.gamma(key, jnp.ones((4, 2)) * 2.0)], (KEYS[0],)),
    Small(lambda keys: [jax.vmap(bits)(keys), jax.random.clone(keys), jax.random.key_data(keys)], (KEYS,)),
    Small(lambda n: jax.vmap(lambda n: jax.random.fold_in(jax.random.key(n), n))(n), (np.arange(8),)),
    Small(jax.random.wrap_key_data, (np.asarray(jax.random.key_data(KEYS)),)),
    Small(lambda state: lax.rng_bit_generator(state, (8, 4)), (WORDS[0, :4],)),
    Small(lambda k, x: jax.extend.random.threefry2x32_p.bind(k, k, x, x), (WORDS, WORDS)),
    Small(lambda key: [jax.random.normal(key, (8, 1)), jax.random.uniform(key, (4, 8)), jax.random.permutation(key, 8)], (KEYS[0],)),
]


def recurrence(x, w):
    def step(carry, row):
        carry = jnp.tanh(carry @ w + row)
        return carry, carry.sum(0)

    return lax.scan(step, x[0], x)


CONTROL = [
    Small(recurrence, ((3, 4, 8), (8, 8))),
    Small(lambda x, w: jax.grad(lambda w: jnp.sum(recurrence(x, w)[0] ** 2))(w), ((2, 2, 4), (4, 4))),
    Small(lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x)), ((4, 8),)),
    Small(lambda x: lax.cond(x[0, 0] > 0.5, jnp.sin, lambda x: x[::-1], x), ((4, 8),)),
    Small(lambda x: lax.switch(jnp.argmax(x[0, :3]), [jnp.sin, jnp.cos, jnp.tanh], x), ((1, 8),)),
    Small(lambda x, w: jax.grad(lambda w: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ w))(x)))(w), ((4, 8), (8, 2))),
    Small(lambda x: lax.associative_scan(jnp.add, x), ((8, 2),)),
    Small(lambda x: lax.map(lambda row: jnp.cumsum(row), x), ((4, 8),)),
]


@custom_partitioning
def kernel(x, y):
    return x + y


kernel.def_partition(
    partition=lambda mesh, given, made: (mesh, lambda x, y: x + y, made.sharding, tuple(one.sharding for one in given)),
    infer_sharding_from_operands=lambda mesh, given, made: given[0].sharding,
    sharding_rule="i j, i j -> i j",
)
ANNOTATED = [
    Small(lambda x: [checkpoint_name(x * 2, "twice"), jax.device_put(x + 1), set_xla_metadata(jnp.sin(x), kind="sine")], ((4, 8),)),
    Small(lambda x, y: shard_alike(x * 2, y + 1), ((4, 8), (4, 8))),
    Small(kernel, ((4, 8), (4, 8))),
]
KERNELS = [
    Small(kernels.scaled, ((16, 4), (4,))),
    Small(kernels.transposed, ((8, 16),)),
    Small(partial(kernels.attention, causal=True), ((2, 8, 4, 8), (2, 4, 4, 8), (2, 4, 4, 8))),
    Small(kernels.attention, ((4, 4, 8, 8), (4, 2, 8, 8), (4, 2, 8, 8))),
    Small(kernels.summed, ((4, 8, 3),)),
    Small(partial(kernels.summed, order=(0, 2, 1)), ((4, 8, 3),)),
    Small(kernels.looked_up, (np.array([2, 0, 3, 1], np.int32), (4, 16))),
    Small(kernels.in_place, ((8, 4),)),
    Small(jax.vmap(kernels.numbered), ((8, 2, 2),)),
    Small(jax.vmap(jax.vmap(kernels.scaled, (0, None)), (None, 0)), ((4, 4, 4), (8, 4))),
]
NOT_RUN = {
    **dict.fromkeys(("cholesky_update", "geqp3", "geqrf", "select_and_scatter"), "has no public function that makes it"),
    **dict.fromkeys(("eq_to", "le_to", "lt_to", "copy_p", "dce_sink", "empty", "tie", "zeros_like", "relayout", "stage"), "is JAX's own"),
    **dict.fromkeys(("to_edtype", "from_edtype", "iota_2x32_shape", "polynomial", "broadcast_to"), "is JAX's own"),
    **dict.fromkeys(("layout_constraint", "with_memory_space_constraint"), "asks for what CPU devices do not have"),
    **dict.fromkeys(("sharding_constraint", "reshard"), "says how its operand is split, so that no split of its own is left"),
    **dict.fromkeys(
        ("mulhi", "philox2x32", "philox4x32", "threefry4x32", "scaled_matmul", "scaled_matmul_wrapper"), "has no lowering for CPU"
    ),
    "rng_uniform": "gives other numbers in every run",
}
"""Primitives with rules that split something, and the reason why no program here has them."""

FAMILIES = {
    "elementwise": ELEMENTWISE,
    "contraction": CONTRACTION,
    "convolution": CONVOLUTION,
    "reduction": REDUCTION,
    "windows": WINDOWS,
    "ordering": ORDERING,
    "batched": BATCHED,
    "indexing": INDEXING,
    "moving": MOVING,
    "random": RANDOM,
    "control": CONTROL,
    "annotated": ANNOTATED,
    "kernels": KERNELS,
}
