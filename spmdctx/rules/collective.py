"""Rules of the primitives of hand-written SPMD code.

Inside `shard_map` their shapes are those of one device's blocks, so no axis may split them again.
"""

from __future__ import annotations

from spmdctx.rules.opaque import keep_whole

_STARTED = ("all_gather", "all_gather_reduced", "all_to_all", "pbroadcast", "ppermute", "psum", "reduce_scatter")

keep_whole(
    "communicates between the devices of a shard_map, on blocks that the user has split",
    *_STARTED,
    *(f"{name}_start" for name in _STARTED),
    *(f"{name}_done" for name in _STARTED),
    *("all_gather_invariant", "pbroadcast_dynamic", "pmax", "pmin", "ragged_all_to_all", "psend", "precv"),
    *("psum_invariant", "psum_invariant_start", "unreduced_pmax", "unreduced_pmin", "unreduced_psum", "unreduced_psum_start"),
    *("unreduced_reduce_scatter", "unreduced_reduce_scatter_start"),
)

keep_whole("is a device's place in a shard_map", "axis_index")

keep_whole(
    "marks how a block differs between the devices of a shard_map",
    *("pvary", "preduced", "reduced_vary_cast", "reduced_vary_cast_p", "vary_unreduced_cast", "vary_unreduced_cast_p"),
)
