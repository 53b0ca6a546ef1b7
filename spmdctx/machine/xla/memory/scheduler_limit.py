"""XLA's scheduler on TPU lets values live as long as it likes, up to a limit that can be set."""

LIMIT = "xla_tpu_scheduler_percent_shared_memory_limit"

RERUNS = "xla_latency_hiding_scheduler_rerun"

OWN_PERCENT = 95
"""The limit where none is given; one above it would be none."""

MOST_RERUNS = 10
"""Each try aims at a tenth less, and the last one counts, whatever it needs."""
