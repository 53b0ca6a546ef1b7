"""Divides a step between workers and servers."""
