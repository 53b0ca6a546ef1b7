"""The one road: captured step and settings to graph, set-up, search, bill and plan."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import NamedTuple

from spmdctx.context import AutoParallelContext
from spmdctx.context_options import BY_NAME
from spmdctx.context_values import OPTIMIZER_LEVELS
from spmdctx.cost.reshard import reshard_time_s
from spmdctx.cost.topology import Topology, as_asked
from spmdctx.errors import ContextWarning, UnsupportedError
from spmdctx.ir import LITERAL, Assignment, AxisNames, Collective, Graph, Role, item_bytes
from spmdctx.mesh import LogicalMesh, format_sharding, replicated
from spmdctx.plan.plan import Cost, OpTable, Plan, PlannedGradient, PlannedTensor, Reshard, Timing
from spmdctx.plan.rows import LateRows
from spmdctx.search.accumulation import Holds, holds_of, loop_sums
from spmdctx.search.algo import AlgoLimits
from spmdctx.search.bodies import Body, add_bodies
from spmdctx.search.certificate import Certificate, gap_of
from spmdctx.search.dynamic import DynamicOptions, lower_bound_s
from spmdctx.search.evaluate import evaluate
from spmdctx.search.gradient_order import Gradient, gradient_buckets, gradient_order, sum_buckets
from spmdctx.search.modes import LAYERWISE, ManualSpecs, OptimizerSharding, Request, Setup, ValuePin, prepare
from spmdctx.search.optimizer_pins import couplings
from spmdctx.search.optimizer_state import layer_dims
from spmdctx.search.price import Bill, Moved, price
from spmdctx.search.reduced_once import sums_of_gradients
from spmdctx.search.refined_mesh import refined_axes
from spmdctx.search.region_groups import region_groups, ungrouped_note
from spmdctx.search.select import SearchOptions, search
from spmdctx.search.shortfall import over_budget
from spmdctx.search.step import Step, bill_of
from spmdctx.search.transfer import partial_axes
from spmdctx.trace.build import Argument, build
from spmdctx.trace.capture import Captured, InputLeaf
from spmdctx.trace.collector import no_garbage_collection
from spmdctx.trace.program import Program
from spmdctx.wording import bytes_text, exact_bytes_text

PEAK_NOTE = "The predicted peak"
_MOST_LISTED = 4
"""How notes on what a plan takes begin."""

_WORTH_A_WORD = 0.01
_NO_BUCKETS = "Buckets of gradients have no effect: the CPU compiler drops what keeps them apart, and reduces all of them at once."
_NO_GROUPS = "shard(fusion=) groups nothing in the forward and backward pass: the CPU compiler combines what does not wait for others."
_SEARCHED = ("dynamic_programming", "recursive_programming")


@dataclass(frozen=True)
class Settings:
    """Everything but the step that a plan depends on.

    `memory_bytes` is the budget per device, None for no budget; `max_mesh_axes` limits the meshes that a search tries.
    """

    context: AutoParallelContext
    num_devices: int
    mesh: LogicalMesh | None
    topology: Topology
    memory_bytes: int | None = None
    strict: bool = False
    layerwise_parallel: tuple[str, ...] = ()
    max_mesh_axes: int | None = None


@dataclass(frozen=True)
class Planned:
    """A plan with what lowering needs beside it."""

    plan: Plan
    program: Program
    assignment: Assignment
    mesh: LogicalMesh


def plan_program(captured: Captured, settings: Settings) -> Planned:
    """Plans a captured step.

    Raises:
        StrategyError: strategies, batch or constraints that do not fit the mesh.
        UnsupportedError: something that the mode does not support, or with `strict` a primitive without a rule.
    """
    start = time.perf_counter()
    with no_garbage_collection():
        program = build(captured.jaxpr, [Argument(leaf.path, leaf.role) for leaf in captured.inputs], captured.carried)
        request = _request(program, captured, settings)
        step = _step(program, captured)
        setup, assignment, certificate = search(step, request, _search_options(settings))
        grouped = _is_grouped(program, settings, setup.mesh)
        written = _written(program, setup.parts)
        gradients, buckets, by_sum, holds, bill = _priced(program, step, settings, assignment, setup.mesh, written)
        if settings.memory_bytes is not None and bill.memory_bytes > settings.memory_bytes and _search_mode(settings):
            raise over_budget(step, bill, settings.memory_bytes, setup.mesh.num_devices, settings.topology)
        notes = _notes(program, captured, setup, settings, assignment, bill)
        if grouped and program.region_ops:
            groups = region_groups(program.graph, assignment, setup.mesh, by_sum)
            notes = (*notes, *_group_notes(program, settings, setup, bill, groups))
        without = _without_buckets(program, settings, setup, buckets) or _in_turns(program, assignment, gradients, buckets, holds)
        if without:
            warnings.warn(without, ContextWarning, stacklevel=2)
            notes = (*notes, without)
        timing = Timing(trace_s=captured.trace_s, search_s=time.perf_counter() - start)
        plan = _assemble(program, captured, settings, setup, assignment, bill, notes, timing)
        named = [PlannedGradient(one.path, bucket) for one, bucket in zip(gradients, buckets, strict=True)]
        own = [PlannedGradient(*one) for one in captured.gradients]
        plan = replace(plan, gradients=(*own, *named) if own or grouped else _gradients(program, setup))
        if certificate is not None:
            plan = _certified(plan, certificate)
    return Planned(plan, program, assignment, setup.mesh)


def priced_here(plan: Plan, program: Program, captured: Captured, settings: Settings) -> Plan:
    """A plan with its price for a captured step and a machine that may not be those for which it was made."""
    parts = prepare(program.graph, _request(program, captured, settings)).parts if program.manual else {}
    step, written = _step(program, captured), _written(program, parts)
    bill = _priced(program, step, settings, plan.assignment, plan.logical_mesh, written).bill
    reshards = LateRows(lambda: _reshards(program.graph, bill.moves))
    priced = replace(plan, cost=_cost(bill), collectives=tuple(bill.collectives), reshards=reshards)
    return replace(priced, memory_profile=bill.memory_profile, early=bill.early)


def _written(program: Program, parts: Mapping[str, AxisNames]) -> list[Collective]:
    """The collectives that stand in the program, along axes of the plan's mesh."""
    return [replace(row, axes=refined_axes(row.axes, parts)) for region in program.manual for row in region.collectives]


