"""The parameter server: servers hold the state of a step and renew it, workers compute gradients of parts of the batch."""

WORKER = "SPMDCTX_PS_WORKER"
"""The number of this worker, in its environment; without it this process is the only one."""
