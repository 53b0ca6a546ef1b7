"""Runs a step that is cut for servers in this process alone: by it the cut is compared with one device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np

from spmdctx._compat import x64_is_on
from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.cut import Cut
from spmdctx.server.program.spec import raw, server_specs, typed
from spmdctx.server.program.worker import WorkerProgram
from spmdctx.server.state.shard import Shard

Call = Callable[..., Sequence[Any]]


def part_results(
    program: WorkerProgram, call: Call, values: Mapping[int, Any], part: int, num_parts: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Returns what a worker pushes of one part, by slot: keys as the words that they are made of.

    Args:
        program: of one part.
        call: runs it.
        values: the inputs of the step, by number; those of the batch are whole.
        part: its number.
        num_parts: of the step.
    """
    given = []
    for number in program.inputs:
        value, dim = values[number], program.batch_dims.get(number)
        given.append(value if dim is None else value[(*[slice(None)] * dim, slice(part, None, num_parts))])
    made = call(*given, np.uint32(part))
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


def run_alone(step: ServedStep, cut: Cut, program: WorkerProgram, call: Call, leaves: Sequence[Any]) -> list[Any]:
    """Does one step in this process, with all servers in it; returns its flat results."""
    specs = server_specs(step, cut, x64=x64_is_on())
    shards = [Shard(spec, {slot: raw(jnp.asarray(leaves[int(slot[3:])])) for slot in spec.held}, 0) for spec in specs]
    values = dict(enumerate(leaves))
    for part in range(step.loss.num_parts):
        made = part_results(program, call, values, part, step.loss.num_parts)
        for number, shard in enumerate(shards):
            shard.add(part, pushed_to(cut, number, made, values, gives=part == 0))
    board = _Board()
    with ThreadPoolExecutor(len(shards)) as pool:
        for done in [pool.submit(shard.renew, board.exchange) for shard in shards]:
            done.result()
    held = {slot: value for shard in shards for slot, value in shard.values.items()}
    results = {number: value for shard in shards for number, value in shard.results.items()}
    captured = step.captured
    found = []
    for number, (leaf, aval) in enumerate(zip(captured.outputs, captured.jaxpr.out_avals, strict=True)):
        if leaf.carried_from is not None:
            found.append(typed(held[f"in/{leaf.carried_from}"], aval))
        elif number in cut.constants:
            found.append(constant(cut, number, leaves))
        else:
            found.append(typed(jnp.asarray(results[number]), aval))
    return found


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
