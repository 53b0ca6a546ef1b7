"""Prices: what computing, communicating and resharding cost on a machine. Knows no algorithm and no JAX."""
