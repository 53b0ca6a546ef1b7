"""Turns a captured step and its settings into the request and the options of a search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from spmdctx.context.layers import AutoParallelContext
from spmdctx.cost.step import Step
from spmdctx.ir.analysis.loop_sums import LoopSum
from spmdctx.search.optimizer.asked import optimizer_sharding
from spmdctx.search.optimizer.couplings import couplings
from spmdctx.search.optimizer.state import layer_dims
from spmdctx.search.reduced_once import sums_of_gradients
from spmdctx.search.select import SearchOptions
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.request import Coupling, ManualSpecs, OptimizerSharding, Request, ValuePin
from spmdctx.trace.build.origins import differentiated_ops
from spmdctx.trace.build.program import Program
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.capture.layerwise import is_layerwise
from spmdctx.trace.scope.settings import Settings


def step_of(program: Program, captured: Captured) -> Step:
    """Returns a captured step as searches see it."""
    donated = frozenset([value for value, leaf in zip(program.graph.inputs, captured.inputs, strict=True) if leaf.donated])
    return Step(program.graph, program.scopes, program.from_literals, donated)


def request_of(program: Program, captured: Captured, settings: Settings) -> Request:
    """Returns the request that a step makes of a search."""
    context = settings.context
    pins = [ValuePin(*pin) for pin in program.user_pins]
    for value, leaf in zip(program.graph.inputs, captured.inputs, strict=True):
        if leaf.metadata is not None:
            dims = tuple(() if name is None else (name,) if isinstance(name, str) else name for name in leaf.metadata)
            axes = captured.mesh_axes if {name for dim in dims for name in dim} <= dict(captured.mesh_axes).keys() else ()
            pins.append(ValuePin(value, axes, dims + ((),) * (len(leaf.shape) - len(dims)), "partitioning metadata"))
    layerwise = frozenset(
        value for value, leaf in zip(program.graph.inputs, captured.inputs, strict=True) if is_layerwise(leaf, settings.layerwise_parallel)
    )
    optimizer = _optimizer(program, context)
    searches = optimizer is not None and search_mode(settings) == "dynamic_programming"
    coupled = couplings(program.graph, settings.num_devices, optimizer, layerwise) if optimizer is not None and searches else ()
    return Request(
        parallel_mode=context.parallel_mode,
        num_devices=settings.num_devices,
        mesh=settings.mesh,
        dataset=_dataset(context),
        marks=program.marks,
        region_ops=program.region_ops,
        value_pins=tuple(pins),
        manual=tuple(
            ManualSpecs(region.op, region.mesh_axes, region.operands, region.results, region.is_loss) for region in program.manual
        ),
        layerwise=layerwise,
        optimizer=optimizer,
        couplings=coupled,
        batch_is_asked=context.batch_is_pinned,
        batch_axes=captured.batch_axes,
        once=_once(program, coupled, settings),
    )


def _once(program: Program, coupled: Iterable[Coupling], settings: Settings) -> tuple[LoopSum, ...]:
    """Returns the sums that wait until they are complete; of accumulators, dynamic programming decides which do."""
    graph, is_searched = program.graph, search_mode(settings) == "dynamic_programming"
    if settings.num_devices == 1 or not (settings.context.grad_accumulation_step > 1 or graph.accumulators):
        return ()
    return tuple(one for one in sums_of_gradients(graph, coupled) if one.repeats >= 1 or not is_searched)


def _optimizer(program: Program, context: AutoParallelContext) -> OptimizerSharding | None:
    """Returns what the parallel optimizer splits in a step, or None if the context does not enable it."""
    asked = optimizer_sharding(context)
    if asked is None:
        return None
    layers: dict[int, int] = {}
    for region in program.manual:
        operands = program.graph.ops[region.op].operands if region.op >= 0 else ()
        layers.update(zip(operands, layer_dims(region.body.graph), strict=False))
    own = tuple((value, count) for value, count in layers.items() if value >= 0 and count)
    return replace(asked, layers=own, differentiated=differentiated_ops(program))


def _dataset(context: AutoParallelContext) -> str | tuple[object, ...] | None:
    """Returns how the batch is split, or None if auto_parallel may choose."""
    if context.parallel_mode == "auto_parallel" and not context.batch_is_pinned:
        return None
    if isinstance(context.dataset_strategy, tuple):
        return context.dataset_strategy
    return "full_batch" if context.full_batch else context.dataset_strategy


def search_mode(settings: Settings) -> str:
    """Returns the search mode, or an empty string if the parallel mode leaves nothing to search."""
    context = settings.context
    return context.effective_search_mode if context.parallel_mode == "auto_parallel" else ""


def search_options(settings: Settings) -> SearchOptions:
    """Returns the options and limits of a search."""
    context = settings.context
    return SearchOptions(
        search_mode=search_mode(settings),
        topology=settings.topology,
        memory_bytes=settings.memory_bytes,
        max_mesh_axes=settings.max_mesh_axes,
        limits=AlgoLimits.of(context.algo),
        mem_coeff=context.mem_coeff,
    )
