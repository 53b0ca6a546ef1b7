"""Decorated steps: each is captured, planned, compiled, run and verified for every set of shapes and every context."""
