"""The least cost without memory: the graph is reduced and eliminated.

If elimination is too wide, the solver bounds the cost, keeps a shell of states around the bound, and eliminates the shell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from spmdctx.ir.arrays import IntArray
from spmdctx.search.solver.problem.graph import CostGraph
from spmdctx.search.solver.problem.local import descend
from spmdctx.search.solver.problem.memory import Rows
from spmdctx.search.solver.unlimited.dominance import discard, supported, thin
from spmdctx.search.solver.unlimited.dual import Bound, Dual, Resumed
from spmdctx.search.solver.unlimited.eliminate import eliminate, order
from spmdctx.search.solver.unlimited.run import SWEEPS, SolverRun
from spmdctx.search.solver.unlimited.triples import Triples

MAX_TABLE = 1 << 23
DIRECT_WORK = 60_000_000
NARROW_WORK = 4 * DIRECT_WORK
"""Additions up to which elimination is cheaper than a bound."""
EQUAL = 1e-9
"""Relative distance from the cost up to which a bound equals it except for rounding."""
THOROUGH = 3
"""Effort from which dominated states go without memory (with memory from 1 on). On a planner's problems this takes longer than it saves."""
SHELL_WORK = 30_000_000
MAX_SHELLS = 8
FIRST_WORK, NARROWINGS = 2_000_000, 4
"""Additions up to which the first shell is quickly solved, and the times that it is made narrower for that."""
_WORTH = 0.7
"""A core is made anew if it keeps at most this share of its states."""
_NEAR = 8
"""Multiple of the allowed gap from which on shells are tried."""
_LOOSE = 4
"""Factor by which elimination may exceed its limits before a shell is made smaller."""
REDUCING_SHARE = 0.1
"""Share of the time that one reduction may take."""
FEW_SWEEPS = 5
"""Sweeps after which a first look asks whether its bound is enough, and those of the first round from messages of a graph alike."""
MORE_SWEEPS = 200
"""Sweeps of each further round, if the effort allows all rounds of `SWEEPS`."""
MORE_WORK = 2e8
"""Additions of all further rounds at effort 0; each effort may take four times as many as the one before."""
WORTH_SWEEPS = 0.02
"""Share of the gap by which a further round must raise the bound to go on."""
TRIPLES_WORK, MAX_TRIPLES = 15_000_000, 10_000_000
"""Limits on the work on triples at effort 0, and on the entries of those that are added at one time."""
PASSES = 5
FIRST_SHARE = 4e-5
"""Distance from the bound, as a share of the gap, up to which a state looks as good as the best.

It is small, so that few triples are formed at first.
"""
WORTH_GAIN = 0.02
"""Share of the gap by which passes must raise the bound to go on with the same triples."""
GOOD_GAP = 0.04
"""Gap at effort 0, relative to the cost, that is not worth triples; each effort allows a quarter of the gap before."""
TIED_GAP, TIE_BREAK, UNTIED_SWEEPS = 0.005, 1e-4, (10, 10, 10, 10, 10)
"""The gap, relative to the cost, from which ties are broken, the share of the cost that breaks them, spread over all nodes, and the
sweeps before each choice of states."""
FORBIDDEN = 4.0
"""Replaces infinite costs, as a multiple of the best cost."""


class Minimum(NamedTuple):
    """A choice of states, its cost and a valid lower bound, both with the graph's constant."""

    states: list[int]
    cost: float
    bound: float


def shrink(graph: CostGraph, search: SolverRun, rows: Rows | None = None) -> bool:
    """Makes a graph smaller without changing its optimum, with the memory of `rows` if given; returns False if nothing is finite."""
    over, is_over = search.progress() + REDUCING_SHARE, search.effort < (THOROUGH if rows is None else 1)
    while supported(graph):
        graph.split()
        graph.peel(None if rows is None else rows.live)
        removed = 0 if is_over else discard(graph, None if rows is None else rows.priced, lambda: search.progress() > over)
        if not removed:
            # What peeling joins may leave states without any finite choice: messages between them are no numbers.
            return supported(graph)
        search.count("dominated", removed)
        is_over = search.progress() > over  # Nodes of one state go nevertheless.
    return False


