"""The public surface: the names that users type, pinned."""

import ast
import importlib
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
import spmdctx.plan.show.page
import spmdctx.shard.call

FUNCTIONS = [
    "auto_parallel_context",
    "build_searched_strategy",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_mesh",
    "get_ps_context",
    "grad",
    "load_context",
    "load_distributed_checkpoint",
    "merge_sliced_parameter",
    "parallel",
    "pipeline_stage",
    "plan",
    "rank_list_for_transform",
    "reset_algo_parameters",
    "reset_auto_parallel_context",
    "reset_ps_context",
    "save_distributed_checkpoint",
    "server_init",
    "server_table",
    "set_algo_parameters",
    "set_auto_parallel_context",
    "set_param_ps",
    "set_ps_context",
    "shard",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "value_and_grad",
]
MODULES = ["communication", "data", "ops"]
CLASSES = [
    "AuditReport",
    "AutoParallel",
    "CheckpointManager",
    "Layout",
    "Metrics",
    "MicroBatchInterleaved",
    "ParallelStep",
    "PipelineCell",
    "Plan",
    "StepReport",
    "Topology",
    "VerifyReport",
]
ERRORS = [
    "CheckpointError",
    "CommunicationError",
    "ContextError",
    "ContextWarning",
    "DonationError",
    "InfeasibleError",
    "PlanError",
    "PlanFormatError",
    "PlanMismatchError",
    "SpmdctxError",
    "StrategyError",
    "UnsupportedError",
]


def test_the_public_names_are_these():
    assert sorted(spmdctx.__all__) == sorted(FUNCTIONS + MODULES + CLASSES + ERRORS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_are_documented(name):
    assert inspect.isfunction(getattr(spmdctx, name))
    assert getattr(spmdctx, name).__doc__


@pytest.mark.parametrize("name", CLASSES + ERRORS)
def test_public_classes_are_documented(name):
    assert inspect.isclass(getattr(spmdctx, name))
    assert getattr(spmdctx, name).__doc__


def test_a_step_has_these_methods():
    methods = {name for kind in spmdctx.ParallelStep.__mro__[:-2] for name in vars(kind) if not name.startswith("_")}
    assert sorted(methods) == [
        "audit",
        "batch_targets",
        "clear_cache",
        "context",
        "eval_shape",
        "in_shardings",
        "infer_predict_layout",
        "init",
        "lower",
        "notes",
        "out_shardings",
        "plan",
        "profile",
        "report",
        "shard_batch",
        "trace",
        "traffic",
        "verify",
        "with_context",
        "with_options",
    ]


def imports_for_type_checkers():
    """Where type checkers find a name, from the block that only they read."""
    tree = ast.parse(Path(spmdctx.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {name.name: node.module for node in block.body for name in node.names}


@pytest.mark.parametrize("name", FUNCTIONS + MODULES + CLASSES)
def test_a_name_is_imported_from_where_type_checkers_find_it(name):
    home = imports_for_type_checkers()[name]
    expected = importlib.import_module(f"spmdctx.{name}") if home == "spmdctx" else getattr(importlib.import_module(home), name)
    assert getattr(spmdctx, name) is expected
    assert name in dir(spmdctx)


def test_subpackages_do_not_hide_the_functions_of_their_names():
    script = """
import spmdctx
import spmdctx.plan.file, spmdctx.shard.call
from spmdctx import plan, shard
from spmdctx.plan import Plan
assert callable(spmdctx.plan) and spmdctx.plan is plan, spmdctx.plan
assert callable(spmdctx.shard) and spmdctx.shard is shard, spmdctx.shard
assert spmdctx.Plan is Plan
assert spmdctx.context.options.BY_NAME["device_num"]
assert not hasattr(spmdctx, "nothing")
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize(
    "words",
    [
        ("-c", "import spmdctx; dir(spmdctx); spmdctx.ContextError; spmdctx.set_auto_parallel_context(device_num=2)"),
        ("-c", "from spmdctx import parallel, plan"),
        ("-c", "import spmdctx.models.presets; spmdctx.models.preset('tiny')"),
        ("-m", "spmdctx", "--help"),
        ("-m", "spmdctx", "plan", "--help"),
        ("-m", "spmdctx", "train", "--help"),
        ("-m", "spmdctx", "k8s", "submit", "--help"),
        ("-m", "spmdctx", "launch", "--help"),
    ],
    ids=lambda words: " ".join(words[1:]),
)
def test_help_and_a_bare_import_load_no_heavy_library(words):
    done = subprocess.run([sys.executable, "-X", "importtime", *words], capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "spmdctx" in loaded
    assert not loaded & {"jax", "jaxlib", "flax", "optax", "orbax", "scipy", "rich", "ray", "kubernetes", "IPython", "numpy"}


def test_a_plan_of_pytrees_loads_no_flax_and_nothing_that_it_does_not_need():
    script = """
import sys
import spmdctx
step = spmdctx.parallel(abs, parallel_mode="auto_parallel", device_num=2)
heavy = [f"spmdctx.{name}" for name in ("search.select", "step.entry", "pipeline", "server", "checkpoint", "plan.plan", "cost")]
assert not [name for name in heavy if name in sys.modules], sys.modules.keys()
step.plan(1.0)
assert "spmdctx.search.select" in sys.modules
unneeded = ["flax", "rich", "yaml", "IPython", "spmdctx.server.roles", "spmdctx.pipeline.search", "spmdctx.checkpoint"]
assert not [name for name in unneeded if name in sys.modules]
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_a_step_that_is_the_first_to_import_flax_may_make_objects():
    script = """
import sys
import jax.numpy as jnp
import spmdctx

def make(x):
    from flax import nnx
    return nnx.Linear(4, 8, rngs=nnx.Rngs(0)), x

assert "flax" not in sys.modules
plan = spmdctx.plan(make, jnp.ones((4, 4)), parallel_mode="auto_parallel", device_num=2)
assert [leaf.path for leaf in plan.outputs] == ["out/state/0", "out/state/1", "out/1"]
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_a_plan_is_made_without_a_step():
    plan = spmdctx.plan(lambda w, x: x @ w, jnp.ones((4, 4)), np.ones((8, 4)), parallel_mode="data_parallel", device_num=4)
    assert plan.mesh == {"data": 4}


def test_the_version_is_that_of_the_package():
    assert spmdctx.__version__.count(".") == 2


@pytest.mark.parametrize("name", ERRORS)
def test_tracebacks_name_errors_as_users_import_them(name):
    error = getattr(spmdctx, name)
    assert error.__module__ == "spmdctx"
    assert pickle.loads(pickle.dumps(error)) is error


def test_a_topology_is_found_where_messages_say():
    assert importlib.import_module("spmdctx.cost").Topology is spmdctx.Topology
