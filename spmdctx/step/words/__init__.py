"""Words at the right time: what a step logs while it is planned, compiled and called."""
