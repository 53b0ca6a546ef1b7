"""XLA on TPU lays what convolutions and products with batch dimensions read and make in tiles of 8 by 128, and fills these up.

What XLA does: memory is in tiles of the two minor dimensions. Most arrays are laid out so that little is filled up. Operands and results
    of a product with batch dimensions have other dimensions as their minor ones, however small: f32[32768, 7, 7] takes 128 MiB, not 6.
    Those of a convolution have the batch and the features, in the order that fills up less: bf16[48, 48, 48, 64] takes 27 MiB, not 13.5,
    and bf16[256, 32, 32, 64] no more than its elements. Reshapes, repetitions and sums over space keep that. Tiles of fewer than eight
    rows are as high as the next power of two: f32[16, 128, 128, 3] takes 32 MiB, as 3 becomes 4 and 16 becomes 128.
    A scatter adds rows of a table to zeros in which each row takes lanes, then the sum is laid out otherwise: f32[65536, 64] takes 32 MiB.
    Rows that are looked up or scattered take lanes, too, and so does what is around them element by element, unless a product makes that:
    f32[320000, 4] takes 156 MiB. Rows of two dimensions fill tiles while they are looked up or scattered: f32[320000, 4, 32] takes 625 MiB.
    An argument is copied into that order, and the copy stays to the gradient of the kernel: bf16[16, 192, 192, 3] takes 36 MiB.
Seen in: libtpu 0.0.42, v5e:2x4: the interactions of embeddings, bik,bjk->bij. libtpu 0.0.42.1, v5e, v5p and v6e: U-Nets,
    ResNets, gradients of tables of 8 to 64 features, attention over the edges of graphs (benchmarks/RESULTS.md). GPU and CPU have no tiles.
Switch: none: the name of the device tells
Priced by: cost.price.memory, search.problem.memory.stored
Written or prevented by: nothing
Checked by: tests/machine/xla/test_tiles.py, tests/search/problem/memory/test_rows.py, benchmarks/memory_intervals.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import permutations

from spmdctx.ir.analysis.kinds import ops_of
from spmdctx.ir.graph import LITERAL, Graph, Op
from spmdctx.ir.primitives import CONTRACTIONS
from spmdctx.ir.rule import FactorKind

_ROWS, _LANES = 8, 128

_WORTH_COUNTING = 2.0
"""The share from which tiles are counted: below it XLA may find another layout, and peaks were foreseen well without.

Measured on: attention of ViT over 197 patches (v5e:2x4).
Checked by: benchmarks/fidelity_plans.py
"""

_CONVOLUTIONS = ("conv_general_dilated",)

_BY_ROWS = ("scatter-add",)

_LOOK_UPS, _SCATTERS = ("gather",), ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul")

_CONVERSIONS = ("convert_element_type", "sharding_constraint")

_KEEPING_IMAGES = ("reshape", "broadcast_in_dim", "reduce_sum")
"""Ops whose results keep the minor dimensions of an image."""

Minor = tuple[int, ...]
"""The dimensions of a value of which two are its minor ones."""

Shares = Callable[[Sequence[int], Minor], float]
"""Returns how many times its bytes a block takes, by its shape and minor dimensions."""

Filling = tuple[Mapping[int, Minor], Shares]
"""Values with their minor dimensions, and how blocks of them are filled up."""


def has_tiles(device: str) -> bool:
    """Returns whether a device, by a topology's name for it, has memory in tiles."""
    return device.startswith("tpu-")


