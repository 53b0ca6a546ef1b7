"""Solves without limits: dominated states, exact elimination, and the dual bound of what is left."""
