"""XLA on CPU drops optimization barriers before it combines collectives.

What XLA does: barriers keep the buckets of gradients apart, and the groups of `shard(fusion=)`. TPU and GPU keep them until they have
    combined collectives. CPU drops them, and combines all collectives that do not wait for others.
Seen in: jax 0.10.2, libtpu 0.0.42 for v5e:2x4 and CUDA plugin 0.10.2 for 8 x H100: 20 parameters in buckets by index [3, 10] become three
    all_reduces of 10, 7 and 3. CPU reduces all of them at once.
Switch: `Compiler.keeps_barriers`
Priced by: nothing; step.planning.notes says so.
Written or prevented by: lowering.rewrite.buckets writes the barriers.
Checked by: tests/lowering/rewrite/test_buckets.py, benchmarks/collective_options.py
"""

NO_BUCKETS = "Buckets of gradients have no effect: the CPU compiler drops what keeps them apart, and reduces all of them at once."

NO_GROUPS = "shard(fusion=) groups nothing in the forward and backward pass: the CPU compiler combines what does not wait for others."
