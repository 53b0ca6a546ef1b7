"""Losses of `spmdctx.value_and_grad` that each device computes by itself: which values of the user's own trace are their results."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import jax
import jax.extend.core as jexc

from spmdctx.errors import UnsupportedError
from spmdctx.gradients.loss import Loss, LossCall
from spmdctx.gradients.marker import mark
from spmdctx.gradients.scope import carried_by, plainly
from spmdctx.ir.primitives import LOSS
from spmdctx.rules.control_flow import MANUAL
from spmdctx.step.export.form import Form
from spmdctx.step.export.runtime import Numbered, digest
from spmdctx.trace.build.shard_maps import LOSS_SCOPE


def marked_trace(form: Form, own: Any, name: str) -> Any:
    """Returns the user's own trace, in which the results of losses are marked.

    Args:
        form: the step.
        own: its trace without marks, in which JAX differentiates the loss of the whole batch.
        name: the step's.

    Raises:
        UnsupportedError: with marks it is traced otherwise.
    """
    with carried_by(_Marks()):
        marked, _ = form.traced()
    if digest(Numbered(marked.jaxpr)) != digest(Numbered(own.jaxpr)):
        raise UnsupportedError(
            'export("jax") cannot write this loss: JAX alone traces it otherwise than spmdctx.value_and_grad.',
            where=name,
            fix="export a step that uses jax.value_and_grad, whose loss is that of the whole batch",
        )
    return marked


class _Marks:
    """Runs losses as JAX does, and marks their results in the order in which a loss of each device gives them."""

    def __init__(self) -> None:
        self._count = 0

    def run(self, loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, self._count = self._count, self._count + 1
        call = LossCall(loss, args, kwargs, 1)
        traced = plainly(lambda: call.trace([jax.typeof(value) for value in call.values]))
        results = jexc.jaxpr_as_fun(traced.jaxpr)(*call.values)
        return call.finish([mark(result, number, place) for place, result in enumerate(results)])


def results_of_losses(own: Numbered) -> list[list[Any]]:
    """Returns the names of the results of each loss in a body of the marked trace."""
    found: dict[int, dict[int, Any]] = defaultdict(dict)
    for eqn, name in own.renamed:
        if eqn.primitive.name == LOSS:
            found[eqn.params["call"]][eqn.params["leaf"]] = name
    return [[results[place] for place in sorted(results)] for _, results in sorted(found.items())]


def is_loss(eqn: Any) -> bool:
    """Returns whether an equation is a loss that each device computes by itself."""
    return eqn.primitive.name in MANUAL and LOSS_SCOPE in str(eqn.source_info.name_stack)
