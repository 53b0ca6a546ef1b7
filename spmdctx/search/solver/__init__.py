"""The package's own solver: pairwise costs over finite states, subject to memory; it knows numbers only."""
