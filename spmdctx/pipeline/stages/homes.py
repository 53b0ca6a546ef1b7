"""On which stages the inputs of a step lie, and what each stage computes before the loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.extend.core as jexc

from spmdctx.ir.graph import Role
from spmdctx.pipeline.capture.around import EVERYWHERE, SPREAD, Around
from spmdctx.pipeline.cut.line import needed, variables
from spmdctx.pipeline.stages.whole import PlannedPipeline

Homes = dict[Any, tuple[int, ...]]
"""The stages on which each input lies."""


class Before(NamedTuple):
    """What a stage computes before the loss. Inputs and outputs are variables of the whole step."""

    inputs: list[Any]
    outputs: list[Any]
    program: jexc.ClosedJaxpr


def before_of(pipeline: PlannedPipeline) -> dict[int, Before]:
    """Returns, by stage, what its chunks read and the step computes before the loss.

    The first stage computes what is read after the loss too; all together, under SPREAD, compute what they share by layers.
    """
    around = pipeline.around
    made = {var for eqn in around.before for var in eqn.outvars}
    later = dict.fromkeys(var for atoms in (*(eqn.invars for eqn in around.after), around.jaxpr.jaxpr.outvars) for var in variables(atoms))
    wanted: dict[int, list[Any]] = {stage: [] for stage in (SPREAD, *range(pipeline.schedule.num_stages))}
    stacked = [own for own in pipeline.stacks if not own.stack.is_gradient and own.stack.whole in made]
    for own in stacked:
        wanted[SPREAD if own.is_spread else own.kept[0].stage].append(own.stack.whole)
    by_layers = {var for eqn in needed(around.before, wanted[SPREAD]) for var in eqn.outvars}
    for leaf, var in enumerate(around.loss.invars):
        if not isinstance(var, jexc.Literal) and var in made:
            for stage in map(pipeline.stage_of_chunk, pipeline.readers(leaf)):
                wanted[stage].append(var)
    for var in later:
        if var in made:
            wanted[SPREAD if var in by_layers else 0].append(var)
    return {stage: _program(around, list(dict.fromkeys(outputs))) for stage, outputs in wanted.items() if outputs}


def homes_of(pipeline: PlannedPipeline, *, spans_processes: bool = False) -> Homes:
    """Returns the stages on which each input lies: all have scalars, and those that read a part of the batch have that.

    In several processes all stages have the batch, so that every process has something to give.
    """
    body, all_stages = pipeline.around.jaxpr.jaxpr, tuple(range(pipeline.schedule.num_stages))
    readers: dict[Any, set[int]] = {}
    for leaf, var in enumerate(pipeline.around.loss.invars):
        if not isinstance(var, jexc.Literal):
            readers.setdefault(var, set()).update(map(pipeline.stage_of_chunk, pipeline.readers(leaf)))
    for stage, before in before_of(pipeline).items():
        for var in before.inputs:
            readers.setdefault(var, set()).update(pipeline.stages_with(stage))
    found: Homes = {}
    for var, given in zip(body.invars, pipeline.step.captured.inputs, strict=True):
        stage = pipeline.placement.stage_of.get(var, EVERYWHERE)
        if stage in (EVERYWHERE, SPREAD) or (given.role is Role.BATCH and spans_processes):
            found[var] = all_stages
        elif given.role is Role.BATCH:
            found[var] = tuple(sorted(readers.get(var, set()))) or (stage,)
        else:
            found[var] = (stage,)
    return found


def _program(around: Around, outputs: list[Any]) -> Before:
    """Returns the program of some values."""
    closed, own = around.jaxpr, needed(around.before, outputs)
    body = closed.jaxpr
    wanted = {var for eqn in own for var in variables(eqn.invars)}
    inputs = [var for var in body.invars if var in wanted]
    consts = [(var, value) for var, value in zip(body.constvars, closed.consts, strict=True) if var in wanted]
    jaxpr = body.replace(
        constvars=[var for var, _ in consts],
        invars=inputs,
        outvars=outputs,
        eqns=own,
        effects=frozenset().union(*(eqn.effects for eqn in own)),
        debug_info=body.debug_info._replace(arg_names=None, result_paths=None),
    )
    return Before(inputs, outputs, jexc.ClosedJaxpr(jaxpr, [value for _, value in consts]))