class _Priced(NamedTuple):
    """The price of an assignment, and the sums that it reduces apart: gradients in buckets, and what loops hold back."""

    gradients: Sequence[Gradient]
    buckets: Sequence[int | None]
    by_sum: Mapping[int, int]
    holds: Holds
    bill: Bill


def _priced(
    program: Program, step: Step, settings: Settings, assignment: Assignment, mesh: LogicalMesh, written: Sequence[Collective]
) -> _Priced:
    """Prices an assignment, with the collectives that are `written` in the program."""
    graph = program.graph
    gradients = gradient_order(graph) if _is_grouped(program, settings, mesh) else ()
    buckets = gradient_buckets(graph, settings.context, gradients)
    by_sum = sum_buckets(gradients, buckets)
    holds = holds_of(graph, loop_sums(graph, by_sum), assignment, mesh)
    bill = _bill(step, written, assignment, mesh, settings.topology, by_sum, holds)
    add_bodies(bill, graph, _bodies(program), assignment, mesh, settings.topology)
    return _Priced(gradients, buckets, by_sum, holds, bill)


def _is_grouped(program: Program, settings: Settings, mesh: LogicalMesh) -> bool:
    """Whether anybody asked for gradients to be reduced in buckets."""
    return mesh.num_devices > 1 and (settings.context.fuses_by_index or bool(program.region_ops))


def _bill(
    step: Step,
    written: Sequence[Collective],
    assignment: Assignment,
    mesh: LogicalMesh,
    topology: Topology,
    by_sum: Mapping[int, int],
    holds: Holds,
) -> Bill:
    """The price of the plan; that which a search has asked for already, where there is nothing to add."""
    if not (written or by_sum or holds.axes or holds.totals):
        return bill_of(step, assignment, mesh, topology)
    return price(step.graph, step.scopes, step.loose, written, assignment, mesh, topology, step.donated, by_sum, holds)


