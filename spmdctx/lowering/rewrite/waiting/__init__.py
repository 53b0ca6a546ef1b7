"""Makes parts of a step wait for others, so that XLA frees what only those read."""
