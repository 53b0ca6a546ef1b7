"""Writes a plan in forms that other programs read."""
