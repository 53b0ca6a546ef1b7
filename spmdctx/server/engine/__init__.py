"""Runs servers and workers as actors of Ray, on one machine or a cluster."""
