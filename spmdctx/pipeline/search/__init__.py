"""Searches for the stages of a pipeline: where to cut, and how many there are."""
