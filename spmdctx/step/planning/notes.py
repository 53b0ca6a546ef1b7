"""Collects the notes of a plan: what was guessed, padded or replicated, and which options have no effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from spmdctx.context.state import AutoParallelContext
from spmdctx.cost.bill import Bill
from spmdctx.cost.region_groups import ungrouped_note
from spmdctx.errors import Sentence, UnsupportedError, listed
from spmdctx.ir.analysis.gradient_order import Gradient
from spmdctx.ir.analysis.loop_sums import Holds
from spmdctx.ir.graph import Graph, Op, Role
from spmdctx.ir.mesh import LogicalMesh, format_sharding
from spmdctx.ir.projection import partial_axes
from spmdctx.ir.sharding import Assignment
from spmdctx.machine.xla.collectives.barriers import NO_BUCKETS, NO_GROUPS
from spmdctx.machine.xla.memory.spread import safe_bytes as safe_bytes_of
from spmdctx.plan.data import PeakForm, PeakNote, PlannedTensor, WorkForm
from spmdctx.rules import has_rule
from spmdctx.search.optimizer.asked import optimizer_sharding
from spmdctx.search.optimizer.owners import WHOLE_NUMBERS
from spmdctx.search.optimizer.state import WEIGHTS_TOO
from spmdctx.search.setup.modes import BatchForm, batch_leaves, indivisible
from spmdctx.search.setup.request import Request, Setup
from spmdctx.step.planning.request import search_mode
from spmdctx.trace.build.program import Program
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.capture.layerwise import matches_path
from spmdctx.trace.scope.settings import Settings
from spmdctx.wording import bytes_text, exact_bytes_text

_MOST_LISTED = 4
_MUCH, _MUCH_BYTES = 0.1, 2**20
"""The part of the state, and its bytes, from which it is warned of that it stays whole."""


def no_buckets_note(program: Program, settings: Settings, mesh: LogicalMesh, buckets: Sequence[int | None]) -> str:
    """Returns why the requested buckets of gradients have no effect, or an empty string if they have one."""
    if any(bucket is not None for bucket in buckets):
        return "" if settings.topology.compiler.keeps_barriers else NO_BUCKETS
    local = any(region.is_loss for region in program.manual)
    if not settings.context.fuses_by_index or local or mesh.num_devices == 1:
        return ""
    return "all_reduce_fusion_config has no effect: no gradient is found that the plan reduces; what a shard_map reduces is the user's own."


def group_notes(program: Program, settings: Settings, setup: Setup, bill: Bill, groups: Mapping[int, int]) -> list[str]:
    """Names the parts of `shard(fusion=)` that have no effect."""
    machine = settings.topology
    notes = ungrouped_note(program.graph, bill, setup.mesh, all_to_all=machine.preferences.allows_all_to_all)
    return [*notes, NO_GROUPS] if groups and not machine.compiler.keeps_barriers else notes


def unbucketed_note(
    program: Program, assignment: Assignment, gradients: Sequence[Gradient], buckets: Sequence[int | None], holds: Holds
) -> str:
    """Names the gradients that a loop reduces in each iteration because they cannot wait for their bucket."""
    graph = program.graph
    apart = []
    for gradient, bucket in zip(gradients, buckets, strict=True):
        makers = [graph.ops[graph.producers[value]] for value in gradient.sums if value not in holds.axes]
        if bucket is not None and any(op.repeats > 1 and partial_axes(op.rule, assignment.ops[op.id].axes) for op in makers):
            apart.append(f"'{gradient.path}'")
    if not apart:
        return ""
    return f"A loop reduces these gradients in each of its turns, apart from their buckets: {', '.join(apart)}."


def plan_notes(
    program: Program, captured: Captured, setup: Setup, settings: Settings, assignment: Assignment, bill: Bill
) -> tuple[str, ...]:
    """Collects all notes of a plan, each of them once.

    Raises:
        UnsupportedError: a primitive has no rule and the settings are strict.
    """
    notes = [*captured.notes, *program.graph.notes, *setup.notes]
    whole = _whole_ops(program)
    unknown = next((op for op in whole if not has_rule(op.primitive)), None)
    if settings.strict and unknown is not None:
        raise UnsupportedError(
            f"There is no sharding rule for primitive {unknown.primitive!r}, and strict=True allows no replication.",
            where=program.graph.origins[unknown.id].source,
            fix="leave strict out: the op is then computed whole on every device",
        )
    if setup.mesh.num_devices > 1:
        origins = program.graph.origins
        notes += [f"{op.primitive} is computed whole on every device: {op.rule.reason} ({origins[op.id].source})." for op in whole]
    notes += _stored_otherwise(program.graph, setup, assignment)
    of_peak = memory_notes(settings, bill.memory_bytes, bill.safe_bytes)
    notes += of_peak
    notes += _reserved_notes(settings, bill) if of_peak and not captured.is_part else []
    if setup.mesh.num_devices > 1:
        notes += [] if captured.is_part else _batch_notes(program)
        # What follows a pipeline's loss has no batch, by which its devices could share the work.
        if not captured.is_part or batch_leaves(program.graph):
            notes += _repeated_work(program, setup, assignment, bill, settings)
        notes += [] if captured.is_part else unmatched_patterns(captured, settings)
        notes += _early_notes(program, captured, bill)
    # A pipeline reads those of its stages leaf by leaf.
    found = list(dict.fromkeys(notes))
    return tuple(found if captured.is_part else together(found))


def together(notes: Sequence[str]) -> list[str]:
    """Returns the notes, where those that say the same of several leaves of the batch are one."""
    groups: dict[tuple[str, ...], list[Sentence]] = {}
    for note in notes:
        if isinstance(note, Sentence) and note.form is BatchForm.UNDIVIDED:
            groups.setdefault(_all_but_the_leaf(note), []).append(note)
    found: list[str] = []
    for note in notes:
        own = groups.get(_all_but_the_leaf(note), []) if isinstance(note, Sentence) and note.form is BatchForm.UNDIVIDED else []
        if len(own) < 2:
            found.append(note)
        elif note is own[0]:
            axes, kept, rows = _all_but_the_leaf(note)
            leaves = listed([f"'{one.gaps['path']}' {one.gaps['shape']}" for one in own], _MOST_LISTED)
            kept = kept.replace("holds it whole", "holds them whole")
            found.append(Sentence(BatchForm.SEVERAL, count=len(own), axes=axes, kept=kept, rows=rows, leaves=leaves))
    return found


def _all_but_the_leaf(note: Sentence) -> tuple[str, ...]:
    return tuple(note.gaps[name] for name in ("axes", "kept", "rows"))


def _stored_otherwise(graph: Graph, setup: Setup, assignment: Assignment) -> list[str]:
    """Names the leaves of the batch that are stored in another way than the mode would have them."""
    found: dict[tuple[str, str], list[str]] = {}
    for value, wanted in setup.seeds.items():
        known, stored = graph.values[value], assignment.values[value]
        if known.role is Role.BATCH and stored != wanted:
            found.setdefault((format_sharding(stored), format_sharding(wanted)), []).append(f"'{known.path}'")
    notes = []
    for (own, asked), paths in found.items():
        leaves = f"Batch leaf {paths[0]} is" if len(paths) == 1 else f"{len(paths)} batch leaves ({listed(paths, _MOST_LISTED)}) are"
        notes.append(f"{leaves} stored {own}, not {asked}: the ops that read {'it' if len(paths) == 1 else 'them'} do so.")
    return notes


def _whole_ops(program: Program) -> list[Op]:
    """Returns the first op of each primitive that every device computes whole for a reason that its rule gives."""
    first: dict[str, Op] = {}
    for op in program.graph.ops:
        if op.rule.reason:
            first.setdefault(op.primitive, op)
    return list(first.values())


def _early_notes(program: Program, captured: Captured, bill: Bill) -> list[str]:
    """Names the state whose update the rest of the step waits for."""
    waited_for = {value for update in bill.early for value in update.results}
    if not waited_for:
        return []
    paths = [leaf.path for leaf, value in zip(captured.outputs, program.graph.outputs, strict=True) if value in waited_for]
    listed = ", ".join(f"'{path}'" for path in paths[:_MOST_LISTED]) + (", ..." if len(paths) > _MOST_LISTED else "")
    return [f"The rest of the step waits for the new value of {listed}: what its gradient is made of would be in memory to the end."]


def memory_notes(settings: Settings, peak_bytes: int, safe_bytes: int) -> list[str]:
    """Returns a note if the peak is, or may be, over the user's budget, or without one over the memory of a device."""
    machine, peak = settings.topology, exact_bytes_text(peak_bytes)
    budget, capacity = settings.memory_bytes, bytes_text(machine.memory_bytes)
    limit = machine.memory_bytes if budget is None else budget
    if peak_bytes > limit:
        over_device = PeakNote(PeakForm.OVER_DEVICE, peak=peak, capacity=capacity, device=machine.device)
        return [over_device if budget is None else PeakNote(PeakForm.OVER_BUDGET, peak=peak, budget=budget)]
    of = f"the {capacity} that a program may use of a {machine.device}" if budget is None else f"memory_bytes={budget}"
    return [PeakNote(PeakForm.MAY_BE_OVER, peak=peak, safe=exact_bytes_text(safe_bytes), limit=of)] if safe_bytes > limit else []


