"""The solver without memory: dominated states, exact elimination, and the dual bound for what is left."""
