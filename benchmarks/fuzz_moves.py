"""What a random program may do: one function per move, which adds a line to a block, or nothing where nothing fits."""

from __future__ import annotations

import math
from collections.abc import Callable

from benchmarks.fuzz_programs import EPS, Block, Var, fill, indented

_UNARY = (
    "jnp.sin({})",
    "jnp.cos({})",
    "jnp.tanh({})",
    "jax.nn.sigmoid({})",
    "jnp.exp(-jnp.abs({}))",
    "jnp.square(jnp.tanh({}))",
    "lax.erf({})",
    "jnp.log1p(jnp.abs({}))",
    "jnp.sqrt(jnp.abs({}) + 0.1)",
    "lax.rsqrt(jnp.abs({}) + 0.5)",
    "jax.nn.gelu({})",
    "jax.nn.silu({})",
    "jnp.arctan({})",
    "jax.nn.softplus({})",
    "jnp.expm1(-jnp.abs({}))",
    "lax.integer_pow(jnp.tanh({}), 3)",
    "jnp.cbrt({})",
    "jnp.sinh(jnp.tanh({}))",
    "lax.logistic({})",
    "0.5 * {} + 0.25",
    "lax.stop_gradient({}) * 0.5",
)
_EXACT_UNARY = ("-{}", "jnp.abs({})", "jnp.maximum({}, 0)", "jnp.minimum({}, 1)", "jnp.clip({}, -1, 2)", "lax.stop_gradient({})")
_ROUNDING = ("jnp.floor({})", "jnp.round({})", "jnp.ceil({})", "jnp.sign({})", "jnp.trunc({})")
_INTEGER = (
    "~{}",
    "{} + 1",
    "{} * 3",
    "{} // 2",
    "{} % 3",
    "lax.population_count({})",
    "lax.clz({})",
    "{} << 1",
    "{} >> 1",
    "jnp.abs({})",
    "{} ^ 5",
)
_BINARY = (
    "{} + {}",
    "{} - {}",
    "{} * {}",
    "{} / (jnp.abs({}) + 1)",
    "jnp.arctan2({}, jnp.abs({}) + 1)",
    "jnp.hypot({}, {})",
    "jnp.logaddexp({}, {})",
)
_EXACT_BINARY = ("jnp.maximum({}, {})", "jnp.minimum({}, {})", "jnp.where({0} > {1}, {0}, {1})", "jnp.copysign({}, {})")
_INT_BINARY = (
    "{} + {}",
    "{} * {}",
    "{} - {}",
    "{} & {}",
    "{} | {}",
    "{} ^ {}",
    "jnp.maximum({}, {})",
    "{} // (jnp.abs({}) + 1)",
    "{} % (jnp.abs({}) + 1)",
)
_COMPARISONS = ("{} < {}", "{} >= {}", "{} == {}", "{} != {}")


def unary(b: Block) -> None:
    kind = b.random.random()
    if kind < 0.6:
        x = b.float()
        if x:
            b.let(b.random.choice(_UNARY).format(x.name), x)
    elif kind < 0.75:
        x = b.array()
        if x and (x.is_float or x.is_int):
            b.let(b.random.choice(_EXACT_UNARY).format(x.name), x, exact=True)
    elif kind < 0.85:
        x = b.float(exact=True)
        if x:
            b.let(b.random.choice(_ROUNDING).format(x.name), x, exact=True)
    else:
        x = b.pick(lambda var: var.is_int)
        if x:
            b.let(b.random.choice(_INTEGER).format(x.name), x, exact=True)


def _fitting(b: Block, x: Var, fits: Callable[[Var], bool]) -> Var | None:
    """Returns another variable that broadcasts with x."""

    def broadcasts(var: Var) -> bool:
        return all(1 in pair or pair[0] == pair[1] for pair in zip(reversed(var.shape), reversed(x.shape), strict=False))

    return b.pick(lambda var: var.name != x.name and fits(var) and broadcasts(var))


