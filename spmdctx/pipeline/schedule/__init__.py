"""Schedules of a pipeline: which task each group of devices runs next, how long a step takes, and what is in memory meanwhile."""
