"""Makes the entry of a call: on servers, on stages, or on all devices at once. What a step does not need is not imported."""

from __future__ import annotations

import os
from collections.abc import Sequence

from spmdctx.server import WORKER
from spmdctx.step.entry import Entry
from spmdctx.trace.capture.arguments import Call, Static
from spmdctx.trace.capture.target import Target
from spmdctx.trace.scope.environment import Environment


def entry_of(target: Target, call: Call, static: Static, around: Environment, notes: Sequence[str]) -> Entry:
    """Traces one call of a step, and returns its entry.

    Raises:
        ContextError: options that contradict each other.
        StrategyError: a loss that cannot be split.
        UnsupportedError: a loss that cannot be cut, or a mode or an option that servers or stages do not have.
    """
    servers = around.settings.context.servers
    is_launched = WORKER in os.environ and "enable_ps" not in servers.explicit
    if servers.enable_ps or is_launched:
        from spmdctx.step.served.make import entry_of as made
    else:
        from spmdctx.step.pipelined.make import entry_of as made
    return made(target, call, static, around, notes)
