"""The update of a step, the ops between the gradients and the next state, planned again around state that is split further.

An op belongs to the update if no matrix product can be reached from it and none of its tensors contains the batch. Where the optimizer
multiplies matrices itself, such products belong to it too: those from which nothing that is differentiated can be reached. Only ops that
hang together with the split state are planned again; all others, and the values that they read, stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spmdctx.ir.analysis.batch import batch_dims
from spmdctx.ir.analysis.kinds import ops_of
from spmdctx.ir.graph import Graph, Op, Role
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.primitives import CARRYING, HEAVY, MATRIX_PRODUCTS
from spmdctx.ir.sharding import Assignment, TensorSharding
from spmdctx.machine.xla.overlap import terminal_values
from spmdctx.search.problem.space import NO_SLOT, Space
from spmdctx.search.propagation import Spreader, place_values_from_literals, settle


def plan_update(
    space: Space,
    assignment: Assignment,
    stored: Mapping[int, TensorSharding],
    gradients: Mapping[int, TensorSharding],
    kept: frozenset[int],
    *,
    splits_accumulators: bool,
    differentiated: frozenset[int] = frozenset(),
) -> Assignment:
    """Returns the assignment with other shardings of some inputs, and an update that fits them.

    Args:
        space: the graph on its mesh.
        assignment: the plan so far.
        stored: input values with their new shardings.
        gradients: parameters whose gradients must be split, and how.
        kept: ops whose split stands.
        splits_accumulators: whether the sums of loops may be split too.
        differentiated: ops of the losses and their gradients, if products of the update may be split too.
    """
    graph, slot_of = space.graph, space.slot_of
    given = {slot_of[value]: sharding for value, sharding in stored.items()}
    region = _UpdateRegion(space, kept, splits_accumulators, differentiated)
    free, ops = region.around({*given, *(slot_of[value] for value in gradients)})
    given |= {slot: sharding for value, sharding in gradients.items() if (slot := region.gradient(slot_of[value])) is not None}
    free -= given.keys()
    pins = {value: given.get(slot, assignment.values[value]) for value, slot in enumerate(slot_of) if slot not in free}
    forced = {op.id: assignment.ops[op.id].axes for op in graph.ops if op.id not in ops}
    spreader = Spreader(space, pins, forced, {})
    spreader.dirty &= ops
    spreader.spread()
    state = spreader.state
    settle(space, state, spreader.fixed, forced, sorted({op for slot in free for op in space.neighbours[slot]}))
    place_values_from_literals(space, state, spreader.fixed)
    chosen = list(assignment.ops)
    for index in sorted(ops):
        chosen[index] = space.choose(index, state).sharding
    return replace(assignment, ops=tuple(chosen), values=tuple([space.shardings[state[slot]] for slot in slot_of]))


def multiplied_state(graph: Graph, differentiated: frozenset[int], mesh: LogicalMesh) -> frozenset[int]:
    """Returns the inputs from which matrix products of the update are reached, and nothing that is differentiated.

    Args:
        graph: the step.
        differentiated: ops of the losses and their gradients; if there are none, nothing is known of the update.
        mesh: the mesh, by which the batch is followed.
    """
    if not differentiated:
        return frozenset()
    after = terminal_values(graph, frozenset(graph.inputs), differentiated)
    products = [op for op in ops_of(graph, MATRIX_PRODUCTS) if op.id not in differentiated and all(after[value] for value in op.results)]
    if not products:
        return frozenset()
    batch = batch_dims(graph, [value for value in graph.inputs if graph.values[value].role is Role.BATCH], mesh).found.keys()
    own = frozenset(op.id for op in products if batch.isdisjoint((*op.operands, *op.results)))
    beyond = terminal_values(graph, frozenset(), own)
    return frozenset(value for value in graph.inputs if after[value] and not beyond[value])


class _UpdateRegion:
    """The ops and slots of the update that may be planned again."""

    def __init__(self, space: Space, kept: frozenset[int], splits_accumulators: bool, differentiated: frozenset[int]) -> None:
        self._space = space
        graph = space.graph
        leaves = [value for value in graph.inputs if graph.values[value].role is Role.BATCH]
        self._batch = batch_dims(graph, leaves, space.mesh).found.keys()
        self._fixed = {space.slot_of[value] for value in graph.inputs}
        # A value that the next iteration of a loop over whole steps reads is no part of this iteration's update.
        self._stored = frozenset([value for value, slot in enumerate(space.slot_of) if slot in self._fixed])
        terminal = terminal_values(graph, self._stored)
        self._after = terminal_values(graph, self._stored, differentiated) if differentiated else bytearray(len(graph.values) + 1)
        self._differentiated = differentiated
        self._fixed |= {
            slot for value, slot in enumerate(space.slot_of) if not (terminal[value] or self._after[value]) or value in self._batch
        }
        self._fixed |= {slot for slot, shape in enumerate(space.shapes) if not shape}
        if not splits_accumulators:
            self._fixed |= {space.slot_of[op.results[0]] for op in graph.ops if op.primitive in CARRYING}
        self._ops = {op.id for op in graph.ops if op.id not in kept and self._is_update(op, terminal)}

    def _is_update(self, op: Op, terminal: bytearray) -> bool:
        last = op.primitive not in HEAVY and all(terminal[value] or value in self._stored for value in op.results)
        return (last or self._is_after(op)) and self._batch.isdisjoint((*op.operands, *op.results))

    def _is_after(self, op: Op) -> bool:
        """Returns whether an op follows all that is differentiated; never, if that is unknown."""
        if op.id in self._differentiated or op.primitive == "shard_map":
            return False
        return all(self._after[value] or (value in self._stored and bool(self._differentiated)) for value in op.results)

    def gradient(self, parameter: int) -> int | None:
        """Returns the slot of the first free value of a parameter's shape in its update: its gradient.

        A value that only a transposition reads is skipped for the transposed one.
        """
        space = self._space
        found, _ = self.around({parameter})
        alike = [slot for slot in found if space.shapes[slot] == space.shapes[parameter] and slot not in space.free_slots]
        return min([slot for slot in alike if not self._is_turned(slot)], default=None)

    def _is_turned(self, slot: int) -> bool:
        """Returns whether only a transposition reads a slot."""
        ops = self._space.graph.ops
        readers = [index for index in self._space.neighbours[slot] if slot in self._space.op_slots[index][: len(ops[index].operands)]]
        return bool(readers) and all(ops[index].primitive == "transpose" for index in readers)

    def around(self, start: set[int]) -> tuple[set[int], set[int]]:
        """Returns the free slots and the ops that hang together with some slots."""
        space = self._space
        free: set[int] = set()
        ops: set[int] = set()
        waiting = sorted(start)
        while waiting:
            slot = waiting.pop()
            for index in space.neighbours[slot]:
                if index not in self._ops or index in ops:
                    continue
                ops.add(index)
                for other in space.op_slots[index]:
                    if other != NO_SLOT and other not in self._fixed and other not in free and other not in start:
                        free.add(other)
                        waiting.append(other)
        return free, ops
