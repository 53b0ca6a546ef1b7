"""XLA computes many values only on the way into other ops, and never stores them.

What XLA does: it fuses chains of element-wise ops into the matrix products and reductions that read them, and computes them again for each
    reader. It also fuses chains into the op that makes their operand. These are in memory: arguments, results, and what non-chain ops make.
    A chain that alone reads such an op is fused into it, also a slice of a product. Some of these ops must also find their operands in
    memory. XLA keeps a value that several ops read if it is made of many tensors of its size, or with a scatter. On TPU a pad that puts
    elements apart is no chain: what it reads and makes is in memory, as at every level of an associative scan and of its gradient. What
    a loop stacks up is there, too, whatever reads it.
Seen in: jax 0.10.2, libtpu 0.0.42, v5e:2x4: 70 plans whose peaks are within 15 % of those compiled; U-Nets of 128, 256 and 512 images in
    data parallelism, 1.02, 1.13 and 1.05 times those compiled (benchmarks/RESULTS.md). v5e, v5p and v6e: selective scans; six
    plans of Mamba, 0.89 to 1.08 of the judge's time instead of 0.33 to 0.87. v5e: twelve losses of logits that are scaled, biased,
    capped, masked or smoothed, and convolutions before a group norm. 8 x H100, CUDA plugin 0.10.2: 43 of 56 plans within 15 %.
Switch: `Compiler.fuses_into_products`: on GPU and CPU operands and results of a product are in memory.
Priced by: trace.build.build, which marks what is fused on TPU; trace.build.compiled, elsewhere; cost.roofline, cost.memory.lives
Written or prevented by: machine.xla.partitioner.recompute, machine.xla.partitioner.needed_constraints: a constraint makes a value exist.
Checked by: tests/machine/xla/test_fusion.py, tests/cost/memory/test_lives.py, benchmarks/fidelity_plans.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import Any

import numpy as np

from spmdctx.ir.analysis.columns import Columns
from spmdctx.ir.arrays import BoolArray, IntArray
from spmdctx.ir.graph import LITERAL
from spmdctx.ir.primitives import BOUNDARY_OF, CARRYING, ENTERING, MARKER, MATRIX_PRODUCTS, SCAN_EXIT
from spmdctx.rules.elementwise import ELEMENTWISE

CHAINED = frozenset(
    {
        *ELEMENTWISE,
        *("broadcast_in_dim", "broadcast_to", "iota", "empty", "empty2", "reshape", "transpose", "squeeze", "expand_dims", "rev", "slice"),
        *("dynamic_slice", "pad", "concatenate", "split", "bitcast_convert_type", MARKER, "sharding_constraint", "name"),
        *(*ENTERING, *CARRYING, "device_put", "random_wrap", "random_unwrap"),
    }
)
"""Ops that XLA fuses with others."""


_SPREAD = frozenset({"broadcast_in_dim", "convert_element_type"})

_READS_CHAINS = ("reduce", "arg", SCAN_EXIT, "dynamic_update_slice")
"""Prefixes of the names of ops that XLA does not fuse with each other, but that take chains as operands."""

_TAKES_CHAINS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
"""The same, where `Compiler.fuses_into_products`; elsewhere a library computes them from memory to memory."""

_WIDEST = 52
"""The most slots of an op for which one float64 holds a bit each."""

_MOST_SOURCES = 3
"""The most tensors of its own size from which XLA computes a value again for several readers; if there are more, it keeps the value.

Measured on: 70 plans for v5e:2x4, and U-Nets of 128 to 512 images.
Checked by: benchmarks/fidelity_plans.py
"""

_LONGEST_FORK = 16
"""The most ops that are followed from a fork to where its ways meet again.

