"""Runs the search of each mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spmdctx.cost.step import Step, bill_of
from spmdctx.errors import ContextError
from spmdctx.ir.graph import Graph, Role
from spmdctx.ir.mesh import axes_of, replicated
from spmdctx.ir.sharding import Assignment, OpSharding
from spmdctx.machine.topology import Topology
from spmdctx.search.dynamic.certificate import Certificate
from spmdctx.search.dynamic.results import DynamicOptions, Found, Shortfall
from spmdctx.search.dynamic.searcher import Budgets, Searcher, mesh_is_fixed
from spmdctx.search.dynamic.shortfall import Quick, infeasible, over_device
from spmdctx.search.optimizer.couplings import name_what_is_split
from spmdctx.search.optimizer.state import split_optimizer
from spmdctx.search.problem.orbits import Precedents
from spmdctx.search.problem.space import Space
from spmdctx.search.propagation import propagate
from spmdctx.search.recursive.plan import plan_recursive
from spmdctx.search.recursive.searcher import DEFAULT_MEM_COEFF, RecursiveOptions, RecursiveSearcher
from spmdctx.search.reduced_once import reduced_once
from spmdctx.search.setup.blocks import is_too_wide, with_blocks
from spmdctx.search.setup.limits import AlgoLimits
from spmdctx.search.setup.meshes import MAX_AXES
from spmdctx.search.setup.modes import batch_parts, prepare
from spmdctx.search.setup.request import Request, Setup
from spmdctx.search.whatif.axis_order import with_axes_in_order
from spmdctx.wording import counted

_IN_TURNS = "Gradients are reduced in every micro-batch, not once per step"


class Shared:
    """The work that searches of one step share: no budget changes it.

    All are searches of one request but for its number of devices, the mesh that follows from that, and whether gradients are reduced once.
    """

    def __init__(self) -> None:
        self._budgets: dict[tuple[int, bool], Budgets] = {}

    def budgets(self, key: tuple[int, bool], make: Callable[[], Budgets]) -> Budgets:
        """Returns the budgets of a number of devices, with or without gradients that are reduced once."""
        if key not in self._budgets:
            self._budgets[key] = make()
        return self._budgets[key]


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search. `search_mode` is empty where the mode leaves nothing to search.

    A search that `is_rough` only tells how plans compare. One that `is_brief` works less on proofs, and its errors name no budget and no
    number of devices that are enough. One whose budget `is_a_room`, which is not the user's, takes little time for a program of more than
    `middle_program` ops, and its errors name neither. With `shared`, it shares its work with others. Ctrl-C ends one that
    `is_interruptible` with the best plan so far. Searches of larger programs within memory start from the plans of `precedents`, and add
    theirs. Where the splits are `given`, nothing is searched.
    """

    search_mode: str
    topology: Topology
    memory_bytes: int | None = None
    max_mesh_axes: int | None = None
    limits: AlgoLimits = field(default_factory=AlgoLimits)
    mem_coeff: float = DEFAULT_MEM_COEFF
    is_brief: bool = False
    is_rough: bool = False
    is_interruptible: bool = False
    is_a_room: bool = False
    shared: Shared | None = None
    precedents: Precedents | None = None
    given: Assignment | None = None


class Chosen(NamedTuple):
    """The result of a search, and its certificate if it proved a bound."""

    setup: Setup
    assignment: Assignment
    certificate: Certificate | None = None


