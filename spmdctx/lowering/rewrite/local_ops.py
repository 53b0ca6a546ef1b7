"""Runs ops per block inside a shard_map if XLA's partitioner cannot split them, or would gather what no device needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.sharding import Mesh

from spmdctx.errors import UnsupportedError
from spmdctx.ir.primitives import KERNELS
from spmdctx.ir.projection import partial_axes, project
from spmdctx.ir.rule import DimFactors, OpRule
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.machine.xla.partitioner.complex_products import is_complex_product
from spmdctx.machine.xla.partitioner.grouped_convolutions import group_factor, groups_of
from spmdctx.machine.xla.partitioner.ragged_products import RAGGED, ragged_axes, ragged_dim
from spmdctx.rules.kernels.grids import shared_axes
from spmdctx.trace.build.jaxprs.equations import structs_of
from spmdctx.trace.build.origins import source_line
from spmdctx.trace.specs import named_sharding, partition_spec

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


CUSTOM_CALLS = KERNELS | {"ffi_call", "tpu_custom_call", "mosaic_gpu_p"}
"""Primitives that run a kernel of which the partitioner knows nothing.

TPU's compiler refuses them in a program that it partitions. In a manual region they run on what the plan gives each device: all of it,
but for parts of a grid.
"""

TRANSFORM = "fft"
"""A primitive whose kernel on CPU ends the process unless its arrays are row-major, which CPU's compiler does not see to.

A gather of columns makes it choose another order, also for the transforms before it.
"""

PARTITIONED = "custom_partitioning"
"""A primitive that brings its own partitioner, which TPU's compiler does not call."""


def is_local(eqn: Any, rule: OpRule | None, axes: tuple[AxisNames, ...], mesh: Mesh) -> bool:
    """Returns whether an equation, split over `axes`, must be written as a manual region."""
    name, is_tpu = eqn.primitive.name, bool(mesh.devices.flat[0].platform == "tpu")
    if name in CUSTOM_CALLS:
        return not eqn.effects
    if name == PARTITIONED:
        return is_tpu
    if _is_row_major(eqn, mesh):
        return True
    return any(axes) and (
        name in LOCAL_OPS
        or is_grouped(eqn)
        or bool(split_rows(eqn, rule, axes))
        or (is_tpu and is_complex_product(name, str(getattr(eqn.outvars[0].aval, "dtype", ""))))
    )


def _is_row_major(eqn: Any, mesh: Mesh) -> bool:
    """Returns whether an equation's arrays must be row-major, and are not by themselves."""
    return eqn.primitive.name == TRANSFORM and bool(mesh.devices.flat[0].platform == "cpu")


def split_rows(eqn: Any, rule: OpRule | None, axes: tuple[AxisNames, ...]) -> AxisNames:
    """Returns the axes that split the rows of a ragged product; none of other equations."""
    return ragged_axes(rule, eqn.params, axes) if rule is not None and eqn.primitive.name == RAGGED else ()


def own_groups(eqn: Any, names: AxisNames, blocks: Sequence[Any]) -> Sequence[Any]:
    """Returns the operands of a ragged product on one device, whose rows are split over `names`: each group has the rows that are there."""
    left, right, sizes = blocks
    rows = left.shape[ragged_dim(eqn.params)]
    first = jax.lax.axis_index(names).astype(sizes.dtype) * rows
    ends = jnp.cumsum(sizes, -1, dtype=sizes.dtype)
    own = jnp.clip(ends, first, first + rows) - jnp.clip(ends - sizes, first, first + rows)
    return left, right, own


def is_grouped(eqn: Any) -> bool:
    """Returns whether an equation is a convolution with groups."""
    return eqn.primitive.name == "conv_general_dilated" and groups_of(eqn.params) > 1