def certify(plan: Plan, captured: Captured, settings: Settings) -> Plan:
    """A plan of auto_parallel with what dynamic programming proves of it."""
    with no_garbage_collection():
        program = build(captured.jaxpr, [Argument(leaf.path, leaf.role) for leaf in captured.inputs], captured.carried)
        options = DynamicOptions(limits=AlgoLimits.of(settings.context.algo), max_axes=settings.max_mesh_axes)
        request = _request(program, captured, settings)
        step, mesh, machine = _step(program, captured), plan.logical_mesh, settings.topology
        bound = lower_bound_s(step, request, machine, options, mesh)
        counted = evaluate(step.graph, step.scopes, step.loose, plan.assignment, mesh, machine).total_s
    return _certified(plan, Certificate(bound, counted))


def _certified(plan: Plan, certificate: Certificate) -> Plan:
    bound_s, note = certificate.of_price(plan.cost.total_s)
    notes = (*plan.notes, note) if note else plan.notes
    return replace(plan, lower_bound_s=bound_s, gap=gap_of(plan.cost.total_s, bound_s), notes=notes)


def _gradients(program: Program, setup: Setup) -> Sequence[PlannedGradient]:
    """The gradients where they have no buckets."""
    return LateRows(lambda: [PlannedGradient(one.path) for one in gradient_order(program.graph)]) if setup.mesh.num_devices > 1 else ()


def _bodies(program: Program) -> list[Body]:
    """What runs inside shard_maps."""
    return [
        Body(region.op, region.repeats, region.body.graph, region.body.scopes, region.body.loose)
        for region in program.manual
        if region.op >= 0
    ]


def _without_buckets(program: Program, settings: Settings, setup: Setup, buckets: Sequence[int | None]) -> str:
    """Why the gradients' buckets that were asked for are none; empty where they are made."""
    if any(bucket is not None for bucket in buckets):
        return _NO_BUCKETS if settings.topology.device == "cpu" else ""
    local = any(region.is_loss for region in program.manual)
    if not settings.context.fuses_by_index or local or setup.mesh.num_devices == 1:
        return ""
    return "all_reduce_fusion_config has no effect: no gradient is found that the plan reduces; what a shard_map reduces is the user's own."


def _group_notes(program: Program, settings: Settings, setup: Setup, bill: Bill, groups: Mapping[int, int]) -> list[str]:
    """What of `shard(fusion=)` has no effect."""
    machine = settings.topology
    notes = ungrouped_note(program.graph, bill, setup.mesh, all_to_all=machine.uses_all_to_all)
    return [*notes, _NO_GROUPS] if groups and machine.device == "cpu" else notes


def _in_turns(program: Program, assignment: Assignment, gradients: Sequence[Gradient], buckets: Sequence[int | None], holds: Holds) -> str:
    """Names the gradients that a loop reduces in each of its turns, where they cannot wait for their bucket."""
    graph = program.graph
    apart = []
    for gradient, bucket in zip(gradients, buckets, strict=True):
        makers = [graph.ops[graph.producers[value]] for value in gradient.sums if value not in holds.axes]
        if bucket is not None and any(op.repeats > 1 and partial_axes(op.rule, assignment.ops[op.id].axes) for op in makers):
            apart.append(f"'{gradient.path}'")
    if not apart:
        return ""
    return f"A loop reduces these gradients in each of its turns, apart from their buckets: {', '.join(apart)}."


def _step(program: Program, captured: Captured) -> Step:
    donated = frozenset([value for value, leaf in zip(program.graph.inputs, captured.inputs, strict=True) if leaf.donated])
    return Step(program.graph, program.scopes, program.loose, donated)


