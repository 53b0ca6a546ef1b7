"""The behavior of XLA: one file for each, with its evidence, its switch, and the modules that price it."""
