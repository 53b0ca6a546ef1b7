"""Runs a step that is cut for servers in this process alone: by it the cut is compared with one device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdctx._compat import x64_is_on
from spmdctx.server.local.state import LocalState
from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.cut import Cut
from spmdctx.server.program.row_ids import RowReader, given_to, interleaved, places_on
from spmdctx.server.program.spec import ServerSpec, raw, server_specs, typed
from spmdctx.server.program.worker import WorkerProgram
from spmdctx.server.state.folder import row_pieces
from spmdctx.server.state.row_files import rows_of
from spmdctx.server.state.shard import Shard

Call = Callable[..., Sequence[Any]]


def part_results(
    program: WorkerProgram, call: Call, values: Mapping[int, Any], part: int, num_parts: int, places: Sequence[Any] = ()
) -> dict[str, np.ndarray[Any, Any]]:
    """Returns what a worker pushes of one part, by slot: keys as the words that they are made of.

    Args:
        program: of one part.
        call: runs it.
        values: the inputs of the step, by number; those of the batch are whole.
        part: its number.
        num_parts: of the step.
        places: of the ids of each read of a table, whose rows are among the inputs.
    """
    made = call(*given_to(program, values, part, num_parts), *places, np.uint32(part))
    return {f"loss/{number}": np.asarray(raw(value)) for number, value in zip(program.outputs, made, strict=True)}


def pushed_to(cut: Cut, server: int, made: Mapping[str, Any], values: Mapping[int, Any], *, gives: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Returns what one server gets of one part, with what it is given once in a step if this part `gives` it."""
    own = cut.servers[server]
    found = {f"loss/{number}": made[f"loss/{number}"] for number in own.joined}
    if gives:
        found |= {f"in/{number}": np.asarray(raw(jnp.asarray(values[number]))) for number in own.given}
    return found


def constant(cut: Cut, number: int, leaves: Sequence[Any]) -> Any:
    """Returns a result of the step that does not depend on servers."""
    atom = cut.constants[number]
    place = next((place for place, var in enumerate(cut.around.jaxpr.jaxpr.invars) if var is atom), None)
    return jnp.asarray(atom.val, atom.aval.dtype) if place is None else leaves[place]


def run_alone(
    step: ServedStep, cut: Cut, part: tuple[WorkerProgram, Call], leaves: Sequence[Any], local: LocalState | None = None
) -> list[Any]:
    """Does one step in this process, with all servers in it; returns its flat results.

    Args:
        step: the step.
        cut: how it is cut.
        part: the program of one part, and what runs it.
        leaves: the arguments of the step.
        local: a copy of what stays with workers, if something does.
    """
    alone = Alone(step, cut, leaves, local)
    alone.advance(*part, leaves)
    return alone.results(leaves)


class Alone:
    """All servers of a step in this process.

    Args:
        step: the step.
        cut: how it is cut.
        leaves: its first arguments, of which servers hold the state.
        local: a copy of what stays with workers, if something does.
    """

    def __init__(self, step: ServedStep, cut: Cut, leaves: Sequence[Any], local: LocalState | None = None) -> None:
        self._step, self._cut = step, cut
        self._specs = server_specs(step, cut, x64=x64_is_on())
        self._reader = RowReader(step)
        avals = step.captured.in_avals
        self.shards = [Shard(spec, _held(spec, leaves, avals), 0) for spec in self._specs]
        self._own = local
        if step.local is not None and local is not None:
            local.load(0, {number: raw(jnp.asarray(leaves[number])) for number in step.local.held})

    def advance(self, program: WorkerProgram, call: Call, leaves: Sequence[Any]) -> None:
        """Does one step from the servers' state and the other leaves."""
        self._push(program, call, {**dict(enumerate(leaves)), **self._state()})
        board = _Board()
        with ThreadPoolExecutor(len(self.shards)) as pool:
            for done in [pool.submit(_renew, shard, board) for shard in self.shards]:
                done.result()
        if self._own is not None:
            kept = [own for shard in self.shards for own in shard.kept(shard.version - 1, shard.version) or ()]
            taken = {slot: value for own in kept for slot, value in own.items()}
            self._own.advance([taken[slot] for slot in self._cut.taken], dict(enumerate(leaves)))

    def results(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the flat results of the last step, which has read these leaves."""
        held = self._state(with_tables=True)
        results = {number: value for shard in self.shards for number, value in shard.results.items()}
        results |= {} if self._own is None else self._own.results.get(self._own.version - 1, {})
        captured, found = self._step.captured, []
        for number, (leaf, aval) in enumerate(zip(captured.outputs, captured.jaxpr.out_avals, strict=True)):
            if leaf.carried_from is not None:
                found.append(held[leaf.carried_from])
            elif number in self._cut.constants:
                found.append(constant(self._cut, number, leaves))
            else:
                found.append(typed(jnp.asarray(results[number]), aval))
        return found

    def _push(self, program: WorkerProgram, call: Call, whole: Mapping[int, Any]) -> None:
        count, reader, num_parts = len(self.shards), self._reader, self._step.loss.num_parts
        for part in range(num_parts):
            rows = reader.rows(whole, part)
            pieces = [shard.pull_rows(places_on(rows, number, count)) or {} for number, shard in enumerate(self.shards)]
            values = {**whole, **reader.gathered(rows, pieces)}
            made = part_results(program, call, values, part, num_parts, rows.places)
            for number, shard in enumerate(self.shards):
                own = pushed_to(self._cut, number, made, values, gives=part == 0)
                shard.add(shard.version, part, {**own, **reader.pushed(rows, made, number, count)})

    def _state(self, *, with_tables: bool = False) -> dict[int, Any]:
        """Returns the servers' arrays by the input's number."""
        avals = self._step.captured.in_avals
        found = {slot: value for shard in self.shards for slot, value in shard.values.items()}
        if with_tables:
            saved = [shard.saved() for shard in self.shards]
            slots = [slot for table in self._specs[0].tables for slot in table.held]
            found |= {slot: jnp.asarray(interleaved([own[slot] for own in saved])) for slot in slots}
        own = {} if self._own is None else self._own.values
        return {**{int(slot[3:]): typed(value, avals[int(slot[3:])]) for slot, value in found.items()}, **own}


def _held(spec: ServerSpec, leaves: Sequence[Any], avals: Sequence[Any]) -> dict[str, Any]:
    """Returns what a server holds, of the leaves of the step."""
    found = {slot: raw(jnp.asarray(leaves[int(slot[3:])])) for slot in spec.held}
    for slot, piece in row_pieces(spec).items():
        found[slot] = np.array(rows_of(leaves[int(slot[3:])], avals[int(slot[3:])], piece))
    return found


def _renew(shard: Shard, board: _Board) -> None:
    with jax.enable_x64(shard.spec.x64):  # a thread has a switch of its own
        shard.renew(board.exchange)


class _Board:
    """What servers send each other."""

    def __init__(self) -> None:
        self._changed, self._values = threading.Condition(), dict[str, Any]()

    def exchange(self, number: int, values: dict[str, Any], awaited: tuple[str, ...]) -> Mapping[str, Any]:
        """Takes values, and returns others once they are there."""
        del number
        with self._changed:
            self._values.update(values)
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(slot in self._values for slot in awaited))
            return {slot: self._values[slot] for slot in awaited}
