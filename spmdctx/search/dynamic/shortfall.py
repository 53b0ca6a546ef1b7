"""The errors where no plan fits in memory: they name the op where it runs out, and a budget or device count that is enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from spmdctx.cost.bill import Bill
from spmdctx.cost.memory.lives import compiled_memory
from spmdctx.cost.step import Step, bill_of
from spmdctx.errors import InfeasibleError
from spmdctx.ir.analysis.carried import carried_inputs
from spmdctx.machine.topology import Topology
from spmdctx.machine.xla.memory.spread import spread_on
from spmdctx.search.dynamic.effort import ENOUGH_DEVICES
from spmdctx.search.dynamic.least_bytes import least_bytes
from spmdctx.search.dynamic.results import DynamicOptions, Found, Shortfall
from spmdctx.search.dynamic.searcher import Budgets, mesh_is_fixed, plan_dynamic
from spmdctx.search.setup.request import Request
from spmdctx.wording import bytes_text, counted, exact_bytes_text

_LARGEST = 3
_MOST_DEVICES = 4096
_MOST_SEARCHED = 2
"""Device counts that are searched for a plan; a bound that rules a count out is no search."""

_DOWN = 0.9
"""Share of a budget that is enough at which a small program's next one is tried."""

_ATTEMPTS, _MOST_ATTEMPTS = 8, 60
"""Quick searches for a budget that is enough, and searches for a small program's least one, to the byte."""

_MOST_WORK = 1e9
"""Additions of the search and of all of these, after the last of which none begins."""

_LEAST_WORK = 3e8
"""Additions that these searches may make in any case."""

_JUMPS = 2
"""Failures in a row after which the search no longer tries the bytes of a small program's smallest plan seen."""

_SAME, _NEAR, _FAR = 0.005, 0.05, 0.1
"""Shares of a budget by which it may be too large: if hardly less would do, without another quick search, and without one that is not."""

_WORTH_A_WORD = 0.01
"""Share of the fastest plan's peak that donated state must save."""

_STAYS = 0.9
"""More devices are tried only if the least bytes alive, or the bounds on them, shrink by a tenth."""


Quick = Callable[[int, int], bool]
"""Whether a quick search finds a plan on a number of devices within a number of bytes."""


def infeasible(
    step: Step, request: Request, topology: Topology, options: DynamicOptions, found: Shortfall, budgets: Budgets, quick: Quick
) -> InfeasibleError:
    """Returns the error for a budget that no plan meets.

    It searches for a small budget and a small number of devices that are enough, with limited work. `budgets` are those of the search
    that found none. Whoever asks for what a `quick` search meets gets a plan. An error of a brief search names neither.
    """
    said = _said(found, request.num_devices, f"keeps the step within memory_bytes={options.memory_bytes}")
    joined = f"; axes of the mesh were used only together: {found.joined}" if found.joined else ""
    least = exact_bytes_text(found.least_bytes)
    what = "to allow for" if spread_on(topology.device).of(1) else "alive"
    alive = f"at least {least} {what} there" if found.is_proven else f"{least} {what} there in the smallest plan of this search"
    return InfeasibleError(
        f"{said}{', as was proven' if found.is_proven else ''}{joined}.",
        where=place_of(step, found.time),
        got=f"{alive}, the largest of them {_largest(step, topology, found.time)}{_likely(step, topology, options, found)}",
        need="" if options.is_brief else _need(step, request, topology, options, found, budgets, quick),
        fix=f"{_donating(step, topology, found)}raise the budget or the number of devices, make the batch smaller, or recompute "
        "activations (jax.checkpoint)",
    )


def _likely(step: Step, topology: Topology, options: DynamicOptions, found: Shortfall) -> str:
    """Returns that the fastest plan is over the budget only by what is safe to allow for, or an empty string if it is not."""
    bill = bill_of(step, found.fastest.assignment, found.fastest.setup.mesh, topology)
    if options.memory_bytes is None or bill.memory_bytes > options.memory_bytes:
        return ""
    return f"; the fastest plan likely takes {bytes_text(bill.memory_bytes)}, but {bytes_text(bill.safe_bytes)} are safe to allow for"


