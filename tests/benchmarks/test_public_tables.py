"""Rule tables of public projects: what they split, and that programs under them compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks.public_models import Marks, decoder, moe_dense, moe_ragged
from benchmarks.public_tables import Pins, spec_of, tables, template

RULES = {"batch": ("data", "fsdp"), "embed": ("fsdp", "tensor"), "heads": ("tensor",), "mlp": ("tensor",)}
SMALL = {"layers": 1, "features": 32, "hidden": 64}


@pytest.mark.parametrize(
    ("names", "shape", "spec"),
    [
        ("embed heads", (64, 32), (("fsdp",), ("tensor",))),
        ("batch length embed", (8, 4, 32), (("fsdp",), (), ("tensor",))),
        ("heads mlp", (32, 32), (("tensor",), ())),
        ("batch mlp", (6, 32), ((), ("tensor",))),
        (". other", (8, 8), ((), ())),
    ],
)
def test_a_name_takes_the_axes_that_exist_are_free_and_divide(names, shape, spec):
    assert spec_of(names, shape, RULES, {"fsdp": 4, "tensor": 2}) == spec


def test_templates_store_what_their_stage_says():
    program = decoder(batch=8, length=8, heads=4, scan=True, **SMALL)
    found = {}
    for zero in (0, 1, 3):
        mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
        pins = Pins(program, template(program, 4, 2, zero), mesh)
        found[zero] = [pins.stored("layers/up", (2, 32, 64), stage) for stage in (3, 1)]
    assert found == {
        0: [((), (), ("model",))] * 2,
        1: [((), (), ("model",)), ((), ("data",), ("model",))],
        3: [((), ("data",), ("model",))] * 2,
    }


@pytest.mark.parametrize(("make", "table"), [(moe_dense, "maxtext expert8"), (moe_ragged, "maxtext fsdp4 tensor2")])
def test_programs_compute_the_same_under_a_table(make, table):
    program = make(batch=8, length=8, **SMALL)
    own = tables(make.__name__)[table]
    pins = Pins(program, own, Mesh(np.array(jax.devices()).reshape(*own.mesh.values()), tuple(own.mesh)))
    random = np.random.default_rng(0)
    weights = jax.tree.map(lambda shape: jnp.asarray(random.normal(size=shape) / 8, jnp.float32), program.weights, is_leaf=_is_shape)
    tokens = jnp.asarray(random.integers(0, 32000, program.batch[0][0].shape))
    losses = [
        jax.jit(lambda weights, tokens, mark=mark: program.loss(mark, weights, tokens))(weights, tokens)
        for mark in (pins, Marks(program.dtype))
    ]
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-2)


def _is_shape(node):
    return isinstance(node, tuple)
