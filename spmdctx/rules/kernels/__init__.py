"""Rules of kernels that can be split: those that their authors describe, and those whose grids tell which blocks are independent."""

from spmdctx.rules.kernels import described, grids

__all__ = ["described", "grids"]
