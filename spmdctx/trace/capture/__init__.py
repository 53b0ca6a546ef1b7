"""Captures a function and its arguments as a flat jaxpr: leaves with paths and roles, state carried from input to output."""
