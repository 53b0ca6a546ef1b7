"""Makes the entry of a call on servers, if the step has a loss."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.extend.core as jexc
import numpy as np

from spmdctx.context.state import AutoParallelContext
from spmdctx.errors import UnsupportedError, shown
from spmdctx.gradients.capture import capture_step
from spmdctx.pipeline.cut.inline import inlined
from spmdctx.server.engine.client import JOB, NUM_PARTS, NUM_WORKERS
from spmdctx.server.engine.fleet import Job
from spmdctx.server.local.split import local_notes, with_local
from spmdctx.server.marks import marks_of
from spmdctx.server.program.capture import ServedStep, capture_served, num_losses
from spmdctx.server.program.tables import table_notes, with_tables
from spmdctx.server.results import check_results
from spmdctx.server.roles import role_of, take_role
from spmdctx.step.entry import Entry
from spmdctx.step.served.entry import FetchingEntry, ServedEntry
from spmdctx.trace.capture.arguments import Call, Static
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.capture.target import Target
from spmdctx.trace.scope.environment import Environment

_SERVED_MODES = ("stand_alone", "semi_auto_parallel", "auto_parallel")

_FILES = ("strategy_ckpt_load_file", "strategy_ckpt_save_file")


def entry_of(target: Target, call: Call, static: Static, around: Environment, notes: Sequence[str]) -> Entry:
    """Traces one call of a step, and returns its entry.

    Raises:
        ContextError: options that contradict each other.
        StrategyError: a loss that cannot be split.
        UnsupportedError: a loss that cannot be cut, or a mode or an option that servers do not have.
    """
    settings = around.settings
    context = settings.context
    servers = context.servers
    if (role := role_of(os.environ)) is not None:
        folder = os.path.abspath(servers.folder) if servers.folder else ""
        take_role(role, Job(servers.num_servers, servers.update_mode, servers.max_staleness, servers.save_every, folder))
    if context.parallel_mode not in _SERVED_MODES or context.pipeline_stages > 1:
        got = f"parallel_mode={context.parallel_mode!r}, pipeline_stages={context.pipeline_stages}"
        raise UnsupportedError(
            "Servers have no part in this mode.",
            got=got,
            need=f"parallel_mode among {', '.join(_SERVED_MODES)}, and pipeline_stages=1",
            fix='parallel_mode="semi_auto_parallel", whose workers split their part of the batch over their devices',
        )
    if not num_losses(target, call, static, settings):
        captured = capture_step(target, call, static, settings)
        return FetchingEntry(replace(captured, warnings=(*captured.warnings, *_alone(captured))), around, notes)
    parts = context.grad_accumulation_step if context.is_set("grad_accumulation_step") else _num_parts(os.environ)
    job = json.loads(os.environ.get(JOB, "{}"))
    own = replace(settings, context=context.with_checked({"grad_accumulation_step": 1}).with_servers(replace(servers, **job)))
    step = capture_served(target, call, static, own, parts)
    check_results(step.captured)
    marks = marks_of(step, servers.marked)
    if marks.unmarked and own.context.servers.update_mode == "async":
        _refuse_marks(step, marks.unmarked)
    step = with_local(with_tables(step, barred=marks.unmarked), marks.unmarked)
    warnings = (*step.captured.warnings, *_unheeded(context, job))
    notes = (*notes, *_narrowed(step.captured, call))
    step = replace(step, captured=replace(step.captured, warnings=warnings))
    return ServedEntry(step, replace(around, settings=own), (*notes, *table_notes(step), *local_notes(step, marks.unmarked), *marks.notes))


def _refuse_marks(step: ServedStep, unmarked: Iterable[int]) -> None:
    paths = [step.captured.inputs[number].path for number in sorted(unmarked)]
    raise UnsupportedError(
        "In async workers do not wait for each other, so parameters without a mark that stay with them would become different on each.",
        where=step.loss.where,
        got=f"{len(paths)} without a mark: {', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''}",
        fix='spmdctx.set_param_ps("*"), no mark at all, or update_mode="sync"',
    )


def _narrowed(captured: Captured, call: Call) -> list[str]:
    """Returns what to say of state that NumPy has in a type that JAX is told not to use."""
    read = captured.structure.read(call)
    if read is None:
        return []
    found = []
    carried = {leaf.carried_from for leaf in captured.outputs if leaf.carried_from is not None}
    for index in sorted(carried):
        given, aval = read.leaves[index], captured.in_avals[index]
        if isinstance(given, np.ndarray) and given.dtype != aval.dtype:
            path = captured.inputs[index].path
            found.append(f"{path} is {given.dtype}, and servers hold it as {aval.dtype}: jax_enable_x64 is off.")
    return found


def _num_parts(environ: Mapping[str, str]) -> int:
    """Returns how many parts a step has that says nothing of them."""
    return int(environ.get(NUM_PARTS, environ.get(NUM_WORKERS, "1")))


def _alone(captured: Captured) -> list[str]:
    """Returns what to say of a step that renews state and has nothing that servers could do."""
    body = inlined(captured.jaxpr).jaxpr
    source = {eqn.outvars[0]: eqn.invars[0] for eqn in body.eqns if eqn.primitive.name == "copy"}
    for result, leaf in zip(body.outvars, captured.outputs, strict=True):
        given = result if isinstance(result, jexc.Literal) else source.get(result, result)
        if leaf.carried_from is not None and given is not body.invars[leaf.carried_from]:
            path = captured.inputs[leaf.carried_from].path
            return [f"{captured.name} has no loss of spmdctx.value_and_grad: each worker renews {path} by itself."]
    return []


def _unheeded(context: AutoParallelContext, job: Mapping[str, Any]) -> list[str]:
    """Returns what to say of options that have no effect: those of a job that was launched otherwise, and files of plans."""
    servers, is_planned = context.servers, context.parallel_mode != "stand_alone"
    found = [f"{name} has no effect on a step on servers." for name in _FILES if is_planned and getattr(context, name)]
    for name in sorted(servers.explicit & job.keys()):
        own = os.path.abspath(servers.folder) if name == "folder" else getattr(servers, name)
        if own != job[name]:
            found.append(f"{name}={shown(own)} has no effect in this script: spmdctx launch has started the job with {shown(job[name])}.")
    return found
