"""Checks before the first call that several processes run a step's same program with the same plan."""

from __future__ import annotations

import base64
import hashlib
import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np

from spmdctx._compat import KeyValueStore, key_value_store
from spmdctx.errors import CommunicationError, PlanMismatchError
from spmdctx.plan.file import parse_plan, plan_json
from spmdctx.plan.plan import Plan
from spmdctx.rules.control_flow import bodies_of, opened

_TIMEOUT_S = 600.0
"""Limit on how much longer the other processes may take to plan than this one."""
_PIECE = 1 << 19
"""Characters per message. JAX's coordination service allows at most 4 MB."""

_numbers = itertools.count()


def spans_processes(devices: Any) -> bool:
    """Returns whether devices belong to several processes."""
    return jax.process_count() > 1 and len({device.process_index for device in devices}) > 1


def agree_on_plan(name: str, plan: Plan, jaxpr: jexc.ClosedJaxpr, store: KeyValueStore | None = None) -> None:
    """Compares the program and the plan of a step with those of process 0.

    Every process calls this for each of its steps.

    Args:
        name: the name of the step.
        plan: the plan that this process made.
        jaxpr: the program that was planned.
        store: the store through which processes exchange messages.

    Raises:
        PlanMismatchError: the program or the plan differs from that of process 0; the message names the first difference.
        CommunicationError: process 0 plans no step within the timeout.
    """
    store, number = store or key_value_store(), next(_numbers)
    key, text, constants = f"spmdctx/plan/{number}", plan_json(plan), _constants_digest(jaxpr)
    own = f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()} {constants} {name}"
    if jax.process_index() == 0:
        packed = base64.b85encode(zlib.compress(text.encode())).decode()
        pieces = [packed[start : start + _PIECE] for start in range(0, len(packed), _PIECE)]
        for index, piece in enumerate(pieces):
            store.set(f"{key}/{index}", piece)
        store.set(key, f"{len(pieces)} {own}")
        return
    told = store.get(key, _TIMEOUT_S)
    if told is None:
        raise CommunicationError(
            f"Process {jax.process_index()} calls {name}, the step number {number} that it has planned, and process 0 has not come to one.",
            need="the same steps, called in the same order, on every process",
        )
    count, _, theirs = told.partition(" ")
    if theirs != own:
        raise _mismatch(name, plan, theirs.split(" ", 2), constants, _plan_told(store, key, int(count)))


def _plan_told(store: KeyValueStore, key: str, count: int) -> Plan:
    packed = "".join(store.get(f"{key}/{index}", _TIMEOUT_S) or "" for index in range(count))
    return parse_plan(zlib.decompress(base64.b85decode(packed)), "the plan of process 0", Plan)


def _mismatch(name: str, plan: Plan, theirs: list[str], constants: str, other: Plan) -> PlanMismatchError:
    process = jax.process_index()
    if theirs[2] != name:
        return PlanMismatchError(
            f"Process {process} calls {name} where process 0 calls {theirs[2]}.",
            need="the same steps, called in the same order, on every process",
        )
    difference = next(_differences(other, plan), "")
    if not difference and theirs[1] != constants:
        difference = "numbers or arrays that are written into the program"
    return PlanMismatchError(
        f"{name} is another program on process {process} than on process 0, or is planned otherwise.",
        got=f"the first difference is {difference or 'in the order of what the plan says'}",
        need="one program: shapes, options and numbers that are the same on every process",
        fix="leave out what depends on the process, such as get_rank(), host names, or an order that differs between runs",
    )


def _differences(theirs: Plan, ours: Plan) -> Iterator[str]:
    """Yields the differences that `Plan.diff` finds, as text."""
    found = theirs.diff(ours)
    for change in (*found.tensors, *found.settings, *found.costs):
        yield f"{change.name}: {change.before or 'nothing'} on process 0, {change.after or 'nothing'} here"
    for row in found.communication:
        yield f"{row.kind} over {'+'.join(row.axes)}: {row.counts[0]} on process 0, {row.counts[1]} here"
    for note in (*found.notes_removed, *found.notes_added):
        yield f"the note '{note}'"
    if found.num_ops:
        yield f"{found.num_ops} ops that are split otherwise"


def _constants_digest(jaxpr: jexc.ClosedJaxpr) -> str:
    """Hashes the numbers and arrays in a program, which its plan does not record."""
    digest = hashlib.blake2b(digest_size=8)
    for value in _constants(jaxpr):
        array = np.asarray(value)
        digest.update(f"{array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _constants(jaxpr: Any) -> Iterator[Any]:
    body = opened(jaxpr)
    for const in getattr(jaxpr, "consts", ()):
        if isinstance(const, np.ndarray) or (isinstance(const, jax.Array) and const.is_fully_addressable and not _is_key(const)):
            yield const
    for eqn in body.eqns:
        yield from (atom.val for atom in eqn.invars if isinstance(atom, jexc.Literal) and not _is_key(atom.val))
        for inner in bodies_of(eqn.params):
            yield from _constants(inner)


def _is_key(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
