"""The request to a search (mode, mesh, marks and pins), and the set-up that the mode makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from spmdctx.ir.analysis.loop_sums import LoopSum
from spmdctx.ir.graph import Mark
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.projection import FactorAxes
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.search.setup.marks import PinnedDims

MeshAxes = tuple[tuple[str, int], ...]


class ValuePin(NamedTuple):
    """A sharding fixed by the user's code for a mesh with `mesh_axes`; None leaves a dimension free. `origin` names its source."""

    value: int
    mesh_axes: MeshAxes
    dims: PinnedDims
    origin: str


class ManualSpecs(NamedTuple):
    """The shardings that a shard_map fixes for one op; `is_loss` if the shard_map is the library's own, around the loss."""

    op: int
    mesh_axes: MeshAxes
    operands: tuple[TensorSharding, ...]
    results: tuple[TensorSharding, ...]
    is_loss: bool = False


ALL_REPLICAS = -1


@dataclass(frozen=True, slots=True)
class OptimizerSharding:
    """The split that the user asked of the parallel optimizer.

    Attributes:
        level: 1 for optimizer state, 2 for gradients too, 3 for weights too.
        threshold_bytes: smaller parameters stay whole, and their state.
        shard_size: how many replicas share one copy; `ALL_REPLICAS` for all.
        splits_accumulators: whether the sums of loops over micro-batches are split too.
        layers: values that go into shard_maps whose bodies scan over them, with how many of their leading dimensions count layers.
        differentiated: the ops of the losses and of their gradients; none if they are unknown.
    """

    level: int
    threshold_bytes: int
    shard_size: int
    splits_accumulators: bool
    layers: tuple[tuple[int, int], ...] = ()
    differentiated: frozenset[int] = frozenset()


LAYERWISE = "layerwise_parallel: each device has its own"
"""The reason for which data_parallel splits a parameter."""


class Coupling(NamedTuple):
    """A value whose sharding the search must choose by the sharding of a parameter of the same shape.

    `how` names the relation:

        further   the parameter's sharding, with all other axes added to dimension `dim`
        alike     the parameter's sharding
        within    no axis that the parameter does not use
        itself    the value is the parameter, and is stored as any sharding with all other axes added
    """

    parameter: int
    value: int
    dim: int
    how: str


@dataclass(frozen=True, slots=True)
class Request:
    """The user's request, without JAX.

    `dataset` is None (free), "data_parallel", "full_batch", or slices per batch leaf. `batch_is_asked` is false where it is the default.
    `batch_axes` are those by which logical axis rules split the batch, None where they do not speak of it. `optimizer` is None without the
    parallel optimizer; `couplings` are the pairs that the parallel optimizer makes a search keep to. `once` are sums of loops that are
    reduced when they are complete, and not before.
    """

    parallel_mode: str
    num_devices: int
    mesh: LogicalMesh | None
    dataset: str | tuple[object, ...] | None
    marks: tuple[Mark, ...]
    region_ops: frozenset[int]
    value_pins: tuple[ValuePin, ...]
    manual: tuple[ManualSpecs, ...]
    layerwise: frozenset[int]
    optimizer: OptimizerSharding | None = None
    couplings: tuple[Coupling, ...] = ()
    batch_is_asked: bool = True
    batch_axes: AxisNames | None = None
    once: tuple[LoopSum, ...] = ()


@dataclass(slots=True)
class Setup:
    """The start of a search. Keys of `pins`, `seeds` and `reasons` are value ids, keys of `forced` and `one_way` are op ids.

    `partial_pins` are the seeds that the user asked for, with None for the dimensions that the user left free.

    Partial results that are `unscattered` are reduced in place, if they are reduced where they are made.

    `reasons` names for a pinned or seeded value who asked for it; for the values of `layerwise` the reason holds however they are split.

    `follows_user` says that nothing but shardings that the user wrote with JAX is pinned.

    `parts` are, per axis of the mesh that the program was written for, its axes in this mesh; empty if the two are the same.
    """

    mesh: LogicalMesh
    pins: dict[int, TensorSharding] = field(default_factory=dict)
    seeds: dict[int, TensorSharding] = field(default_factory=dict)
    forced: dict[int, FactorAxes] = field(default_factory=dict)
    one_way: dict[int, bool] = field(default_factory=dict)
    partial_pins: dict[int, PinnedDims] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    layerwise: set[int] = field(default_factory=set)
    parts: Mapping[str, AxisNames] = field(default_factory=dict)
    couplings: tuple[Coupling, ...] = ()
    unscattered: frozenset[int] = frozenset()
    follows_user: bool = False