def _donating(step: Step, topology: Topology, found: Shortfall) -> str:
    """Returns the advice to donate the state that the step returns, with what it saves, or an empty string if that is nothing."""
    carried = carried_inputs(step.graph) - step.donated
    if not carried:
        return ""
    mesh, assignment = found.fastest.setup.mesh, found.fastest.assignment
    donating = replace(step, donated=step.donated | carried)
    now, then = (bill_of(one, assignment, mesh, topology).memory_bytes for one in (step, donating))
    if then > now * (1 - _WORTH_A_WORD):
        return ""
    return f"donate the state that the step returns (donate_argnums: the fastest plan takes {bytes_text(then)}, now {bytes_text(now)}), "


def _need(
    step: Step, request: Request, topology: Topology, options: DynamicOptions, found: Shortfall, budgets: Budgets, quick: Quick
) -> str:
    """Returns a budget and a number of devices that are enough, as far as the search finds them."""
    count = _enough_devices(step, request, topology, options, quick)
    budget, is_whole = _enough_bytes(step, request, topology, options, found, budgets, quick)
    enough = f"memory_bytes={budget} ({bytes_text(budget)})" + ("" if is_whole else ", which is enough; less may be")
    if count is not None:
        return f"{enough}, or device_num={count}"
    return enough if mesh_is_fixed(request) else f"{enough}; a short search found no number of devices that is enough"


def _said(found: Shortfall, num_devices: int, what: str) -> str:
    """Returns that no plan does `what`, or only that none was found, and whether the search ended early."""
    devices = counted(num_devices, "device")
    no_plan = f"No plan on {devices} {what}" if found.is_proven else f"No plan was found on {devices} that {what}"
    return f"{no_plan} within the search's limit of work; one may exist" if found.is_cut else no_plan


def over_device(step: Step, num_devices: int, topology: Topology, found: Shortfall) -> str:
    """Returns the note for a budget that the user did not set, where no plan fits in the memory of the devices."""
    said = _said(found, num_devices, f"fits in the {bytes_text(topology.memory_bytes)} of a {topology.device}")
    least = ": each has at least" if found.is_proven else "; the smallest that was seen has"
    alive = f"{bytes_text(found.least_bytes)} alive at {place_of(step, found.time)}"
    return f"{said}{least} {alive}. More devices, a smaller batch or recomputed activations (jax.checkpoint) take less."


def over_budget(step: Step, bill: Bill, memory_bytes: int, num_devices: int, topology: Topology) -> InfeasibleError:
    """Returns the error for a plan over the budget that was not searched within it (one device, propagation)."""
    time = bill.memory_profile.index(bill.memory_bytes)
    what, fix = "The step on one device", "set device_num to more devices"
    if num_devices > 1:
        what, fix = "The plan of sharding_propagation", "use search_mode='dynamic_programming', which searches within a budget"
    return InfeasibleError(
        f"{what} does not keep within memory_bytes={memory_bytes}.",
        where=place_of(step, time),
        got=f"{exact_bytes_text(bill.memory_bytes)} alive there, the largest of them {_largest(step, topology, time)}",
        need=f"memory_bytes={bill.safe_bytes} ({bytes_text(bill.safe_bytes)})",
        fix=fix,
    )


def place_of(step: Step, time: int) -> str:
    """Returns an op's primitive, its name if it has one, and its line."""
    origin = step.graph.origins[time]
    name = f" {origin.name!r}" if origin.name else ""
    return f"{step.graph.ops[time].primitive}{name} ({origin.source})"


def _largest(step: Step, topology: Topology, time: int) -> str:
    """Returns the largest values alive at an op, by their whole size."""
    graph = step.graph
    memory = compiled_memory(graph, step.scopes, step.donated, topology.compiler)
    alive = [life.value for life in memory.lives if life.start <= time <= life.end]
    sizes = {value: graph.values[value].num_bytes for value in alive}
    shown = sorted(sizes, key=lambda value: (-sizes[value], value))[:_LARGEST]
    return ", ".join(f"{_name(step, value)} {graph.values[value].dtype}{list(graph.values[value].shape)}" for value in shown)


def _name(step: Step, value: int) -> str:
    known = step.graph.values[value]
    if known.path:
        return f"'{known.path}'"
    maker = step.graph.producers.get(value)
    if maker is None:
        return "a constant"
    return f"{step.graph.ops[maker].primitive} ({step.graph.origins[maker].source})"


