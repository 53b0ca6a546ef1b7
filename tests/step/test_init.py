"""init after plans and calls in every form: by position, by name, with static arguments, for methods."""

import jax
import jax.numpy as jnp
import pytest

import spmdctx

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
