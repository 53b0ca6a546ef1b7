"""Steps that are traced by themselves: no context, no plan."""

from spmdctx.trace.capture.arguments import split_static
from spmdctx.trace.capture.capture import capture_call
from spmdctx.trace.capture.target import target_of


def capture(fn, args, kwargs=None, **named):
    """Traces a step on example arguments; `named` says which are batch, static or donated."""
    target = target_of(fn, **named)
    return capture_call(target, *split_static(target.static, (*target.leading, *args), dict(kwargs or {})))
