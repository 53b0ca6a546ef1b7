"""Reads MindSpore's strategy files as pins, and writes them from plans."""