def binary(b: Block) -> None:
    x = b.array()
    if x is None:
        return
    if x.is_float and EPS[x.dtype] < 0.1:
        y = _fitting(b, x, lambda var: var.dtype == x.dtype)
        if y:
            exact = b.random.random() < 0.2
            table = _BINARY if not exact else _EXACT_BINARY if x.exact and y.exact else _EXACT_BINARY[:2]
            b.let(b.random.choice(table).format(x.name, y.name), x, y, exact=exact)
    elif x.is_int:
        y = _fitting(b, x, lambda var: var.is_int)
        if y:
            b.let(b.random.choice(_INT_BINARY).format(x.name, y.name), x, y, exact=True)
    elif x.dtype == "bool":
        y = _fitting(b, x, lambda var: var.dtype == "bool")
        if y:
            b.let(
                b.random.choice(("{} & {}", "{} | {}", "{} ^ {}", "jnp.logical_and({}, ~{})")).format(x.name, y.name),
                x,
                y,
                exact=True,
            )


def compare(b: Block) -> None:
    x = b.pick(lambda var: (var.is_float or var.is_int) and var.exact)
    y = x and _fitting(b, x, lambda var: var.exact and var.dtype == x.dtype)
    if x and y:
        other = y.name if b.random.random() < 0.7 else "1"
        b.let(b.random.choice(_COMPARISONS).format(x.name, other), x, y, exact=True)


def select(b: Block) -> None:
    c = b.pick(lambda var: var.dtype == "bool")
    x = c and _fitting(b, c, lambda var: not var.is_key)
    if c and x:
        y = b.pick(lambda var: var.dtype == x.dtype and var.shape == x.shape)
        other = y.name if y and b.random.random() < 0.7 else "0"
        b.let(f"jnp.where({c.name}, {x.name}, {other})", c, x, *([y] if y else []), exact=True)


def convert(b: Block) -> None:
    x = b.array()
    if x is None or x.dtype == "complex64":
        return
    kinds = ["float32", "bfloat16", "float16", "float32"]
    if x.exact or not x.is_float:
        kinds += ["int32", "int8", "bool", "uint8", "float8_e4m3fn", "float8_e5m2"]
    kind = b.random.choice(kinds)
    # Out of range, conversions to integers differ by machine and by fusion.
    taken = f"jnp.clip({x.name}.astype(jnp.float32), 0, 100)" if x.is_float and kind in ("int32", "int8", "uint8") else x.name
    b.let(f"({taken}).astype(jnp.{kind if kind != 'bool' else 'bool_'})", x, exact=x.exact)


def _factors(b: Block, size: int, count: int) -> list[int]:
    shape = [1] * count
    while size > 1:
        prime = next(p for p in (2, 3, 5, 7, 11, 13, size) if size % p == 0)
        shape[b.random.randrange(count)] *= prime
        size //= prime
    return shape


def reshape(b: Block) -> None:
    x = b.array()
    if x is None:
        return
    shape = _factors(b, x.size, b.random.randint(1, 4)) if x.size else [0, *x.shape[:1]]
    axis = b.random.randint(0, len(x.shape))
    forms = [f"{x.name}.reshape({tuple(shape)})", f"jnp.expand_dims({x.name}, {axis})", f"jnp.squeeze({x.name})", f"jnp.ravel({x.name})"]
    b.let(b.random.choices(forms, (4, 2, 1, 1))[0], x, exact=True)


def transpose(b: Block) -> None:
    x = b.array(2)
    if x:
        order = b.random.sample(range(len(x.shape)), len(x.shape))
        forms = (f"jnp.transpose({x.name}, {tuple(order)})", f"jnp.swapaxes({x.name}, 0, -1)", f"jnp.moveaxis({x.name}, 0, -1)")
        b.let(b.random.choice(forms), x, exact=True)


def broadcast(b: Block) -> None:
    x = b.array()
    if x is None:
        return
    n, axis = b.random.choice((1, 2, 3, 8)), b.random.randrange(max(len(x.shape), 1))
    forms = (
        f"jnp.broadcast_to({x.name}, {(n, *x.shape)})",
        f"jnp.broadcast_to({x.name}[..., None], {(*x.shape, n)})",
        f"jnp.tile({x.name}, {n})",
        f"jnp.repeat({x.name}, {n}, axis={axis if x.shape else None})",
        f"jnp.stack([{x.name}, {x.name}], axis={axis})",
    )
    b.let(b.random.choice(forms), x, exact=True)


