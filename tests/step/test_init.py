"""init after plans and calls in every form: by position, by name, with static arguments, for methods."""

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.errors import PlanError

SHAPES = {"x": jax.ShapeDtypeStruct((8, 16), jnp.float32), "y": jax.ShapeDtypeStruct((8, 1), jnp.float32)}


def make():
    return {"w": jnp.zeros((16, 16))}


def gradients(state, batch):
    return jax.grad(lambda state: jnp.mean((batch["x"] @ state["w"] - batch["y"]) ** 2))(state)


def moved(state, batch, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, state, gradients(state, batch))


def step(state, batch):
    return moved(state, batch)


def by_name_only(*, state, batch):
    return moved(state, batch)


def with_several(params, average, batch, scale=1.0):
    return moved(params, batch, scale), jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, average, params)


def with_static(state, kind, batch):
    return moved(state, batch, 0.1 if kind == "slow" else 1.0)


class Trainer:
    @spmdctx.parallel(parallel_mode="auto_parallel")
    def train(self, state, batch):
        return moved(state, batch)


def parallel(fn, **options):
    return spmdctx.parallel(fn, parallel_mode="auto_parallel", **options)


STATE = jax.eval_shape(make)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((STATE, SHAPES), {}),
        ((), {"state": STATE, "batch": SHAPES}),
        ((), {"batch": SHAPES, "state": STATE}),
        ((STATE,), {"batch": SHAPES}),
    ],
    ids=["by position", "by name", "by name in another order", "mixed"],
)
def test_init_takes_the_batch_of_an_earlier_plan_in_its_form(args, kwargs):
    for batch in ({}, {"batch": SHAPES}):
        planned = parallel(step)
        plan = planned.plan(*args, **kwargs)
        state = planned.init(make, **batch)
        assert state["w"].sharding.num_devices == 8
        assert planned.plan(*args, **kwargs) is plan
    assert len(planned._entries) == 1


def test_init_after_a_plan_by_name_plans_nothing_anew():
    planned = parallel(step)
    planned.plan(batch=SHAPES, state=STATE)
    entry = planned._last.entry
    planned.init(make)
    assert planned._last.entry is entry


def test_steps_whose_arguments_have_only_names_are_initialised():
    planned = parallel(by_name_only)
    state = planned.init(make, batch=SHAPES)
    assert planned(state=state, batch={"x": jnp.ones((8, 16)), "y": jnp.ones((8, 1))})["w"].shape == (16, 16)
    again = parallel(by_name_only)
    again.plan(batch=SHAPES, state=STATE)
    assert again.init(make)["w"].sharding.num_devices == 8


@pytest.mark.parametrize(
    "given",
    [
        {"params": STATE, "average": STATE, "batch": SHAPES},
        {"batch": SHAPES, "scale": 0.5, "average": STATE, "params": STATE},
    ],
    ids=["without a default", "with it, in another order"],
)
def test_several_states_are_initialised_after_a_plan_by_name(given):
    planned = parallel(with_several)
    planned.plan(**given)
    params, average = planned.init(lambda: (make(), make()))
    assert params["w"].sharding.num_devices == average["w"].sharding.num_devices == 8


def test_init_after_a_plan_with_static_arguments_keeps_them():
    planned = parallel(with_static, static_argnums=1)
    planned.plan(STATE, "slow", SHAPES)
    assert planned._last.static.positional == ((1, "slow"),)
    assert planned.init(make)["w"].sharding.num_devices == 8
    assert planned._last.static.positional == ((1, "slow"),)


