"""The planning problem in numbers: slots, states, their costs, the network between them, and rows of memory."""
