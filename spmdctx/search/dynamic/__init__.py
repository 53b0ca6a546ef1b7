"""`dynamic_programming`: the cheapest assignment of its space, within a memory budget, with a certificate."""