Measured on: the gradient of logits capped by a tanh has three.
Checked by: tests/machine/xla/test_fusion.py
"""


def parts_elements(primitive: str, params: Mapping[str, Any]) -> bool:
    """Returns whether an op puts the elements of its operand apart, as the gradient of a slice with strides does."""
    return primitive == "pad" and any(between for _, _, between in params["padding_config"])


def in_memory(columns: Columns, kept: Iterable[int], *, into_products: bool = True) -> BoolArray:
    """Returns for each value whether it exists in memory, and is not only computed on the way; a last False stands for literals.

    Args:
        columns: The columns of the step.
        kept: Its inputs and outputs.
        into_products: `Compiler.fuses_into_products`.
    """
    materialized = np.zeros(columns.num_values + 1, dtype=bool)
    materialized[[value for value in kept if value != LITERAL]] = True
    if not columns.num_ops:
        return materialized
    readers = _FusedReaders(columns, materialized, _READS_CHAINS + (_TAKES_CHAINS if into_products else ()))
    maker = columns.maker_of
    is_result = maker >= 0
    can_be_ahead = is_result & readers.takes_chains[maker] & ~readers.needed & ~materialized & readers.passes_on()
    if into_products:
        can_be_ahead &= ~columns.which(SCAN_EXIT.__eq__)[maker]
    ahead, made = _ahead(columns, ~readers.chained, can_be_ahead, readers.last)
    materialized |= is_result & ~ahead & (made[maker] | readers.needed)
    _keep_shared(columns, materialized, is_result & ~materialized & ~ahead, readers)
    return materialized


def _ahead(columns: Columns, made: BoolArray, can_be: BoolArray, last: IntArray) -> tuple[BoolArray, BoolArray]:
    """Returns the values whose one reader is fused into their maker, and the ops that are no chains (`made`) or are fused so."""
    left = np.flatnonzero(can_be & made[columns.maker_of]).tolist()
    found, done, open_, reader = bytearray(len(can_be)), bytearray(made), bytearray(can_be), last.tolist()
    for value in left:  # grows
        found[value] = 1
        op = reader[value]
        if not done[op]:
            done[op] = 1
            left += [result for result in columns.results[op] if open_[result]]
    return np.frombuffer(found, dtype=bool), np.frombuffer(done, dtype=bool)


def _keep_shared(columns: Columns, materialized: BoolArray, chains: BoolArray, readers: _FusedReaders) -> None:
    """Adds to `materialized` the values of `chains` that several ops read and that are made of many tensors, or with a scatter."""
    kept, is_chain, shared, scatters = bytearray(materialized), bytearray(chains), bytearray(readers.count > 1), bytearray(readers.scatters)
    compared, compares = bytearray(len(materialized)), any(scatters)
    elements = columns.elements.tolist()
    sources: list[frozenset[int]] = [frozenset()] * len(materialized)
    for op in np.flatnonzero(columns.have_result(chains)).tolist():
        operands = columns.operands[op]
        for value in columns.results[op]:
            if not is_chain[value]:
                continue
            found = _sources(operands, elements[value], kept, sources, elements)
            if compares:
                compared[value] = scatters[op] or any(compared[operand] for operand in operands)
            if shared[value] and (len(found) > _MOST_SOURCES or (compared[value] and not readers.joins_again(value))):
                materialized[value] = True
                kept[value], compared[value] = 1, 0
            sources[value] = found


def _sources(
    operands: tuple[int, ...], size: int, materialized: bytearray, sources: list[frozenset[int]], elements: list[int]
) -> frozenset[int]:
    """Returns the values in memory of at least `size` elements from which a chain computes its result."""
    found: frozenset[int] = frozenset()
    for operand in operands:
        if materialized[operand]:
            if elements[operand] >= size:
                found |= {operand}
        elif own := sources[operand]:
            if elements[operand] < size:  # it is spread out, and most of what it is made of was small
                own = frozenset(source for source in own if elements[source] >= size)
            found = own | found if found else own
        if len(found) > _MOST_SOURCES:
            break  # more change nothing, but where it is spread out again and some were slices of larger ones
    return found


def read_before(columns: Columns) -> BoolArray:
    """Returns for each operand whether the fusion of its op has read it, or made it, for an earlier op.

    Element-wise ops that lead to nothing but results, through element-wise ops alone, make up such fusions. An optimizer's update
    reads each tensor of a parameter once, and writes all of its results.
    """
    last = _last_ops(columns)
    inside = last[columns.slot_ops]
    first = np.full(columns.num_values + 1, columns.num_ops)
    first[columns.slot_values[inside][::-1]] = columns.slot_ops[inside][::-1]  # of several the one written last, the earliest
    return last[columns.readers] & (first[columns.read] < columns.readers)


def _last_ops(columns: Columns) -> BoolArray:
    """Returns for each op whether it is element-wise and leads to nothing but results, through element-wise ops alone."""
    elementwise = columns.which(ELEMENTWISE.__contains__)
    leads_on = bytearray(~elementwise)
    makers = columns.maker_of.tolist()
    left = columns.maker_of[columns.read[~elementwise[columns.readers]]].tolist()
    for op in left:  # grows
        if op >= 0 and not leads_on[op]:
            leads_on[op] = 1
            left += [makers[value] for value in columns.operands[op] if value != LITERAL]
    return ~np.frombuffer(leads_on, dtype=bool)


def fused_slots(columns: Columns, materialized: BoolArray) -> BoolArray:
    """Returns for each slot whether `Op.fused` has its bit set; `materialized` says for each value whether it exists in memory."""
    fused = ~materialized[columns.slot_values]
    fused[columns.is_operand] |= read_before(columns)
    return fused


def fused_bits(columns: Columns, fused: BoolArray) -> list[int]:
    """Returns `Op.fused` of all ops, whose bits are the flags `fused` of their slots."""
    starts, ops = columns.slot_starts, columns.slot_ops
    places = np.arange(len(ops)) - starts[ops]
    weights = np.where(fused, np.exp2(np.minimum(places, _WIDEST)), 0.0)
    bits: list[int] = np.bincount(ops, weights, columns.num_ops).astype(np.int64).tolist()
    for op in np.flatnonzero(np.diff(starts) > _WIDEST).tolist():
        bits[op] = sum(1 << place for place, own in enumerate(fused[starts[op] : starts[op + 1]]) if own)
    return bits


class _FusedReaders:
    """The ops that XLA fuses with others, and the readers of each value: their number, the last, and whether one needs it in memory."""

    def __init__(self, columns: Columns, kept: BoolArray, takers: tuple[str, ...]) -> None:
        size = columns.num_values + 1  # the last one stands for literals
        self._columns = columns
        self._order: IntArray | None = None
        self._sorted: IntArray = columns.read
        self.scatters = comparing_scatters(columns)
        self.chained = (columns.which(CHAINED.__contains__) & ~columns.parting) | self.scatters
        self.takes_chains = self.chained | columns.which(lambda primitive: primitive.startswith(takers))
        readers, read = np.divmod(np.unique(columns.readers * size + columns.read), size)
        self.count = np.bincount(read, minlength=size)
        self.last = np.full(size, -1)
        self.last[read] = readers
        self.needed = np.zeros(size, dtype=bool)
        self.needed[columns.read[~self.takes_chains[columns.readers]]] = True
        # A loop reads values computed before it from memory.
        starts = columns.which(ENTERING.__contains__)
        if starts.any():
            entering = columns.read[starts[columns.readers]]
            self.needed[entering[~_simple(columns, kept)[entering]]] = True

    def passes_on(self) -> BoolArray:
        """Returns for each value whether its one reader is a chained op on as many elements, fused into the op that makes the value."""
        columns, last = self._columns, self.last
        fits = self.chained & columns.which(lambda primitive: primitive not in BOUNDARY_OF)
        made = np.full(columns.num_ops, -1)
        made[columns.makers[::-1]] = columns.made[::-1]  # of several results the first
        made = made[last]
        # A cast that only makes numbers wider for several readers is done by each of them.
        widens = columns.which("convert_element_type".__eq__)[last] & (self.count[made] > 1)
        widens &= columns.item_bytes[made] > columns.item_bytes
        # A slice is cut off within a product.
        cut = columns.which("slice".__eq__)[last] & columns.which(MATRIX_PRODUCTS.__contains__)[columns.maker_of]
        found: BoolArray = (self.count == 1) & fits[last] & ~widens & (cut | (columns.elements[made] == columns.elements))
        self._stop_before_wide_forks(found, made)
        return found

    def _stop_before_wide_forks(self, passes: BoolArray, made: IntArray) -> None:
        """Takes the products' results out of `passes` whose chain, of ops with one reader each, has several at a wider value.

        Each of these readers computes the chain anew, from the product's result in its own precision. Rows of which the largest is sought
        stay, unless a look-up reads them: they become the exponentials of a softmax.
        """
        columns, count, items, elements = self._columns, self.count, self._columns.item_bytes, self._columns.elements
        widens = columns.which("convert_element_type".__eq__)[self.last] & (items[made] > items)
        products = columns.which(MATRIX_PRODUCTS.__contains__)[columns.maker_of] & (columns.maker_of >= 0)
        rows = np.zeros(len(count), dtype=bool)
        rows[columns.read[columns.which("reduce_max".__eq__)[columns.readers]]] = True
        rows &= ~self.needed
        for value in np.flatnonzero(passes & widens & products).tolist():
            end = int(made[value])
            while passes[end] and elements[made[end]] == elements[value] and made[end] > end:
                end = int(made[end])
            if count[end] > 1 and items[end] > items[value] and elements[end] == elements[value] and not rows[end]:
                passes[value] = False

    def joins_again(self, value: int) -> bool:
        """Returns whether the few ops that read a value, and those that read what they make, are chains that end in a single op."""
        columns, left, seen = self._columns, list[int](), set[int]()

        def add(read: int) -> None:
            for op in self.readers_of(read):
                if op not in seen:
                    seen.add(op)
                    heappush(left, op)

        add(value)
        while left and len(seen) <= _LONGEST_FORK:
            op = heappop(left)
            if not self.chained[op] or len(columns.results[op]) != 1:
                return False
            if not left:
                return True
            add(columns.results[op][0])
        return False

    def readers_of(self, value: int) -> list[int]:
        """Returns the ops that read a value."""
        if self._order is None:
            self._order = np.argsort(self._columns.read, kind="stable")
            self._sorted = self._columns.read[self._order]
        first, last = np.searchsorted(self._sorted, [value, value + 1])
        return [int(op) for op in self._columns.readers[self._order[first:last]]]


def comparing_scatters(columns: Columns) -> BoolArray:
    """Returns for each op whether it scatters one element per row, which XLA writes as a comparison of indices."""
    found = columns.which("scatter-add".__eq__)
    for op in np.flatnonzero(found).tolist():
        rule = columns.kinds[columns.kind_of[op]].rule
        rows = {dim for dim in rule.operands[2] if dim} & set(rule.results[0])
        shared = 1
        for dim in rows:
            for factor in dim:
                shared *= rule.sizes[factor]
        left = len(rule.results[0]) - len(rows)
        found[op] = left == 1 and columns.elements[columns.operands[op][2]] == shared
    return found


def _simple(columns: Columns, kept: BoolArray) -> BoolArray:
    """Returns for each value whether it is one number, spread out or not, that depends on no input: XLA makes it where it is read."""
    simple: BoolArray = (columns.elements == 1) & ~kept
    simple[-1] = True
    spread = columns.which(_SPREAD.__contains__)[columns.makers] | (columns.elements[columns.made] == 1)
    simple[columns.made] = False
    for op, value in zip(columns.makers[spread].tolist(), columns.made[spread].tolist(), strict=True):
        simple[value] = all(simple[operand] for operand in columns.operands[op])
    return simple
