"""Arrays come to other groups of devices as they were, by the shortest way that JAX has."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdctx.pipeline.run import routes
from spmdctx.pipeline.run.routes import Spot, move
from spmdctx.pipeline.run.tape import Tape

ROWS = jnp.arange(64.0).reshape(8, 8)


def on(first, spec, shape=(2, 2)):
    devices = np.array(jax.devices()[first : first + int(np.prod(shape))])
    return NamedSharding(Mesh(devices.reshape(shape), ("x", "y")[: len(shape)]), spec)


def mover(values, sources, targets):
    """A tape that moves arrays of these types."""
    tape = Tape()
    spots = [Spot(index, place, jax.typeof(value)) for index, (value, place) in enumerate(zip(values, sources, strict=True))]
    found = move(tape, spots, targets)
    return tape.finished([spot.name for spot in spots], [spot.name for spot in found])


def moved(values, sources, targets, given=None):
    """Arrays after their move, of a tape that takes them as they lie in `given`."""
    arrays = [jax.device_put(value, place) for value, place in zip(values, given or sources, strict=True)]
    return mover(values, sources, targets)(arrays)


@pytest.fixture
def no_device_put(monkeypatch):
    """Lets `jax.device_put` fail inside of the tape alone."""

    class Jax:
        def __getattr__(self, name):
            assert name != "device_put"
            return getattr(jax, name)

    monkeypatch.setattr(routes, "jax", Jax())


@pytest.mark.parametrize("spec", [P(), P("x"), P("y", "x"), P(None, ("x", "y"))])
def test_shards_that_go_over_as_they_are_need_no_device_put(spec, no_device_put):
    source, target = on(0, spec), on(4, spec)
    one, other = moved([ROWS, 2 * ROWS], [source, source], [target, target])
    for found, value in ((one, ROWS), (other, 2 * ROWS)):
        assert found.sharding == target
        assert found.committed
        np.testing.assert_array_equal(found, value)


MOVES = {
    "another sharding": (on(0, P("x")), on(4, P("y"))),
    "the same devices": (on(0, P("x")), on(0, P("y"))),
    "devices in another order": (on(0, P("x")), NamedSharding(Mesh(np.array(jax.devices()[3::-1]).reshape(2, 2), ("x", "y")), P("x"))),
    "fewer devices": (on(0, P("x")), on(4, P("x"), (2,))),
    "another memory": (on(0, P("x")), on(4, P("x")).with_memory_kind("unpinned_host")),
}


@pytest.mark.parametrize("name", MOVES)
def test_all_other_moves_keep_the_values(name):
    source, target = MOVES[name]
    (found,) = moved([ROWS], [source], [target])
    assert found.sharding == target
    np.testing.assert_array_equal(found, ROWS)


def test_keys_are_moved():
    keys = jax.random.split(jax.random.key(3), 8)
    (found,) = moved([keys], [on(0, P("x"))], [on(4, P("x"))])
    assert found.sharding == on(4, P("x"))
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))


def test_an_array_that_lies_otherwise_than_the_tape_was_told_is_moved():
    """A caller's array counts as at home where an equal division has another name."""
    (found,) = moved([ROWS], [on(0, P("x"))], [on(4, P("x"))], given=[on(0, P("y"))])
    assert found.sharding == on(4, P("x"))
    np.testing.assert_array_equal(found, ROWS)


def test_a_deleted_array_is_an_error():
    source = on(0, P("x"))
    run, array = mover([ROWS], [source], [on(4, P("x"))]), jax.device_put(ROWS, source)
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        run([array])


@pytest.mark.parametrize(("guard", "is_refused"), [("disallow", False), ("disallow_explicit", True)])
def test_a_guard_of_transfers_takes_moves_for_explicit_ones(guard, is_refused):
    source = on(0, P("x"))
    run, array = mover([ROWS], [source], [on(4, P("x"))]), jax.device_put(ROWS, source)
    with jax.transfer_guard(guard), pytest.raises(RuntimeError, match="Disallowed") if is_refused else nullcontext():
        jax.block_until_ready(run([array]))
