"""Communication between processes and devices, modeled on `mindspore.communication`; a rank is a device."""

from spmdctx.communication.current import is_initialized
from spmdctx.communication.groups import WORLD, create_group, destroy_group
from spmdctx.communication.world import (
    get_group_rank_from_world_rank,
    get_group_size,
    get_local_rank,
    get_local_rank_size,
    get_rank,
    get_world_rank_from_group_rank,
    init,
    release,
)

__all__ = [
    "WORLD",
    "create_group",
    "destroy_group",
    "get_group_rank_from_world_rank",
    "get_group_size",
    "get_local_rank",
    "get_local_rank_size",
    "get_rank",
    "get_world_rank_from_group_rank",
    "init",
    "is_initialized",
    "release",
]
