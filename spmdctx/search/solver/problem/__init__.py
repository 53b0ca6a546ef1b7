"""The solver's problem: nodes with states, costs on nodes and edges, and rows that limit memory."""
