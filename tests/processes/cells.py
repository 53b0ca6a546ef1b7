"""The part of the acceptance matrix that runs on several processes, and how one cell of it is run."""

import jax
from flax import nnx

from spmdctx.step.processes import to_host
from tests.zoo import case
from tests.zoo.matrix import Cell, step_of

CELLS = {
    (2, 4): (
        Cell("mlp", "pytree", "data_parallel", "", 8),
        Cell("mlp", "nnx", "auto_parallel", "dynamic_programming", 8),
        Cell("transformer", "linen", "semi_auto_parallel", "", 8),
        Cell("moe", "pytree", "auto_parallel", "recursive_programming", 8),
    ),
    (4, 2): (
        Cell("mlp", "pytree", "data_parallel", "", 8),
        Cell("lstm", "nnx", "auto_parallel", "sharding_propagation", 8),
    ),
}
"""By processes and devices of each."""

NUM_STEPS = 2


def run(cell):
    """The step, its plan, its arguments, and all results of two steps in float64, whole, by path."""
    one = case(cell.model, cell.flavor)
    with step_of(cell, "cpu") as (step, args):
        plan = step.plan(*args)
        found = {}
        for number in range(NUM_STEPS):
            result = step(*args)
            if one.flavor == "nnx":
                everything = (result, nnx.state(args[:2]))
            else:
                everything, args = result, (result[0], *args[1:])
            jax.block_until_ready(everything)
            leaves = jax.tree_util.tree_leaves_with_path(everything)
            found |= {f"{number}{jax.tree_util.keystr(path)}": to_host(leaf) for path, leaf in leaves if _is_numeric(leaf)}
    return step, plan, args, found


def _is_numeric(leaf):
    return not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
