"""Memory: when each value is alive in a step, and how many bytes that takes on a device."""
