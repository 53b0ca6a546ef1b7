"""XLA's scheduler on TPU lets values live as long as it likes, up to a limit that can be set.

What XLA does: ops that the scheduler puts off to fill a wait may hold gigabytes that no plan foresaw. It allows that as long as less than
    95 % of the device's memory is alive. With a lower limit the scheduler tries again while its schedule is above it, with a tenth less
    each time. The limit is a goal, not a promise. It is a whole percentage of the device's memory.
Seen in: libtpu 0.0.42, v5e:2x4: with a limit of 1.08 of the plan's peak 65 of 70 peaks are within 15 % instead of 61; 1.0 made some plans
    5 % slower (benchmarks/RESULTS.md). On 8 x H100 the option of that kind held one plan of 56; CPU has none.
    It counts what is alive, and not what XLA reserves for results (`cost.memory.reserved`). A step that keeps its old state may so be
    scheduled beyond the memory: 16 layers of width 8,192, planned at 16.2 GiB, need 19.1 on 32 v5e, and 15.2 to 15.7 with limits of 65 to
    85 %. A limit below what lives at the end of the step does harm: on 8 v6e a plan of 30.7 GiB needs 29.6, and 32.1 with one.
Switch: none: only TPU's compiler has the options, and it is asked whether it knows them.
Priced by: nothing
Written or prevented by: lowering.scheduler_limit
Checked by: tests/lowering/test_scheduler_limit.py, benchmarks/fidelity_plans.py, benchmarks/budget_plans.py
"""

LIMIT = "xla_tpu_scheduler_percent_shared_memory_limit"

RERUNS = "xla_latency_hiding_scheduler_rerun"

OWN_PERCENT = 95
"""The limit if none is given; a higher one would not limit anything.

Measured on: the scheduler's log for v5e:2x4.
Checked by: tests/lowering/test_scheduler_limit.py
"""

MOST_RERUNS = 10
"""Each try aims at a tenth less, and the last one counts, whatever it needs: with three some plans end up to 20 % above the first.

Measured on: 120 plans for v5e:2x4.
Checked by: benchmarks/fidelity_plans.py
"""
