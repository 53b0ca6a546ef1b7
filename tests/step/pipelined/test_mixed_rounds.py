"""A pipeline of which only some rounds of chunks keep to a room computes what one device does."""

import jax
import jax.numpy as jnp

from spmdctx.machine.presets import topology
from spmdctx.pipeline.search import within
from tests.step.pipelined import small


def test_a_plan_with_mixed_rounds_computes_the_same(monkeypatch):
    params, state = small.state_of(8, 64, tied=False)
    args = params, state, small.batch_of(64, 64)
    interleaved = {"pipeline_interleave": True, "pipeline_scheduler": "1f1b"}
    options = {"device_num": 8, "topology": topology("h100"), "pipeline_config": interleaved}
    free, staged, limited = small.parallel(2, **options).plan(*args), within._staged, []

    def noted(*how):
        limited.extend(how[3:])
        return staged(*how)

    # Whether it is faster or not, the mixed plan is taken.
    monkeypatch.setattr(within, "_staged", noted)
    monkeypatch.setattr(within, "min", lambda *own, **how: own[1] if how else min(*own), raising=False)
    run = small.parallel(2, memory_bytes=int(0.9 * free.memory_bytes), **options)
    plan = run.plan(*args)
    assert limited == [2]
    assert plan.simulation.schedule.num_chunks == 4
    assert any(note.startswith("The chunks of 1 round of 2 take less memory") for note in plan.notes)
    assert plan.memory_bytes <= 0.9 * free.memory_bytes
    want = jax.tree.leaves(jax.jit(small.step)(*args))
    for own, other in zip(jax.tree.leaves(run(*args)), want, strict=True):
        assert jnp.allclose(own, other, rtol=1e-5, atol=1e-6)
    assert run.audit(*args).ok
