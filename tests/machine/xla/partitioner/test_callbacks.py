"""Results of callbacks come to all devices as the plan says, and the host sees whole arrays, once and in order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import spmdctx
from spmdctx.ir.collective import CauseForm

X = jnp.linspace(-1.0, 1.0, 64).reshape(16, 4)


def like(x, dtype=None):
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def twice(x):
    return np.asarray(x) * 2


def in_scan(x):
    return jax.lax.scan(lambda own, _: (jax.pure_callback(twice, like(own), own) - own, None), x, None, length=3)[0]


USED = {
    "pure": (1, lambda x: jax.pure_callback(twice, like(x), x) + x),
    "two results": (2, lambda x: sum(jax.pure_callback(lambda x: (x, twice(x)), (like(x), like(x)), x))),
    "one of two results": (1, lambda x: jax.pure_callback(lambda x: (x, twice(x)), (like(x), like(x)), x)[1] + x),
    "booleans": (1, lambda x: jax.pure_callback(lambda x: np.asarray(x) > 0, like(x, bool), x) * x),
    "scalar": (1, lambda x: jax.pure_callback(lambda x: np.float32(np.sum(x)), jax.ShapeDtypeStruct((), jnp.float32), x) + x),
    "io": (1, lambda x: io_callback(twice, like(x), x) + x),
    "ordered io": (1, lambda x: io_callback(twice, like(x), x, ordered=True) + x),
    "in a scan": (3, in_scan),
    "no result": (0, lambda x: (io_callback(lambda x: None, None, x), x * 2)[1]),
    "unused result": (0, lambda x: (io_callback(twice, like(x), x), x * 2)[1]),
}


def stepped(function, **options):
    return spmdctx.parallel(lambda x, scale: (function(x), scale * 2), batch_argnums=0, **options)


@pytest.mark.parametrize("name", USED)
def test_results_that_are_used_are_summed_over_all_devices(name):
    count, function = USED[name]
    step = stepped(function, parallel_mode="data_parallel")
    plan, report = step.plan(X, jnp.float32(1)), step.audit(X, jnp.float32(1))
    assert sum(one.repeats for one in plan.collectives if one.cause.form is CauseForm.BROADCAST) == count
    assert (report.missing, report.unplanned) == ((), ()), str(report)
    np.testing.assert_allclose(step(X, jnp.float32(1))[0], jax.jit(function)(X), rtol=1e-6)


def test_on_one_device_nothing_is_sent():
    step = stepped(USED["pure"][1], parallel_mode="stand_alone")
    assert step.plan(X, jnp.float32(1)).collectives == ()


def debugged(seen):
    def note(tag, x):
        seen.append((int(tag), np.shape(x), round(float(np.sum(x)), 3)))

    def plain(x):
        for tag in range(3):
            jax.debug.callback(note, tag, x * tag, ordered=True)
        return x + 1

    def in_scan(x):
        def turn(own, tag):
            jax.debug.callback(note, tag, own, ordered=True)
            return own * 2, None

        return jax.lax.scan(turn, x, jnp.arange(3))[0]

    def with_io(x):
        jax.debug.callback(note, 0, x, ordered=True)
        io_callback(note, None, 1, x, ordered=True)
        jax.jit(lambda x: jax.debug.callback(note, 2, jnp.sum(x), ordered=True))(x)
        return x * 3

    return {"plain": plain, "in a scan": in_scan, "with io": with_io}


@pytest.mark.parametrize("name", ["plain", "in a scan", "with io"])
def test_ordered_debugging_sees_whole_arrays_once_and_in_order(name):
    seen = []
    function = debugged(seen)[name]
    step = stepped(function, parallel_mode="data_parallel")
    result = step(X, jnp.float32(1))[0]
    jax.effects_barrier()
    got = list(seen)
    seen.clear()
    want = jax.jit(function)(X)
    jax.effects_barrier()
    assert [one[0] for one in got] == [0, 1, 2]
    assert got == sorted(seen)  # JAX itself does not order callbacks of different kinds
    np.testing.assert_allclose(result, want, rtol=1e-6)
    assert step.audit(X, jnp.float32(1)).ok


def test_ordered_prints_print(capsys):
    step = stepped(lambda x: (jax.debug.print("sum {total:.1f}", total=jnp.sum(x + 1), ordered=True), x)[1], parallel_mode="data_parallel")
    step(X, jnp.float32(1))
    jax.effects_barrier()
    assert capsys.readouterr().out.count("sum 64.0") == 1
