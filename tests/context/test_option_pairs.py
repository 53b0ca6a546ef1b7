"""Every pair of context options in one step: it runs as the options say, or says by name what it does not do."""

import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdctx
from spmdctx.context.checks import ineffective
from spmdctx.context.layers import current_context
from spmdctx.context.options import OPTIONS
from spmdctx.errors import ContextError, ContextWarning, StrategyError, UnsupportedError
from spmdctx.ir.graph import Role
from spmdctx.pipeline.plan import PipelinePlan

UNSET = "unset"
LOCAL = ("data_parallel", "hybrid_parallel")
PLANNED = ("semi_auto_parallel", "auto_parallel")
FUSION = {"mode": "size", "config": 1}

VALUES = {
    "parallel_mode": ["stand_alone", *LOCAL, *PLANNED],
    "comm_fusion": [
        UNSET,
        {"allreduce": FUSION, "allgather": FUSION, "reducescatter": FUSION},
        {"allreduce": {"mode": "index", "config": [1]}},
        {"openstate": False},
    ],
    "search_mode": [UNSET, "recursive_programming", "dynamic_programming", "sharding_propagation"],
    "dataset_strategy": [UNSET, "data_parallel", "full_batch", ((2, 1), (2, 1))],
    "parallel_optimizer_config": [
        UNSET,
        {"parallel_optimizer_threshold": 0},
        {"parallel_optimizer_threshold": 0, "optimizer_level": "level3", "gradient_accumulation_shard": False},
        {"parallel_optimizer_threshold": 0, "optimizer_level": "level2"},
    ],
    "device_num": [UNSET, 4, 1],
    "enable_parallel_optimizer": [True, UNSET],
    "optimizer_weight_shard_size": [UNSET, 2],
    "grad_accumulation_step": [UNSET, 2],
    "gradients_mean": [UNSET, True],
    "gradient_fp32_sync": [UNSET, False],
    "loss_repeated_mean": [UNSET, False],
    "parameter_broadcast": [UNSET, True],
    "enable_alltoall": [UNSET, True],
    "all_reduce_fusion_config": [UNSET, [1]],
    "full_batch": [UNSET, True],
    "sharding_propagation": [UNSET, True],
    "auto_pipeline": [UNSET, True],
    "pipeline_stages": [UNSET, 2],
    "pipeline_config": [UNSET, {"pipeline_scheduler": "gpipe"}],
    "pipeline_segments": [UNSET, 1],
    "mem_coeff": [UNSET, 0.5],
    "global_rank": [UNSET, 0],
    "strategy_ckpt_save_file": [UNSET, "saved.json"],
    "strategy_ckpt_load_file": [UNSET, "loaded.json"],
}
"""Of each option the values that are told apart; files are made in a folder of the test's own."""

CONTRADICTIONS = [
    *({"full_batch": True, "parallel_mode": mode} for mode in LOCAL),
    *({"dataset_strategy": "full_batch", "parallel_mode": mode} for mode in LOCAL),
    {"full_batch": True, "dataset_strategy": ((2, 1), (2, 1))},
    {"pipeline_stages": 2, "device_num": 1},
    {"optimizer_weight_shard_size": 2, "device_num": 1},
    {"dataset_strategy": ((2, 1), (2, 1)), "device_num": 1},
]
"""Pairs that are refused."""

REFUSED = {
    "group_ckpt_save_file": "groups.json",
    "optimizer_weight_shard_aggregated_save": True,
    "communi_parallel_mode": "no_group_parallel",
}
SAME = {"auto_parallel_search_mode", "strategy_ckpt_config"}
"""Other names of options that are in the table."""

BATCH, WIDTH, HIDDEN, RATE = 16, 16, 32, 0.1


def pairs_of(row):
    return {frozenset(pair) for pair in itertools.combinations([(name, VALUES[name].index(value)) for name, value in row.items()], 2)}


def is_legal(row):
    return not any(all(name in row and row[name] == value for name, value in pair.items()) for pair in CONTRADICTIONS)


def covering_rows():
    """Rows that hold every legal pair of values, found greedily: each starts from a pair that is missing."""
    wanted = {}
    for first, second in itertools.combinations(VALUES, 2):
        for row in itertools.product(VALUES[first], VALUES[second]):
            pair = {first: row[0], second: row[1]}
            if is_legal(pair):
                wanted.update(dict.fromkeys(pairs_of(pair)))
    rows = []
    while wanted:
        row = {name: VALUES[name][index] for name, index in sorted(next(iter(wanted)), key=lambda one: list(VALUES).index(one[0]))}
        for name, values in VALUES.items():
            if name not in row:
                legal = [value for value in values if is_legal({**row, name: value})]
                row[name] = max(legal, key=lambda value: len(pairs_of({**row, name: value}) & wanted.keys()))
        for pair in pairs_of(row):
            wanted.pop(pair, None)
        rows.append({name: row[name] for name in VALUES})
    return rows


ROWS = covering_rows()


def options_of(row, folder):
    options = {name: value for name, value in row.items() if value is not UNSET}
    for name in ("strategy_ckpt_save_file", "strategy_ckpt_load_file"):
        if name in options:
            options[name] = str(folder / options[name])
    return options


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


TX = optax.sgd(RATE, momentum=0.9)


def step(params, state, x, y):
    value, gradients = spmdctx.value_and_grad(spmdctx.PipelineCell(loss, micro_size=2))(params, x, y)
    updates, state = TX.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


def arguments():
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(WIDTH, HIDDEN)), "down": rng.normal(size=(HIDDEN, WIDTH))}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    return params, TX.init(params), *(jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32) for _ in range(2))


