"""Steps that run through a pipeline."""