class Minimisation:
    """The minimisation of one graph, which may stop early and go on with a higher cutoff in `search`.

    The graph is left as it is.
    """

    def __init__(self, graph: CostGraph, search: SolverRun, resumed: Resumed | None = None) -> None:
        self._core, self._search, self._resumed = graph.copy(), search, resumed
        self._is_possible = shrink(self._core, search) and (not thin(self._core) or shrink(self._core, search))
        self._shells: _Shells | None = None

    @property
    def dual(self) -> Dual | None:
        """The messages so far, of a search that keeps all states; None if it needed none."""
        return self._shells.dual if self._shells is not None and self._search.keeps_states else None

    def run(self, *, narrow: bool = False) -> Minimum | None:
        """Returns the states of least cost, or the best found with its bound; None if every choice is infinite.

        If `narrow`, plain elimination comes first for all that `is_narrow`.
        """
        if not self._is_possible:
            return None
        found = _eliminated(self._core, self._search, NARROW_WORK if narrow else DIRECT_WORK) if self._shells is None else None
        if found is None:
            self._shells = self._shells or _Shells(self._core, self._search, self._resumed)
            found = self._shells.run()
        return None if found is None else found._replace(states=self._core.complete(found.states))


def minimise(graph: CostGraph, search: SolverRun, *, narrow: bool = False) -> Minimum | None:
    """Returns the states of least cost, or the best found with its bound; None if every choice is infinite.

    `graph` is left as it is.
    """
    return Minimisation(graph, search).run(narrow=narrow)


def is_narrow(graph: CostGraph) -> bool:
    """Returns whether plain elimination is cheap."""
    return order(graph, MAX_TABLE, NARROW_WORK) is not None


def _eliminated(graph: CostGraph, search: SolverRun, work: int) -> Minimum | None:
    """Returns the optimum by elimination; None if that is too much work."""
    found = order(graph, MAX_TABLE, work)
    if found is None:
        return None
    search.count("eliminated", len(found.nodes))
    search.reach("largest_table", found.largest)
    result = eliminate(graph, found.nodes, search.memo, search.expired)
    if result is None:
        return None
    states, value = result
    return Minimum(states, value + graph.base, value + graph.base)


