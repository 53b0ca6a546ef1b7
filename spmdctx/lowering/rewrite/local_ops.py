"""Runs ops per block inside a shard_map if XLA's partitioner would gather them although no device needs another's data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from spmdctx.ir.sharding import TensorSharding
from spmdctx.trace.specs import partition_spec

LOCAL_OPS = frozenset(
    {
        "approx_top_k",
        "cholesky",
        "eig",
        "eigh",
        "fft",
        "geqrf",
        "hessenberg",
        "householder_product",
        "igamma",
        "igamma_grad_a",
        "igammac",
        "lu",
        "ormqr",
        "qr",
        "random_gamma_grad",
        "regularized_incomplete_beta",
        "schur",
        "select_and_gather_add",
        "select_and_scatter_add",
        "svd",
        "top_k",
        "triangular_solve",
        "tridiagonal",
        "tridiagonal_solve",
    }
)
"""Primitives whose split dimensions are all batch dimensions, and whose parameters do not name their sizes.

Most become custom calls, which the partitioner keeps whole; select_and_scatter is expanded into a scatter before it runs. Gamma and beta
functions become loops until every element has converged; split by the partitioner, devices would ask each other in every iteration.
"""


def local_op(eqn: Any, operands: Sequence[TensorSharding], results: Sequence[TensorSharding], mesh: Mesh) -> Any:
    """Returns an equation like `eqn` that works on each device's block; operands and results must be in the given shardings."""

    def local(*blocks: Any) -> Any:
        found = eqn.primitive.bind(*blocks, **eqn.params)
        return tuple(found) if eqn.primitive.multiple_results else found

    out_specs: Any = tuple(partition_spec(sharding) for sharding in results)
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(partition_spec(sharding) for sharding in operands),
        out_specs=out_specs if eqn.primitive.multiple_results else out_specs[0],
        check_vma=False,
    )
    structs = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=var.aval.weak_type) for var in eqn.invars]
    return jax.make_jaxpr(mapped)(*structs).jaxpr.eqns[0]
