"""Counts the memory of an assignment: the bytes alive at each op, and the updates that the step waits for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np

from spmdctx.cost.bill import Bill
from spmdctx.cost.memory.copies import Copies
from spmdctx.cost.memory.early_updates import Late, early_updates
from spmdctx.cost.memory.lives import Copy, StepMemory, compiled_memory, profile
from spmdctx.cost.memory.reserved import reserved_in
from spmdctx.cost.price.assigned import Assigned
from spmdctx.cost.price.directives import Directives
from spmdctx.cost.price.peak import set_peak
from spmdctx.ir.analysis.kinds import ops_of, value_kinds
from spmdctx.ir.analysis.loop_sums import widened_ways
from spmdctx.ir.analysis.numbering import Numbering
from spmdctx.ir.arrays import IntArray
from spmdctx.ir.graph import Op
from spmdctx.ir.mesh import local_shape
from spmdctx.ir.projection import project
from spmdctx.ir.sharding import TensorSharding
from spmdctx.machine.xla.collectives.combining import combines_up_to
from spmdctx.machine.xla.late_products import GradientProduct
from spmdctx.machine.xla.memory.images_on_chip import images_on_chip
from spmdctx.machine.xla.memory.late_gradients import barriers_wait, updates_wait
from spmdctx.machine.xla.memory.on_chip import OnChip
from spmdctx.machine.xla.memory.tiles import Minor, filled_up, fillings, has_tiles, in_images, in_lanes, laid_by_rows, laid_out
from spmdctx.machine.xla.options import UNLIMITED
from spmdctx.machine.xla.overlap import overlap_candidates
from spmdctx.machine.xla.partitioner.ragged_products import RAGGED, groups_of


class MemoryCount:
    """Collects the copies that moves and reductions make, and counts them with the values of the step."""

    def __init__(self, assigned: Assigned, directives: Directives, stored_as: IntArray) -> None:
        step, topology = assigned.step, assigned.topology
        is_split = assigned.mesh.num_devices > 1
        self._assigned, self._directives, self._stored_as = assigned, directives, stored_as
        self._memory = compiled_memory(step.graph, step.scopes, step.donated, topology.compiler, is_split=is_split)
        self._terminal = overlap_candidates(step.graph).terminal
        self._reduced: set[int] = set()
        self.copies = Copies(step.graph, self._memory)

    def keep_unreduced(self, op: Op, value: int, natural: TensorSharding, *, in_place: bool, scattered: bool) -> None:
        """Keeps a partial result in memory until it is reduced.

        A gradient that a loop makes stays to the end of the iteration, if the compiler combines its reduction with others. A result that is
        reduced `in_place` takes only the bytes by which it is wider than what it becomes.
        """
        is_gradient = bool(self._terminal[value])
        combined = is_gradient and self._assigned.topology.compiler.combines_reductions
        size = self._assigned.stored_bytes(value, natural)
        added = size * (self._directives.widening(value) - in_place)
        self.copies.keep(op, value, added, to_the_end=combined, put_off=is_gradient and scattered)
        self._reduced.add(op.id)
        if in_place:
            self.copies.reduce_in_place(op, size)

    def reduce_with_others(self, op: Op, value: int, natural: TensorSharding, axes: Sequence[str]) -> None:
        """Notes that a partial result is reduced over axes, where it is a gradient with others of its bucket."""
        if self._terminal[value]:
            num_bytes = self._directives.widening(value) * self._assigned.stored_bytes(value, natural)
            self.copies.reduce_with_others(op, value, (tuple(axes), self._directives.buckets.get(value)), num_bytes)

    def is_reduced_in_place(self, value: int, natural: TensorSharding) -> bool:
        """Returns whether a value that is made as `natural` can take the place of its partial result, which has the same type."""
        is_narrow = self._assigned.topology.compiler.narrows_matrix_operands and self.copies.narrow[value]
        return self.copies.is_made_in_place(value) and natural == self._assigned.assignment.values[value] and not is_narrow

    def count(self, bill: Bill, moving: Collection[int] = ()) -> None:
        """Writes the bytes alive at each op, and the updates that the step waits for, into a bill, when every op is known.

        Args:
            bill: the bill.
            moving: the ops for which devices communicate.
        """
        graph, memory, chip = self._assigned.graph, self._found(bill), self._chip()
        self._mask_rows()
        self._lay_out_images()
        self._scatter_rows()
        most = combines_up_to(self._assigned.topology)
        if most:
            self.copies.combine(UNLIMITED if self._directives.buckets else most)
        sizes, moved, images = self._sizes(), {row.value for row in bill.moves}, self._images()

        until = self._late_updates(moving, bill)
        waiting = [Copy(life.end + 1, until[life.value], sizes[life.value]) for life in memory.lives if life.value in until]
        stacks = self._stacks(sizes)

        def alive_with(late: Mapping[int, GradientProduct]) -> IntArray:
            copies = [*self.copies.finish(moved, sizes, late), *(copy for copy in waiting if copy.start <= copy.end), *stacks]
            return profile(memory.lives, sizes, len(graph.ops), copies, chip, images)

        def fuses(op: Op) -> bool:
            return op.id not in self._directives.unfused_updates

        products = self.copies.late(moved, self._reduced, sizes) if memory.gradients else {}
        late = Late(products, alive_with(products), alive_with, partial(self.copies.waiting, sizes), fuses)
        waits = self._assigned.topology.compiler.runs_barriers_in_order
        bill.early, alive = early_updates(graph, self._assigned.step.scopes, memory, late) if waits else ((), late.alive)
        reserved = reserved_in(memory, frozenset(graph.outputs), sizes, alive, stacks)
        every = alive + reserved.bytes
        bill.reserved, bill.reserved_bytes = reserved.pieces, int(every.max(initial=0) - alive.max(initial=0))
        bill.argument_bytes = sum(sizes[value] for value in dict.fromkeys(graph.inputs))
        set_peak(bill, every.tolist(), self._assigned.topology)

    def _stacks(self, sizes: Sequence[int]) -> list[Copy]:
        """Returns the narrow copies of stacks that loops read."""
        stacks = self._memory.stacks if self._assigned.topology.compiler.narrows_matrix_operands else ()
        return [Copy(start, end, int(share * sizes[value])) for value, start, end, share in stacks]

    def _found(self, bill: Bill) -> StepMemory:
        """Returns the lives of values; XLA for TPU puts off no product of a stage whose gradients stay unreduced and that hides no gather.

        Where gradients are delayed, such a stage must communicate nothing (`machine.xla.memory.late_gradients`).
        """
        step, compiler = self._assigned.step, self._assigned.topology.compiler
        hides = bool(compiler.gather_overlap) and any(row.kind == "all_gather" for row in bill.collectives)
        is_quiet = self._is_quiet(bill) if compiler.delays_gradients else bool(self._directives.loop_sums.totals) and not hides
        if not (step.graph.accumulators and is_quiet):
            return self._memory
        return compiled_memory(step.graph, step.scopes, step.donated, compiler, is_split=False)

    def _is_quiet(self, bill: Bill) -> bool:
        """Returns whether a pass of micro-batches communicates nothing; of other steps the search counts gradients as delayed."""
        return not bill.collectives and bool(self._assigned.step.graph.accumulators)

    def _late_updates(self, moving: Collection[int], bill: Bill) -> Mapping[int, int]:
        """Returns until when gradients wait for the sums that they are added to: XLA updates these late, or behind barriers."""
        step = self._assigned.step
        if not self._assigned.topology.compiler.delays_gradients or self._assigned.mesh.num_devices == 1:
            return {}
        if bill.collectives:
            return updates_wait(step.graph, step.scopes, moving)
        return barriers_wait(step.graph, step.scopes) if self._is_quiet(bill) else {}

    def _chip(self) -> OnChip:
        return OnChip.of(self._assigned.topology.compiler.scratch_bytes, self._assigned.topology.device)

    def _images(self) -> tuple[Mapping[int, object], OnChip] | None:
        """Returns the images of convolutions, and the chip's part of them; None where they are values like others."""
        topology, graph, others = self._assigned.topology, self._assigned.graph, self._chip()
        together = images_on_chip(graph, topology.device, others)
        return None if together == others else (in_images(graph), together)

    def _mask_rows(self) -> None:
        """Adds the rows of ragged products that are masked for each group, and those turned; products that read the same share them."""
        graph, assignment = self._assigned.graph, self._assigned.assignment
        for op in ops_of(graph, {RAGGED}) if self._assigned.topology.compiler.masks_groups else ():
            groups, is_summed = groups_of(op.rule)
            for name, position in (("masked", 0), ("masked" if is_summed else "turned", int(is_summed))):
                value, axes = op.operands[position], assignment.ops[op.id].axes
                taken = project(op.rule.operands[position], axes)
                num_bytes = groups * self._assigned.stored_bytes(value, taken)
                self.copies.make(op, value, (name, value, taken), num_bytes, gathered=False)

    def _lay_out_images(self) -> None:
        """Adds the copies of arguments that convolutions read as images."""
        assigned = self._assigned
        for index, minor in laid_out(assigned.graph).items() if has_tiles(assigned.topology.device) else ():
            op = assigned.graph.ops[index]
            value, taken = op.operands[0], project(op.rule.operands[0], assigned.assignment.ops[index].axes)
            share = filled_up(local_shape(assigned.graph.values[value].shape, taken, assigned.mesh), minor, 1.0)
            num_bytes = int(assigned.stored_bytes(value, taken) * share)
            self.copies.make(op, value, ("image", value, taken), num_bytes, gathered=False)

    def _scatter_rows(self) -> None:
        """Adds tables into which rows are scattered, and rows of two dimensions, that take more while they are laid out by rows."""
        assigned = self._assigned
        for op, rows in in_lanes(assigned.graph, assigned.topology.device):
            natural = dict(zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True))
            num_bytes = 0
            for value, minor in rows.items():
                split = project(natural[value], assigned.assignment.ops[op.id].axes)
                shape = local_shape(assigned.graph.values[value].shape, split, assigned.mesh)
                num_bytes += int(assigned.stored_bytes(value, split) * laid_by_rows(shape, minor))
            if num_bytes:
                self.copies.scatter(op, num_bytes)

    def _sizes(self) -> Sequence[int]:
        """Returns the bytes that each value takes in memory."""
        graph, stored = self._assigned.graph, self._assigned.assignment.values
        narrow = bytes(len(graph.values))
        if self._assigned.topology.compiler.narrows_matrix_operands:
            narrow = bytes(self.copies.narrow[:-1])
        alike = Numbering(value_kinds(graph).numbers)
        alike.refine(self._stored_as)
        alike.refine(np.frombuffer(narrow, dtype=np.uint8))
        firsts, numbers = alike.classes()
        sizes = [self._assigned.stored_bytes(value, stored[value], bool(narrow[value])) for value in firsts]
        found = [sizes[number] for number in numbers.tolist()]
        for value in widened_ways(graph, self._directives.loop_sums, self._directives.widened):
            found[value] *= 2
        shares: dict[tuple[int, Minor, int], float] = {}
        for way, (known, share_of) in enumerate(fillings(graph, self._assigned.topology.device)):
            for value, minor in known.items():
                key = int(numbers[value]), minor, way
                share = shares.get(key)
                if share is None:
                    shape = local_shape(graph.values[value].shape, stored[value], self._assigned.mesh)
                    share = shares[key] = share_of(shape, minor)
                found[value] = int(found[value] * share)
        return found
