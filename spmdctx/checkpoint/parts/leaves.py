"""Which leaves of a state some process has no part of, as those of a pipeline's other stages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from spmdctx.checkpoint.tree import StateTree, has_no_part
from spmdctx.errors import CheckpointError, listed


def shared_leaves(tree: StateTree) -> list[bool]:
    """Returns one flag per leaf; all processes of the job call this together.

    Raises:
        CheckpointError: random keys among such leaves, of which a process that has no part cannot tell the raw numbers.
    """
    own = [has_no_part(leaf) for leaf in tree.leaves]
    if jax.process_count() == 1:
        return own
    found = [bool(flag) for flag in np.any(multihost_utils.process_allgather(np.array(own)), axis=0)]
    keys = [
        path
        for path, leaf, flag in zip(tree.paths, tree.leaves, found, strict=True)
        if flag and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    if keys:
        raise CheckpointError(
            "Arrays of random keys that some processes have no part of cannot be saved.",
            got=listed(keys),
            fix="save the numbers of jax.random.key_data(key) in their place",
        )
    return found
