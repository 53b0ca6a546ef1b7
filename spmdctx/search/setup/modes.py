"""The set-up that each parallel mode makes before the search: the mesh, the pins, and the shardings that spread."""

from __future__ import annotations

import math
from enum import Enum

from spmdctx.errors import Sentence, StrategyError, UnsupportedError
from spmdctx.ir.analysis.batch import batch_dims, dividing_axes
from spmdctx.ir.graph import Graph, Op, Role
from spmdctx.ir.mesh import LogicalMesh, axes_of, format_sharding, replicated
from spmdctx.ir.projection import FactorAxes
from spmdctx.ir.rule import OpRule
from spmdctx.ir.sharding import AxisNames, TensorSharding
from spmdctx.search.setup.dataset import dataset_marks
from spmdctx.search.setup.mark_checks import strategy_text
from spmdctx.search.setup.marks import PinnedDims, resolve_marks
from spmdctx.search.setup.request import LAYERWISE, ManualSpecs, Request, Setup
from spmdctx.search.setup.user_pins import fix, pin_user_shardings, place_of

_MOST_NAMED = 8


class BatchForm(Enum):
    """Sentences about the leaves of a batch."""

    UNDIVIDED = "Batch leaf '{path}' of shape {shape} does not divide over {axes}: {kept}. A multiple of {rows} rows would."
    SEVERAL = "{count} batch leaves do not divide over {axes}: {kept}. A multiple of {rows} rows would. They are {leaves}."


_PMAP = "where this is a function of jax.pmap, call the function below it (docs/migrate/pmap.md)"


def prepare(graph: Graph, request: Request) -> Setup:
    """Prepares the mesh, pins and seeds of a mode.

    Raises:
        StrategyError: a strategy, batch or constraint that does not fit.
        UnsupportedError: a shard_map on another mesh than the step's.
    """
    if request.parallel_mode == "stand_alone" or request.num_devices == 1:
        return _stand_alone(graph, request)
    mesh, marked, notes = _mesh_of(graph, request)
    unscattered = frozenset(value for one in request.once for value in one.way)
    setup = Setup(mesh, notes=list(notes), couplings=request.couplings, unscattered=unscattered)
    _force_manual(graph, request, setup)
    for value, dims in marked.items():
        fix(setup, value, dims)
    if isinstance(request.dataset, tuple) and marked:
        for value, entry in zip(batch_leaves(graph), request.dataset, strict=True):
            setup.reasons[value] = f"dataset_strategy {strategy_text(entry)}"
    pin_user_shardings(graph, request, setup)
    _SETUP_OF_MODE[request.parallel_mode](graph, request, setup)
    _keep_empty_whole(graph, setup)
    _reconcile(graph, setup)
    return setup


def batch_parts(graph: Graph, setup: Setup) -> dict[int, TensorSharding]:
    """Returns the shardings from which propagation starts besides the pins.

    Parts of a split batch, such as micro-batches, are split like the batch.
    """
    split = {value: sharding[0] for value in batch_leaves(graph) if (sharding := setup.pins.get(value) or setup.seeds.get(value))}
    axes = next((own for own in split.values() if own), ())
    parts: dict[int, TensorSharding] = {}
    if axes:
        for value, dim in batch_dims(graph, split, setup.mesh).parts.items():
            shape = graph.values[value].shape
            own = dividing_axes(shape[dim], axes, setup.mesh)
            if own and 0 not in shape:
                parts[value] = (*replicated(dim), own, *replicated(len(shape) - dim - 1))
    return parts


def _keep_empty_whole(graph: Graph, setup: Setup) -> None:
    """Keeps pinned and seeded tensors without elements whole: XLA does so too, whatever their shardings say. A note names changed pins."""
    changed: list[str] = []
    for given in (setup.pins, setup.seeds):
        for value in [value for value in given if 0 in graph.values[value].shape]:
            known, asked = graph.values[value], given[value]
            given[value] = replicated(len(known.shape))
            is_pin = given is setup.pins or value in setup.partial_pins
            setup.partial_pins.pop(value, None)
            if asked == given[value]:
                continue
            setup.reasons.pop(value, None)
            if is_pin:
                changed.append(f"{list(known.shape)} {place_of(graph, value)} (asked for: {format_sharding(asked)})")
    if changed:
        more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
        setup.notes.append(f"Tensors without elements stay whole: {'; '.join(changed[:_MOST_NAMED])}{more}.")


