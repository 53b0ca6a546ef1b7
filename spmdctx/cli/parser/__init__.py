"""The arguments of every command, which are read and explained without JAX; each command names the function that runs it."""
