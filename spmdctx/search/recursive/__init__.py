"""`recursive_programming`: cuts the devices axis by axis, each time by the cheapest split of every op."""