def _reconcile(graph: Graph, setup: Setup) -> None:
    """Makes state come out as it goes in, whatever a constraint on its next value says."""
    for before, after in graph.ties:
        kept, dropped = setup.pins.get(before), setup.pins.get(after)
        if kept is not None and dropped is not None and kept != dropped:
            del setup.pins[after]
            setup.notes.append(
                f"'{graph.values[before].path}' goes in as {format_sharding(kept)}, so its next value comes out so too, "
                f"and not as {format_sharding(dropped)}."
            )


def batch_leaves(graph: Graph) -> list[int]:
    """Lists the input values that are batch leaves, in flatten order."""
    return [value for value in graph.inputs if graph.values[value].role is Role.BATCH]


def _stand_alone(graph: Graph, request: Request) -> Setup:
    mesh = request.mesh if request.mesh is not None and request.mesh.num_devices == 1 else LogicalMesh.of({"data": 1})
    setup = Setup(mesh)
    if request.value_pins and request.parallel_mode == "stand_alone":
        setup.notes.append("stand_alone: sharding constraints and partitioning metadata in the step have no effect.")
    if any(spec.mesh_axes != mesh.axes for spec in request.manual):
        mesh = LogicalMesh(request.manual[0].mesh_axes)
        if mesh.num_devices != 1:
            mode = "another parallel_mode" if request.parallel_mode == "stand_alone" else f"device_num={mesh.num_devices}"
            raise UnsupportedError(
                "The step holds a shard_map over several devices, which one device cannot run.",
                where=graph.origins[request.manual[0].op].source,
                got=f"shard_map mesh {dict(mesh.axes)}",
                fix=f"use {mode}; {_PMAP}",
            )
        setup.mesh = mesh
    return setup


def _mesh_of(graph: Graph, request: Request) -> tuple[LogicalMesh, dict[int, PinnedDims], tuple[str, ...]]:
    """Returns the user's mesh, else that of the user's constraints or shard_maps, else the one that the strategies need."""
    mesh = request.mesh
    if mesh is None:
        own = dict.fromkeys([*(spec.mesh_axes for spec in request.manual), *(pin.mesh_axes for pin in request.value_pins if pin.mesh_axes)])
        fitting = [axes for axes in own if LogicalMesh(axes).num_devices == request.num_devices]
        mesh = LogicalMesh(fitting[0]) if fitting else None
    if request.parallel_mode == "data_parallel" or request.parallel_mode == "hybrid_parallel":
        return mesh or LogicalMesh.of({"data": request.num_devices}), {}, ()
    marks = (*request.marks, *dataset_marks(graph, batch_leaves(graph), request.dataset, request.num_devices))
    if not marks and mesh is None:
        mesh = _mesh_for_batch(graph, request.num_devices)
    found, pins, notes = resolve_marks(graph, marks, request.num_devices, mesh)
    return found, dict(pins), tuple(notes)


