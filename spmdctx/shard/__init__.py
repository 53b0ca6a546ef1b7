"""`shard()`: the user's strategies for functions and modules, written into the trace as marks."""