def search(step: Step, request: Request, options: SearchOptions) -> Chosen:
    """Runs the search that the options name, then splits the optimizer state if the parallel optimizer is on.

    Dynamic programming splits the state itself, unless only a part of the replicas shares a copy.

    Raises:
        StrategyError: strategies, batch or constraints that do not fit the mesh.
        InfeasibleError: a budget that cannot be met.
        ContextError: a search mode that does not exist.
    """
    left_out = _too_wide(step, request, options)
    if left_out:
        options = replace(options, search_mode="sharding_propagation")
    if options.given is not None:
        chosen = Chosen(prepare(step.graph, request), options.given)
    else:
        chosen = _in_order(step, options, _search(step, request, options))
    chosen = _reduced_once(step, request, options, chosen)
    chosen.setup.notes += left_out
    if request.optimizer is None or chosen.setup.mesh.num_devices == 1:
        return chosen
    if chosen.setup.couplings and options.search_mode == "dynamic_programming":
        name_what_is_split(step.graph, chosen.setup, chosen.assignment, request.num_devices, request.optimizer, request.layerwise)
        return chosen
    split = split_optimizer(step, chosen.setup, chosen.assignment, request.optimizer, options.topology, request.layerwise)
    return Chosen(*split, chosen.certificate and chosen.certificate._replace(counted_s=None))


def _too_wide(step: Step, request: Request, options: SearchOptions) -> list[str]:
    """Returns a note if the user's mesh has too many axes for the search, else nothing."""
    if options.search_mode not in ("dynamic_programming", "recursive_programming") or not mesh_is_fixed(request):
        return []
    if request.num_devices < 2**MAX_AXES or not is_too_wide(step.graph, with_blocks(step.graph, prepare(step.graph, request))):
        return []
    apart = f"The mesh has too many axes that the user's shardings keep apart for {options.search_mode}"
    return [f"{apart}: sharding_propagation made this plan. A mesh of fewer axes is searched."]


def _in_order(step: Step, options: SearchOptions, chosen: Chosen) -> Chosen:
    """Has sums scattered that only the order of axes keeps whole; where nothing was searched, the order is the user's."""
    setup, before, certificate = chosen
    if options.is_rough or options.search_mode not in ("dynamic_programming", "recursive_programming") or setup.mesh.num_devices == 1:
        return chosen
    assignment = with_axes_in_order(step, setup, before, options.topology)
    return chosen if assignment is before else Chosen(setup, assignment, certificate and certificate._replace(counted_s=None))


def _reduced_once(step: Step, request: Request, options: SearchOptions, chosen: Chosen) -> Chosen:
    """Lets gradients of micro-batches wait for their sum; a note names those that cannot."""
    setup, before, certificate = chosen
    if not request.once or setup.mesh.num_devices == 1 or not setup.unscattered:
        return chosen
    assignment, fixed = reduced_once(step.graph, setup, before, request.once)
    if fixed:
        setup.notes.append(f"{_IN_TURNS}: a sharding that is asked for splits their sum ({counted(len(fixed), 'gradient')}).")
    if assignment == before:
        return chosen
    if options.memory_bytes is not None and _peak(step, setup, before, options) <= options.memory_bytes < _peak(
        step, setup, assignment, options
    ):
        setup.notes.append(f"{_IN_TURNS}: whole sums do not fit in memory_bytes.")
        return chosen
    return Chosen(setup, assignment, certificate and certificate._replace(counted_s=None))


def _peak(step: Step, setup: Setup, assignment: Assignment, options: SearchOptions) -> int:
    return bill_of(step, assignment, setup.mesh, options.topology).safe_bytes


def _search(step: Step, request: Request, options: SearchOptions) -> Chosen:
    """Runs the search of the options' mode; one device, or a step without ops, leaves nothing to search."""
    if options.search_mode not in _SEARCHES:
        known = ", ".join(mode for mode in _SEARCHES if mode)
        raise ContextError(f"There is no search mode {options.search_mode!r}.", need=f"{known}, or none where nothing is searched")
    is_searched = request.num_devices > 1 and bool(step.graph.ops)
    return (_SEARCHES[options.search_mode] if is_searched else _propagated)(step, request, options)


