"""Automatic parallelism for JAX: traces a step for one device, plans its shardings, lowers it to `jax.jit`, runs it and audits it."""

from spmdctx import communication, data, ops
from spmdctx.api import (
    MicroBatchInterleaved,
    ParallelStep,
    PipelineCell,
    get_mesh,
    grad,
    parallel,
    pipeline_stage,
    plan,
    server_init,
    server_table,
    set_param_ps,
    value_and_grad,
)
from spmdctx.audit import AuditReport
from spmdctx.checkpoint import (
    CheckpointManager,
    build_searched_strategy,
    load_distributed_checkpoint,
    merge_sliced_parameter,
    rank_list_for_transform,
    save_distributed_checkpoint,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)
from spmdctx.context.layers import (
    auto_parallel_context,
    get_algo_parameters,
    get_auto_parallel_context,
    get_ps_context,
    load_context,
    reset_algo_parameters,
    reset_auto_parallel_context,
    reset_ps_context,
    set_algo_parameters,
    set_auto_parallel_context,
    set_ps_context,
)
from spmdctx.errors import (
    CheckpointError,
    CommunicationError,
    ContextError,
    ContextWarning,
    DonationError,
    InfeasibleError,
    PlanError,
    PlanFormatError,
    PlanMismatchError,
    SpmdctxError,
    StrategyError,
    UnsupportedError,
)
from spmdctx.ir.layout import Layout
from spmdctx.machine.topology import Topology
from spmdctx.plan import Plan
from spmdctx.shard.decorate import shard
from spmdctx.step.report.metrics import Metrics
from spmdctx.step.report.report import StepReport
from spmdctx.step.verify.verify import VerifyReport

__version__ = "0.1.0"

__all__ = [
    "AuditReport",
    "CheckpointError",
    "CheckpointManager",
    "CommunicationError",
    "ContextError",
    "ContextWarning",
    "DonationError",
    "InfeasibleError",
    "Layout",
    "Metrics",
    "MicroBatchInterleaved",
    "ParallelStep",
    "PipelineCell",
    "Plan",
    "PlanError",
    "PlanFormatError",
    "PlanMismatchError",
    "SpmdctxError",
    "StepReport",
    "StrategyError",
    "Topology",
    "UnsupportedError",
    "VerifyReport",
    "auto_parallel_context",
    "build_searched_strategy",
    "communication",
    "data",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_mesh",
    "get_ps_context",
    "grad",
    "load_context",
    "load_distributed_checkpoint",
    "merge_sliced_parameter",
    "ops",
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

# Tracebacks name what users can catch. Classes with sources to be read (`Plan??` in a notebook) keep the module that holds these.
for _name in __all__:
    if isinstance(globals()[_name], type) and issubclass(globals()[_name], (Exception, Warning)):
        globals()[_name].__module__ = "spmdctx"
