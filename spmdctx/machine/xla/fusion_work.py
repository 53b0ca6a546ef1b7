"""XLA computes a fusion in one kernel, whose time is the longest of its products, arithmetic and traffic.

What XLA does: it computes chains of element-wise ops on the way into the matrix product, the reduction or the stored result that needs
    them. The reads and the arithmetic of the chain hide behind the product's multiplications, or these hide behind the chain. The price
    charges all of a fusion to its one main op. It charges a chain that leads to several to the first, and what the others read again to
    them. On TPU a product also sums its result with what was made before, for gradients of biases and of norms. What products alone
    read it writes in their precision. One whose result is needed in float32, too, or what a chain makes of it for a look-up, as of capped
    logits, writes both; other fusions read the narrower. What a scatter of one element per row makes, the gradient of logits, is computed
    in each product that reads it, from the logits: the plan counts its memory, and no time to write it.
Seen in: jax 0.10.2, libtpu 0.0.42, v5e:2x4: the step times of 70 plans have the order of those compiled (rank correlation 0.997, by the
    roofline of the scheduled program). Sums in the fusions of products: ViT, DiT, T5 and evoformer (benchmarks/RESULTS.md). One H200, jax
    0.11.2: kernels take what the bytes of their fusions take; steps of ten programs are predicted at 0.52 to 0.95 of the kernels' time,
    of six more at 0.26 to 0.80 (0.21 to 0.79 without this), of nine others at 0.65 to 0.99 with what kernels take besides
    (`Topology.kernel_s`). CPU: not measured.
Switch: `Compiler.fuses_into_products`: if it is False, chains count for each of their readers.
Priced by: trace.build.build, trace.build.compiled, cost.roofline
Written or prevented by: nothing
Checked by: tests/machine/xla/test_fusion_work.py, tests/cost/test_roofline.py, benchmarks/fidelity_plans.py
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spmdctx.ir.analysis.columns import Columns, Kind
from spmdctx.ir.arrays import BoolArray, IntArray
from spmdctx.ir.graph import Op, Work
from spmdctx.ir.primitives import ANNOTATIONS, CARRYING, KERNELS, MATRIX_PRODUCTS, PICKING, SCAN_ENTER, SCAN_EXIT, WHILE_ENTER
from spmdctx.machine.xla.fusion import CHAINED, comparing_scatters
from spmdctx.machine.xla.rereads import NOWHERE, FusionMoves, looked_up, operands_again, other_homes, rates_apart, wide_copies

_COSTLY = frozenset(
    {
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "digamma", "div", "erf", "erf_inv", "erfc"),
        *("exp", "exp2", "expm1", "lgamma", "log", "log1p", "logistic", "pow", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh"),
    }
)
_COSTLY_FLOPS = 10
"""The vector operations of one such function: a polynomial, and the steps before and after it.

