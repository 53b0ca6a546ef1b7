"""The product: what was decided, readable, comparable, saved as a file, drawn and explained."""

from spmdctx.plan.plan import FORMAT_VERSION, Cost, OpTable, Plan, PlannedOp, PlannedTensor, Reshard, Timing

__all__ = ["FORMAT_VERSION", "Cost", "OpTable", "Plan", "PlannedOp", "PlannedTensor", "Reshard", "Timing"]