def _propagated(step: Step, request: Request, options: SearchOptions) -> Chosen:
    """Spreads the pinned shardings."""
    setup = prepare(step.graph, request)
    if setup.mesh.num_devices == 1:
        return Chosen(setup, whole(step.graph, request.parallel_mode))
    setup.notes += setup.guesses
    space = Space(step.graph, setup.mesh, options.topology, step.from_literals, options.limits)
    seeds = {**batch_parts(step.graph, setup), **setup.seeds}
    ways = [propagate(space, setup.pins, setup.forced, seeds, setup.one_way)]
    if setup.follows_user and (contested := _contested(step.graph, setup)):
        # Whether a gather of weights is cheaper than one of activations is not for the order of ops to say.
        ways += [propagate(space, setup.pins, setup.forced, seeds, setup.one_way, later) for later in contested]
    found = min(ways, key=lambda one: bill_of(step, one, setup.mesh, options.topology).total_s)
    # Without ops nothing costs anything.
    return Chosen(setup, found, None if step.graph.ops else Certificate(0.0, 0.0))


def _contested(graph: Graph, setup: Setup) -> tuple[set[int], ...]:
    """Returns the pinned and seeded values that are weights, and those that are the batch, if they use a common axis; else nothing."""
    given = {**setup.seeds, **setup.pins}
    roles = {value: graph.values[_constrained(graph, value)].role for value in given}
    batch = {value for value, role in roles.items() if role is Role.BATCH}
    weights = {value for value, role in roles.items() if role in (Role.PARAMETER, Role.OPTIMIZER, Role.STATE, Role.ARGUMENT)}
    weights |= given.keys() & set(graph.outputs)
    used = [{name for value in values for name in axes_of(given[value])} for values in (weights, batch)]
    return (weights, batch) if used[0] & used[1] else ()


def _constrained(graph: Graph, value: int) -> int:
    """Returns the value to which nothing but constraints were applied."""
    while value in graph.producers and (op := graph.ops[graph.producers[value]]).primitive == "sharding_constraint":
        value = op.operands[0]
    return value


def _recursive(step: Step, request: Request, options: SearchOptions) -> Chosen:
    return Chosen(*plan_recursive(step, request, options.topology, _recursive_options(options)))


def _recursive_options(options: SearchOptions) -> RecursiveOptions:
    return RecursiveOptions(
        mem_coeff=options.mem_coeff,
        binding=options.mem_coeff != DEFAULT_MEM_COEFF,
        memory_bytes=options.memory_bytes,
        limits=options.limits,
    )


def _dynamic(step: Step, request: Request, options: SearchOptions) -> Chosen:
    """Searches within the user's budget, or within the device's memory as far as that is possible."""
    shared = options.shared or Shared()
    asked = DynamicOptions(
        options.memory_bytes,
        options.limits,
        options.max_mesh_axes,
        is_brief=options.is_brief,
        is_rough=options.is_rough,
        is_of_a_part=options.is_a_room,
        is_interruptible=options.is_interruptible,
    )
    is_asked = options.memory_bytes is not None
    own = asked if is_asked else replace(asked, memory_bytes=options.topology.memory_bytes)
    is_long = len(step.graph.ops) > own.middle_program
    own = replace(own, is_soft=not is_asked or (options.is_a_room and is_long), precedents=options.precedents if is_long else None)

    def budgets_of(wanted: Request) -> Budgets:
        key = (wanted.num_devices, bool(wanted.once))
        return shared.budgets(key, lambda: Searcher(step, options.topology, own).budgets(wanted))

    found = budgets_of(request).within(own)
    if isinstance(found, Shortfall) and request.once:
        in_turns = budgets_of(replace(request, once=())).within(own)
        if not isinstance(in_turns, Shortfall):
            found = in_turns
            found.setup.notes.append(f"{_IN_TURNS}: whole sums do not fit in the memory.")
    if isinstance(found, Shortfall) and is_asked:
        other = _fitting(step, request, options, own, found, budgets_of(request))
        if other is not None:
            return other
        own = replace(own, is_brief=options.is_brief or options.is_a_room)
        raise infeasible(step, request, options.topology, own, found, budgets_of(request), _quick(step, request, options))
    if isinstance(found, Shortfall):
        # No plan is safe. One that is likely to fit is better than the fastest, and a note of the planner says what it may take.
        found = budgets_of(request).within(replace(own, is_likely=True))
    if isinstance(found, Shortfall):
        other = _fitting(step, request, options, own, found, budgets_of(request))
        if other is not None:
            return other
        note = over_device(step, request.num_devices, options.topology, found)
        found = found.fastest
        found.setup.notes.append(note)
    return _chosen(found)