Measured on: not measured.
Checked by: benchmarks/fidelity_plans.py
"""

NAMING = ANNOTATIONS | CARRYING | {WHILE_ENTER}
"""Ops that only give a tensor another name."""

_APART = KERNELS | {SCAN_ENTER, SCAN_EXIT, "dynamic_update_slice", "gather", "shard_map"}
"""Ops priced on their own: they take parts of their operands, write in place, or are whole programs."""

_ALONE, _NO_ARITHMETIC = _APART | NAMING, MATRIX_PRODUCTS | KERNELS | NAMING

_HIDDEN = 1 / 64
"""The part of its price that is left for arithmetic that hides in a fusion, so that a search still prefers to split it."""

_WIDE_BYTES = 4

_FUSING = ("reduce_", "arg", "dot_general", "conv_general_dilated")
"""Prefixes of the names of other ops that begin a fusion."""


def fusion_works(columns: Columns, fused: BoolArray, *, for_each: bool = False) -> list[Work | None]:
    """Returns `Op.work` of every op.

    Args:
        columns: The columns of the step.
        fused: For each slot, whether `Op.fused` has its bit set.
        for_each: Whether each main op to which a chain leads reads and computes the chain anew, and not the first alone.
    """
    finder, alone = _Homes(columns, fused, joins_products=not for_each), columns.which(_ALONE.__contains__)
    found_homes, reads = finder.found, finder.reads()
    more = other_homes(columns, found_homes, alone, finder.leads_on)
    if not for_each:
        fused = finder.with_comparisons(fused, reads)
    homes = np.array(found_homes, dtype=np.int64)
    at_home, numbers = homes >= 0, np.arange(columns.num_ops)
    mains = np.where(at_home, columns.slot_ops[homes], numbers) if len(homes) else numbers
    vector = np.array([vector_flops(kind) for kind in columns.kinds], dtype=np.int64)
    arithmetic = np.zeros(columns.num_ops, dtype=np.int64)
    np.add.at(arithmetic, mains, vector[columns.kind_of])
    if for_each:
        np.add.at(arithmetic, columns.slot_ops[more[1]], vector[columns.kind_of[more[0]]])
    known: dict[int, Work] = {}
    inside = [known.setdefault(flops, Work((), flops * _HIDDEN)) for flops in vector.tolist()]
    found: list[Work | None] = [inside[kind] for kind in columns.kind_of.tolist()]
    for op in np.flatnonzero(alone & ~at_home).tolist():
        found[op] = None
    moves = _moves(columns, fused, (homes, *reads), more)
    _add_works(found, np.flatnonzero(~alone & ~at_home), columns, (moves, for_each), arithmetic)
    return found


def vector_flops(op: Op | Kind) -> int:
    """Returns the operations of an op on the vector unit; matrix products, and ops that only name a tensor, have none."""
    if op.primitive in _NO_ARITHMETIC:
        return 0
    return op.flops * _COSTLY_FLOPS if op.primitive in _COSTLY else op.flops


def _moves(columns: Columns, fused: BoolArray, known: tuple[IntArray, IntArray, IntArray], more: tuple[IntArray, IntArray]) -> FusionMoves:
    """Returns what the ops move; `known`: the homes of ops, the tensors of slots and their bytes."""
    (homes, values, sizes), ops = known, columns.slot_ops
    written = np.zeros(columns.num_ops, dtype=np.int64)
    np.add.at(written, columns.makers, columns.sizes[columns.made])
    picks = columns.which(PICKING.__contains__)[ops] & columns.is_operand
    sizes = np.where(picks, np.minimum(sizes, written[ops]), sizes)
    places = np.where(homes[ops] >= 0, homes[ops], np.arange(len(ops)))
    in_memory = np.flatnonzero(~fused)
    again, there = operands_again(columns, fused, more)
    moving, at = np.concatenate([in_memory, again]), np.concatenate([places[in_memory], there])
    _, first = np.unique(ops[at] * (columns.num_values + 1) + values[moving], return_index=True)
    return FusionMoves(at[first], sizes[moving[first]], values[moving[first]], first >= len(in_memory))


def _add_works(found: list[Work | None], mains: IntArray, columns: Columns, moves: tuple[FusionMoves, bool], arithmetic: IntArray) -> None:
    """Adds the works of main ops; equal works are one object. `moves` says whether what is read again counts as the rest does."""
    (slots, sizes, _, again), for_each = moves
    counts, starts = np.maximum(1, columns.elements[columns.slot_values]), columns.slot_starts
    moved = np.zeros(len(counts), dtype=np.int64)
    full = ~again | for_each
    np.add.at(moved, slots[full], sizes[full])
    passing, repeated = ({}, {}) if for_each else rates_apart(columns, moves[0], sizes / counts[slots])
    known: dict[Work, Work] = {}
    every = (moved / counts).tolist()
    rows = zip(mains.tolist(), starts[mains].tolist(), starts[mains + 1].tolist(), arithmetic[mains].tolist(), strict=True)
    for op, start, stop, flops in rows:
        work = Work(tuple(every[start:stop]), float(flops), tuple(passing.get(op, ())), tuple(repeated.get(op, ())))
        found[op] = known.setdefault(work, work)


_LONGEST = 64
"""The most tensors between a comparison and what it is made of that are followed.

