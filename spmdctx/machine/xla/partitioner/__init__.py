"""The behavior of Shardy and the SPMD partitioner, unless the program tells them otherwise: one file for each."""
