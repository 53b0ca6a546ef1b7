"""Solves what `search/problem/` makes: pairwise costs over finite states, subject to memory; it knows numbers only."""
