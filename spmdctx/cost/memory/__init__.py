"""The memory part of a price: when each value and copy of a step is alive, from which `cost/price/` counts a device's peak."""
