"""Gradients of a pipeline are added up on each device alone, and reduced once in a step, by programs of their own."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdctx
from spmdctx.errors import InfeasibleError
from spmdctx.lowering.rewrite.partial_terms import turned, turned_dims
from spmdctx.pipeline.search import reduced
from tests.pipeline.losses import batch, decoder, loss

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
SCHEDULES = {
    "gpipe": {"pipeline_scheduler": "gpipe"},
    "1f1b": {"pipeline_scheduler": "1f1b"},
    "interleaved": {"pipeline_scheduler": "1f1b", "pipeline_interleave": True},
    "zero_bubble_h1": {"pipeline_scheduler": "zero_bubble_h1"},
    "zero_bubble_v": {"pipeline_scheduler": "zero_bubble_v"},
}
REDUCED = ("all_reduce", "reduce_scatter", "all_to_all")


def split_loss(params, given, ways=2):
    """Rows are split two ways, and hidden layers `ways`; nothing is if that is 1."""
    wide = narrow = jnp.matmul
    if ways > 1:
        wide, narrow = (spmdctx.shard(jnp.matmul, in_strategy=own) for own in (((2, 1), (1, ways)), ((2, ways), (ways, 1))))
    x, y = given
    for own in params["layers"]:
        x = x + narrow(jnp.tanh(wide(x, own["up"])), own["down"]) + own["bias"]
    return jnp.mean((x @ params["head"] - y) ** 2)


def split_arguments(dtype=jnp.float64):
    keys = iter(jax.random.split(jax.random.key(0), 7))

    def weight(*shape):
        return jax.random.normal(next(keys), shape, dtype) / shape[0] ** 0.5

    layers = [{"up": weight(16, 32), "down": weight(32, 16), "bias": jnp.zeros(16, dtype)} for _ in range(2)]
    params = {"layers": layers, "head": weight(16, 16)}
    return params, TX.init(params), (weight(16, 16), weight(16, 16))


def arguments(dtype=jnp.float64, **model):
    params = jax.tree.map(lambda own: own.astype(dtype), decoder(jax.random.key(0), 2, **model))
    return params, TX.init(params), batch(jax.random.key(1), 16)


def program(loss, **options):
    def step(params, state, given):
        cell = spmdctx.PipelineCell(lambda params, given: loss(params, given, **options), micro_size=4)
        value, gradients = spmdctx.value_and_grad(cell)(params, given)
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def parallel(step, schedule="1f1b", **options):
    config = {"parallel_mode": "semi_auto_parallel", "pipeline_stages": 2, "pipeline_config": SCHEDULES[schedule]}
    return spmdctx.parallel(step, **{**config, **options})


def reductions_of(plan):
    return {name: own for stage in plan.stages for name, own in stage.after.items() if name.startswith("reduce")}


def in_turns(plan):
    """The bytes that backward passes of one micro-batch reduce of gradients, all of which are matrices here, over slices of the batch."""
    tasks = {name: own for stage in plan.stages for name, own in stage.tasks.items() if not name.startswith("forward")}
    return [row for own in tasks.values() for row in own.collectives if row.kind in REDUCED and "data" in row.axes]


def assert_equal(run, step, given):
    """Compares two steps with those of one device."""
    params, state, given = given
    mine, theirs, one = (params, state), (params, state), jax.jit(step)
    for _ in range(2):
        *mine, value = run(*mine, given)
        *theirs, expected = one(*theirs, given)
    np.testing.assert_allclose(value, expected, rtol=1e-9)
    for own, other in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-9)


CASES = [("interleaved", {"stacked": True}, {}), ("zero_bubble_v", {"tied": True}, {"remat": True})]


@pytest.mark.parametrize(("schedule", "model", "options"), CASES, ids=[f"{own[0]}-{number}" for number, own in enumerate(CASES)])
@pytest.mark.usefixtures("quick_compiler")
def test_numbers_are_those_of_one_device(schedule, model, options):
    with jax.enable_x64(True):
        step, given = program(loss, **options), arguments(**model)
        run = parallel(step, schedule)
        plan = run.plan(*given)
        assert reductions_of(plan)
        assert not in_turns(plan)
        assert_equal(run, step, given)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.usefixtures("quick_compiler")
def test_weights_that_are_split_give_the_numbers_of_one_device(schedule):
    with jax.enable_x64(True):
        step, given = program(split_loss), split_arguments()
        run = parallel(step, schedule, dataset_strategy=((2, 1), (2, 1)))
        names = reductions_of(run.plan(*given))
        assert len(names) >= 2
        assert_equal(run, program(split_loss, ways=1), given)
        report = run.audit(*given)
    assert report.ok
    assert {one.name: one.runs for one in report.programs if one.name in names} == dict.fromkeys(names, 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_that_are_split_wait_over_slices_of_the_batch_alone(schedule):
    given = jax.eval_shape(lambda: split_arguments(jnp.float32))
    run = parallel(program(split_loss, ways=4), schedule, dataset_strategy=((2, 1), (2, 1)), device_num=16, topology="tpu-v5e")
    plan = run.plan(*given)
    assert plan.mesh == {"data": 2, "model": 4}
    assert not in_turns(plan)
    rows = [row for own in reductions_of(plan).values() for row in own.collectives]
    weights = [row for row in rows if row.payload_bytes > 4 * 16]
    assert {(row.kind, row.repeats) for row in rows} == {("all_reduce", 1)}
    assert sorted(row.payload_bytes for row in weights) == [16 * 8 * 4] * 4 + [16 * 16 * 4]


@pytest.mark.parametrize("topology", ["tpu-v5e", "h100"])
def test_a_search_lets_gradients_wait_where_that_is_faster(topology):
    def residual_loss(params, given):
        x, y = given
        for up, down in params:
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean((x - y) ** 2)

    params = [tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2048, 8192), (8192, 2048)))] * 2
    given = params, jax.eval_shape(TX.init, params), (jax.ShapeDtypeStruct((65536, 2048), jnp.float32),) * 2
    run = parallel(program(residual_loss), parallel_mode="auto_parallel", device_num=8, topology=topology)
    plan, pipeline = run.plan(*given), run._entry_of(given, {}).pipeline
    assert reductions_of(plan)
    assert not in_turns(plan)
    assert plan.step_s == pytest.approx(pipeline.total_s)
    assert plan.step_s > pipeline.simulation.makespan_s + pipeline.reduced_s > pipeline.simulation.makespan_s
    assert any("reduced once per step" in note for note in plan.notes)


class Peaks:
    """Plans that take some bytes and seconds, with sums that wait or without; those that fit take `fitted` seconds, or there are none."""

    def __init__(self, peaks, fitted=(None, None)):
        self.peaks, self.fitted, self.planned, self.fits = peaks, fitted, [], []

    def made(self, may_wait, peak, seconds):
        held, reductions = (30, {0: None}) if may_wait else (0, {})
        found = SimpleNamespace(peak_bytes=peak, held=held, reductions=reductions, notes=[], total_s=seconds)
        return reduced.Chosen(None, None, found)

    def plan(self, may_wait, alike=None):
        assert alike is None or not may_wait
        self.planned.append(may_wait)
        return self.made(may_wait, self.peaks[not may_wait], 1.0 if may_wait else 1.25)

    def fit(self, own):
        may_wait = bool(own.found.reductions)
        self.fits.append(may_wait)
        seconds = self.fitted[not may_wait]
        if seconds is None:
            raise InfeasibleError("sums that wait" if may_wait else "sums in turns")
        return self.made(may_wait, 100, seconds)

    def chosen(self, monkeypatch, *, is_binding):
        monkeypatch.setattr(reduced, "memory_of", lambda found: [found])
        monkeypatch.setattr(reduced, "held_bytes", lambda found: [found.held])
        return reduced.reduced_once(self.plan(True), self.plan, self.fit, 100, is_binding=is_binding).found


@pytest.mark.parametrize(
    ("peaks", "is_binding", "waits", "plans"),
    [
        ((90, 70), False, True, 1),
        ((110, 80), False, False, 3),
        ((110, 80), True, False, 2),
        ((140, 120), False, True, 1),
        ((110, 115), False, True, 2),
    ],
)
def test_sums_that_do_not_fit_do_not_wait(monkeypatch, peaks, is_binding, waits, plans):
    own = Peaks(peaks)
    found = own.chosen(monkeypatch, is_binding=is_binding)
    assert (bool(found.reductions), len(own.planned)) == (waits, plans)
    assert found.notes == ([] if waits else [reduced.IN_TURNS])


@pytest.mark.parametrize("is_binding", [False, True])
def test_sums_that_wait_are_made_to_fit_before_others_are_planned(monkeypatch, is_binding):
    own = Peaks((110, 80), fitted=(1.05, None))
    found = own.chosen(monkeypatch, is_binding=is_binding)
    assert (own.planned, own.fits) == ([True], [True])
    assert (bool(found.reductions), found.total_s, found.peak_bytes) == (True, 1.05, 100)


@pytest.mark.parametrize(("fitted_s", "waits"), [(1.2, True), (1.3, False)])
def test_sums_that_fit_at_a_high_price_wait_if_that_is_faster(monkeypatch, fitted_s, waits):
    own = Peaks((110, 80), fitted=(fitted_s, None))
    found = own.chosen(monkeypatch, is_binding=False)
    assert (bool(found.reductions), found.total_s) == (waits, fitted_s if waits else 1.25)
    assert own.planned == [True, False, False]
    assert found.notes == ([] if waits else [reduced.IN_LESS_TIME])


@pytest.mark.parametrize(("peaks", "cause"), [((140, 120), "in turns"), ((110, 115), "that wait")])
def test_a_budget_that_nothing_meets_is_an_error(monkeypatch, peaks, cause):
    with pytest.raises(InfeasibleError, match=cause):
        Peaks(peaks).chosen(monkeypatch, is_binding=True)


def test_sums_in_turns_are_made_to_fit_where_others_cannot(monkeypatch):
    own = Peaks((140, 120), fitted=(None, 1.4))
    found = own.chosen(monkeypatch, is_binding=True)
    assert (bool(found.reductions), found.total_s, own.fits) == (False, 1.4, [True, False])


@pytest.mark.filterwarnings("error::spmdctx.ContextWarning")
def test_buckets_by_index_are_said_to_reduce_in_every_micro_batch():
    given, options = jax.eval_shape(lambda: split_arguments(jnp.float32)), {"device_num": 8, "topology": "tpu-v5e"}
    once = parallel(program(split_loss), **options).plan(*given)
    bucketed = parallel(program(split_loss), all_reduce_fusion_config=[1], **options).plan(*given)
    assert (reduced.BY_INDEX in bucketed.notes, reduced.BY_INDEX in once.notes) == (True, False)
    assert not any("no effect" in note for note in bucketed.notes)
    assert not reductions_of(bucketed)
    assert reductions_of(once)


def test_what_no_stage_can_bucket_is_said_once_at_the_users_line():
    given = jax.eval_shape(lambda: split_arguments(jnp.float32))
    run = parallel(program(split_loss), all_reduce_fusion_config=[1], device_num=8, topology="cpu")
    with pytest.warns(spmdctx.ContextWarning, match="the CPU compiler drops what keeps them apart") as caught:
        plan = run.plan(*given)
    assert [one.filename for one in caught] == [__file__]
    assert [note for note in plan.notes if "no effect" in note] == [str(caught[0].message)]


def test_a_saved_plan_is_planned_again_as_it_was(tmp_path):
    path, given = tmp_path / "plan.json", jax.eval_shape(lambda: split_arguments(jnp.float32))
    options = {"device_num": 8, "topology": "tpu-v5e"}
    plan = parallel(program(split_loss), strategy_ckpt_save_file=str(path), **options).plan(*given)
    again = parallel(program(split_loss), strategy_ckpt_load_file=str(path), **options).plan(*given)
    assert reductions_of(plan)
    assert again.to_json() == plan.to_json()


def test_products_are_written_as_accumulators_have_them():
    def product(x, y):
        return jax.lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,))), precision=("highest", "default"))

    x, y = np.ones((2, 3, 4), np.float32), np.ones((2, 3, 5), np.float32)
    (eqn,) = jax.make_jaxpr(product)(x, y).eqns
    other = turned(eqn)
    assert turned_dims(eqn) == [0, 2, 1]
    made = eqn.primitive.bind(x, y, **eqn.params)
    np.testing.assert_array_equal(other.primitive.bind(y, x, **other.params), jnp.transpose(made, turned_dims(eqn)))
