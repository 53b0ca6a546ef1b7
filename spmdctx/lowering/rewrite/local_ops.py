"""Runs ops per block inside a shard_map if XLA's partitioner would gather them although no device needs another's data."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh

from spmdctx.ir.projection import partial_axes, project
from spmdctx.ir.rule import OpRule
from spmdctx.ir.sharding import AxisNames
from spmdctx.machine.xla.partitioner.grouped_convolutions import group_factor, groups_of
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
        "lu",
        "ormqr",
        "qr",
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

Most become custom calls, which the partitioner keeps whole; select_and_scatter is expanded into a scatter before it runs.
"""


def is_local(eqn: Any) -> bool:
    """Returns whether an equation is run per block where it is split."""
    return eqn.primitive.name in LOCAL_OPS or is_grouped(eqn)


def is_grouped(eqn: Any) -> bool:
    """Returns whether an equation is a convolution with groups."""
    return eqn.primitive.name == "conv_general_dilated" and groups_of(eqn.params) > 1


def on_block(eqn: Any, rule: OpRule, axes: tuple[AxisNames, ...], mesh: Mesh) -> Any:
    """Returns an equation with the parameters that it has on one device's block: a convolution has fewer groups there."""
    if not is_grouped(eqn):
        return eqn
    ways = math.prod(mesh.shape[name] for name in axes[group_factor(rule, eqn.params)])
    counts = {name: -(-eqn.params[name] // ways) for name in ("feature_group_count", "batch_group_count")}
    return eqn.replace(params={**eqn.params, **counts})


def local_op(eqn: Any, rule: OpRule, axes: tuple[AxisNames, ...], mesh: Mesh) -> Any:
    """Returns an equation like `eqn` that works on each device's block, its op split as `axes`, and reduces its result.

    Operands and results must be in the shardings in which the op takes and makes them.
    """
    own, partial = on_block(eqn, rule, axes, mesh), partial_axes(rule, axes)

    def local(*blocks: Any) -> Any:
        found = own.primitive.bind(*blocks, **own.params)
        if own.primitive.multiple_results:
            return tuple(found)
        return jax.lax.psum(found, partial) if partial else found

    out_specs: Any = tuple(partition_spec(project(dims, axes)) for dims in rule.results)
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(partition_spec(project(dims, axes)) for dims in rule.operands),
        out_specs=out_specs if eqn.primitive.multiple_results else out_specs[0],
        check_vma=False,
    )
    structs = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=var.aval.weak_type) for var in eqn.invars]
    template = jax.make_jaxpr(mapped)(*structs).jaxpr.eqns[0]
    return template.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
