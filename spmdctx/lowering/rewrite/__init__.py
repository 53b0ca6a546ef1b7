"""Writes an assignment into the jaxpr: constraints, barriers, buckets and the sums of loops."""
