"""Compares what a pipelined step compiles and does with its plan."""
