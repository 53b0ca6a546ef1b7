"""Automatic parallelism for JAX: decorate a single-device training step, run it split over a device mesh."""