Measured on: the gradient of a softmax of capped logits has 16.
Checked by: tests/machine/xla/test_fusion_work.py
"""


class _ChainStart(NamedTuple):
    """The start of an op's chain.

    `source` is the tensor in memory of so many elements that is made last, -1 if there is none; `last` is the last op that makes any
    other operand of the chain. `is_one` says whether there is one such tensor.
    """

    source: int
    last: int
    is_one: bool


class _Homes:
    """The slot of a main op in which each op is computed; nowhere for main ops and those that are priced on their own."""

    def __init__(self, columns: Columns, fused: BoolArray, *, joins_products: bool) -> None:
        self.found = [NOWHERE] * columns.num_ops
        self._columns = columns
        self._operands, self._results = columns.operands, columns.results
        self._elements, self._repeats = columns.elements.tolist(), columns.repeats.tolist()
        self._maker, self._starts, self._main = columns.maker_of.tolist(), columns.slot_starts.tolist(), columns.slot_ops.tolist()
        chained = columns.which(CHAINED.__contains__)
        # Ops with one result that is not in memory.
        inside = (np.bincount(columns.makers, minlength=columns.num_ops) == 1) & fused[columns.slot_starts[1:] - 1]
        self._chained, self._inside = chained.tobytes(), inside.tobytes()
        self._origins: dict[tuple[int, int], _ChainStart] = {}
        self._products = columns.which(MATRIX_PRODUCTS.__contains__).tobytes()
        self._takes_sums = self._products if joins_products else bytes(columns.num_ops)
        self._widens = wide_copies(columns, fused) if joins_products else bytes(columns.num_ops)
        self._is_looked_up = looked_up(columns, fused) if joins_products else bytes(columns.num_ops)
        self.leads_on = set[int]()  # ops behind a main op that others compute anew
        self._narrow: dict[int, int] = {}  # by value, the narrower one of which a product writes this copy
        self._after_main_ops(self._ops_after(chained, inside))
        self._before_main_ops(np.flatnonzero(chained & inside & ~columns.which(_APART.__contains__)))

    def _after_main_ops(self, ops: IntArray) -> None:
        """Finds the chains that begin with a main op, and the reductions that read their ends."""
        found, repeats, main = self.found, self._repeats, self._main
        ahead: dict[int, int] = {}
        for op in ops.tolist():
            if self._widens[op]:
                self._join_product(op, self._operands[op][0])
            elif self._is_looked_up[op]:
                self._join_chain(op)
            elif self._chained[op]:
                for value in self._operands[op]:
                    if value in ahead and repeats[main[ahead[value]]] == repeats[op]:
                        found[op] = ahead[value]
                if found[op] == NOWHERE:
                    continue
            elif self._columns.primitive(op).startswith("reduce_"):
                found[op] = self._joined(op)
            if self._inside[op]:
                ahead[self._results[op][0]] = found[op] if found[op] != NOWHERE else self._starts[op] + len(self._operands[op])

    def _ops_after(self, chained: BoolArray, inside: BoolArray) -> IntArray:
        """Returns the ops that may be computed behind a main op, and the main ops behind which others may be."""
        columns = self._columns
        behind = np.zeros(columns.num_values + 1, dtype=bool)
        behind[columns.made[inside[columns.makers]]] = True
        follows = np.bincount(columns.readers[behind[columns.read]], minlength=columns.num_ops) > 0
        follows |= np.frombuffer(self._widens, dtype=bool) | np.frombuffer(self._is_looked_up, dtype=bool)
        others = (inside | columns.which(lambda primitive: primitive.startswith("reduce_"))) & ~columns.which(_APART.__contains__)
        return np.flatnonzero(np.where(chained, follows, others))

    def _join_chain(self, op: int) -> None:
        """Has the product from whose result an op's chain computes what is looked up write that, too, if all else is known before."""
        (made,) = self._results[op]
        source, last, _ = self._origin(op, self._elements[made])
        if source >= 0 and last < self._maker[source] and self._columns.item_bytes[source] < self._columns.item_bytes[made]:
            self._join_product(op, source)

    def _join_product(self, op: int, narrow: int) -> None:
        """Has the product that makes a tensor write a wider copy of it, or of what is computed from it alone."""
        (wide,) = self._results[op]
        maker = self._maker[narrow]
        if maker < 0:
            return
        home = self.found[maker] if self.found[maker] != NOWHERE else self._starts[maker] + len(self._operands[maker])
        if self._products[self._main[home]] and self._repeats[self._main[home]] == self._repeats[op]:
            self.found[op], self._narrow[wide] = home, narrow

    def reads(self) -> tuple[IntArray, IntArray]:
        """Returns the tensor of each slot, and its bytes; fusions read the narrower one of what a product writes twice."""
        columns = self._columns
        values: IntArray = columns.slot_values.copy()
        if self._narrow:
            fuses = columns.which(lambda primitive: primitive in CHAINED or primitive.startswith(_FUSING))[columns.slot_ops]
            reads = fuses & columns.is_operand & np.isin(values, list(self._narrow))
            values[reads] = [self._narrow[value] for value in values[reads].tolist()]
        sizes: IntArray = columns.sizes[values]
        return values, np.where(self._for_products()[columns.slot_values], sizes // 2, sizes)

    def _for_products(self) -> BoolArray:
        """Returns for each value whether a product's fusion writes it, and products alone read it, in the precision of their unit."""
        columns = self._columns
        if not any(self._takes_sums):
            return np.zeros(columns.num_values + 1, dtype=bool)
        products, makers = columns.which(MATRIX_PRODUCTS.__contains__), columns.maker_of
        mains = np.array([self._main[home] if home != NOWHERE else op for op, home in enumerate(self.found)])
        found: BoolArray = (makers >= 0) & products[mains[makers]] & (columns.item_bytes == _WIDE_BYTES)
        found &= np.bincount(columns.read, minlength=len(found)) > 0
        found[columns.read[~products[columns.readers]]] = False
        return found

    def with_comparisons(self, fused: BoolArray, known: tuple[IntArray, IntArray]) -> BoolArray:
        """Moves what compares indices into the products that alone read it; returns `fused` with what nobody stores then.

        The products read instead, in `known` (`reads`), what it is made of.
        """
        columns, found, main = self._columns, self.found, self._main
        scatters = np.flatnonzero(comparing_scatters(columns)).tolist()
        if not scatters:
            return fused
        mains = np.array([main[home] if home != NOWHERE else op for op, home in enumerate(found)])
        fused = fused.copy()
        for scatter in scatters:
            inside = mains == scatter
            made = np.flatnonzero(inside[columns.slot_ops] & ~columns.is_operand & ~fused)
            if len(made) != 1:
                continue
            reads = np.flatnonzero(columns.is_operand & (columns.slot_values == columns.slot_values[made]))
            readers = columns.slot_ops[reads].tolist()
            if readers and all(self._products[op] and self._repeats[op] == self._repeats[scatter] for op in readers):
                instead = self._source_of(int(columns.slot_values[made[0]]), fused)
                if instead is not None:
                    known[0][reads], known[1][reads] = instead, columns.sizes[instead]
                fused[made] = True
                for op in np.flatnonzero(inside).tolist():
                    found[op] = int(reads[0])
        return fused

    def _source_of(self, made: int, fused: BoolArray) -> int | None:
        """Returns the one tensor in memory of its size from which a value is computed; None if there are several."""
        found, seen, left = set[int](), set[int](), [self._maker[made]]
        while left and len(seen) < _LONGEST:
            op = left.pop()
            for place, value in enumerate(self._operands[op]):
                maker = self._maker[value]
                if self._elements[value] != self._elements[made] or value in seen:
                    continue
                seen.add(value)
                if maker < 0 or not fused[self._starts[op] + place] or not self._inside[maker]:
                    found.add(self._narrow.get(value, value))
                else:
                    left.append(maker)
        return found.pop() if len(found) == 1 and not left else None

    def _before_main_ops(self, ops: IntArray) -> None:
        """Finds the chains that lead to a main op; one that leads to several belongs to the first."""
        columns, found, repeats, main = self._columns, self.found, self._repeats, self._main
        first, alone = self._first_reads().tolist(), bytearray(columns.which(_ALONE.__contains__))
        for op in ops[::-1].tolist():
            slot = first[self._results[op][0]]
            if found[op] != NOWHERE or slot == NOWHERE:
                continue
            reader = main[slot]
            home = found[reader]
            if home == NOWHERE:
                if alone[reader]:
                    continue
                home = slot
            if repeats[main[home]] == repeats[op]:
                found[op] = home

    def _first_reads(self) -> IntArray:
        """Returns for each value the slot in which the first op reads it; if that op reads it several times, the last such slot."""
        columns = self._columns
        slots = np.flatnonzero(columns.is_operand)
        first = np.full(columns.num_values + 1, NOWHERE)
        first[columns.read[::-1]] = slots[::-1]
        own = columns.slot_ops[first[columns.read]] == columns.readers
        first[columns.read[own]] = slots[own]
        return first

    def _joined(self, op: int) -> int:
        """Returns the fusion that makes the tensor which a reduction reads, if the reduction needs nothing that comes later.

        Products alone take one that reads several tensors of that size.
        """
        source, last, is_one = self._origin(op, max((self._elements[value] for value in self._operands[op]), default=0))
        maker = self._maker[source] if source >= 0 else -1
        if maker < 0 or self._columns.primitive(maker) in _ALONE or not (self._chained[maker] or self._takes_sums[maker]):
            return NOWHERE
        home = self.found[maker] if self.found[maker] != NOWHERE else self._starts[maker] + len(self._operands[maker])
        main, scopes = self._main[home], self._columns.scopes
        fits = self._repeats[main] == self._repeats[op] and scopes[main] == scopes[op] and (is_one or self._takes_sums[main])
        if not fits or not (last < main or (is_one and self._is_softmax(op, main, last))):
            return NOWHERE
        if not is_one and self._columns.primitive(main) == "dot_general":
            self.leads_on |= self._chain_of(op)
        return home

    def _chain_of(self, op: int) -> set[int]:
        """Returns the ops of the chain that a reduction reads."""
        left = [op]
        for one in left:  # grows
            left += [maker for maker, _ in self._chains_before(one, 0) if maker not in left]
        return set(left[1:])

    def _is_softmax(self, op: int, main: int, last: int) -> bool:
        """Returns whether an op sums exponentials of rows that a product makes in low precision, and whose largest it finds, too."""
        exponent, own = self._maker[self._operands[op][0]], self.found[last]
        made = self._columns.item_bytes[self._results[main][0]]
        is_same = own != NOWHERE and self._main[own] == main and made < _WIDE_BYTES and bool(self._takes_sums[main])
        if not is_same or exponent < 0 or self._columns.primitive(exponent) != "exp":
            return False
        self.leads_on |= {exponent, self._maker[self._operands[exponent][0]]}
        return True

    def _origin(self, op: int, elements: int) -> _ChainStart:
        """Returns from which tensors in memory of at least so many elements an op's chain starts."""
        left = [(op, elements)]
        while left:
            key = left[-1]
            inner = [one for one in self._chains_before(*key) if one not in self._origins]
            left += inner
            if not inner:
                self._origins[key] = self._joined_origins(*key)
                left.pop()
        return self._origins[op, elements]

    def _chains_before(self, op: int, elements: int) -> list[tuple[int, int]]:
        """Returns the ops of an op's chain that make its operands, each with the fewest elements that a tensor may have."""
        return [(self._maker[value], min(elements, self._elements[value])) for value in self._operands[op] if self._is_chain(value)]

    def _is_chain(self, value: int) -> bool:
        number = self._maker[value]
        return number >= 0 and bool(self._inside[number] and self._chained[number])

    def _joined_origins(self, op: int, elements: int) -> _ChainStart:
        """Returns the origin of an op from the known origins of the chains before it."""
        source, last, is_one = -1, -1, True
        for value in self._operands[op]:
            number = self._maker[value]
            if self._is_chain(value):
                one, late, alone = self._origins[number, min(elements, self._elements[value])]
            else:
                one, late, alone = (value, -1, True) if self._elements[value] >= elements else (-1, number, True)
            is_one &= alone
            if one >= 0 and source >= 0 and one != source:
                is_one = False
                earlier, one = sorted((one, source), key=self._maker.__getitem__)
                late = max(late, self._maker[earlier])
                source = one
            source, last = (one if source < 0 else source), max(last, late)
        return _ChainStart(source, last, is_one)