def join(b: Block) -> None:
    x = b.array(1)
    if x is None:
        return
    axis = b.random.randrange(len(x.shape))
    y = b.pick(
        lambda v: (
            v.dtype == x.dtype
            and len(v.shape) == len(x.shape)
            and all(p == q for k, (p, q) in enumerate(zip(v.shape, x.shape, strict=True)) if k != axis)
        )
    )
    if y:
        b.let(f"jnp.concatenate([{x.name}, {y.name}], axis={axis})", x, y, exact=True)


def cut(b: Block) -> None:
    x = b.array(1)
    if x is None or 0 in x.shape:
        return
    axis, rng = b.random.randrange(len(x.shape)), b.random
    n = x.shape[axis]
    start = rng.randrange(n)
    stop, step = rng.randint(start + 1, n), rng.choice((1, 1, 2, 3))
    colons = ":, " * axis
    forms = [
        (f"{x.name}[{colons}{start}:{stop}:{step}]", True),
        (f"{x.name}[{colons}{start}]", True),
        (f"{x.name}[{colons}::-1]", True),
        (f"jnp.roll({x.name}, {rng.randint(-3, 3)}, axis={axis})", True),
        (f"jnp.flip({x.name}, {axis})", True),
        (f"jnp.diff({x.name}, axis={axis})", False),
    ]
    if x.dtype != "bool":
        lows = [(rng.choice((0, 0, 1, -1 if n > 2 else 1, 3)), rng.choice((0, 0, 1, 2)), rng.choice((0, 0, 1))) for n in x.shape]
        forms += [(f"lax.pad({x.name}, jnp.zeros((), {x.name}.dtype), {lows})", True)] * 2
    if n % 2 == 0:
        forms.append((f"jnp.split({x.name}, 2, axis={axis})[{rng.randrange(2)}]", True))
    if rng.random() < 0.02:
        forms = [(f"{x.name}[{colons}:0]", True)]
    expression, exact = rng.choice(forms)
    made = b.let(expression, x, exact=exact)
    if made and 0 in made[0].shape:
        b.maker.tags.add("zero size")


def dynamic(b: Block) -> None:
    x, i = b.array(1), b.pick(lambda var: var.is_int and not var.shape)
    if x is None or 0 in x.shape:
        return
    axis = b.random.randrange(len(x.shape))
    size = b.random.randint(1, x.shape[axis])
    start = i.name if i else str(b.random.randrange(x.shape[axis]))
    part = f"lax.dynamic_slice_in_dim({x.name}, {start}, {size}, axis={axis})"
    update = f"lax.dynamic_update_slice_in_dim({x.name}, {part} * 2, {start}, axis={axis})"
    b.let(b.random.choice((part, update)), x, *([i] if i else []), exact=True)


def gather(b: Block) -> None:
    x = b.array(1)
    i = b.pick(lambda var: var.is_int and len(var.shape) <= 2)
    if x is None or i is None or 0 in x.shape:
        return
    axis, mode = b.random.randrange(len(x.shape)), b.random.choice(("clip", "wrap", "fill"))
    n = x.shape[axis]
    index = f"{i.name}.astype(jnp.int32) % {n}"
    forms = [f"jnp.take({x.name}, {index}, axis={axis}, mode={mode!r})", f"{x.name}[{index}]" if axis == 0 else f"{x.name}[:, {index}]"]
    if len(i.shape) == len(x.shape):
        forms.append(f"jnp.take_along_axis({x.name}, {index}, axis={axis})")
    if len(i.shape) <= 1:
        forms.append(f"jax.nn.one_hot({index}, {n})")
    b.let(b.random.choice(forms), x, i, exact=True)


