"""Finds what each call of `value_and_grad` splits, from the graph of a first trace in which the calls are marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from spmdctx.errors import StrategyError, UnsupportedError
from spmdctx.gradients.loss import Made
from spmdctx.gradients.options import GradientOptions
from spmdctx.gradients.roles import judged_by_losses
from spmdctx.ir.analysis.batch import batch_dims
from spmdctx.ir.graph import Graph, Role, Value
from spmdctx.ir.mesh import LogicalMesh, replicated
from spmdctx.ir.primitives import LOSS_VALUE
from spmdctx.ir.sharding import TensorSharding
from spmdctx.search.optimizer.state import scattered_gradients
from spmdctx.trace.build.jaxprs.divisors import divisors_in
from spmdctx.trace.build.program import LossOperand, Program
from spmdctx.trace.capture.capture import Captured

_KEY_MAKERS = frozenset({"random_seed", "random_wrap", "random_unwrap"})
_KEY_SIZES = (2, 4)


class Operand(NamedTuple):
    """A leaf on its way into a loss: its sharding over the replicas, its batch dimension or None, and whether it is a key.

    `scatter_dim` is the dimension along which its gradient leaves the loss in pieces, or None if the gradient is whole.
    """

    sharding: TensorSharding
    batch_dim: int | None = None
    is_key: bool = False
    scatter_dim: int | None = None

    @property
    def is_split(self) -> bool:
        """True if replicas hold different values of the leaf."""
        return any(self.sharding)


@dataclass
class SeenCall:
    """A call in the first trace: its leaves and its results.

    `is_manual` marks a call in which a shard_map of the user's lies. The call differentiates by the leaves `differentiated`. `micro_size`
    is the number of micro-batches that the loss itself asks a pipeline for, `num_parts` the number of parts in which each runs. The program
    divides by the numbers `divisors`; `if_fixed` holds what to say if it does so with fewer rows, too.
    """

    where: str
    paths: Sequence[str]
    avals: Sequence[Any]
    results: Sequence[Made]
    out_avals: Sequence[Any]
    is_manual: bool
    differentiated: frozenset[int] = frozenset()
    operands: dict[int, Operand] = field(default_factory=dict)
    micro_size: int | None = None
    num_parts: int = 1
    divisors: tuple[float, ...] = ()
    if_fixed: list[str] = field(default_factory=list)

    def fixed_notes(self, part: Any) -> list[str]:
        """Returns what to say of a loss that divides by the same numbers in `part`, its program over fewer rows."""
        return self.if_fixed if self.divisors == divisors_in(part) else []

    @property
    def has_batch(self) -> bool:
        """True if any part of the batch enters the call."""
        return any(operand.batch_dim is not None for operand in self.operands.values())

    def operand(self, index: int) -> Operand:
        """Returns how a leaf enters the call."""
        return self.operands.get(index) or Operand(replicated(len(self.avals[index].shape)))


def find_operands(captured: Captured, calls: Sequence[SeenCall], options: GradientOptions, layerwise: frozenset[int]) -> Captured:
    """Fills in the operands of all calls, and returns the step with the roles that its losses show.

    Args:
        captured: the first trace.
        calls: those that it made.
        options: of the gradients.
        layerwise: inputs, by number, of which each replica has a piece of its own.

    Raises:
        StrategyError: a batch that does not divide, that reaches a loss where it cannot be followed, or that is guessed and
            cannot be told from other arguments.
        UnsupportedError: a loss inside a vmap over the batch.
    """
    program = captured.built()
    mesh = options.mesh
    captured = judged_by_losses(captured, program, calls, options)
    graph = program.graph
    leaves = [value for value, leaf in zip(graph.inputs, captured.inputs, strict=True) if leaf.role is Role.BATCH]
    batch = batch_dims(graph, leaves, mesh).found
    own_leaves = [graph.inputs[index] for index in sorted(layerwise)]
    own = batch_dims(_one_step(graph), own_leaves, mesh).found
    metadata = {graph.inputs[index]: _metadata(captured, index, mesh) for index in sorted(layerwise)}
    scattered = scattered_gradients(graph, mesh, options.optimizer, frozenset(own_leaves)) if options.scatters and options.optimizer else {}
    keys = _keys(program)
    for entering in program.loss_operands:
        call = calls[entering.call]
        if entering.value < 0 or entering.leaf == LOSS_VALUE or call.is_manual:
            continue
        value = graph.values[entering.value]
        dim = _dim(entering, batch.get(value.id), call)
        own_dim = _dim(entering, own.get(value.id), call)
        rank = len(value.shape) - len(entering.mapped)
        found = Operand(replicated(rank), None, entering.value in keys or value.dtype.startswith("key<"))
        if dim is not None:
            found = found._replace(batch_dim=dim)
            if options.is_local:
                found = found._replace(sharding=_along(dim, rank, mesh))
        elif own_dim is not None and options.is_local:
            found = found._replace(sharding=metadata.get(value.id) or _along(own_dim, rank, mesh))
        elif not entering.mapped and value.id in scattered:
            found = found._replace(scatter_dim=scattered[value.id])
        _check(found, entering, value, call, options)
        known = call.operands.setdefault(entering.leaf, found)
        if known != found:
            raise StrategyError(
                f"'{_path(call, entering.leaf)}' enters one loss in two ways: once with the batch in dimension {known.batch_dim}, "
                f"once in {found.batch_dim}.",
                where=call.where,
                fix="call spmdctx.value_and_grad outside of a function that jax.jit traces once for both",
            )
    return captured


def _one_step(graph: Graph) -> Graph:
    """Removes the ties of state from a graph.

    The gradient of a split layer then does not split the parameters of the next step.
    """
    carried = set(graph.inputs)
    return replace(graph, ties=tuple(tie for tie in graph.ties if carried.isdisjoint(tie)))


def _along(dim: int, rank: int, mesh: LogicalMesh) -> TensorSharding:
    return (*replicated(dim), mesh.names, *replicated(rank - dim - 1))


def _metadata(captured: Captured, index: int, mesh: LogicalMesh) -> TensorSharding | None:
    """Returns the sharding in a leaf's partitioning metadata, or None if it has none on this mesh."""
    names = captured.inputs[index].metadata
    if names is None:
        return None
    dims = tuple(() if name is None else (name,) if isinstance(name, str) else tuple(name) for name in names)
    used = [name for dim in dims for name in dim]
    return dims if used and set(used) <= set(mesh.names) else None


