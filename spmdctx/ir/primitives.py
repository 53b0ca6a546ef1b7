"""The vocabulary of primitives: every class of them that more than one module asks about.

Ops of a graph have the names of JAX's primitives. The boundaries of loops and branches, which are no equations in JAX, have names of their
own. A class that only one module asks about stands in that module, unless another class has the same members.
"""

from __future__ import annotations

from enum import Enum, auto

MARKER = "spmdctx_shard"
"""The marker of `shard()`: an identity that carries a strategy."""

LOSS = "spmdctx_loss"
"""The marker of values that enter a call of `value_and_grad`; only the first trace of a step, which looks at its losses, has it."""

LOSS_VALUE = -1
"""The number by which that marker knows the loss of a call, which is no leaf that enters it."""

# Boundaries of the bodies of loops and branches.

SCAN_ENTER, SCAN_NEXT, SCAN_EXIT = "scan.enter", "scan.next", "scan.exit"
WHILE_ENTER, WHILE_NEXT = "while.enter", "while.next"
COND_EXIT = "cond.exit"


class Boundary(Enum):
    """The side of a body at which a boundary stands: an op that is no equation of the program."""

    ENTER = auto()
    """A loop begins, with the values that it carries, reads in every iteration, or takes slices of."""
    NEXT = auto()
    """An iteration of a loop hands its carry on to the next iteration, the last one to the ops behind the loop."""
    EXIT = auto()
    """A scan stacks the results of its iterations."""
    JOIN = auto()
    """The branches of a cond meet: the only boundary that is not one of a loop."""


BOUNDARY_OF = {
    SCAN_ENTER: Boundary.ENTER,
    SCAN_NEXT: Boundary.NEXT,
    SCAN_EXIT: Boundary.EXIT,
    WHILE_ENTER: Boundary.ENTER,
    WHILE_NEXT: Boundary.NEXT,
    COND_EXIT: Boundary.JOIN,
}
"""The boundary that an op of each of these primitives is; ops of other primitives are equations."""

ENTERING = frozenset({SCAN_ENTER, WHILE_ENTER})
"""Boundaries at which a loop begins."""

CARRYING = frozenset({SCAN_NEXT, WHILE_NEXT})
"""Boundaries at which an iteration of a loop hands on its carry."""

LEAVING = CARRYING | {SCAN_EXIT}
"""Boundaries at the end of an iteration."""

LOOP_BOUNDARIES = ENTERING | LEAVING
"""All boundaries of loops."""

OUTSIDE = ENTERING | {SCAN_EXIT}
"""Boundaries of loops that are executed once, outside the loop."""

# Ops that compute nothing.

IDENTITIES = frozenset({MARKER, "sharding_constraint", "reshard"})
"""Ops that hand on their operand unchanged, and say how it is split."""

ANNOTATIONS = IDENTITIES | {"name", "copy"}
"""Ops that vanish from the compiled program: JAX lowers a copy to its operand."""

REARRANGED = frozenset({"reshape", "squeeze", "transpose", "copy"})
"""Ops that at most put the elements of their operand in another order."""

LAYOUT = ANNOTATIONS | REARRANGED
"""Ops that change no element: other names, shapes and layouts."""

CASTS = frozenset({"convert_element_type", "reduce_precision", "copy"})
"""Ops whose result is their operand in another precision, or as a copy."""

RENAMES = CASTS | ANNOTATIONS
"""Ops whose result has the dimensions of their operand, and each of its elements as far as the type can hold it."""

VIEWS = RENAMES | REARRANGED
"""Ops that only prepare an array for use: a model may cast all of its parameters before it computes with the first."""

BROUGHT_IN = LAYOUT | {SCAN_ENTER, "slice", "split", "dynamic_slice", "concatenate", "pad", "rev", "broadcast_in_dim"}
"""Ops that a conversion to lower precision passes: the compiler moves it in front of them, also out of loops."""

LOOKED_UP = "gather"
"""A look-up; the compiler also moves such a conversion in front of it, if nothing else reads the table."""

PICKING = frozenset({"slice", "dynamic_slice", "gather", "split"})
"""Ops that read no more of their operand than they return."""

CUTTING = frozenset({"slice", "split", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad"})
"""Ops that take a part of a tensor, or put tensors together; each element of the result is one element of an operand."""

# Sums and what commutes with them.

ADDITIONS = frozenset({"add", "add_any"})
"""Sums of two values."""

SCALED = frozenset({"mul", "div"})
"""Ops that are linear in one operand where the other is a number."""

LINEAR = LAYOUT | {"convert_element_type", "broadcast_in_dim", "neg"}
"""Ops that commute with sums; `reduce_precision` does not, as it is there to round the sum."""

TERMS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "ragged_dot_general"})
"""Ops whose partial results lowering can write into a program, one for each device."""

WIDENED = TERMS - {"ragged_dot_general"}
"""Ops that lowering can make add up low-precision terms in float32; it asks no ragged product for another type."""

# Products.

CONTRACTIONS = frozenset({"dot_general", "ragged_dot_general", "scaled_dot"})
"""Products of matrices, which contract whole dimensions of their operands."""

MATRIX_PRODUCTS = CONTRACTIONS | {"conv_general_dilated"}
"""Ops that run on the matrix unit."""

KERNELS = frozenset({"pallas_call"})
"""Programs for one device's matrix and vector units, on blocks of tensors in memory."""

HEAVY = MATRIX_PRODUCTS | KERNELS | {"shard_map"}
"""Ops long enough to hide communication behind them; a region that the user wrote per device counts as one with products."""
