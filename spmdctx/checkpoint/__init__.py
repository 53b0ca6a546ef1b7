"""Checkpoints: of a training state, and MindSpore's files per rank, which load into any other split."""

from spmdctx.checkpoint.layouts import build_searched_strategy
from spmdctx.checkpoint.manager import CheckpointManager
from spmdctx.checkpoint.per_rank import Loaded, load_distributed_checkpoint, save_distributed_checkpoint
from spmdctx.checkpoint.restored import Restored
from spmdctx.checkpoint.tensor_file import Reads
from spmdctx.checkpoint.transform import (
    Parameter,
    merge_sliced_parameter,
    rank_list_for_transform,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)

__all__ = [
    "CheckpointManager",
    "Loaded",
    "Parameter",
    "Reads",
    "Restored",
    "build_searched_strategy",
    "load_distributed_checkpoint",
    "merge_sliced_parameter",
    "rank_list_for_transform",
    "save_distributed_checkpoint",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
]
