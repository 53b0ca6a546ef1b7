"""`shard()`: writes the user's strategies for functions and modules into the trace as marks."""