class _Shells:
    """Shells around the dual bound of one graph, until the bound is reached or the rounds are spent.

    `best` and `bound` include the graph's constant. `core` loses the states that the bound shows to be useless.
    """

    def __init__(self, core: CostGraph, search: SolverRun, resumed: Resumed | None = None) -> None:
        self.core = core
        self.search = search
        self.best: Minimum | None = None
        self.bound = -np.inf
        # States left out of the core cost at least this much.
        self._outside = np.inf
        self._smaller: list[CostGraph] = []
        self.dual: Dual | None = Dual(core)
        if resumed is not None:
            self.dual.resume(resumed)
        self._of_messages: Bound | None = None
        self._schedule = self._rounds(is_resumed=resumed is not None)

    def run(self) -> Minimum | None:
        """Returns the best states; called again with a higher cutoff, it goes on where it stopped."""
        while self._goes_on():
            num_sweeps = next(self._schedule, 0)
            if not num_sweeps:
                break
            if self.dual is not None and self._of_messages is not None:
                self.dual = self._without_useless(self.dual, self._of_messages)
            if self.dual is None:
                break
            self._of_messages = self._swept(self.dual, num_sweeps)
        dual, bound = self.dual, self._of_messages
        if dual is not None and bound is not None and not self._is_done() and not self.search.expired():
            self._tighten(dual, bound)
        if not self._is_done():
            exact = _eliminated(self.core, self.search, self.search.work)
            if exact is not None:
                self._offer(exact)
                self.bound = min(exact.cost, self._outside)
        if self.best is None:
            return None
        return self.best._replace(bound=self.best.cost if self._gap() <= EQUAL * abs(self.best.cost) else self.bound)

    def _goes_on(self) -> bool:
        """Returns whether to sweep once more, after a look at the shells of the bound."""
        bound = self._of_messages
        if bound is None:
            return True
        if self._is_done():
            if self._gap() > EQUAL * abs(self.best.cost if self.best else 0.0) and self.bound < self.search.cutoff:
                # The gap is small enough. One look at the shells often finds much better states.
                self._closed(bound)
            return False
        return not ((self._is_near() and self._closed(bound)) or self.search.expired())

    def _swept(self, dual: Dual, num_sweeps: int) -> Bound:
        enough = self.search.enough
        parts = (FEW_SWEEPS, num_sweeps - FEW_SWEEPS) if np.isfinite(enough) else dual.parts(num_sweeps)
        enough = min(enough, self.search.cutoff if self.search.cutoff > -np.inf else np.inf)
        for part in parts:
            dual.sweep(part, self.search.expired)
            self.search.count("sweeps", part)
            bound = dual.bound()
            if bound.value + self.core.base >= enough:
                break
            if self.search.has_momentum or dual.is_slow or (self.search.keeps_states and dual.is_long):
                # Not before: some bounds end in the first few sweeps, and of equal states these choose the same ones.
                dual.gain_momentum()
        self._raise(bound.value + self.core.base)
        self._decoded(dual.decode())
        # Searches at prices of memory, which gain no momentum, need the bound more than a good choice.
        if self.search.has_momentum and self.best is not None and self._gap() > TIED_GAP * abs(self.best.cost) and not self._is_done():
            most = TIE_BREAK * abs(self.best.cost) / len(dual.nodes)
            dual.untied(most, UNTIED_SWEEPS, self.search.expired, self._decoded)
        return bound

    def _decoded(self, states: list[int]) -> bool:
        """Offers states that messages choose, after changes of one node at a time; returns whether the search is done."""
        self._offer(Minimum(states, descend(self.core, states) + self.core.base, 0.0))
        return self._is_done()

    def _rounds(self, *, is_resumed: bool) -> Iterator[int]:
        """Yields the number of sweeps before each look at the bound.

        The numbers rise, and at the end sweeps go on as long as the bound rises.
        """
        if is_resumed:
            yield FEW_SWEEPS
        for number in SWEEPS[: self.search.rounds]:
            before = self.bound
            yield number
            if self.search.keeps_states and self._crawls(before):
                return
        if self.search.rounds < len(SWEEPS) or self.best is None:
            return
        work = sum(self.core.size(node) * self.core.size(other) for node in self.core.nodes() for other in self.core.links[node])
        before = self.bound
        for _ in range(int(MORE_WORK * 4.0**self.search.effort / (work * MORE_SWEEPS))):
            if self._gap() <= GOOD_GAP / 4**self.search.effort * abs(self.best.cost):
                return
            yield MORE_SWEEPS
            if self.bound - before < WORTH_SWEEPS * self._gap():
                return
            before = self.bound

    def _crawls(self, before: float) -> bool:
        """Returns whether the bound hardly rises towards the least cost that is known."""
        known = min(self.search.cutoff, np.inf if self.best is None else self.best.cost)
        return self.bound - before < WORTH_SWEEPS * (known - self.bound)

    def _tighten(self, dual: Dual, bound: Bound) -> None:
        """Raises the bound by triples, and by more of them each time it hardly rises; states that cost too much are left out.

        From messages that other searches start from, these do it, each for itself.
        """
        if self.best is None or self.search.keeps_states:
            return
        triples = Triples(self.core, dual, FORBIDDEN * abs(self.best.cost))
        work, share = TRIPLES_WORK * 4.0**self.search.effort, FIRST_SHARE
        good = GOOD_GAP / 4**self.search.effort * abs(self.best.cost)
        worth = max(good, self.search.worth * abs(min(self.search.cutoff, self.best.cost)))
        while work > 0 and self._spare(bound) > worth:
            near = {node: int((beliefs <= bound.value + share * self._spare(bound)).sum()) for node, beliefs in bound.beliefs.items()}
            triples.cover({node: count for node, count in near.items() if count > 1}, MAX_TRIPLES)
            share, gain, before = 4 * share, np.inf, bound.value
            while work > 0 and gain > WORTH_GAIN * self._spare(bound) and not self.search.expired():
                triples.run(PASSES)
                work -= PASSES * triples.work
                self.search.count("passes", PASSES)
                bound = triples.bound()
                gain, before = bound.value - before, max(bound.value, before)
                self._raise(bound.value + self.core.base)
                most = self._spare(bound) + bound.value
                self._outside = min(self._outside, most + self.core.base)
                if self._is_done() or not triples.restrict(most):
                    self._raise(np.inf)
                    return
            if share > 1 or self.search.expired() or self._closed(bound):
                return

    def _spare(self, bound: Bound) -> float:
        """Returns the distance of a bound below the cost from which choices are useless."""
        most = self.search.cutoff if self.best is None else min(self.search.cutoff, self.best.cost)
        return most - self.core.base - bound.value

    def _offer(self, found: Minimum) -> None:
        if np.isfinite(found.cost) and (self.best is None or found.cost < self.best.cost):
            states = found.states
            for graph in reversed(self._smaller):
                states = graph.complete(states)
            self.best = found._replace(states=states)

    def _raise(self, bound: float) -> None:
        """Raises the bound of the core, if this one is higher."""
        self.bound = max(self.bound, min(bound, self._outside))

    def _gap(self) -> float:
        return np.inf if self.best is None else self.best.cost - self.bound

    def _is_done(self) -> bool:
        """Returns whether the best is proven, cannot beat the caller's cost, or shows that the minimum is useless.

        Without any choice it is not done: the caller gets some choice in any case.
        """
        if self.best is None:
            return False
        is_decided = self.bound >= self.search.cutoff or self.best.cost <= self.search.useless
        return is_decided or self._gap() <= max(self.search.tolerance, EQUAL) * abs(self.best.cost)

    def _is_near(self) -> bool:
        """Returns whether shells may well end the search; if a gap is allowed, more sweeps are at first the cheaper way to reach it."""
        tolerance = self.search.tolerance
        return not tolerance or (self.best is not None and self._gap() <= _NEAR * tolerance * abs(self.best.cost))

    def _without_useless(self, dual: Dual, bound: Bound) -> Dual | None:
        """Returns the messages on a core without the states that cost too much; None if that leaves nothing."""
        if self.search.keeps_states:
            return dual
        most = min(self.search.cutoff, np.inf if self.best is None else self.best.cost)
        kept = self._near(bound, most - self.core.base - bound.value)
        if sum(map(len, kept.values())) > _WORTH * sum(map(self.core.size, kept)):
            return dual
        smaller = self._shell(kept)
        self._outside = min(self._outside, most)
        if smaller is None:
            self._raise(most)
            return None
        self.core = smaller
        self._smaller.append(smaller)
        return Dual(smaller, dual, kept)

    def _closed(self, bound: Bound) -> bool:
        """Solves shells of the bound, and returns whether the search is done.

        A shell is as wide as the gap if that can be solved. Else it is narrower, and gives better states and a better bound. The first is
        solved quickly, as its states often make the gap much smaller.
        """
        # Choices that cost more than the caller's are useless.
        delta = max(1.0, abs(bound.value)) if self.best is None else self._spare(bound)
        narrower = [delta / 4**times for times in range(NARROWINGS + 1)]
        delta = next((own for own in narrower[:-1] if self._is_narrow(self._near(bound, own), FIRST_WORK)), narrower[-1])
        too_wide, solved = np.inf, 0.0
        for _ in range(MAX_SHELLS):
            if self.search.expired() or delta <= solved:
                break
            kept = self._near(bound, delta)
            narrow = self._is_narrow(kept, _LOOSE * SHELL_WORK)
            shell = self._shell(kept) if narrow else None
            found = None if shell is None else _eliminated(shell, self.search, SHELL_WORK)
            if found is None and (shell is not None or not narrow):
                too_wide = delta
                delta /= 4
                continue
            if shell is not None and found is not None:
                self._offer(found._replace(states=shell.complete(found.states)))
            # Everything outside the shell costs more than bound + delta.
            inside = np.inf if found is None else found.cost
            self._raise(min(inside, self.core.base + bound.value + delta))
            solved, delta = delta, min(self._spare(bound), 4 * delta)
            if self._is_done() or delta >= too_wide:
                break
        return self._is_done()

    def _near(self, bound: Bound, delta: float) -> dict[int, IntArray]:
        """Returns the states whose bound is at most `delta` above the graph's."""
        most = bound.value + delta + 1e-12 * abs(bound.value)
        return {node: np.flatnonzero(beliefs <= most) for node, beliefs in bound.beliefs.items()}

    def _is_narrow(self, kept: dict[int, IntArray], work: int) -> bool:
        """Returns whether elimination among these states takes at most so many additions."""
        return order(self.core, _LOOSE * MAX_TABLE, work, {node: len(states) for node, states in kept.items()}) is not None

    def _shell(self, kept: dict[int, IntArray]) -> CostGraph | None:
        """Returns the graph with only the states `kept`; None if nothing finite is left."""
        if any(not len(states) for states in kept.values()):
            return None
        shell = self.core.copy()
        shell.restrict({node: states for node, states in kept.items() if len(states) < self.core.size(node)})
        return shell if shrink(shell, self.search) else None
