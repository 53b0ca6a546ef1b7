"""Cuts a step: workers run what comes before the loss, and the loss; servers run the rest, each on the arrays that it holds.

Every value that passes between them has a slot: `in/3` for input 3 of the step, `loss/1` for result 1 of its loss, `v/7` for a value
that is made after the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.extend.core as jexc

from spmdctx.pipeline.capture.around import EVERYWHERE, Around, Placement, Program, programs_of
from spmdctx.pipeline.cut.line import is_array, needed, num_bytes, variables
from spmdctx.server.program.balance import balanced
from spmdctx.server.program.capture import ServedStep, parameter_of
from spmdctx.server.program.split_rows import SplitRows, TableCut, split_rows


class ServerProgram(NamedTuple):
    """What one server runs in one round, with the slots of what it reads and makes."""

    jaxpr: jexc.ClosedJaxpr
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class ServerPart(NamedTuple):
    """What one server does.

    Attributes:
        held: the inputs of the step that it holds, by number.
        joined: the results of the loss that it gets from workers, by number.
        given: the other inputs of the step that it gets from workers, by number.
        rounds: its programs; None where it has none in a round.
        posts: the slots that it sends to other servers before the first round, and after each.
        awaits: the slots that it gets from others before each round, and after the last.
        results: the results of the step that workers take from it, by number, with their slots.
        kept: the slots that it keeps of each step, since workers renew by them what they hold.
    """

    held: tuple[int, ...]
    joined: tuple[int, ...]
    given: tuple[int, ...]
    rounds: tuple[ServerProgram | None, ...]
    posts: tuple[tuple[str, ...], ...]
    awaits: tuple[tuple[str, ...], ...]
    results: Mapping[int, str]
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cut:
    """A step that is cut for a number of servers.

    Attributes:
        around: the step's program around its loss.
        held: the inputs of the step that servers hold, each with the slot of its next value.
        pulled: those of them that workers read.
        home: the server of each held array; scalars are on all.
        servers: what each does.
        constants: results of the step that do not depend on servers: literals, or inputs that it gives back and that are no state.
        rows: its tables, which all servers hold by rows.
        scalars: for each of them, the slots of the scalars that renew its rows.
        taken: the slots of what workers take to renew what they hold.
    """

    around: Around
    held: Mapping[int, str]
    pulled: tuple[int, ...]
    home: Mapping[int, int]
    servers: tuple[ServerPart, ...]
    constants: Mapping[int, Any]
    rows: SplitRows
    scalars: tuple[tuple[str, ...], ...] = ()
    taken: tuple[str, ...] = ()


def cut_step(step: ServedStep, num_servers: int) -> Cut:
    """Cuts a step for a number of servers."""
    return _Cutter(step, num_servers).cut()


def slots_of(around: Around, rows: Mapping[Any, str]) -> dict[Any, str]:
    """Returns the slot of each variable of a step that is cut; those of tables' `rows` are given."""
    found = {var: f"in/{number}" for number, var in enumerate(around.jaxpr.jaxpr.invars)}
    found |= {var: f"loss/{number}" for number, var in enumerate(around.loss.outvars)}
    found |= rows
    made = [var for eqn in around.after for var in eqn.outvars if var not in found]
    return found | {var: f"v/{number}" for number, var in enumerate(made)}


