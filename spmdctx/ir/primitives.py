"""The classes of primitives that more than one module asks about."""

from __future__ import annotations

IDENTITIES = frozenset({"spmdctx_shard", "sharding_constraint", "reshard"})

LINEAR = frozenset({"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "expand_dims", "copy", "neg", "name"})

ADDITIONS = frozenset({"add", "add_any"})

SCALED = frozenset({"mul", "div"})

TERMS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "ragged_dot_general"})
"""Primitives whose partial results lowering can write down."""

LOW = frozenset({"bfloat16", "float16"})

WIDENED = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "scatter-add"})
"""Ops that lowering can make add up in float32 what is of low precision."""

_ADDITIONS = frozenset({"add", "add_any"})

_PASSED = frozenset({"spmdctx_shard", "sharding_constraint", "name"})
"""Ops that are nothing in the compiled program."""

REARRANGED = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "copy"})

LAYOUT = _PASSED | REARRANGED

BROUGHT_IN = LAYOUT | {"scan.enter"}
"""Ops that the compiler moves a conversion to lower precision in front of: out of loops too."""

LOOKED_UP = "gather"
"""And a look-up in a table that nothing else reads."""

MATRIX_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})

OUTSIDE = frozenset({"scan.enter", "while.enter", "scan.exit"})
"""Boundaries of loops that are executed once, outside the loop."""

MARKER = "spmdctx_shard"

LOSS = "spmdctx_loss"