def _reserved_notes(settings: Settings, bill: Bill) -> list[str]:
    """Returns a note if a peak that is over, or may be, would be within without the memory that XLA reserves for results."""
    budget = settings.memory_bytes
    limit = settings.topology.memory_bytes if budget is None else budget
    least = safe_bytes_of(bill.memory_bytes - bill.reserved_bytes, bill.argument_bytes, settings.topology.device)
    if least > limit:
        return []
    return [
        f"Of the peak, {bytes_text(bill.reserved_bytes)} are what XLA reserves for results while the old state is kept: donate_argnums for "
        "the state saves them."
    ]


def without_peak_notes(notes: Iterable[str]) -> list[str]:
    """Returns the notes of a saved plan that are not on its predicted peak."""
    return [note for note in notes if not isinstance(note, PeakNote)]


def _batch_notes(program: Program) -> list[str]:
    """Says which arguments were taken as the batch if that may surprise the user."""
    leaves = [known for known in map(program.graph.values.__getitem__, program.graph.inputs) if known.role is Role.BATCH and known.shape]
    if not leaves:
        return ["No argument is taken as the batch: name it with batch_argnums if there is one."]
    if len({known.shape[0] for known in leaves}) > 1:
        sizes = ", ".join(f"'{known.path}' {known.shape[0]}" for known in leaves[:4])
        return [f"Batch leaves differ in dimension 0 ({sizes}): if some are no batch, name the batch with batch_argnums."]
    return []


