"""From a function and its arguments to a flat jaxpr: leaves with paths and roles, state carried from input to output."""
