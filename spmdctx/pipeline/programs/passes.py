"""Makes the forward and backward programs of a chunk from its part of the loss."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from spmdctx._compat import without_unread
from spmdctx.gradients.reduce import is_low_precision
from spmdctx.pipeline.cut.chunks import Chunk
from spmdctx.pipeline.cut.tangents import has_cotangent
from spmdctx.pipeline.programs.joint import joint_program
from spmdctx.pipeline.programs.slots import Holds, Slot, TaskProgram, slots
from spmdctx.pipeline.schedule.tasks import Kind
from spmdctx.trace.build.jaxprs.equations import struct_of


class Passes:
    """The two passes of a chunk.

    What the forward pass keeps are the residuals of `jax.vjp` that the backward pass reads, without those that are operands of the chunk,
    which stay where they are. The user's `jax.checkpoint` decides what they are.

    Args:
        chunk: the part of the loss.
        differentiated: the leaves by which the loss is differentiated.
        value: the number of the loss among its results; only its chunk has it.
        still: values without cotangents, also where they enter or leave.
    """

    def __init__(self, chunk: Chunk, differentiated: frozenset[int], value: int, still: Container[Any]) -> None:
        self._chunk, self._value, self._still = chunk, value, still
        body = chunk.program.jaxpr
        self._structs = [struct_of(var.aval) for var in body.invars]
        self._inputs = [*slots(Holds.LEAF, chunk.leaves), *slots(Holds.ENTERING, range(len(chunk.entering)))]
        self._outputs = [*slots(Holds.LEAVING, range(len(chunk.leaving))), *slots(Holds.RESULT, chunk.results)]
        self.weights = tuple(leaf for leaf in chunk.leaves if leaf in differentiated)
        self._by = [place for place, slot in enumerate(self._inputs) if self._is_differentiated(slot, differentiated)]
        avals = zip(self._outputs, chunk.program.out_avals, strict=True)
        self._pulled = [place for place, (slot, aval) in enumerate(avals) if has_cotangent(aval) and self._is_pulled(slot)]
        self._tree: Any = None
        self._sources: list[int | None] = []
        self.forward, self.backward = _without_unread(self._forward(), self._backward())
        self.kept = [aval for slot, aval in self.forward.avals.items() if slot.holds is Holds.KEPT]

    @cached_property
    def joint(self) -> TaskProgram:
        """Both passes of a micro-batch as one program, by which a search sees what they cost together."""
        return joint_program(self.forward, self.backward)

    def _is_differentiated(self, slot: Slot, differentiated: frozenset[int]) -> bool:
        if slot.holds is Holds.LEAF:
            return slot.number in differentiated
        return self._moves(self._chunk.entering[slot.number])

    def _is_pulled(self, slot: Slot) -> bool:
        """Returns whether the cotangent of a result is pulled back: of what the loss gives beside itself there is none."""
        if slot.holds is Holds.LEAVING:
            return self._moves(self._chunk.leaving[slot.number])
        return slot == Slot(Holds.RESULT, self._value)

    def _moves(self, var: Any) -> bool:
        """Returns whether a value that crosses a cut has a cotangent."""
        return has_cotangent(var.aval) and var not in self._still

    def _evaluate(self, operands: Sequence[Any], moved: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Runs the chunk on its operands, those by which it is differentiated given anew; returns what is pulled back, and all results."""
        given = list(operands)
        for place, value in zip(self._by, moved, strict=True):
            given[place] = value
        results = list(jexc.jaxpr_as_fun(self._chunk.program)(*given))
        return [results[place] for place in self._pulled], results

    def _forward(self) -> TaskProgram:
        def run(*operands: Any) -> list[Any]:
            moved = [operands[place] for place in self._by]
            _, pull, results = jax.vjp(lambda *moved: self._evaluate(operands, moved), *moved, has_aux=True)
            kept, self._tree = jax.tree.flatten(pull)
            self._sources = [next((place for place, one in enumerate(operands) if one is value), None) for value in kept]
            return [*results, *(value for value, source in zip(kept, self._sources, strict=True) if source is None)]

        jaxpr = jax.make_jaxpr(run)(*self._structs)
        self._residuals = jaxpr.out_avals[len(self._outputs) :]
        return TaskProgram(Kind.FORWARD, jaxpr, tuple(self._inputs), (*self._outputs, *slots(Holds.KEPT, range(len(self._residuals)))))

    def _backward(self) -> TaskProgram:
        """Returns the program that pulls cotangents back, and adds gradients to their sums."""
        sums = slots(Holds.SUM, self.weights)
        cotangents = [self._outputs[place] for place in self._pulled if self._outputs[place].holds is Holds.LEAVING]
        inputs = [*self._inputs, *sums, *slots(Holds.KEPT, range(len(self._residuals))), *map(_of, cotangents)]
        structs = [
            *self._structs,
            *(self.sum_of(leaf) for leaf in self.weights),
            *map(struct_of, self._residuals),
            *(struct_of(self._chunk.leaving[slot.number].aval) for slot in cotangents),
        ]

        def run(*given: Any) -> list[Any]:
            operands, rest = given[: len(self._inputs)], given[len(self._inputs) :]
            totals, rest = rest[: len(sums)], rest[len(sums) :]
            kept, back = iter(rest[: len(self._residuals)]), rest[len(self._residuals) :]
            leaves = [next(kept) if source is None else operands[source] for source in self._sources]
            gradients = jax.tree.unflatten(self._tree, leaves)(self._cotangents(back))
            found = dict(zip(self._by, gradients, strict=True))
            added = [total + found[self._place(slot.number)].astype(total.dtype) for slot, total in zip(sums, totals, strict=True)]
            return [*added, *(found[place] for place in self._by if self._inputs[place].holds is Holds.ENTERING)]

        entering = [_of(self._inputs[place]) for place in self._by if self._inputs[place].holds is Holds.ENTERING]
        return TaskProgram(Kind.BACKWARD, jax.make_jaxpr(run)(*structs), tuple(inputs), (*sums, *entering))

    def sum_of(self, leaf: int) -> jax.ShapeDtypeStruct:
        """Returns the type in which the gradients of a leaf are added up."""
        aval = self._structs[self._place(leaf)]
        return jax.ShapeDtypeStruct(aval.shape, jnp.float32 if is_low_precision(aval.dtype) else aval.dtype)

    def _place(self, leaf: int) -> int:
        return self._chunk.leaves.index(leaf)

    def _cotangents(self, leaving: Sequence[Any]) -> list[Any]:
        """Returns the cotangents of what is pulled back: the loss has 1."""
        given = iter(leaving)
        pulled = [(self._outputs[place].holds, self._chunk.program.out_avals[place]) for place in self._pulled]
        return [next(given) if holds is Holds.LEAVING else jnp.ones(aval.shape, aval.dtype) for holds, aval in pulled]


