"""The public surface: the names that users type, pinned."""

import importlib
import inspect
import pickle

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
    methods = [name for name in vars(spmdctx.ParallelStep) if not name.startswith("_")]
    assert sorted(methods) == [
        "audit",
        "batch_targets",
        "context",
        "in_shardings",
        "infer_predict_layout",
        "init",
        "lower",
        "notes",
        "out_shardings",
        "plan",
        "report",
        "shard_batch",
        "traffic",
        "verify",
        "with_context",
        "with_options",
    ]


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
