"""Turns a step and a mesh into the solver's problem: slots, states of ops and their costs, a network, and rows of memory."""
