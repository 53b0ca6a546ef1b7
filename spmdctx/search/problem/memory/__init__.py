"""The memory of a planning problem: rows for what is stored, for copies, and for what is reserved for results."""
