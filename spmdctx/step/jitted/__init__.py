"""The methods that a step shares with the functions of `jax.jit`, and how it is copied."""