def _request(program: Program, captured: Captured, settings: Settings) -> Request:
    context = settings.context
    pins = [ValuePin(pin.value, pin.mesh_axes, pin.dims, "a sharding constraint") for pin in program.user_pins]
    for value, leaf in zip(program.graph.inputs, captured.inputs, strict=True):
        if leaf.metadata is not None:
            dims = tuple(() if name is None else (name,) if isinstance(name, str) else name for name in leaf.metadata)
            axes = captured.mesh_axes if {name for dim in dims for name in dim} <= dict(captured.mesh_axes).keys() else ()
            pins.append(ValuePin(value, axes, dims + ((),) * (len(leaf.shape) - len(dims)), "partitioning metadata"))
    layerwise = frozenset(
        value for value, leaf in zip(program.graph.inputs, captured.inputs, strict=True) if is_layerwise(leaf, settings.layerwise_parallel)
    )
    optimizer = _optimizer(program, context)
    searches = optimizer is not None and _search_mode(settings) == "dynamic_programming"
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
        once=sums_of_gradients(program.graph, coupled) if context.grad_accumulation_step > 1 and settings.num_devices > 1 else (),
    )


def _optimizer(program: Program, context: AutoParallelContext) -> OptimizerSharding | None:
    """What the parallel optimizer splits of a step."""
    asked = optimizer_sharding(context)
    if asked is None:
        return None
    layers: dict[int, int] = {}
    for region in program.manual:
        operands = program.graph.ops[region.op].operands if region.op >= 0 else ()
        layers.update(zip(operands, layer_dims(region.body.graph), strict=False))
    return replace(asked, layers=tuple((value, count) for value, count in layers.items() if value >= 0 and count))


def optimizer_sharding(context: AutoParallelContext) -> OptimizerSharding | None:
    """What the parallel optimizer splits; None where it is off or the mode has none."""
    if not context.enable_parallel_optimizer or context.parallel_mode not in BY_NAME["enable_parallel_optimizer"].modes:
        return None
    asked = context.parallel_optimizer_config
    return OptimizerSharding(
        level=OPTIMIZER_LEVELS.index(asked.optimizer_level) + 1,
        threshold_bytes=asked.parallel_optimizer_threshold * 1024,
        shard_size=asked.optimizer_weight_shard_size,
        splits_accumulators=asked.gradient_accumulation_shard,
    )


def _dataset(context: AutoParallelContext) -> str | tuple[object, ...] | None:
    """How the batch is split: None where auto_parallel may choose."""
    if context.parallel_mode == "auto_parallel" and not context.batch_is_pinned:
        return None
    if isinstance(context.dataset_strategy, tuple):
        return context.dataset_strategy
    return "full_batch" if context.full_batch else context.dataset_strategy


def is_layerwise(leaf: InputLeaf, patterns: Sequence[str]) -> bool:
    """Whether each device has a piece of its own of an argument, by its own metadata or a path pattern."""
    return leaf.layerwise or any(_matches(leaf.path, pattern) for pattern in patterns)


def _matches(path: str, pattern: str) -> bool:
    return fnmatch(path, pattern) or fnmatch(path, f"*/{pattern}")


def _search_mode(settings: Settings) -> str:
    """What searches; empty where the parallel mode leaves nothing to search."""
    context = settings.context
    return context.effective_search_mode if context.parallel_mode == "auto_parallel" else ""


def _search_options(settings: Settings) -> SearchOptions:
    context = settings.context
    return SearchOptions(
        search_mode=_search_mode(settings),
        topology=settings.topology,
        memory_bytes=settings.memory_bytes,
        max_mesh_axes=settings.max_mesh_axes,
        limits=AlgoLimits.of(context.algo),
        mem_coeff=context.mem_coeff,
        max_stages=context.pipeline_stages if context.auto_pipeline else 0,
    )


