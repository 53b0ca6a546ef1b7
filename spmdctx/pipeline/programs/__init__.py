"""The programs of a pipeline: what a chunk computes of one micro-batch, forwards and backwards."""