def _mesh_for_batch(graph: Graph, num_devices: int) -> LogicalMesh:
    """Returns a mesh of one axis, or of two if the batch divides over only some of the devices."""
    sizes = [graph.values[value].shape[0] for value in batch_leaves(graph) if graph.values[value].shape]
    common = math.gcd(num_devices, *sizes)
    return LogicalMesh.of((common, num_devices // common) if 1 < common < num_devices else (num_devices,))


def _force_manual(graph: Graph, request: Request, setup: Setup) -> None:
    for specs in request.manual:
        if specs.mesh_axes != setup.mesh.axes:
            raise UnsupportedError(
                "A shard_map in the step runs on another mesh than the step itself.",
                where=graph.origins[specs.op].source,
                got=f"shard_map mesh {dict(specs.mesh_axes)}, step mesh {dict(setup.mesh.axes)}",
                fix=f"build the shard_map on spmdctx.get_mesh(), or pass its mesh as mesh=; {_PMAP}",
            )
        setup.forced[specs.op] = _axes_from_specs(graph.ops[specs.op].rule, specs)


def _axes_from_specs(rule: OpRule, specs: ManualSpecs) -> FactorAxes:
    axes: list[AxisNames] = [()] * len(rule.sizes)
    for dims, sharding in zip((*rule.operands, *rule.results), (*specs.operands, *specs.results), strict=True):
        for factors, names in zip(dims, sharding, strict=True):
            if factors:
                axes[factors[0]] = names
    return tuple(axes)


def _data_parallel(graph: Graph, request: Request, setup: Setup) -> None:
    """Splits the batch leaves along dimension 0 over all devices, and keeps every other input whole."""
    for value in graph.inputs:
        known = graph.values[value]
        if known.role is Role.BATCH and known.shape:
            if known.shape[0] % request.num_devices:
                raise StrategyError(
                    f"data_parallel splits dimension 0 of the batch over {request.num_devices} devices, but its size {known.shape[0]} "
                    f"is not divisible by {request.num_devices}.",
                    where=f"batch leaf '{known.path}'",
                    got=f"shape {known.shape}",
                    fix="change the batch size or device_num, or name the batch with batch_argnums",
                )
            setup.pins[value] = (setup.mesh.names, *replicated(len(known.shape) - 1))
            setup.reasons[value] = "data_parallel splits the batch"
        elif value in request.layerwise:
            setup.reasons[value] = LAYERWISE
            setup.layerwise.add(value)
        elif value not in setup.pins:
            setup.reasons[value] = "data_parallel keeps it whole"
            setup.pins[value] = replicated(len(known.shape))


def _hybrid_parallel(graph: Graph, request: Request, setup: Setup) -> None:
    """Leaves the choice to the user's shard_maps; a step without any is split like data_parallel."""
    if all(specs.is_loss for specs in request.manual):
        _data_parallel(graph, request, setup)


def _semi_auto_parallel(graph: Graph, request: Request, setup: Setup) -> None:
    """Splits every op outside shard() regions that has the batch along it, over all devices.

    Where shardings of JAX take the place of shard(), all else follows from them, and the batch too unless the user says how it is split.
    """
    leaves = batch_leaves(graph)
    if not any(mark.strategy is not None for mark in request.marks) and _is_split_by_user(request, setup):
        setup.follows_user = True
        _follow_user(graph, request, setup, leaves)
        return
    _split_batch(graph, request, setup, leaves, setup.mesh.names)
    traced = batch_dims(graph, leaves, setup.mesh).found
    if request.dataset == "full_batch":
        traced = {value: dim for value, dim in traced.items() if value not in leaves}
    # A value that leaves a region does not decide what happens inside.
    setup.one_way.update({mark.op: mark.side == "out" for mark in request.marks if mark.side in ("out", "out_grad")})
    out_marks = {mark.value for mark in request.marks if mark.side == "out"}
    for op in graph.ops:
        if op.id in request.region_ops or _is_boundary(op):
            continue
        for value in op.results:
            if value in traced and value not in setup.pins and value not in out_marks:
                _pin_batch(graph, setup, value, traced[value], setup.mesh.names)


def _is_split_by_user(request: Request, setup: Setup) -> bool:
    """Returns whether a pin of the user's code splits a tensor."""
    given = {pin.value for pin in request.value_pins}
    return any(value in given and any(sharding) for value, sharding in (*setup.pins.items(), *setup.seeds.items()))


def _follow_user(graph: Graph, request: Request, setup: Setup, leaves: list[int]) -> None:
    """Splits the batch as the user's rules say, else as the first constraint along it, else over the axes that no pin uses."""
    if request.batch_is_asked:
        _split_batch(graph, request, setup, leaves, setup.mesh.names)
        return
    if request.batch_axes is not None:
        _split_batch(graph, request, setup, leaves, request.batch_axes, "the rule of the batch")
        return
    axes, reason = _axes_along_batch(graph, setup, leaves), "the batch is split as a constraint along it"
    if not axes:
        axes, reason = _unused(setup), "the batch takes the axes that no strategy uses"
    if not axes:
        axes, reason = setup.mesh.names, "the batch takes all axes, as nothing says how it is split"
    for value in leaves:
        _seed_batch(graph, setup, value, axes, reason)


def _axes_along_batch(graph: Graph, setup: Setup, leaves: list[int]) -> AxisNames:
    """Returns the axes of the first pin that splits the batch dimension of its tensor."""
    along = batch_dims(graph, leaves, setup.mesh).found
    pins = {**setup.seeds, **setup.pins}
    return next((pins[value][along[value]] for value in sorted(pins.keys() & along.keys()) if pins[value][along[value]]), ())


def _is_boundary(op: Op) -> bool:
    return op.boundary is not None


def _pin_batch(graph: Graph, setup: Setup, value: int, dim: int, among: AxisNames) -> None:
    shape = graph.values[value].shape
    axes = dividing_axes(shape[dim], among, setup.mesh)
    if axes:
        setup.pins[value] = (*replicated(dim), axes, *replicated(len(shape) - dim - 1))


def _auto_parallel(graph: Graph, request: Request, setup: Setup) -> None:
    """Pins the dataset strategy if it was set; else gives the batch the axes that no strategy uses."""
    leaves = batch_leaves(graph)
    if request.dataset is not None:
        _split_batch(graph, request, setup, leaves, setup.mesh.names)
        return
    axes = _unused(setup)
    for value in leaves:
        _seed_batch(graph, setup, value, axes, "the batch takes the axes that no strategy uses")


def _unused(setup: Setup) -> AxisNames:
    used = {name for sharding in (*setup.pins.values(), *setup.seeds.values()) for name in axes_of(sharding)}
    return tuple(name for name in setup.mesh.names if name not in used)


def _seed_batch(graph: Graph, setup: Setup, value: int, axes: AxisNames, reason: str) -> None:
    """Lets the search begin with a split of a batch leaf that nothing pins."""
    shape = graph.values[value].shape
    if not shape or value in setup.pins or not axes:
        return
    own = dividing_axes(shape[0], axes, setup.mesh)
    if own != axes:
        setup.guesses.append(indivisible(graph, value, axes, own, setup.mesh))
    setup.seeds[value] = (own, *replicated(len(shape) - 1))
    setup.reasons[value] = reason


def _split_batch(graph: Graph, request: Request, setup: Setup, leaves: list[int], axes: AxisNames, reason: str = "") -> None:
    """Pins the batch leaves as a dataset strategy given by name says; a tuple was resolved with the marks."""
    if isinstance(request.dataset, tuple):
        return
    for value in leaves:
        shape = graph.values[value].shape
        if not shape or value in setup.pins:
            continue
        setup.reasons[value] = reason or f"dataset_strategy {request.dataset!r}"
        if request.dataset == "full_batch":
            setup.pins[value] = replicated(len(shape))
            continue
        own = dividing_axes(shape[0], axes, setup.mesh)
        if own != axes:
            setup.notes.append(indivisible(graph, value, axes, own, setup.mesh))
        setup.pins[value] = (own, *replicated(len(shape) - 1))


def indivisible(graph: Graph, value: int, axes: AxisNames, own: AxisNames, mesh: LogicalMesh) -> Sentence:
    """Says of a batch leaf that only `own` of some axes divide it."""
    known = graph.values[value]
    kept = f"split over {'+'.join(own)} only" if own else "every device holds it whole"
    return Sentence(BatchForm.UNDIVIDED, path=known.path, shape=known.shape, axes="+".join(axes), kept=kept, rows=mesh.num_slices(axes))


_SETUP_OF_MODE = {
    "data_parallel": _data_parallel,
    "hybrid_parallel": _hybrid_parallel,
    "semi_auto_parallel": _semi_auto_parallel,
    "auto_parallel": _auto_parallel,
}
