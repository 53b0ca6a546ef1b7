"""Automatic parallelism for JAX: traces a step for one device, plans its shardings, lowers it to `jax.jit`, runs it and audits it.

Names are imported when they are first used: `import spmdctx` and the help of the command line load neither JAX nor the planner.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from spmdctx import communication, data, ops
    from spmdctx.api import parallel, plan
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
    from spmdctx.gradients import MicroBatchInterleaved, PipelineCell, grad, value_and_grad
    from spmdctx.ir.layout import Layout
    from spmdctx.machine.topology import Topology
    from spmdctx.pipeline.capture.stage import pipeline_stage
    from spmdctx.plan import Plan
    from spmdctx.server.initial import server_init, server_table
    from spmdctx.server.marks import set_param_ps
    from spmdctx.shard.auto_parallel import AutoParallel
    from spmdctx.shard.decorate import shard
    from spmdctx.step.report.metrics import Metrics
    from spmdctx.step.report.report import StepReport
    from spmdctx.step.step import ParallelStep
    from spmdctx.step.verify.verify import VerifyReport
    from spmdctx.trace.scope.mesh import get_mesh

__version__ = "0.1.0"

__all__ = [
    "AuditReport",
    "AutoParallel",
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

_HOMES = {
    "spmdctx.api": "parallel plan",
    "spmdctx.audit": "AuditReport",
    "spmdctx.checkpoint": (
        "CheckpointManager build_searched_strategy load_distributed_checkpoint merge_sliced_parameter rank_list_for_transform "
        "save_distributed_checkpoint transform_checkpoint_by_rank transform_checkpoints"
    ),
    "spmdctx.context.layers": (
        "auto_parallel_context get_algo_parameters get_auto_parallel_context get_ps_context load_context reset_algo_parameters "
        "reset_auto_parallel_context reset_ps_context set_algo_parameters set_auto_parallel_context set_ps_context"
    ),
    "spmdctx.gradients": "MicroBatchInterleaved PipelineCell grad value_and_grad",
    "spmdctx.ir.layout": "Layout",
    "spmdctx.machine.topology": "Topology",
    "spmdctx.pipeline.capture.stage": "pipeline_stage",
    "spmdctx.plan": "Plan",
    "spmdctx.server.initial": "server_init server_table",
    "spmdctx.server.marks": "set_param_ps",
    "spmdctx.shard.auto_parallel": "AutoParallel",
    "spmdctx.shard.decorate": "shard",
    "spmdctx.step.report.metrics": "Metrics",
    "spmdctx.step.report.report": "StepReport",
    "spmdctx.step.step": "ParallelStep",
    "spmdctx.step.verify.verify": "VerifyReport",
    "spmdctx.trace.scope.mesh": "get_mesh",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Imports what a public name stands for, or a subpackage, once."""
    home = _HOME_OF.get(name)
    if home is not None:
        found = getattr(import_module(home), name)
    elif not name.startswith("_") and find_spec(f"spmdctx.{name}") is not None:
        found = import_module(f"spmdctx.{name}")
    else:
        raise AttributeError(f"module 'spmdctx' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package, in which the functions `plan` and `shard` keep their names from the subpackages that are called alike."""

    def __setattr__(self, name: str, value: object) -> None:
        # Importing spmdctx.plan.file would set the attribute "plan" to the package.
        if not (name in ("plan", "shard") and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

# Tracebacks name what users can catch.
for _name in __all__:
    if _name in globals():
        globals()[_name].__module__ = "spmdctx"
