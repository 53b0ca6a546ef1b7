"""Automatic parallelism for JAX: decorate a single-device training step, run it split over a device mesh."""

from spmdctx import data
from spmdctx.api import ParallelStep, get_mesh, grad, parallel, plan, value_and_grad
from spmdctx.audit import AuditReport
from spmdctx.checkpoint import CheckpointManager
from spmdctx.context import (
    auto_parallel_context,
    get_algo_parameters,
    get_auto_parallel_context,
    load_context,
    reset_algo_parameters,
    reset_auto_parallel_context,
    set_algo_parameters,
    set_auto_parallel_context,
)
from spmdctx.cost.topology import Topology
from spmdctx.errors import (
    CheckpointError,
    ContextError,
    ContextWarning,
    InfeasibleError,
    PlanError,
    PlanFormatError,
    PlanMismatchError,
    SpmdctxError,
    StrategyError,
    UnsupportedError,
)
from spmdctx.layout import Layout
from spmdctx.plan import Plan
from spmdctx.shard import shard
from spmdctx.verify import VerifyReport

__version__ = "0.1.0"

__all__ = [
    "AuditReport",
    "CheckpointError",
    "CheckpointManager",
    "ContextError",
    "ContextWarning",
    "InfeasibleError",
    "Layout",
    "ParallelStep",
    "Plan",
    "PlanError",
    "PlanFormatError",
    "PlanMismatchError",
    "SpmdctxError",
    "StrategyError",
    "Topology",
    "UnsupportedError",
    "VerifyReport",
    "auto_parallel_context",
    "data",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_mesh",
    "grad",
    "load_context",
    "parallel",
    "plan",
    "reset_algo_parameters",
    "reset_auto_parallel_context",
    "set_algo_parameters",
    "set_auto_parallel_context",
    "shard",
    "value_and_grad",
]
