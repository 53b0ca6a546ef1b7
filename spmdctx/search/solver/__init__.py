"""The solver: pairwise costs over finite states, subject to memory. It knows numbers only."""
