"""Solves within memory: multipliers for the rows of memory, repairs, and branch and bound."""
