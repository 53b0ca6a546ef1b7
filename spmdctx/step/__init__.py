"""A decorated step: captured, planned, compiled, run and verified for each set of shapes and each context."""