def scatter(b: Block) -> None:
    x = b.array(1)
    i = b.pick(lambda var: var.is_int and len(var.shape) == 1)
    if x is None or 0 in x.shape or x.dtype in ("bool", "float8_e4m3fn", "float8_e5m2"):
        return
    n, rng = x.shape[0], b.random
    if i is not None and rng.random() < 0.7:
        index = f"{i.name}.astype(jnp.int32) % {n}"
        kind = rng.choice(("add", "max", "min", "add"))
        updates = f"{x.name}[{index}] * 2"
        made = b.let(f"{x.name}.at[{index}].{kind}({updates})", x, i, exact=kind != "add" or x.is_int)
        if made and rng.random() < 0.3:
            b.let(f"jax.ops.segment_sum({made[0].name}, jnp.arange({n}) // 2, num_segments={n})", made[0])
    else:
        places = rng.sample(range(n), rng.randint(1, n))
        b.let(f"{x.name}.at[np.array({places})].set({rng.choice(('0', '1'))})", x, exact=True)


def reduce(b: Block) -> None:
    x, rng = b.array(), b.random
    if x is None or x.dtype == "complex64" or (x.is_float and EPS[x.dtype] > 0.1):
        return
    rank = len(x.shape)
    axes = tuple(sorted(rng.sample(range(rank), rng.randint(0, rank)))) or None
    keep = rng.random() < 0.3
    if x.dtype == "bool":
        b.let(f"jnp.{rng.choice(('any', 'all', 'sum'))}({x.name}, axis={axes}, keepdims={keep})", x, exact=True)
    elif x.is_int:
        b.let(f"jnp.{rng.choice(('sum', 'max', 'min', 'prod'))}({x.name}, axis={axes}, keepdims={keep})", x, exact=True)
    elif rng.random() < 0.2 and x.size:
        b.let(f"jnp.{rng.choice(('max', 'min'))}({x.name}, axis={axes}, keepdims={keep})", x, exact=True)
    elif rng.random() < 0.1 and x.exact and rank and x.size:
        b.let(f"jnp.{rng.choice(('argmax', 'argmin'))}({x.name}, axis={rng.randrange(rank)})", x, exact=True)
    else:
        form = rng.choice(
            ("jnp.sum({})", "jnp.mean({})", "jnp.prod(jnp.tanh({}))", "jax.nn.logsumexp({})", "jnp.var({})", "jnp.linalg.norm({})")
        )
        if "norm" in form:
            b.let(f"jnp.sqrt(jnp.sum(jnp.square({x.name}), axis={axes}) + 0.1)", x)
        else:
            b.let(
                form.replace("{})", f"{{}}, axis={axes}, keepdims={keep})").replace("}), ", "}, ").format(x.name)
                if "prod" not in form
                else f"jnp.prod(jnp.tanh({x.name}), axis={axes}, keepdims={keep})",
                x,
            )


def normalize(b: Block) -> None:
    x = b.float(1)
    if x and x.size:
        axis, rng = b.random.randrange(len(x.shape)), b.random
        forms = (
            f"jax.nn.softmax({x.name}, axis={axis})",
            f"jax.nn.log_softmax({x.name}, axis={axis})",
            f"{x.name} * lax.rsqrt(jnp.mean({x.name} * {x.name}, {axis}, keepdims=True) + 0.1)",
            f"jax.nn.standardize({x.name}, axis={axis}, epsilon=0.1)",
            f"jnp.cumsum({x.name}, axis={axis})",
            f"jnp.cumprod(jnp.tanh({x.name}), axis={axis})",
            f"lax.cummax({x.name}, axis={axis}, reverse={rng.random() < 0.5})",
            f"lax.cumlogsumexp({x.name}, axis={axis})",
            f"lax.associative_scan(jnp.add, {x.name}, axis={axis})",
            f"lax.reduce_precision({x.name}, 8, 20)",
        )
        b.let(rng.choice(forms), x)


def order(b: Block) -> None:
    x, rng = b.pick(lambda var: var.exact and len(var.shape) >= 1 and (var.is_float or var.is_int)), b.random
    if x is None or 0 in x.shape:
        return
    axis = rng.randrange(len(x.shape))
    kind = rng.randrange(5)
    if kind == 0:
        b.let(f"jnp.sort({x.name}, axis={axis})", x, exact=True)
    elif kind == 1:
        b.let(f"jnp.argsort({x.name}, axis={axis})", x, exact=True)
    elif kind == 2:
        b.let(f"lax.top_k({x.name}, {rng.randint(1, x.shape[-1])})", x, exact=True)
    elif kind == 3 and x.size <= 256:
        b.let(f"jnp.searchsorted(jnp.sort({x.name}.ravel()), {x.name}.ravel()[:5])", x, exact=True)
    else:
        y = b.pick(lambda var: var.shape == x.shape and not var.is_key and var.dtype != "complex64")
        if y:
            b.let(f"lax.sort(({x.name}, {y.name}), dimension={axis}, num_keys=1)[1]", x, y, exact=y.exact)


