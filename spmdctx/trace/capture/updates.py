"""Tells leaves that only the update of other leaves reads from those that the differentiated function reads, by data flow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jexc

from spmdctx.rules.control_flow import bodies_of, opened
from spmdctx.trace.build.jaxprs.liveness import Liveness
from spmdctx.trace.build.origins import DIFFERENTIATED


class Updates:
    """Answers what a step reads its inputs for. A step that differentiates nothing has no update: its forward pass is unknown."""

    def __init__(self, jaxpr: jexc.Jaxpr, carried: Mapping[int, int]) -> None:
        """Looks at a flat program; `carried` maps each carried input to the output that is its next value."""
        self._jaxpr, self._carried = jaxpr, carried
        known = _differentiates(jaxpr)
        self._forward = _FORWARD.alive(jaxpr, [False] * len(jaxpr.outvars))[1] if known else [True] * len(jaxpr.invars)

    def unread(self, leaves: Iterable[int]) -> set[int]:
        """Returns those of some inputs that no differentiated function reads."""
        return {leaf for leaf in leaves if not self._forward[leaf]}

    def of_others(self, leaves: Iterable[int]) -> set[int]:
        """Returns those of some inputs that no differentiated function reads, and that change the next value of another input."""
        waiting = self.unread(leaves)
        changed = {leaf for leaf in self._carried if self._forward[leaf]}
        found: set[int] = set()
        while waiting and changed:
            targets = {self._carried[leaf] for leaf in changed}
            _, reached = OF_RESULTS.alive(self._jaxpr, [index in targets for index in range(len(self._jaxpr.outvars))])
            # State of state: what changes it changes a parameter one step later.
            changed = {leaf for leaf in waiting if reached[leaf]}
            found |= changed
            waiting -= changed
            changed &= self._carried.keys()
        return found


def _differentiates(jaxpr: Any) -> bool:
    return any(map(holds_differentiated, opened(jaxpr).eqns))


def holds_differentiated(eqn: Any) -> bool:
    """Returns whether an equation, or one inside of it, belongs to a differentiated function."""
    return _is_differentiated(eqn) or any(map(_differentiates, bodies_of(eqn.params)))


def _is_differentiated(eqn: Any) -> bool:
    return DIFFERENTIATED in str(eqn.source_info.name_stack)


def _reads_all(eqn: Any, _needed: Sequence[bool]) -> Sequence[bool] | None:
    return [True] * len(eqn.invars) if _is_differentiated(eqn) else None


_FORWARD = Liveness(holds_differentiated, _reads_all)
"""Finds what differentiated equations read, wherever they stand."""

OF_RESULTS = Liveness(lambda _eqn: False, lambda _eqn, _needed: None)
"""Finds what results depend on."""