def on_block(eqn: Any, rule: OpRule, axes: tuple[AxisNames, ...], mesh: Mesh) -> Any:
    """Returns an equation with the parameters that it has on one device's block: fewer groups of a convolution, a smaller grid."""
    if eqn.primitive.name in KERNELS and any(axes):
        return eqn.replace(params=_on_part_of_grid(eqn.params, rule, [math.prod(mesh.shape[name] for name in own) for own in axes]))
    if not is_grouped(eqn):
        return eqn
    ways = math.prod(mesh.shape[name] for name in axes[group_factor(rule, eqn.params)])
    counts = {name: -(-eqn.params[name] // ways) for name in ("feature_group_count", "batch_group_count")}
    return eqn.replace(params={**eqn.params, **counts})


def _on_part_of_grid(params: Mapping[str, Any], rule: OpRule, ways: Sequence[int]) -> dict[str, Any]:
    """Returns the parameters of a kernel that runs the steps of one device, its factor `i` split so many ways."""
    grid, shared = params["grid_mapping"], shared_axes(params)
    sizes = list(grid.grid)
    for own, count in zip(shared, ways, strict=False):
        sizes[own.axis] //= count
    blocks = [
        mapping.replace(array_aval=_block_of(mapping.array_aval, dims, ways))
        for mapping, dims in zip(grid.block_mappings, (*rule.operands[grid.num_index_operands :], *rule.results), strict=True)
    ]
    own_avals = tuple(_block_of(aval, dims, ways) for aval, dims in zip(params["out_avals"], rule.results, strict=True))
    changed = {**params, "grid_mapping": grid.replace(grid=tuple(sizes), block_mappings=tuple(blocks)), "out_avals": own_avals}
    estimate = params.get("cost_estimate")
    if estimate is not None:
        fields = {name: int(getattr(estimate, name)) // math.prod(ways) for name in ("flops", "transcendentals", "bytes_accessed")}
        changed["cost_estimate"] = dataclasses.replace(estimate, **fields)
    return changed


def _block_of(aval: Any, dims: Sequence[DimFactors], ways: Sequence[int]) -> Any:
    """Returns an array's type on one device, the factors of its dimensions split so many ways."""
    shape = tuple(size // math.prod(ways[factor] for factor in factors) for size, factors in zip(aval.shape, dims, strict=True))
    return aval.update(shape=shape)


def local_op(eqn: Any, rule: OpRule | None, axes: tuple[AxisNames, ...], mesh: Mesh, *, widens: bool = False) -> Any:
    """Returns an equation like `eqn` that works on each device's block, its op split as `axes`, and reduces its result.

    Operands and results must be in the shardings in which the op takes and makes them. Without a rule they are whole. An equation that
    `widens` casts its one result to float32, in a variable of that type, before devices add it up.
    """
    if rule is None:
        operands: list[TensorSharding] = [()] * len(eqn.invars)
        results: list[TensorSharding] = [()] * len(eqn.outvars)
    else:
        operands, results = ([project(dims, axes) for dims in side] for side in (rule.operands, rule.results))
    out_specs: Any = tuple(map(partition_spec, results))
    mapped = jax.shard_map(
        _on_blocks(eqn, rule, axes, mesh, (operands, results), widens=widens),
        mesh=mesh,
        in_specs=tuple(map(partition_spec, operands)),
        out_specs=out_specs if eqn.primitive.multiple_results else out_specs[0],
        check_vma=False,
    )
    template = jax.make_jaxpr(mapped)(*structs_of(eqn.invars)).jaxpr.eqns[0]
    made = [jexc.Var(var.aval) for var in template.outvars] if widens else eqn.outvars
    return template.replace(invars=eqn.invars, outvars=made, source_info=eqn.source_info)


def _on_blocks(
    eqn: Any,
    rule: OpRule | None,
    axes: tuple[AxisNames, ...],
    mesh: Mesh,
    sides: tuple[list[TensorSharding], list[TensorSharding]],
    *,
    widens: bool,
) -> Callable[..., Any]:
    """Returns the function of blocks that stands for an equation."""
    own = eqn if rule is None else on_block(eqn, rule, axes, mesh)
    reduced = () if rule is None else partial_axes(rule, axes)
    rows = split_rows(eqn, rule, axes)
    is_row_major = _is_row_major(eqn, mesh)
    compute = own.primitive.bind if own.primitive.name != PARTITIONED else _partitioned(eqn, *sides, mesh)

    def local(*blocks: Any) -> Any:
        found = compute(*(own_groups(eqn, rows, blocks) if rows else blocks), **own.params)
        if own.primitive.multiple_results:
            return tuple(found)
        found = found.astype(jnp.float32) if widens else found
        # Of one dimension there is one layout; behind a barrier, XLA does not undo the reshapes. A layout_constraint could not be exported.
        found = jax.lax.optimization_barrier(found.reshape(-1)).reshape(found.shape) if is_row_major else found
        return jax.lax.psum(found, reduced) if reduced else found

    return local


def _partitioned(eqn: Any, operands: Sequence[TensorSharding], results: Sequence[TensorSharding], mesh: Mesh) -> Callable[..., Any]:
    """Returns the function that the user's own partitioner gives for blocks; for whole operands, the primitive itself.

    Raises:
        UnsupportedError: the partitioner asks for other shardings than its rule allows.
    """
    params = eqn.params
    if not any(names for sharding in (*operands, *results) for names in sharding):
        return partial(eqn.primitive.bind)
    structs = [
        [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, sharding=named_sharding(mesh, sharding)) for var, sharding in side]
        for side in (zip(eqn.invars, operands, strict=True), zip(eqn.outvars, results, strict=True))
    ]
    trees = [jax.tree.unflatten(tree, own) for tree, own in zip((params["in_tree"], params["out_tree"]), structs, strict=True)]
    _, compute, out_shardings, in_shardings = params["partition"](*params["static_args"], mesh, *trees)
    given = [*jax.tree.leaves(in_shardings), *jax.tree.leaves(out_shardings)]
    for struct, sharding in zip([*structs[0], *structs[1]], given, strict=True):
        if not sharding.is_equivalent_to(struct.sharding, len(struct.shape)):
            raise UnsupportedError(
                "The partitioner of a custom_partitioning op asks for another sharding than its sharding_rule allows.",
                where=source_line(eqn.source_info),
                got=f"{sharding.spec} for {struct.sharding.spec} of shape {struct.shape}",
                fix="let partition() take the shardings that it is given, or wrap the op in jax.shard_map on spmdctx.get_mesh()",
            )

    def local(*blocks: Any, **_: Any) -> Any:
        return jax.tree.leaves(compute(*jax.tree.unflatten(params["in_tree"], blocks)))

    return local