class _Cutter:
    def __init__(self, step: ServedStep, num_servers: int) -> None:
        self._step, self._count = step, num_servers
        self._rows = split_rows(step, step.around, num_servers)
        around = self._rows.around
        body = around.jaxpr.jaxpr
        wanted = [var for eqn in around.after for var in variables(eqn.invars)] + variables(body.outvars)
        self._around = replace(around, after=(*needed(around.before, wanted), *around.after))
        self._body = body
        self._slot_of = slots_of(self._around, self._rows.slot_of)
        self._carried = {leaf.carried_from: number for number, leaf in enumerate(step.captured.outputs) if leaf.carried_from is not None}

    def cut(self) -> Cut:
        """Returns the cut."""
        around, body = self._around, self._body
        carried = {number: output for number, output in self._carried.items() if number not in self._step.held_elsewhere}
        held = {number: self._slot(body.outvars[output]) for number, output in sorted(carried.items())}
        taken = () if self._step.local is None else self._step.local.taken
        placement = self._placement()
        rounds = [self._of_servers(programs) for programs in programs_of(around, placement, self._count)]
        home = {number: placement.stage_of.get(body.invars[number], 0) for number in held if is_array(body.invars[number])}
        early = variables(around.loss.invars)
        read = set(early) | {var for eqn in needed(around.before, early) for var in variables(eqn.invars)}
        makers = {number: [number_of for number_of in held if home.get(number_of, number) == number] for number in range(self._count)}
        made_on = _made_on(rounds, held, home)
        results, constants = self._results(made_on)
        kept: dict[int, list[str]] = {}
        for var in taken:
            slot = self._slot_of[var]
            kept.setdefault(made_on.get(slot, placement.stage_of.get(var, 0)), []).append(slot)
        traffic = _Traffic(rounds, {number: {f"in/{one}" for one in own} for number, own in makers.items()})
        servers = tuple(
            self._part(number, rounds, traffic, {one: held[one] for one in makers[number]}, (results.get(number, {}), kept.get(number, [])))
            for number in range(self._count)
        )
        servers = tuple(own._replace(posts=traffic.posts(number)) for number, own in enumerate(servers))
        return Cut(
            around=around,
            held=held,
            pulled=tuple(number for number in held if body.invars[number] in read),
            home=home,
            servers=servers,
            constants=constants,
            rows=self._rows,
            scalars=tuple(self._scalars(own) for own in self._rows.tables),
            taken=tuple(self._slot_of[var] for var in taken),
        )

    def _scalars(self, own: TableCut) -> tuple[str, ...]:
        return tuple(self._slot_of[var] for var in own.step.scalars)

    def _of_servers(self, programs: Sequence[Program]) -> list[ServerProgram | None]:
        found: list[ServerProgram | None] = [None] * self._count
        for one in programs:
            inputs, outputs = (tuple(self._slot_of[var] for var in own) for own in (one.inputs, one.outputs))
            found[one.stage] = ServerProgram(one.jaxpr, inputs, outputs)
        return found

    def _placement(self) -> Placement:
        around, body, inputs = self._around, self._body, self._step.captured.inputs
        by_rows = {own.table.result for own in self._rows.tables}
        source = {result: var for result, var in parameter_of(self._step, around).items() if result not in by_rows}
        number_of = {var: number for number, var in enumerate(body.invars)}
        path_of = {var: f"{number_of[var]:06d} {inputs[number_of[var]].path}" for var in source.values()}
        server_of = balanced({path_of[var]: num_bytes(var) for var in path_of}, self._count)
        known = {var: server_of[path_of[var]] for var in path_of}
        known |= {around.loss.outvars[result]: known[var] for result, var in source.items()}
        known |= {var: 0 for var in around.loss.outvars if is_array(var) and var not in known}
        known |= self._rows.server_of
        names = {var: leaf.path for var, leaf in zip(body.invars, inputs, strict=True)}
        next_of = {
            body.invars[number]: body.outvars[output]
            for number, output in self._carried.items()
            if not isinstance(body.outvars[output], jexc.Literal)
        }
        placement = Placement(around, known, names, (), next_of)
        placement.stages = self._settled(placement.stages)
        return placement

    def _settled(self, stages: Sequence[int]) -> list[int]:
        """Returns the server of each equation after the loss; what needs scalars alone runs on their only reader, if there is one."""
        found = list(stages)
        on_all = set(variables(self._body.outvars))
        readers: dict[Any, set[int]] = {}
        for place, eqn in reversed([*enumerate(self._around.after)]):
            servers = set().union(*(readers.get(var, set()) for var in eqn.outvars))
            if found[place] == EVERYWHERE and len(servers) == 1 and on_all.isdisjoint(eqn.outvars):
                (found[place],) = servers
            for var in variables(eqn.invars):
                readers.setdefault(var, set()).add(found[place])
        return found

    def _results(self, made_on: Mapping[str, int]) -> tuple[dict[int, dict[int, str]], dict[int, Any]]:
        """Returns, by server, the slots of the results that are no next value of state, and the results that need no server."""
        results: dict[int, dict[int, str]] = {}
        constants = {}
        elsewhere = () if self._step.local is None else self._step.local.results
        for number, leaf in enumerate(self._step.captured.outputs):
            atom = self._body.outvars[number]
            if leaf.carried_from is not None or number in elsewhere:
                continue
            slot = self._slot(atom)
            if not slot or (slot.startswith("in/") and slot not in made_on):
                constants[number] = atom
            else:
                results.setdefault(made_on.get(slot, 0), {})[number] = slot
        return results, constants

    def _part(
        self,
        server: int,
        rounds: Sequence[Sequence[ServerProgram | None]],
        traffic: _Traffic,
        held: Mapping[int, str],
        sent: tuple[Mapping[int, str], Sequence[str]],
    ) -> ServerPart:
        """Returns what a server does, and tells the others what they send it; `sent` are the results and slots that workers take."""
        results, kept = sent
        own = [programs[server] for programs in rounds]
        scalars = {slot for own in self._rows.tables for slot in self._scalars(own)}
        by_rows = set(self._rows.slot_of.values())
        last = scalars.union(slot for slot in (*held.values(), *results.values(), *kept) if slot)
        read = last.union(*(program.inputs for program in own if program is not None))
        state = {f"in/{number}" for number in self._carried}
        given = {slot for slot in read if slot.startswith("in/") and slot not in state}
        joined = {slot for slot in read if slot.startswith("loss/")} - by_rows
        have = {f"in/{number}" for number in held} | given | joined | by_rows
        awaits: list[tuple[str, ...]] = []
        for program in (*own, None):
            wanted = last if len(awaits) == len(own) else set(program.inputs) if program is not None else set()
            awaits.append(tuple(sorted(wanted - have)))
            traffic.ask(awaits[-1])
            have |= wanted | (set(program.outputs) if program is not None else set())
        return ServerPart(tuple(held), _numbers(joined), _numbers(given), tuple(own), (), tuple(awaits), results, tuple(kept))

    def _slot(self, atom: Any) -> str:
        return "" if isinstance(atom, jexc.Literal) else self._slot_of[atom]


