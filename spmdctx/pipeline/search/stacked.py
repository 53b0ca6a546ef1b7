"""Says what stacked layers cost where stages do not keep just what they use: what crosses, or lies on one stage, or on all of them."""

from __future__ import annotations

from typing import Any

from spmdctx.pipeline.cut.line import is_array, variables
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.stages.sizes import device_bytes, slot_bytes
from spmdctx.pipeline.stages.transfers import layer_moves
from spmdctx.pipeline.stages.whole import PlannedPipeline, is_spread, stages_of
from spmdctx.wording import bytes_text, counted


def stacked_notes(pipeline: PlannedPipeline) -> list[str]:
    """Returns notes on parameters whose layers lie on several stages."""
    return [*_sent(pipeline), *_together(pipeline), *_whole(pipeline)]


def _sent(pipeline: PlannedPipeline) -> list[str]:
    """Returns a note on those of which stages keep equal shares, and use others."""
    own = [one for one in pipeline.stacks if one.is_spread and not one.is_at_home]
    if not own:
        return []
    count = counted(sum(not one.stack.is_gradient for one in own), "parameter")
    used = ", ".join(f"{part.last - part.first} on stage {rows.stage}" for part, rows in zip(own[0].stack.parts, own[0].used, strict=True))
    sent = bytes_text(sum(size for one in own for route, size in layer_moves(one) if route.source != route.target))
    return [
        f"{count} stack layers of several stages, which use {used}. Between steps each stage keeps an equal share of them, and of "
        f"their optimizer state. Each step sends {sent} of layers and their gradients from stage to stage."
    ]


def _together(pipeline: PlannedPipeline) -> list[str]:
    """Returns a note on those that lie on one stage, with all that lies there."""
    invars = [var for var in pipeline.around.jaxpr.jaxpr.invars if is_array(var) and not is_spread(pipeline, var)]
    own = [one for one in pipeline.stacks if not one.is_spread and not one.stack.is_gradient]
    if not own:
        return []
    stages = sorted({one.kept[0].stage for one in own})
    there = [var for var in invars if stages_of(pipeline, var) in stages and var in pipeline.placed]
    held = sum(device_bytes(var.aval, pipeline.placed[var], pipeline.mesh) for var in there)
    numbers, count = sorted({one.num_layers for one in own}), pipeline.schedule.num_stages
    undivided = [str(number) for number in numbers if number % count]
    reason = f", since {' or '.join(undivided)} layers do not divide by {count} stages" if undivided else ""
    return [
        f"{counted(len(own), 'parameter')} stack layers of several stages. Between steps they lie whole on stage "
        f"{', '.join(map(str, stages))}, as their optimizer state does{reason}: {bytes_text(held)} per device with all other state "
        "there. Each step sends every stage its layers. Layers that are not stacked lie on their own stages."
    ]


def _whole(pipeline: PlannedPipeline) -> list[str]:
    """Returns a note on those that each stage holds whole, with the bytes on one device of them and of the sums of their gradients."""
    differentiated = sorted(pipeline.step.loss.differentiated)
    leaves = [leaf for leaf in differentiated if len(pipeline.readers(leaf)) > 1 and _is_sliced(pipeline, leaf)]
    if not leaves:
        return []
    sizes = slot_bytes(pipeline.planned[pipeline.readers(leaves[0])[0]], (Holds.LEAF, Holds.SUM))
    held = sum(sizes.get(Slot(holds, leaf), 0) for leaf in leaves for holds in (Holds.LEAF, Holds.SUM))
    paths, count = pipeline.step.loss.paths, counted(len(leaves), "parameter")
    named = paths[leaves[0]] if len(leaves) == 1 else f"{paths[leaves[0]]} to {paths[leaves[-1]]}"
    return [
        f"{count} ({named}) stack layers of several stages, and are read as a whole too. Each stage holds them and the sums of their "
        f"gradients whole, {bytes_text(held)} per device."
    ]


def _is_sliced(pipeline: PlannedPipeline, leaf: int) -> bool:
    """Returns whether some chunk takes a slice of a leaf, or of what it makes of it element by element."""
    for number in pipeline.readers(leaf):
        chunk = pipeline.chunks[number]
        body = chunk.program.jaxpr
        shape = body.invars[chunk.leaves.index(leaf)].aval.shape
        made: set[Any] = {body.invars[chunk.leaves.index(leaf)]}
        for eqn in body.eqns:
            if not made.isdisjoint(variables(eqn.invars)):
                if eqn.primitive.name == "slice":
                    return True
                made.update(var for var in eqn.outvars if var.aval.shape == shape)
    return False