def _chosen(found: Found) -> Chosen:
    return Chosen(found.setup, found.assignment, None if found.is_interrupted else Certificate(found.lower_bound_s, found.cost_s))


def _fitting(
    step: Step, request: Request, options: SearchOptions, own: DynamicOptions, short: Shortfall, budgets: Budgets
) -> Chosen | None:
    """Returns any plan within the budget where the search for the cheapest one ended without a plan; None if none is found.

    Budgets that errors name were met in the first way. The other ways are plans that are known without the budget.
    """
    if short.is_proven or options.is_brief or options.is_rough or options.is_a_room or request.manual or request.optimizer:
        return None
    if not own.is_small(step) and not own.is_soft:
        found = budgets.within(own.for_any_plan(step))
        if not isinstance(found, Shortfall):
            found.setup.notes.append("The search within memory ended without a plan: this one is of a search for any that fits.")
            return _chosen(found)
    for setup, assignment in _other_plans(step, request, options, own):
        bill = bill_of(step, assignment, setup.mesh, options.topology)
        if own.memory_bytes is not None and bill.safe_bytes <= own.memory_bytes:
            setup.notes.append(f"The search within memory ended without a plan: this one, of {assignment.mode}, is known to fit.")
            # What holds without a budget holds within one.
            return Chosen(setup, assignment, Certificate(short.fastest.lower_bound_s))
    return None


def _quick(step: Step, request: Request, options: SearchOptions) -> Quick:
    """Returns what finds plans by recursive programming, as far as `_fitting` gives such plans."""

    def finds(num_devices: int, memory_bytes: int) -> bool:
        if request.manual or request.optimizer:
            return False
        wanted = replace(request, num_devices=num_devices)
        return not isinstance(_quickly(step, wanted, replace(options, memory_bytes=memory_bytes)), Shortfall)

    return finds


def _quickly(step: Step, request: Request, options: SearchOptions) -> Found | Shortfall:
    return RecursiveSearcher(step, options.topology, replace(_recursive_options(options), wants_any=True)).plan(request)


def _other_plans(step: Step, request: Request, options: SearchOptions, own: DynamicOptions) -> Iterator[tuple[Setup, Assignment]]:
    """Yields plans that may be within a budget: of recursive programming, the fastest on each mesh, and what propagation spreads."""
    quick = _quickly(step, request, replace(options, memory_bytes=own.memory_bytes))
    if not isinstance(quick, Shortfall):
        yield quick.setup, quick.assignment
    if len(step.graph.ops) <= own.middle_program and not mesh_is_fixed(request):
        searcher = Searcher(step, options.topology, replace(own, memory_bytes=None))
        for mesh in own.meshes(step, request.num_devices, options.topology):
            found = searcher.search(prepare(step.graph, replace(request, mesh=mesh)))
            if isinstance(found, Found):
                yield found.setup, found.assignment
    yield _propagated(step, request, options)[:2]


_SEARCHES: Mapping[str, Callable[[Step, Request, SearchOptions], Chosen]] = {
    "dynamic_programming": _dynamic,
    "recursive_programming": _recursive,
    "sharding_propagation": _propagated,
    "": _propagated,
}


def whole(graph: Graph, mode: str) -> Assignment:
    """Returns the assignment that keeps everything whole, as on one device."""
    ops = tuple([OpSharding(((),) * len(op.rule.sizes)) for op in graph.ops])
    return Assignment(ops, tuple([replicated(len(value.shape)) for value in graph.values]), mode)