def filled_up(shape: Sequence[int], minor: Minor, least: float = _WORTH_COUNTING) -> float:
    """Returns how many times the bytes of a block are taken, if two of the dimensions `minor` make its tiles; 1 up to `least`."""

    def tiles(second: int, first: int) -> int:
        rows = min(_ROWS, 1 << max(0, shape[second] - 1).bit_length())
        return -(-shape[second] // rows) * rows * -(-shape[first] // _LANES) * _LANES

    share = min(tiles(*pair) / max(1, shape[pair[0]] * shape[pair[1]]) for pair in permutations(minor, 2))
    return share if share > least else 1.0


def rows_filled_up(shape: Sequence[int], minor: Minor, least: float = _WORTH_COUNTING) -> float:
    """Returns the same for a block of rows of the dimensions `minor`, of which one has several elements; 1 for other rows."""
    several = [shape[dim] for dim in minor if shape[dim] > 1]
    share = -(-several[0] // _LANES) * _LANES / several[0] if len(several) == 1 else 1.0
    return share if share > least else 1.0


def laid_by_rows(shape: Sequence[int], minor: Minor) -> float:
    """Returns how many times its bytes a block takes while it is laid out by rows of the dimensions `minor`; 0 if that changes nothing."""
    if len(minor) == 1:
        share = rows_filled_up(shape, minor, 1.0)
    else:
        share = filled_up(shape, minor, 1.0) if min(shape[dim] for dim in minor) > 1 else 1.0
    return share if share > 1 else 0.0


def in_lanes(graph: Graph, device: str) -> list[tuple[Op, dict[int, Minor]]]:
    """Returns the ops that scatter or look up rows which a device lays out by rows only while they run, with those values.

    Each op is there once: of what it scatters, and the result, only the first counts.
    """
    if not has_tiles(device):
        return []
    values, known = graph.values, in_rows(graph)
    found: dict[int, tuple[Op, dict[int, Minor]]] = {}
    for op in ops_of(graph, _BY_ROWS):
        if len(values[op.results[0]].shape) == 2 and len(values[op.operands[2]].shape) > 1:
            found[op.id] = op, {op.results[0]: (1,)}
    for op in ops_of(graph, (*_LOOK_UPS, *_SCATTERS)):
        rows = _of_rows(op, 2) or {
            value: minor for value, minor in _of_rows(op, 1).items() if value not in known and value not in op.results
        }
        if rows:
            found[op.id] = op, rows
    return list(found.values())


def fillings(graph: Graph, device: str) -> list[Filling]:
    """Returns the ways in which a device fills up stored values; a value may have several."""
    if not has_tiles(device):
        return []
    return [(in_rows(graph), rows_filled_up), (in_tiles(graph), filled_up), (in_images(graph), partial(filled_up, least=1.0))]


def in_tiles(graph: Graph) -> dict[int, Minor]:
    """Returns the values that products with batch dimensions read or make, and what becomes of them element by element."""
    return _known(graph, in_tiles, CONTRACTIONS, _of_product)


def in_rows(graph: Graph) -> dict[int, Minor]:
    """Returns the rows of one or two dimensions that are looked up or scattered, and what is around them element by element.

    None of them joins what a product makes, or an argument, such as a parameter that it is the gradient of: those are laid out otherwise.
    """

    def rows(op: Op) -> dict[int, Minor]:
        found, others = _of_rows(op, 1) or _of_rows(op, 2), _near_products(graph)
        return {value: minor for value, minor in found.items() if value not in others}

    return _known(graph, in_rows, (*_LOOK_UPS, *_SCATTERS), rows)


def _near_products(graph: Graph) -> Collection[int]:
    """Returns the arguments, what products make, and what is around these element by element."""
    known: dict[int, Minor] | None = graph.facts.get(_near_products)
    if known is None:
        made = (value for op in ops_of(graph, CONTRACTIONS) for value in op.results)
        known = graph.facts[_near_products] = dict.fromkeys([*made, *graph.inputs], ())
        _spread(graph, known)
    return known


def _of_rows(op: Op, rank: int) -> dict[int, Minor]:
    """Returns what an op looks up in or scatters into a table of so many dimensions beside the rows, with these."""
    looks_up = op.primitive in _LOOK_UPS
    table, rows = op.rule.operands[0], op.rule.results[0] if looks_up else op.rule.operands[2]
    if len(table) != rank + 1 or len(rows) != rank + 1 or rows[1:] != table[1:] or not all(rows[1:]):
        return {}
    minor = tuple(range(1, rank + 1))
    return {value: minor for value in (op.results[0], *(() if looks_up else (op.operands[2],))) if value != LITERAL}


def in_images(graph: Graph) -> dict[int, Minor]:
    """Returns the values that convolutions read or make, and what becomes of them element by element; batch and features are minor.

    So are those of what is reshaped, repeated or summed over space alone.
    """
    return _known(graph, in_images, _CONVOLUTIONS, _of_convolution, _KEEPING_IMAGES)


def laid_out(graph: Graph) -> dict[int, Minor]:
    """Returns the minor dimensions of the images, by convolution, that are arguments, converted or not.

    Arguments are laid out otherwise, so that a copy stays from the first convolution that reads it to the last one.
    """
    known: dict[int, Minor] | None = graph.facts.get(laid_out)
    if known is None:
        known = graph.facts[laid_out] = {}
        given = set(graph.inputs)
        for op in ops_of(graph, _CONVOLUTIONS):
            minor = _of_convolution(op).get(op.operands[0])
            if minor is not None and _source(graph, op.operands[0]) in given:
                known[op.id] = minor
    return known


def _source(graph: Graph, value: int) -> int:
    """Returns what a value is a conversion of; a constraint on its sharding is no op of its own."""
    while value != LITERAL:
        maker = graph.producers.get(value)
        if maker is None or graph.ops[maker].primitive not in _CONVERSIONS:
            break
        value = graph.ops[maker].operands[0]
    return value


def _known(
    graph: Graph,
    fact: object,
    primitives: Collection[str],
    of_op: Callable[[Op], dict[int, Minor]],
    keeping: Collection[str] = (),
) -> dict[int, Minor]:
    known: dict[int, Minor] | None = graph.facts.get(fact)
    if known is None:
        known = {}
        for op in ops_of(graph, primitives):
            known.update(of_op(op))
        if known:
            _spread(graph, known)
            for op in ops_of(graph, keeping):
                known.update(_kept(op, known))
            if keeping:
                _spread(graph, known)
        for value in graph.inputs:
            known.pop(value, None)
        graph.facts[fact] = known
    return known


def _of_convolution(op: Op) -> dict[int, Minor]:
    """Returns the operands and the result of a convolution with the two dimensions of each that are no space."""
    found: dict[int, Minor] = {}
    sides = [*zip(op.operands, op.rule.operands, strict=True), *zip(op.results, op.rule.results, strict=True)]
    space = {factor for factor, kind in enumerate(op.rule.kinds) if kind is FactorKind.PERMUTATION}
    for value, rule in sides:
        minor = tuple([place for place, dims in enumerate(rule) if dims and space.isdisjoint(dims)])
        if value != LITERAL and len(minor) == 2:
            found[value] = minor
    return found


def _of_product(op: Op) -> dict[int, Minor]:
    """Returns the operands and results of a product that has dimensions of a batch, and two others in each of them."""
    sides = [*zip(op.operands, op.rule.operands, strict=True), *zip(op.results, op.rule.results, strict=True)]
    shared = set.intersection(*({factor for dims in rule for factor in dims} for _, rule in sides))
    if not shared:
        return {}
    minor = [tuple(place for place, dims in enumerate(rule) if not shared.intersection(dims)) for _, rule in sides]
    return {value: dims for (value, _), dims in zip(sides, minor, strict=True) if value != LITERAL and len(dims) > 1}


def _kept(op: Op, known: Mapping[int, Minor]) -> dict[int, Minor]:
    """Returns what an op makes of a known value, or makes a known value of, where both minor dimensions stay as they are."""
    ends = (op.operands[0], op.rule.operands[0]), (op.results[0], op.rule.results[0])
    for (value, rule), (other, other_rule) in (ends, ends[::-1]):
        if value in known and other not in known and other != LITERAL:
            sought = [rule[place] for place in known[value]]
            found = tuple([other_rule.index(dims) for dims in sought if dims and dims in other_rule])
            if len(found) == len(sought):
                return {other: found}
    return {}


def _spread(graph: Graph, known: dict[int, Minor]) -> None:
    """Adds what is made of known values element by element, then what they are made of."""
    places: dict[int, list[int]] = {}
    every = [alike for op in graph.ops if len(alike := _alike(graph, op, places)) > 1]
    for ordered in (every, reversed(every)):
        for alike in ordered:
            for value in alike:
                if value in known:
                    minor = known[value]
                    for other in alike:
                        known.setdefault(other, minor)
                    break


def _alike(graph: Graph, op: Op, places: dict[int, list[int]]) -> list[int]:
    """Returns the operands and results that an op relates element by element; `places` keeps those of each rule."""
    rule = op.rule
    known = places.get(id(rule))
    if known is None:
        is_plain = bool(op.results) and all(kind is FactorKind.PASS_THROUGH for kind in rule.kinds)
        sides = enumerate((*rule.operands, *rule.results)) if is_plain else ()
        known = places[id(rule)] = [place for place, dims in sides if dims == rule.results[0]]
    if not known:
        return []
    values, every, shape = (*op.operands, *op.results), graph.values, graph.values[op.results[0]].shape
    return [value for place in known if (value := values[place]) != LITERAL and every[value].shape == shape]