def undivided_batch(program: Program, request: Request, mesh: LogicalMesh, assignment: Assignment) -> list[str]:
    """Names the batch leaves that every device holds whole since they do not divide, unless the user asked for whole ones."""
    graph = program.graph
    if mesh.num_devices == 1 or request.dataset == "full_batch" or isinstance(request.dataset, tuple):
        return []
    return [
        indivisible(graph, value, mesh.names, (), mesh)
        for value in batch_leaves(graph)
        if _is_undivided(graph.values[value].shape, mesh.num_devices, request.dataset) and not any(assignment.values[value])
    ]


def _is_undivided(shape: tuple[int, ...], num_devices: int, dataset: object) -> bool:
    """Returns whether a batch does not divide over the devices; nobody expects it of fewer rows than devices where nobody asked for it."""
    return bool(shape) and shape[0] % num_devices != 0 and (shape[0] > num_devices or dataset is not None)


def _repeated_work(program: Program, setup: Setup, assignment: Assignment, bill: Bill, settings: Settings) -> list[str]:
    """Returns a note if devices repeat work that they could share, with what the user can do."""
    if not bill.flops or bill.split_flops / bill.flops >= 0.5:
        return []
    graph, mesh = program.graph, setup.mesh
    whole = [op for op in graph.ops if mesh.num_slices(name for own in assignment.ops[op.id].axes for name in own) < mesh.num_devices]
    largest = max(whole, key=lambda op: op.flops * op.repeats)
    ways = bill.split_flops / bill.flops * mesh.num_devices
    place = f"{largest.primitive} ({graph.origins[largest.id].source})"
    return [Sentence(WorkForm.REPEATED, ways=f"{ways:.1f}", devices=mesh.num_devices, place=place, remedy=_remedy(settings))]


def _remedy(settings: Settings) -> str:
    """Returns what has devices share the work of a step."""
    context, search = settings.context, search_mode(settings)
    if search == "sharding_propagation":
        return "Give a strategy to spmdctx.shard, or set search_mode='dynamic_programming', which weighs other splits."
    if not search:
        return "Give a strategy to spmdctx.shard, a batch whose rows divide over the devices, or parallel_mode='auto_parallel'."
    own = "" if context.batch_is_pinned else " dataset_strategy='data_parallel' has the batch split in any case."
    return f"The search found other splits slower: they exchange too much for so little work. Larger batches or layers are split.{own}"


def left_whole(inputs: Iterable[PlannedTensor], context: AutoParallelContext) -> list[str]:
    """Returns a sentence on state that the parallel optimizer was to split, and that each device holds whole, if that is much of it.

    What is below `parallel_optimizer_threshold` stays whole as asked.
    """
    asked = optimizer_sharding(context)
    if asked is None:
        return []
    roles = {Role.OPTIMIZER, Role.STATE, *([Role.PARAMETER] if asked.level >= WEIGHTS_TOO else [])}
    weights = () if asked.level >= WEIGHTS_TOO else WHOLE_NUMBERS
    large = [one for one in inputs if one.role in roles and one.shape and one.num_bytes >= max(asked.threshold_bytes, 1)]
    state = [one for one in large if one.role is Role.OPTIMIZER or not (weights and one.dtype.startswith(weights))]
    whole = [one for one in state if not any(one.sharding)]
    sizes = [sum(one.num_bytes for one in some) for some in (whole, state)]
    if sizes[0] < max(_MUCH_BYTES, _MUCH * sizes[1]):
        return []
    names = listed([f"'{one.path}' {list(one.shape)}" for one in sorted(whole, key=lambda one: -one.num_bytes)])
    return [
        f"enable_parallel_optimizer leaves {bytes_text(sizes[0])} of {bytes_text(sizes[1])} of state whole on every device: {names}. "
        "Notes of the plan say why."
    ]


def unmatched_patterns(captured: Captured, settings: Settings) -> list[str]:
    """Names the patterns of `layerwise_parallel` that match no argument of a step, in one sentence."""
    unmatched = [repr(one) for one in settings.layerwise_parallel if not any(matches_path(leaf.path, one) for leaf in captured.inputs)]
    if len(unmatched) > 1:
        return [f"{len(unmatched)} patterns of layerwise_parallel match no argument. They are {listed(unmatched)}."]
    return [f"layerwise_parallel pattern {pattern} matches no argument." for pattern in unmatched]
