"""Says what other values of options would bring: where a step would be more than 1 % faster, or would fit in memory.

The plan itself is as the user asked for it. Each figure is the price of a plan with the other value, by the same cost model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spmdctx.context.state import AutoParallelContext
from spmdctx.context.values import OPTIMIZER_LEVELS
from spmdctx.cost.bill import Bill
from spmdctx.cost.price.assigned import Assigned
from spmdctx.cost.price.directives import Directives
from spmdctx.errors import StrategyError, UnsupportedError
from spmdctx.ir.analysis.carried import carried_inputs
from spmdctx.ir.collective import LOSS_REDUCTION, Collective
from spmdctx.ir.graph import LOW, Graph
from spmdctx.machine.topology import Preferences, as_asked
from spmdctx.plan.data import PeakForm, PeakNote
from spmdctx.search.optimizer.asked import optimizer_sharding
from spmdctx.search.select import search
from spmdctx.search.setup.request import Setup
from spmdctx.step.planning.bills import priced, written_collectives
from spmdctx.step.planning.request import request_of, search_mode, search_options, step_of
from spmdctx.trace.build.program import Program
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.scope.settings import Settings
from spmdctx.wording import bytes_text, seconds_text

_WORTH_A_WORD = 0.01
"""Share of a step that another value must save."""

_UNSEARCHED = ("", "sharding_propagation")
"""Search modes that make a plan in the time that it takes to price one."""


@dataclass(frozen=True)
class Decision:
    """A plan as the planner decided and priced it."""

    program: Program
    captured: Captured
    settings: Settings
    setup: Setup
    assigned: Assigned
    bill: Bill
    directives: Directives

    @property
    def limit_bytes(self) -> int:
        """The user's budget per device, or else the memory of a device."""
        budget = self.settings.memory_bytes
        return self.settings.topology.memory_bytes if budget is None else budget

    @property
    def fits(self) -> bool:
        """Whether the plan keeps within its limit."""
        return self.bill.memory_bytes <= self.limit_bytes

    @property
    def written(self) -> list[Collective]:
        """The collectives that the user's own code holds."""
        return written_collectives(self.program, self.setup.parts)

    def notes(self, option: str, other: Bill, why: str = "", least: str = "") -> Iterator[str]:
        """Yields what a plan with another value of an option is better at, if that is worth a word."""
        seconds, why = seconds_text(other.total_s), f": {why}" if why else ""
        if not self.fits and other.memory_bytes <= self.limit_bytes:
            peaks = {"peak": bytes_text(other.memory_bytes), "now": bytes_text(self.bill.memory_bytes)}
            yield PeakNote(PeakForm.WOULD_FIT, option=option, seconds=seconds, why=why, **peaks)
        elif other.memory_bytes <= max(self.limit_bytes, self.bill.memory_bytes):
            share = 1 - other.total_s / self.bill.total_s if self.bill.total_s else 0.0
            if share > _WORTH_A_WORD:
                now = seconds_text(self.bill.total_s)
                yield f"{option} would make a step {least}{100 * share:.1f} % faster ({seconds} instead of {now}){why}."


def other_values(decision: Decision) -> list[str]:
    """Returns a note for each option of which another value would make the step faster or make it fit."""
    if decision.setup.mesh.num_devices == 1 or decision.captured.is_part:
        return list(_donation(decision)) if not decision.captured.is_part else []
    own = (_all_to_all, _own_type, _unbucketed, _parallel_optimizer, _donation)
    return [note for notes in own for note in notes(decision)]


def _all_to_all(decision: Decision) -> Iterator[str]:
    """Prices the plan with moves between dimensions by all-to-all, if the context forbids it."""
    machine = decision.settings.topology
    if machine.preferences.allows_all_to_all:
        return
    bill = _priced_on(decision, Preferences(True, machine.preferences.widens_gradients), decision.written)
    yield from decision.notes("enable_alltoall=True", bill, "tensors are moved between dimensions by all-gathers")


def _priced_on(decision: Decision, preferences: Preferences, written: Sequence[Collective]) -> Bill:
    """Returns the price of the plan with other preferences for its communication."""
    machine = as_asked(decision.settings.topology, preferences)
    return priced(decision.program, replace(decision.assigned, topology=machine), decision.settings.context, written)[0]


