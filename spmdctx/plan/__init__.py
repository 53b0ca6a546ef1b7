"""The plan, which is what planning returns: it can be read, compared, saved as a file, drawn and explained."""

from spmdctx.plan.data import FORMAT_VERSION, Cost, OpTable, PlannedOp, PlannedTensor, Reshard, Timing
from spmdctx.plan.plan import Plan

__all__ = ["FORMAT_VERSION", "Cost", "OpTable", "Plan", "PlannedOp", "PlannedTensor", "Reshard", "Timing"]