def _notes(program: Program, captured: Captured, setup: Setup, settings: Settings, assignment: Assignment, bill: Bill) -> tuple[str, ...]:
    """Everything guessed, padded, replicated or without effect, each said once."""
    notes = [*captured.notes, *program.graph.notes, *setup.notes]
    missing: dict[str, str] = {}
    for op in program.graph.ops:
        if op.rule.reason and op.primitive not in missing:
            missing[op.primitive] = (
                f"{op.primitive} is computed whole on every device: {op.rule.reason} ({program.graph.origins[op.id].source})."
            )
    unknown = [name for name in missing if missing[name].find("no rule for primitive") >= 0]
    if settings.strict and unknown:
        raise UnsupportedError(
            f"There is no sharding rule for primitive {unknown[0]!r}, and strict=True allows no replication.",
            where=missing[unknown[0]].partition("(")[2].rstrip(")."),
            fix="leave strict out: the op is then computed whole on every device",
        )
    if setup.mesh.num_devices > 1:
        notes += missing.values()
    for value, wanted in setup.seeds.items():
        known, stored = program.graph.values[value], assignment.values[value]
        if known.role is Role.BATCH and stored != wanted:
            notes.append(
                f"Batch leaf '{known.path}' is stored {format_sharding(stored)}, not {format_sharding(wanted)}: the ops that read it do so."
            )
    notes += memory_notes(settings, bill.memory_bytes)
    if setup.mesh.num_devices > 1:
        notes += _batch_notes(program)
        notes += _all_to_all_notes(program, setup, settings, bill)
        notes += _repeated_work(program, setup, assignment, bill)
        notes += _unmatched_patterns(captured, settings)
        notes += _early_notes(program, captured, bill)
    return tuple(dict.fromkeys(notes))


def _early_notes(program: Program, captured: Captured, bill: Bill) -> list[str]:
    """The updates of state for which the rest of the step is made to wait."""
    waited_for = {value for update in bill.early for value in update.results}
    if not waited_for:
        return []
    paths = [leaf.path for leaf, value in zip(captured.outputs, program.graph.outputs, strict=True) if value in waited_for]
    listed = ", ".join(f"'{path}'" for path in paths[:_MOST_LISTED]) + (", ..." if len(paths) > _MOST_LISTED else "")
    return [f"The rest of the step waits for the new value of {listed}: what its gradient is made of would be in memory to the end."]


def memory_notes(settings: Settings, peak_bytes: int) -> list[str]:
    """What is over the user's budget, or over what a device has where he gave none."""
    machine, peak = settings.topology, f"{PEAK_NOTE} of {exact_bytes_text(peak_bytes)} per device is over"
    if settings.memory_bytes is None:
        has_room = peak_bytes <= machine.memory_bytes
        return [] if has_room else [f"{peak} the {bytes_text(machine.memory_bytes)} that a program may use of a {machine.device}."]
    if peak_bytes <= settings.memory_bytes:
        return []
    return [f"{peak} memory_bytes={settings.memory_bytes}; only auto_parallel can meet a budget."]


def _batch_notes(program: Program) -> list[str]:
    """What was found to be the batch, where that may surprise."""
    leaves = [known for known in map(program.graph.values.__getitem__, program.graph.inputs) if known.role is Role.BATCH and known.shape]
    if not leaves:
        return ["No argument is taken as the batch: name it with batch_argnums if there is one."]
    if len({known.shape[0] for known in leaves}) > 1:
        sizes = ", ".join(f"'{known.path}' {known.shape[0]}" for known in leaves[:4])
        return [f"Batch leaves differ in dimension 0 ({sizes}): if some are no batch, name the batch with batch_argnums."]
    return []


def _all_to_all_notes(program: Program, setup: Setup, settings: Settings, bill: Bill) -> list[str]:
    """What all-to-all would save where the context forbids it, if it is worth a word."""
    machine = settings.topology
    if machine.uses_all_to_all:
        return []
    allowed = as_asked(machine, True, machine.widens_gradients)
    saved_s = 0.0
    for move in bill.moves:
        if move.time_s:
            known = program.graph.values[move.value]
            ends = known.shape, item_bytes(known.dtype), move.source, move.target, setup.mesh
            saved_s += move.time_s * (1 - reshard_time_s(*ends, allowed) / reshard_time_s(*ends, machine))
    if saved_s < _WORTH_A_WORD * _cost(bill).total_s:
        return []
    return [f"enable_alltoall=True would save about {saved_s * 1e6:.3g} µs of a step: tensors are moved between dimensions by all-gathers."]


