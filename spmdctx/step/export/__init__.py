"""Writes a planned step's program as a Python module that needs JAX alone."""