def _made_on(rounds: Sequence[Sequence[ServerProgram | None]], held: Mapping[int, str], home: Mapping[int, int]) -> dict[str, int]:
    """Returns the server of each slot that one holds or makes."""
    made_on = {f"in/{number}": home.get(number, 0) for number in held}
    for programs in rounds:
        for server, program in enumerate(programs):
            made_on |= dict.fromkeys((slot for slot in (program.outputs if program else ()) if slot not in made_on), server)
    return made_on


class _Traffic:
    """Finds who sends what other servers read, and when."""

    def __init__(self, rounds: Sequence[Sequence[ServerProgram | None]], held: Mapping[int, set[str]]) -> None:
        self._count = len(rounds)
        self._source: dict[str, tuple[int, int]] = {}
        for server, slots in held.items():
            self._source |= {slot: (server, 0) for slot in slots if slot not in self._source}
        for number, programs in enumerate(rounds):
            for server, program in enumerate(programs):
                for slot in program.outputs if program is not None else ():
                    self._source.setdefault(slot, (server, number + 1))
        self._asked: set[str] = set()

    def ask(self, slots: Iterable[str]) -> None:
        """Has the servers that make these values send them."""
        self._asked.update(slots)

    def posts(self, server: int) -> tuple[tuple[str, ...], ...]:
        """Returns what a server sends before the first round, and after each."""
        own = {slot: at for slot in sorted(self._asked) for by, at in [self._source[slot]] if by == server}
        return tuple(tuple(slot for slot, at in own.items() if at == number) for number in range(self._count + 1))


def _numbers(slots: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted(int(slot.partition("/")[2]) for slot in slots))