def product(b: Block) -> None:
    x = b.float(1)
    if x is None or 0 in x.shape:
        return
    rng = b.random
    letters = "abcdefgh"[: len(x.shape)]
    known = b.pick(lambda v: v.dtype == x.dtype and 1 <= len(v.shape) <= 3 and any(n in x.shape for n in v.shape) and v.name != x.name)
    if known is not None and rng.random() < 0.6:
        free, other, used = iter("mnopq"), "", set[str]()
        for n in known.shape:
            same = [c for c, size in zip(letters, x.shape, strict=True) if size == n and c not in used]
            other += rng.choice(same) if same and rng.random() < 0.8 else next(free)
            used.add(other[-1])
        y = known
    else:
        n = rng.choice((1, 3, 8, 16))
        axes = sorted(rng.sample(range(len(x.shape)), min(len(x.shape), rng.choice((1, 1, 2)))))
        other = "".join(letters[axis] for axis in axes) + "m"
        y = b.argument((*(x.shape[axis] for axis in axes), n), x.dtype)
    shared = [c for c in letters if c in other]
    kept = [c for c in shared if rng.random() < 0.25]
    out = [c for c in dict.fromkeys(letters + other) if c not in shared or c in kept]
    rng.shuffle(out)
    summed = math.prod(n for c, n in zip(letters, x.shape, strict=True) if c in shared and c not in kept)
    wide = ", preferred_element_type=jnp.float32" if x.dtype != "float32" and rng.random() < 0.3 else ""
    b.let(f"jnp.einsum('{letters},{other}->{''.join(out)}', {x.name}, {y.name}{wide}) / {max(1, round(math.sqrt(summed)))}", x, y)


