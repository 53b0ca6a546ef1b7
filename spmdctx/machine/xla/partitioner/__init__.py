"""What Shardy and the SPMD partitioner do unless the program tells them otherwise: one file per behavior."""
