"""Turns a user's function into a program: the flat jaxpr of a call, and the graph built from it."""
