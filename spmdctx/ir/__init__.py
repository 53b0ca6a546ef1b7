"""The step as data: values, ops, rules, shardings and meshes, without cost, search or JAX."""
