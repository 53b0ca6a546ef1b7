"""What calls of a step took, beside what its plan foretold."""