def _dim(entering: LossOperand, dim: int | None, call: SeenCall) -> int | None:
    """Returns the number of a marked value's dimension as the loss sees it."""
    for mapped in reversed(entering.mapped):
        if dim is None:
            return None
        if dim == mapped:
            raise UnsupportedError(
                "spmdctx.value_and_grad runs inside a vmap over the batch, so that its loss is that of one example.",
                where=call.where,
                fix="use jax.value_and_grad there",
            )
        dim -= mapped < dim
    return dim


def _keys(program: Program) -> frozenset[int]:
    """Returns the values that hold raw PRNG keys: words made from keys alone."""
    values = program.graph.values
    found = {value for value in program.graph.inputs if values[value].role is Role.KEY}
    for op in program.graph.ops:
        if op.primitive in _KEY_MAKERS or not found.isdisjoint(op.operands):
            found.update(value for value in op.results if _may_be_key(values[value]))
    return frozenset(value for value in found if _is_raw_key(values[value]))


def _may_be_key(value: Value) -> bool:
    return value.dtype.startswith("key<") or value.dtype == "uint32"


def _is_raw_key(value: Value) -> bool:
    return value.dtype == "uint32" and bool(value.shape) and value.shape[-1] in _KEY_SIZES


def _path(call: SeenCall, index: int) -> str:
    return call.paths[index] if index < len(call.paths) else "an array"


def _check(operand: Operand, entering: LossOperand, value: Value, call: SeenCall, options: GradientOptions) -> None:
    if entering.leaf >= len(call.paths):
        if operand.batch_dim is not None or operand.is_split:
            raise StrategyError(
                f"An array of the batch, {value.dtype}{list(value.shape)}, reaches the loss by a way that cannot be followed.",
                where=call.where,
                fix="pass it to the loss as an argument",
            )
        return
    shape = call.avals[entering.leaf].shape
    for dim, names in enumerate(operand.sharding):
        pieces = options.mesh.num_slices(names)
        micro, parts = (options.micro_batches, call.num_parts) if dim == operand.batch_dim else (1, 1)
        if shape[dim] % (pieces * micro * parts):
            raise StrategyError(
                _indivisible(call.paths[entering.leaf], dim, shape[dim], pieces, micro, parts),
                where=call.where,
                got=f"shape {tuple(shape)}",
                need=f"a multiple of {(product := pieces * micro * parts)}, such as {-(-shape[dim] // product) * product}",
                fix=_change(call, options, pieces, micro, parts),
            )


def _change(call: SeenCall, options: GradientOptions, pieces: int, micro: int, num_parts: int) -> str:
    """Returns what a user can change where a batch does not divide."""
    by_cell = call.micro_size is not None and call.micro_size == options.micro_batches
    names = [
        "the batch size",
        *(["device_num"] if pieces > 1 else []),
        *(["micro_size of PipelineCell" if by_cell else "grad_accumulation_step"] if micro > 1 else []),
        *(["interleave_num of MicroBatchInterleaved"] if num_parts > 1 else []),
    ]
    return f"change {' or '.join([', '.join(names[:-1]), names[-1]] if len(names) > 1 else names)}"


def _indivisible(path: str, dim: int, size: int, pieces: int, micro: int, num_parts: int) -> str:
    parts = [f"over {pieces} devices"] if pieces > 1 else []
    parts += [f"into {micro} micro-batches"] if micro > 1 else []
    parts += [f"into {num_parts} interleaved parts"] if num_parts > 1 else []
    product = pieces * micro * num_parts
    return f"The loss splits dimension {dim} of '{path}' {' and '.join(parts)}, but its size {size} is not divisible by {product}."


def operands_of(call: SeenCall) -> list[Operand]:
    """Returns the operand of each leaf."""
    return [call.operand(index) for index in range(len(call.paths))]