def _of(slot: Slot) -> Slot:
    """Returns the slot of a cotangent."""
    return Slot(Holds.OF_LEAVING if slot.holds is Holds.LEAVING else Holds.OF_ENTERING, slot.number)


def _without_unread(forward: TaskProgram, backward: TaskProgram) -> tuple[TaskProgram, TaskProgram]:
    """Returns both passes without the residuals that only dead equations of the backward pass read."""
    stays = [slot.holds is not Holds.KEPT for slot in backward.inputs]
    jaxpr, used = without_unread(backward.jaxpr, stays)
    if all(used):
        return forward, backward
    inputs = tuple(slot for slot, is_used in zip(backward.inputs, used, strict=True) if is_used)
    body = forward.jaxpr.jaxpr
    left = [(slot, var) for slot, var in zip(forward.outputs, body.outvars, strict=True) if slot.holds is not Holds.KEPT or slot in inputs]
    body = body.replace(outvars=[var for _, var in left], debug_info=body.debug_info._replace(result_paths=None))
    shorter = jexc.ClosedJaxpr(body, forward.jaxpr.consts)
    return (
        TaskProgram(forward.kind, shorter, forward.inputs, tuple(slot for slot, _ in left)),
        TaskProgram(backward.kind, jaxpr, inputs, backward.outputs),
    )
