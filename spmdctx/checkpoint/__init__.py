"""Checkpoints: of training, and MindSpore's files per rank that load into any other split."""

from spmdctx.checkpoint.manager import CheckpointManager, Restored

__all__ = ["CheckpointManager", "Restored"]
