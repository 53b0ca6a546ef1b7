"""Pipeline parallelism: cuts a loss into stages on devices of their own, and runs micro-batches through them on a schedule."""