def _enough_bytes(
    step: Step, request: Request, topology: Topology, options: DynamicOptions, found: Shortfall, budgets: Budgets, quick: Quick
) -> tuple[int, bool]:
    """Returns a budget within which the search finds a plan, and whether hardly less would do.

    Of a small program it is the least one, unless that takes too much work.
    """
    enough, short = _peak_bytes(step, topology, found.fastest), options.memory_bytes or 0
    if found.is_proven:
        short = max(short, found.least_bytes - 1)
    if options.is_small(step):
        return _least_enough(step, topology, options, found, budgets, (short, enough))

    tried = short
    for _ in range(_ATTEMPTS):
        if enough - tried <= enough * _NEAR:
            break
        attempt = (tried + enough) // 2
        if quick(request.num_devices, attempt):
            enough = attempt
        else:
            tried = attempt
    if enough - short > enough * _FAR:
        # This search finds plans where a quick one does not, in much more time.
        attempt = (short + enough) // 2
        if not isinstance(budgets.within(replace(options.for_any_plan(step), memory_bytes=attempt)), Shortfall):
            enough = attempt
    return enough, found.is_proven and enough - short <= enough * _SAME


def _least_enough(
    step: Step, topology: Topology, options: DynamicOptions, found: Shortfall, budgets: Budgets, between: tuple[int, int]
) -> tuple[int, bool]:
    """Returns the least budget `between` two within which the search finds a plan, and whether the search for it went to its end."""
    short, enough = between
    attempt, failures = max(found.enough_bytes, short + 1), 0
    any_plan = options.for_any_plan(step)
    if found.is_proven:
        # Least bytes that nothing meets say little of the plans; a failure not far above them does.
        attempt = min(2 * attempt, (short + enough) // 2)
    most, met, is_whole = max(_MOST_WORK, budgets.spent + _LEAST_WORK), enough, True
    for _ in range(_MOST_ATTEMPTS):
        if not short < attempt < enough:
            # A plan is found faster than it is found that there is none.
            attempt = max((short + enough) // 2, math.ceil(enough * _DOWN))
        if enough - short <= (1 if budgets.spent < most / 2 else max(1, enough * _SAME)):
            break
        if budgets.spent > most:
            is_whole = False
            break
        result = budgets.within(replace(any_plan, memory_bytes=attempt))
        if isinstance(result, Shortfall):
            # The smallest plan seen is mostly found within its own bytes.
            short, failures = attempt, failures + 1
            attempt = result.enough_bytes if failures <= _JUMPS else short
        else:
            # The bytes of a plan are often the least already.
            enough, failures, met, attempt = _peak_bytes(step, topology, result), 0, attempt, short
    if enough < met and isinstance(budgets.within(replace(any_plan, memory_bytes=enough)), Shortfall):
        # A limited search may find a plan within more bytes than it takes, and not within these.
        return met, is_whole
    return enough, is_whole


def _peak_bytes(step: Step, topology: Topology, found: Found) -> int:
    return bill_of(step, found.assignment, found.setup.mesh, topology).safe_bytes


def _enough_devices(step: Step, request: Request, topology: Topology, options: DynamicOptions, quick: Quick) -> int | None:
    """Returns the first doubling of the devices that meets the budget.

    Returns None if the user's code fixes the mesh, or if no such doubling was found. It ends after a few searches that found no plan, and
    where twice as many devices need hardly fewer bytes.
    """
    if mesh_is_fixed(request):
        return None
    count, searched = request.num_devices, 0
    least_bound = least_found = float("inf")
    # There are many meshes of three axes, and little is gained by them.
    schedule = ENOUGH_DEVICES if options.is_small(step) else None
    any_plan = replace(options, wants_any=True, max_axes=min(2, options.max_axes or 2), schedule=schedule)
    while count < _MOST_DEVICES and searched < _MOST_SEARCHED:
        count *= 2
        bound = least_bytes(step, any_plan.meshes(step, count, topology), topology)
        if bound > (options.memory_bytes or 0):
            if bound > least_bound * _STAYS:
                return None
            least_bound = bound
            continue
        if quick(count, options.memory_bytes or 0):
            return count
        searched += 1
        found = plan_dynamic(step, replace(request, num_devices=count), topology, any_plan)
        if not isinstance(found, Shortfall):
            return count
        if found.least_bytes > least_found * _STAYS:
            return None
        least_found = found.least_bytes
    return None