@pytest.mark.parametrize("static", [{"static_argnums": 0}, {"static_argnames": "kind"}])
def test_init_after_a_plan_keeps_static_arguments_before_the_state(static):
    own = spmdctx.parallel(lambda kind, state, batch: with_static(state, kind, batch), parallel_mode="auto_parallel", **static)
    own.plan("slow", jax.eval_shape(make), SHAPES)
    assert own.init(make)["w"].sharding == own.in_shardings("slow", make(), SHAPES)[0]["w"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_init_from_a_saved_plan_skips_static_arguments(tmp_path, place):
    def with_kind(*values):
        batch = values[2 if place < 2 else 1]
        return with_static(values[1 if place < 1 else 0], values[place], batch)

    given = [jax.eval_shape(make), SHAPES]
    given.insert(place, "slow")
    options = {"parallel_mode": "auto_parallel", "static_argnums": place}
    planned = spmdctx.parallel(with_kind, **options)
    planned.plan(*given).save(tmp_path / "plan.json")
    again = spmdctx.parallel(with_kind, **options, strategy_ckpt_load_file=str(tmp_path / "plan.json"))
    assert again.init(make)["w"].sharding == planned.in_shardings(*given)[0]["w"]


def test_methods_are_initialised_after_a_plan_by_name():
    trainer = Trainer()
    trainer.train.plan(state=STATE, batch=SHAPES)
    assert trainer.train.init(make)["w"].sharding.num_devices == 8


@pytest.mark.parametrize("option", ["strategy_ckpt_load_file", "topology"])
def test_a_file_that_is_not_there_is_named_with_its_option(tmp_path, option):
    where = str(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match=rf"{option}(.|\n)*none\.json(.|\n)*No such file"):
        parallel(step, **{option: where}).plan(STATE, SHAPES)


def test_a_missing_strategy_is_named_by_init_too(tmp_path):
    with pytest.raises(FileNotFoundError, match="strategy_ckpt_load_file"):
        parallel(step, strategy_ckpt_load_file=str(tmp_path / "none.json")).init(make)


def test_a_plan_that_cannot_be_written_is_named_with_its_option(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"strategy_ckpt_save_file(.|\n)*file.plan\.json"):
        parallel(step, strategy_ckpt_save_file=str(tmp_path / "file" / "plan.json")).plan(STATE, SHAPES)


def test_plans_are_saved_into_folders_that_are_not_there(tmp_path):
    plan = parallel(step).plan(STATE, SHAPES)
    plan.save(tmp_path / "a" / "b" / "plan.json")
    plan.save_html(tmp_path / "c" / "plan.html")
    assert spmdctx.Plan.load(tmp_path / "a" / "b" / "plan.json") == plan
    assert (tmp_path / "c" / "plan.html").exists()


def with_training(state, batch, training=False):
    return moved(state, batch, 1.0 if training else 0.1)


def with_early_static(state, kind="slow", batch=None):
    return with_static(state, kind, batch)


def with_static_first(kind, state, batch):
    return with_static(state, kind, batch)


def with_static_by_name(state, batch, *, kind):
    return with_static(state, kind, batch)


def of_pairs(state, batch, key=None):
    x, y = batch
    return moved(state, {"x": x, "y": y})


def of_two(state, x, y=None):
    return moved(state, {"x": x, "y": y})


PAIR = SHAPES["x"], SHAPES["y"]


@pytest.mark.parametrize(
    ("fn", "static", "batch"),
    [
        (with_static, "kind", ("slow", SHAPES)),
        (with_static_first, "kind", ("slow", SHAPES)),
        (with_static_by_name, "kind", (SHAPES, "slow")),
        (with_early_static, "kind", SHAPES),
        (with_early_static, "kind", ("fast", SHAPES)),
        (with_training, "training", SHAPES),
        (with_training, "training", (SHAPES, True)),
    ],
)
def test_init_takes_a_batch_with_static_arguments_or_their_defaults(fn, static, batch):
    assert parallel(fn, static_argnames=static).init(make, batch=batch)["w"].sharding.num_devices == 8


@pytest.mark.parametrize("batch", [SHAPES, (SHAPES,)])
@pytest.mark.parametrize("fn", [with_static, with_static_first, with_static_by_name])
def test_init_with_a_batch_takes_static_arguments_of_an_earlier_plan(fn, batch):
    planned = parallel(fn, static_argnames="kind")
    given = {"state": STATE, "batch": SHAPES, "kind": "slow"}
    plan = planned.plan(**given)
    assert planned.init(make, batch=batch)["w"].sharding.num_devices == 8
    assert planned.plan(**given) is plan


def test_init_with_a_batch_takes_static_arguments_among_any_number(tmp_path):
    planned = parallel(lambda *values: with_static(values[0], values[1], values[2]), static_argnums=1)
    planned.plan(STATE, "slow", SHAPES)
    assert planned.init(make, batch=SHAPES)["w"].sharding.num_devices == 8


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("fn", [with_static, with_static_first, with_static_by_name])
def test_init_names_a_static_argument_without_a_value(tmp_path, fn, is_saved):
    options = {"static_argnames": "kind"}
    if is_saved:
        parallel(fn, **options).plan(state=STATE, batch=SHAPES, kind="slow").save(tmp_path / "plan.json")
        options["strategy_ckpt_load_file"] = str(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"static argument 'kind' must be known(.|\n)*or plan a call first"):
        parallel(fn, **options).init(make, batch=SHAPES)


@pytest.mark.parametrize("fn", [of_pairs, of_two])
def test_init_passes_a_tuple_on_as_an_earlier_plan_did(fn):
    planned = parallel(fn)
    plan = planned.plan(STATE, PAIR) if fn is of_pairs else planned.plan(STATE, *PAIR)
    assert planned.init(make, batch=PAIR)["w"].sharding.num_devices == 8
    assert len(planned._entries) == 1
    assert (planned.plan(STATE, PAIR) if fn is of_pairs else planned.plan(STATE, *PAIR)) is plan


def test_init_counts_the_values_that_do_not_make_up_the_arguments():
    with pytest.raises(PlanError, match=r"do not make up the arguments of with_several(.|\n)*2 values for params, average, batch, scale"):
        parallel(with_several).init(make, batch=SHAPES)
