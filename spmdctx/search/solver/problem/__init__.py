"""The solver's input, which knows no step and no mesh: nodes with states, costs on nodes and edges, and rows that limit memory."""