def _own_type(decision: Decision) -> Iterator[str]:
    """Prices the plan with low-precision gradients that are reduced in their own type."""
    asked, narrow = decision.settings.topology.preferences, _narrowed(decision.program, decision.written)
    if not asked.widens_gradients or (not decision.directives.widened and narrow == decision.written):
        return
    bill = _priced_on(decision, Preferences(asked.allows_all_to_all, widens_gradients=False), narrow)
    # What a loss of its own writes in float32 on each device is still in the price.
    least = "" if narrow == decision.written else "at least "
    yield from decision.notes("gradient_fp32_sync=False", bill, "gradients of low precision are reduced in float32", least)


def _narrowed(program: Program, written: Sequence[Collective]) -> list[Collective]:
    """Returns the collectives of a program with the gradients that a loss widens for its reduction in their own type."""
    sizes = Counter(size for region in program.manual if region.is_loss for size in _widened_bytes(region.body.graph))
    narrow = []
    for row in written:
        is_widened = row.cause == LOSS_REDUCTION and sizes[row.payload_bytes] > 0
        if is_widened:
            sizes[row.payload_bytes] -= 1
        narrow.append(replace(row, payload_bytes=row.payload_bytes // 2) if is_widened else row)
    return narrow


def _widened_bytes(body: Graph) -> Iterator[int]:
    """Yields the bytes of the values that a body widens behind a barrier: `gradients.reduce` writes them so."""
    for op in body.ops:
        made_by = body.producers.get(op.operands[0], -1) if op.primitive == "optimization_barrier" else -1
        if made_by >= 0 and body.ops[made_by].primitive == "convert_element_type":
            source = body.ops[made_by].operands[0]
            if body.values[source].dtype in LOW and body.values[op.results[0]].dtype not in LOW:
                yield body.values[op.results[0]].num_bytes


def _unbucketed(decision: Decision) -> Iterator[str]:
    """Prices the plan with gradients that XLA's own combiner joins."""
    if not decision.directives.buckets:
        return
    context = replace(decision.settings.context, index_fusion=False, all_reduce_fusion_config=())
    bill, _ = priced(decision.program, decision.assigned, context, decision.written)
    yield from decision.notes("Gradients without buckets", bill, "XLA's combiner would join them")


def _parallel_optimizer(decision: Decision) -> Iterator[str]:
    """Plans the step with the parallel optimizer, or with more of its state split, where that takes no search."""
    settings = decision.settings
    if search_mode(settings) not in _UNSEARCHED or settings.context.grad_accumulation_step > 1:
        return
    found: list[tuple[float, str]] = []
    for context, said in _larger_levels(settings.context):
        bill = _planned(decision, replace(settings, context=context))
        if bill is not None:
            found += [(bill.total_s, note) for note in decision.notes(said, bill)]
    if found:
        yield min(found, key=lambda one: one[0])[1]


def _larger_levels(context: AutoParallelContext) -> Iterator[tuple[AutoParallelContext, str]]:
    """Yields contexts that split more and more state, with the words for what they set."""
    asked = context.parallel_optimizer_config
    enabled = replace(context, enable_parallel_optimizer=True)
    if optimizer_sharding(enabled) is None:
        return
    levels = OPTIMIZER_LEVELS[OPTIMIZER_LEVELS.index(asked.optimizer_level) :]
    for level in levels[1:] if context.enable_parallel_optimizer else levels:
        named = "" if level == asked.optimizer_level else f"optimizer_level={level!r}"
        switch = "" if context.enable_parallel_optimizer else "enable_parallel_optimizer=True"
        yield (
            replace(enabled, parallel_optimizer_config=asked._replace(optimizer_level=level)),
            " with ".join(filter(None, (switch, named))),
        )


def _planned(decision: Decision, settings: Settings) -> Bill | None:
    """Returns the price of a plan with other settings, None where the step does not allow them."""
    program, captured = decision.program, decision.captured
    step = step_of(program, captured)
    try:
        setup, assignment, _ = search(step, request_of(program, captured, settings), search_options(settings))
    except (StrategyError, UnsupportedError):
        return None
    assigned = Assigned(step, assignment, setup.mesh, settings.topology)
    return priced(program, assigned, settings.context, written_collectives(program, setup.parts))[0]


def _donation(decision: Decision) -> Iterator[str]:
    """Prices the plan with all state donated that the step returns, if the plan does not fit without."""
    step = decision.assigned.step
    carried = carried_inputs(step.graph) - step.donated
    if decision.fits or not carried:
        return
    donating = replace(step, donated=step.donated | carried)
    bill, _ = priced(decision.program, replace(decision.assigned, step=donating), decision.settings.context, decision.written)
    why = "the old state and the new one are in memory together"
    yield from decision.notes("donate_argnums for the state that the step returns", bill, why)
