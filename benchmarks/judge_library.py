"""The kinds of instructions, and what calls of cuBLAS and cuDNN do: FLOPs from the call's own description, bytes without its workspace."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from spmdctx.audit.hlo import Instruction, Leaf, Module

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")

Shape = Sequence[int]
ConvolutionFlops = Callable[[Shape, Shape, Shape, Sequence[str], str], float]

_PRODUCTS, _CONVOLUTIONS, _ATTENTION = "__cublas$", "__cudnn$conv", "__cudnn$fmha"
_SORTS = ("__cub$", "xla.gpu.ext.cub_")


def library_kind(instruction: Instruction) -> str:
    """What a library computes: "product", "convolution", "attention" or "sort"; "" for other instructions."""
    found = _TARGET.search(instruction.attributes) if instruction.opcode == "custom-call" else None
    target = found.group(1) if found else ""
    if target.startswith(_SORTS):
        return "sort"
    kinds = ((_PRODUCTS, "product"), (_CONVOLUTIONS, "convolution"), (_ATTENTION, "attention"))
    return next((kind for start, kind in kinds if target.startswith(start)), "")


def library_bytes(instruction: Instruction, operands: Sequence[Leaf]) -> float:
    """Bytes that a call reads and writes; the last result is the workspace, where it is flat bytes."""
    results = list(instruction.leaves)
    if len(results) > 1 and results[-1].dtype in ("int8", "uint8") and len(results[-1].shape) == 1:
        results.pop()
    return float(sum(leaf.num_bytes for leaf in (*operands, *results)))


def library_flops(instruction: Instruction, operands: Sequence[Leaf], convolution: ConvolutionFlops) -> float:
    """FLOPs of a product, a convolution or attention without a mask; none of a sort.

    `convolution` counts those of a convolution from the shapes of its input, kernel and result, its labels and its attributes.
    """
    kind, result = library_kind(instruction), instruction.leaves[0].shape
    if kind == "product":
        found = _CONTRACTED.search(instruction.attributes)
        dims = [int(text.strip('" ')) for text in found.group(1).split(",") if text.strip('" ')] if found else []
        return 2.0 * math.prod(result) * math.prod(operands[0].shape[dim] for dim in dims)
    labels = _LABELS.search(instruction.attributes)
    if kind == "convolution" and labels is not None:
        first, second = operands[0].shape, operands[1].shape
        # The labels of a gradient are those of the convolution whose gradient it is.
        backward = {"BackwardInput": (result, second, first), "BackwardFilter": (first, result, second)}
        shapes = next((own for name, own in backward.items() if name in instruction.attributes), (first, second, result))
        return convolution(*shapes, labels.groups(), instruction.attributes)
    if kind == "attention":
        return _attention_flops(instruction, operands)
    return 0.0


def _attention_flops(instruction: Instruction, operands: Sequence[Leaf]) -> float:
    """Of two products with the scores forward, of five backward; operands are [batch, length, heads, features]."""
    batch, length, heads, features = operands[0].shape
    products = 5 if "Backward" in instruction.attributes else 2
    return 2.0 * products * batch * heads * length * operands[1].shape[1] * features


_OPCODES = {
    "dot": "product",
    "ragged-dot": "product",
    "convolution": "convolution",
    "sort": "sort",
    "scatter": "gather",
    "gather": "gather",
    "reduce": "reduction",
    "reduce-window": "reduction",
    "select-and-scatter": "reduction",
    "transpose": "transpose",
    "copy": "transpose",
}
_RANK = ("product", "convolution", "attention", "sort", "gather", "reduction", "transpose")
_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all")


def is_collective(instruction: Instruction) -> bool:
    """Whether an instruction is a collective, or begins or ends one."""
    return instruction.opcode.startswith(_COLLECTIVES)


def kind_of(instruction: Instruction, module: Module) -> str:
    """The kind of an instruction; a product of a batch that TPU's compiler writes as a convolution is a product."""
    found = {library_kind(instruction) or _OPCODES.get(instruction.opcode, "fusion")}
    for name in instruction.callees("calls"):
        for inner in module.computations[name].instructions.values():
            if inner.opcode == "fusion":
                found.add(kind_of(inner, module))
            elif inner.opcode == "convolution" and 'op_name="' in inner.attributes and "conv_general" not in inner.attributes:
                found.add("product")
            else:
                found.add(_OPCODES.get(inner.opcode, "fusion"))
    kind = next((kind for kind in _RANK if kind in found), "fusion")
    return "product" if kind == "attention" else kind
