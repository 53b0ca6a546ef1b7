"""The solver, which knows numbers only: it minimises pairwise costs over finite states, subject to memory."""
