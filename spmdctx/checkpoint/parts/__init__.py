"""Leaves of which some processes have no part."""