def stages_of(row):
    return row["pipeline_stages"] if row["parallel_mode"] in PLANNED and row["pipeline_stages"] != UNSET else 1


def check_numbers(results, row, num_devices):
    """Gradients are summed over the replicas in the modes where the loss is local, and averaged everywhere else."""
    params, _, x, y = arguments()
    value, gradients = jax.jit(jax.value_and_grad(loss))(params, x, y)
    is_sum = row["parallel_mode"] in LOCAL and row["gradients_mean"] is UNSET
    times = num_devices if is_sum else 1
    np.testing.assert_allclose(results[2], value, rtol=1e-5)
    for name, gradient in gradients.items():
        moved = (params[name] - results[0][name]) / RATE
        np.testing.assert_allclose(moved, gradient * times, rtol=1e-3, atol=1e-4 * times)


def check_plan(plan, row, num_devices):
    """What the options ask for, as far as a plan shows it."""
    num_devices //= stages_of(row)
    assert math.prod(plan.mesh.values()) == num_devices
    mode = row["parallel_mode"]
    if mode == "auto_parallel" and num_devices > 1:
        spread = row["sharding_propagation"] is True or row["search_mode"] == "sharding_propagation"
        assert plan.search_mode == (
            "sharding_propagation" if spread else row["search_mode"] if row["search_mode"] != UNSET else plan.search_mode
        )
    batch = [leaf.sharding[0] for leaf in plan.inputs if leaf.role is Role.BATCH]
    slices = [math.prod(plan.mesh[name] for name in axes) for axes in batch]
    if mode in PLANNED and num_devices > 1:
        if row["full_batch"] is True or row["dataset_strategy"] == "full_batch":
            assert slices == [1, 1]
        elif isinstance(row["dataset_strategy"], tuple):
            assert slices == [2, 2]
        elif mode == "semi_auto_parallel" or row["dataset_strategy"] == "data_parallel":
            assert slices == [num_devices] * 2
    elif mode in LOCAL:
        assert slices == [num_devices] * 2
    if row["enable_parallel_optimizer"] is True and mode in ("data_parallel", *PLANNED) and num_devices > 1:
        state = [leaf for leaf in plan.inputs if leaf.role is Role.OPTIMIZER]
        named = any("parallel_optimizer_threshold" in note for note in plan.notes)
        assert named if row["parallel_optimizer_config"] is UNSET else all(any(leaf.sharding) for leaf in state)


def check_said(plan, context, caught):
    """Options without effect are warned of and noted, each by its name."""
    said = [str(one.message) for one in caught if issubclass(one.category, ContextWarning)]
    for name, sentence in ineffective(context):
        assert name in sentence
        assert sentence in said
        assert sentence in plan.notes


def check_refused_in_a_pipeline(options):
    """Takes out the files that a choice of stages has no use for, and refuses by name."""
    for name in ("strategy_ckpt_load_file", "strategy_ckpt_save_file"):
        if name in options:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ContextWarning)
                with pytest.raises(UnsupportedError, match=name):
                    spmdctx.parallel(step, **options).plan(*arguments())
            del options[name]


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_row_of_options_runs_as_it_says(number, tmp_path):
    row = ROWS[number]
    options = options_of(row, tmp_path)
    num_devices = 1 if row["parallel_mode"] == "stand_alone" else row["device_num"] if row["device_num"] != UNSET else 8
    is_chosen = stages_of(row) > 1 and row["auto_pipeline"] is True and row["parallel_mode"] == "auto_parallel"
    if is_chosen:
        check_refused_in_a_pipeline(options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load = options.pop("strategy_ckpt_load_file", None)
        if load is not None:
            spmdctx.parallel(step, **options).plan(*arguments()).save(load)
            caught.clear()
            options["strategy_ckpt_load_file"] = load
        parallel = spmdctx.parallel(step, **options)
        plan = parallel.plan(*arguments())
        results = parallel(*arguments())
        report = parallel.audit(*arguments())
    check_said(plan, current_context().replace(**options), caught)
    check_plan(plan, row, num_devices)
    check_numbers(results, row, num_devices)
    assert report.ok, str(report)
    found = report.rows if stages_of(row) == 1 else [own.collective for own in report.rows]
    if row["enable_alltoall"] is UNSET:
        assert not [own for own in found if own.kind == "all_to_all"]
    if "strategy_ckpt_save_file" in options and row["parallel_mode"] in PLANNED:
        saved = PipelinePlan if stages_of(row) > 1 else spmdctx.Plan
        assert saved.load(options["strategy_ckpt_save_file"]) == plan


@pytest.mark.parametrize("pair", CONTRADICTIONS, ids=lambda pair: "-".join(pair))
def test_a_contradiction_is_refused_by_name(pair):
    options = {"parallel_mode": "semi_auto_parallel", **pair}
    options |= {"enable_parallel_optimizer": True} if "optimizer_weight_shard_size" in pair else {}
    with pytest.raises((ContextError, StrategyError)) as caught:
        spmdctx.parallel(step, **options).plan(*arguments())
    assert any(name in str(caught.value) for name in pair)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(name):
    with pytest.raises(UnsupportedError, match=name):
        spmdctx.parallel(step, **{name: REFUSED[name]})


def test_the_rows_hold_every_pair_of_every_option():
    assert {option.name for option in OPTIONS} == {*VALUES, *REFUSED, *SAME}
    held = set().union(*(pairs_of(row) for row in ROWS))
    for first, second in itertools.combinations(VALUES, 2):
        for one, other in itertools.product(VALUES[first], VALUES[second]):
            pair = {first: one, second: other}
            assert pairs_of(pair) <= held or not is_legal(pair)
