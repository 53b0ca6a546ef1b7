"""Prices an assignment: `cost/memory/` says what is alive when, `cost/price/` makes the bill, and `evaluate` is the searches' objective."""

from spmdctx.machine.topology import Topology

__all__ = ["Topology"]
