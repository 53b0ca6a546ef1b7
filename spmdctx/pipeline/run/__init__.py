"""Runs a planned pipeline: walks its schedule, and moves what crosses between stages."""
