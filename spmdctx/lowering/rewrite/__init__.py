"""Writes an assignment into the jaxpr: constraints, barriers, buckets and held sums."""
