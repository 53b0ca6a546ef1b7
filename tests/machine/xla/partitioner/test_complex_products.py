"""Complex products on TPU are reduced once, as complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdctx
from spmdctx.audit import audit_text
from spmdctx.machine.xla.collectives.ways import WAYS
from tests.audit.compile_only import need_tpu

X = jax.ShapeDtypeStruct((64, 512), jnp.complex64)
SPLITS = {
    "contraction": (P(None, "data"), P("data"), P()),
    "contraction, scattered": (P(None, "data"), P("data"), P("data")),
    "rows and contraction": (P("model", "data"), P("data"), P("model")),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split_complex_products_are_reduced_as_planned(name):
    mesh = Mesh(np.array(need_tpu()).reshape(4, 2), ("data", "model"))

    def step(left, right):
        shardings = [NamedSharding(mesh, spec) for spec in SPLITS[name]]
        left, right = (jax.lax.with_sharding_constraint(one, own) for one, own in zip((left, right), shardings, strict=False))
        return jax.lax.with_sharding_constraint(jnp.tanh(left) @ right, shardings[2])

    run = spmdctx.parallel(step, mesh=mesh, topology="tpu-v5e", parallel_mode="auto_parallel", search_mode="sharding_propagation")
    arguments = X, jax.ShapeDtypeStruct((512, 256), jnp.complex64)
    report = audit_text(run.plan(*arguments), run.lower(*arguments).compile().as_text(), WAYS)
    assert (report.unplanned_bytes, report.found_bytes) == (0, report.planned_bytes)
    assert report.compiled_bytes == report.planned_bytes > 0