def _repeated_work(program: Program, setup: Setup, assignment: Assignment, bill: Bill) -> list[str]:
    """Says when devices do alike what they could share."""
    if not bill.flops or bill.split_flops / bill.flops >= 0.5:
        return []
    graph, mesh = program.graph, setup.mesh
    whole = [op for op in graph.ops if mesh.num_slices(name for own in assignment.ops[op.id].axes for name in own) < mesh.num_devices]
    largest = max(whole, key=lambda op: op.flops * op.repeats)
    ways = bill.split_flops / bill.flops * mesh.num_devices
    return [
        f"Devices repeat each other's work: the step's FLOPs are split {ways:.1f} ways on average over {mesh.num_devices} devices; "
        f"the largest op that is not split over all of them is {largest.primitive} ({graph.origins[largest.id].source})."
    ]


def _unmatched_patterns(captured: Captured, settings: Settings) -> list[str]:
    unmatched = [one for one in settings.layerwise_parallel if not any(_matches(leaf.path, one) for leaf in captured.inputs)]
    return [f"layerwise_parallel pattern {pattern!r} matches no argument." for pattern in unmatched]


def _assemble(
    program: Program,
    captured: Captured,
    settings: Settings,
    setup: Setup,
    assignment: Assignment,
    bill: Bill,
    notes: tuple[str, ...],
    timing: Timing,
) -> Plan:
    graph, context, moves = program.graph, settings.context, tuple(bill.moves)
    inputs = tuple(
        PlannedTensor(leaf.path, leaf.role, leaf.shape, leaf.dtype, assignment.values[value], _reason(setup, assignment, value))
        for leaf, value in zip(captured.inputs, graph.inputs, strict=True)
    )
    outputs = tuple(
        PlannedTensor(
            leaf.path,
            Role.INTERMEDIATE if leaf.carried_from is None else captured.inputs[leaf.carried_from].role,
            leaf.shape,
            leaf.dtype,
            assignment.values[value] if value != LITERAL else replicated(len(leaf.shape)),
        )
        for leaf, value in zip(captured.outputs, graph.outputs, strict=True)
    )
    return Plan(
        fingerprint=graph.fingerprint,
        mode=context.parallel_mode,
        search_mode=_search_mode(settings),
        options=context.plan_options(),
        logical_mesh=setup.mesh,
        topology=settings.topology.device,
        inputs=inputs,
        outputs=outputs,
        op_table=OpTable.of(graph, assignment),
        memory_limit_bytes=settings.memory_bytes,
        assignment=assignment,
        reshards=LateRows(lambda: _reshards(graph, moves)),
        collectives=tuple(bill.collectives),
        cost=_cost(bill),
        notes=notes,
        timing=timing,
        memory_profile=bill.memory_profile,
        early=bill.early,
    )


def _cost(bill: Bill) -> Cost:
    total_s = bill.compute_s + bill.exposed_communication_s
    return Cost(bill.compute_s, bill.communication_s, total_s, bill.memory_bytes, bill.hidden_communication_s)


def _reason(setup: Setup, assignment: Assignment, value: int) -> str:
    """Where an input's sharding comes from."""
    if setup.mesh.num_devices == 1:
        return "there is one device"
    known = setup.reasons.get(value)
    if known is not None and (value in setup.pins or known == LAYERWISE or setup.seeds.get(value) == assignment.values[value]):
        return known
    if assignment.mode in _SEARCHED:
        return "the cheapest that the search found"
    return "spread from what is pinned" if any(assignment.values[value]) else "nothing pinned reaches it"


def _reshards(graph: Graph, moves: Sequence[Moved]) -> Iterator[Reshard]:
    for move in moves:
        origin = graph.origins[move.op]
        name = graph.values[move.value].path or f"value of {origin.name or graph.ops[move.op].primitive}"
        yield Reshard(name, move.source, move.target, graph.ops[move.op].primitive, origin.source, move.time_s)