def convolve(b: Block) -> None:
    rng = b.random
    dims = rng.choice((1, 1, 2))
    x = b.pick(lambda var: var.is_float and EPS[var.dtype] < 0.1 and len(var.shape) == dims + 2 and 0 not in var.shape)
    if x is None:
        x = b.argument(
            (b.maker.batch, *(rng.choice((3, 4, 5, 8)) for _ in range(dims)), rng.choice((1, 2, 3, 4, 8))),
            rng.choice(("float32", "bfloat16")),
        )
    features = x.shape[-1]
    groups = rng.choice([g for g in range(1, features + 1) if features % g == 0]) if rng.random() < 0.4 else 1
    window, out = [rng.choice((1, 1, 2, 3)) for _ in range(dims)], groups * rng.choice((1, 2, 3, 4))
    w = b.argument((*window, features // groups, out), x.dtype)
    padding = rng.choice(("'SAME'", "'VALID'", str([(rng.randint(0, 2), rng.randint(0, 2)) for _ in range(dims)])))
    strides, dilation = [rng.choice((1, 1, 2)) for _ in range(dims)], [rng.choice((1, 1, 2)) for _ in range(dims)]
    grown = [rng.choice((1, 1, 1, 2)) for _ in range(dims)] if "[" in padding else None
    numbers = {1: "('NWC', 'WIO', 'NWC')", 2: "('NHWC', 'HWIO', 'NHWC')"}[dims]
    made = b.let(
        f"lax.conv_general_dilated({x.name}, {w.name}, {strides}, {padding}, lhs_dilation={grown}, rhs_dilation={dilation}, "
        f"dimension_numbers={numbers}, feature_group_count={groups}) / {max(1, round(math.sqrt(math.prod(window) * features // groups)))}",
        x,
        w,
    )
    if made and groups > 1:
        b.maker.tags.add("grouped convolution")


def pool(b: Block) -> None:
    rng = b.random
    x = b.float(2)
    if x and 0 not in x.shape:
        window = tuple(rng.choice((1, 1, 2, 3)) for _ in x.shape)
        strides = tuple(rng.choice((1, 1, 2)) for _ in x.shape)
        padding = rng.choice(("SAME", "VALID"))
        start, function = rng.choice((("-jnp.inf", "lax.max"), ("0.0", "lax.add")))
        b.let(
            f"lax.reduce_window({x.name}, jnp.array({start}, {x.name}.dtype), {function}, {window}, {strides}, {padding!r})",
            x,
        )


def algebra(b: Block) -> None:
    x = b.pick(lambda v: v.dtype == "float32" and len(v.shape) >= 2 and 0 not in v.shape and v.shape[-1] <= 8)
    if x is None:
        return
    n, t = x.shape[-1], f"jnp.swapaxes({x.name}, -1, -2)"
    square = f"jnp.tanh({t}) @ jnp.tanh({x.name}) / {x.shape[-2]} + 2 * jnp.eye({n})"
    form = b.random.choice(
        ("jnp.linalg.cholesky({})", "jnp.linalg.inv({})", "jnp.linalg.slogdet({})[1]", "jnp.fft.rfft({}).real", "jnp.linalg.det({})")
    )
    b.let(form.format(square), x)


def complexes(b: Block) -> None:
    x = b.pick(lambda v: v.dtype == "complex64")
    if x is None or b.random.random() < 0.3:
        y = b.pick(lambda v: v.dtype == "float32" and 0 not in v.shape)
        if y:
            b.let(b.random.choice((f"lax.complex({y.name}, jnp.sin({y.name}))", f"jnp.exp(1j * {y.name})")), y)
        return
    b.let(b.random.choice(("{}.real", "{}.imag", "jnp.conj({})", "jnp.abs({}) + 1", "{0} * {0}")).format(x.name), x)


def literals(b: Block) -> None:
    n, rng = b.random.choice((1, 3, 8, 16)), b.random
    forms = (
        f"jnp.arange({n}, dtype=jnp.{rng.choice(('int32', 'float32', 'int8'))})",
        f"jnp.ones(({n}, {rng.choice((2, 8))}), jnp.{rng.choice(('float32', 'bfloat16'))})",
        f"jnp.tri({n}, dtype=bool)",
        f"jnp.eye({n})",
        f"lax.broadcasted_iota(jnp.int32, ({n}, 4), {rng.randrange(2)})",
        f"jnp.asarray(np.linspace(-1, 1, {n * 2}).reshape({n}, 2), jnp.float32)",
    )
    b.let(rng.choice(forms), exact=True)


def draw(b: Block) -> None:
    key = b.pick(lambda var: var.is_key and not var.shape)
    if key is None:
        if b.depth:
            return
        made = b.let(f"jax.random.key({b.random.randrange(100)})")
        key = made[0] if made else None
    if key is None:
        return
    rng = b.random
    shape = tuple(rng.choice((1, 3, 8, 16)) for _ in range(rng.randint(0, 3)))
    forms = (
        f"jax.random.normal({key.name}, {shape})",
        f"jax.random.uniform({key.name}, {shape})",
        f"jax.random.bernoulli({key.name}, 0.5, {shape})",
        f"jax.random.randint({key.name}, {shape}, 0, 9)",
        f"jax.random.bits({key.name}, {shape}, jnp.{rng.choice(('uint32', 'uint8', 'uint16'))})",
        f"jax.random.permutation({key.name}, {rng.choice((3, 8, 16))})",
        f"jax.random.split({key.name})[{rng.randrange(2)}]",
        f"jax.random.fold_in({key.name}, {rng.randrange(9)})",
        f"jax.random.categorical({key.name}, jnp.zeros({shape}), axis=-1)" if shape else f"jax.random.gumbel({key.name}, {shape})",
        f"jax.random.truncated_normal({key.name}, -1., 1., {shape})",
    )
    b.let(rng.choice(forms), key)


def pin(b: Block) -> None:
    x = b.pick(lambda v: v.is_float and len(v.shape) >= 1 and 0 not in v.shape and EPS[v.dtype] < 0.1)
    if x is None or b.depth:
        return
    left, strategy = 8, []
    for n in x.shape:
        slices = b.random.choice([s for s in (1, 1, 2, 4, 8) if n % s == 0 and left % s == 0])
        left //= slices
        strategy.append(slices)
    own = tuple(strategy)
    body = b.random.choice(("x + x", "jnp.sin(x)", "x", "jnp.tanh(x) * x"))
    out = f", ({own},)" if b.random.random() < 0.5 else ""
    if b.let(f"spmdctx.shard(lambda x: {body}, ({own},){out})({x.name})", x):
        b.maker.tags.add("pins")


def _body(b: Block, params: list[Var], count: int, *, closed: bool = False) -> Block:
    """Returns a filled block of a function with these parameters, which sees what `b` sees unless it is `closed`."""
    inner = Block(b.maker, () if closed else b.vars, b.depth + 1)
    for var in params:
        inner.add(var)
    before = len(b.maker.arguments)
    fill(inner, count, MOVES)
    known = {var.name for var in b.vars}
    for one in b.maker.arguments[before:]:
        if one.name not in known:
            b.vars.insert(0, Var(one.name, one.shape, one.dtype, True, EPS.get(one.dtype, 0.0)))
    return inner


def _define(name: str, params: list[Var], inner: Block, returned: str) -> list[str]:
    return [f"def {name}({', '.join(var.name for var in params)}):", *indented([*inner.lines, f"return {returned}"])]


def _like(inner: Block, var: Var) -> str:
    """Returns an expression of the shape and type of a variable, from the body's last values where they fit."""
    own = [one for one in inner.own if one.shape == var.shape and one.dtype == var.dtype and one.name != var.name]
    if own:
        return own[-1].name
    found = [one for one in inner.own if one.is_float and one.name != var.name and EPS[one.dtype] < 0.1]
    if found and var.is_float:
        return f"({var.name} + jnp.mean({found[-1].name}.astype(jnp.float32)).astype({var.name}.dtype)) / 2" if found[-1].size else var.name
    return var.name


def _renamed(b: Block, var: Var, shape: tuple[int, ...] | None = None, exact: bool = False) -> Var:
    return Var(b.maker.name("x"), var.shape if shape is None else shape, var.dtype, exact or not var.is_float, var.eps)


def nested(b: Block) -> None:
    """Adds control flow around a body of a few lines, or a transformation of it."""
    if b.depth >= 2:
        return
    b.random.choice((_scan, _scan, _loop, _branches, _vmap, _remat, _gradient, _custom))(b)


def _scan(b: Block) -> None:
    carry, rng = b.float(), b.random
    xs = b.pick(lambda v: len(v.shape) >= 1 and 1 <= v.shape[0] <= 16 and not v.is_key)
    if carry is None:
        return
    c = _renamed(b, carry)
    each = [_renamed(b, xs, xs.shape[1:], exact=xs.exact)] if xs else []
    inner = _body(b, [c, *each], rng.randint(1, 5))
    name, last = b.maker.name("f"), inner.own[-1]
    out = last.name if not last.is_key else "None"
    params = [c, *(each or [Var("_", (), "int32", True, 0.0)])]
    before = _define(name, params, inner, f"{_like(inner, c)}, {out}")
    length = f"{xs.name}" if xs else f"None, length={rng.choice((1, 2, 3))}"
    extra = rng.choice(("", "", ", reverse=True", ", unroll=2"))
    call = f"lax.scan({name}, {carry.name}, {length}{extra})"
    b.let(call if out != "None" else f"{call}[:1]", *inner.own, carry, *b.vars, before=before)


def _loop(b: Block) -> None:
    carry, rng = b.float(), b.random
    if carry is None:
        return
    c, i = _renamed(b, carry), Var(b.maker.name("i"), (), "int32", True, 0.0)
    inner, name = _body(b, [i, c], rng.randint(1, 4)), b.maker.name("f")
    before = _define(name, [i, c], inner, _like(inner, c))
    bound = b.pick(lambda v: v.is_int and not v.shape)
    end = f"jnp.clip({bound.name}.astype(jnp.int32), 0, 4)" if bound and rng.random() < 0.5 else str(rng.randint(0, 3))
    b.let(f"lax.fori_loop(0, {end}, {name}, {carry.name})", *inner.own, carry, *b.vars, before=before)


def _branches(b: Block) -> None:
    x, p = b.float(), b.pick(lambda v: v.dtype == "bool" and not v.shape)
    if x is None:
        return
    test = p.name if p else None
    if test is None:
        k = b.pick(lambda v: v.exact and v.size > 0 and (v.is_int or v.is_float))
        if k is None:
            return
        test = f"jnp.ravel({k.name})[0] > 0"
    before, names, own = [], [], list[Var]()
    for _ in range(2):
        param = _renamed(b, x)
        inner, name = _body(b, [param], b.random.randint(0, 3)), b.maker.name("f")
        before += _define(name, [param], inner, _like(inner, param))
        names.append(name)
        own += inner.own
    b.let(f"lax.cond({test}, {names[0]}, {names[1]}, {x.name})", *own, x, *b.vars, before=before)


def _mapped(b: Block, x: Var, shape: tuple[int, ...] | None = None, exact: bool = False) -> tuple[Var, Block, str, Var]:
    """Returns the parameter, the body, the name and the last value of a new function, which is to be called with x."""
    param = _renamed(b, x, shape, exact)
    inner, name = _body(b, [param], b.random.randint(1, 4)), b.maker.name("f")
    return param, inner, name, inner.own[-1]


def _vmap(b: Block) -> None:
    x = b.pick(lambda v: len(v.shape) >= 1 and v.shape[0] >= 1 and not v.is_key and v.size > 0)
    if x is None:
        return
    axis = b.random.randrange(len(x.shape))
    param, inner, name, last = _mapped(b, x, (*x.shape[:axis], *x.shape[axis + 1 :]), exact=x.exact)
    if not last.is_key:
        before = _define(name, [param], inner, last.name)
        b.let(f"jax.vmap({name}, in_axes={axis}, out_axes=0)({x.name})", *inner.own, x, *b.vars, before=before)


def _remat(b: Block) -> None:
    x = b.float()
    if x is None:
        return
    param, inner, name, last = _mapped(b, x)
    if not last.is_key:
        wrap = b.random.choice(("jax.checkpoint", "jax.jit", "jax.checkpoint"))
        b.let(f"{wrap}({name})({x.name})", *inner.own, x, *b.vars, before=_define(name, [param], inner, last.name))


def _gradient(b: Block) -> None:
    x = b.float()
    if x is None:
        return
    param, inner, name, last = _mapped(b, x)
    if last.is_float and last.size:
        before = _define(name, [param], inner, f"jnp.mean({last.name}.astype(jnp.float32))")
        b.let(f"jax.{b.random.choice(('grad', 'grad', 'value_and_grad'))}({name})({x.name})", *inner.own, x, *b.vars, before=before)


def _custom(b: Block) -> None:
    x = b.float()
    if x is None:
        return
    param, raw = _renamed(b, x), b.maker.name("f")
    inner, name = _body(b, [param], b.random.randint(1, 3), closed=True), b.maker.name("f")
    last = inner.own[-1]
    if last.is_float and not {one.name for one in b.maker.arguments}.intersection(" ".join(inner.lines).replace(",", " ").split()):
        before = [
            *_define(raw, [param], inner, last.name),
            f"{name} = jax.custom_jvp({raw})",
            f"{name}.defjvp(lambda p, t: jax.jvp({raw}, p, t))",
        ]
        b.let(f"{name}({x.name})", *inner.own, x, *b.vars, before=before)


MOVES: list[tuple[int, Callable[[Block], object]]] = [
    (10, unary),
    (10, binary),
    (3, compare),
    (3, select),
    (4, convert),
    (4, reshape),
    (4, transpose),
    (3, broadcast),
    (3, join),
    (5, cut),
    (2, dynamic),
    (4, gather),
    (3, scatter),
    (7, reduce),
    (4, normalize),
    (3, order),
    (8, product),
    (3, convolve),
    (2, pool),
    (1, algebra),
    (1, complexes),
    (2, literals),
    (2, draw),
    (4, pin),
    (6, nested),
]
"""All moves with their weights."""
