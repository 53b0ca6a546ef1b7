"""Prices: the seconds and bytes of an assignment on a machine."""
