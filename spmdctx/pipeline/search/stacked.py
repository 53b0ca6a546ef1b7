"""Says what stacked layers cost: they lie on one stage, and where they cannot be sliced, each stage that runs some holds them all."""

from __future__ import annotations

from typing import Any

from spmdctx.pipeline.capture.around import is_array
from spmdctx.pipeline.cut.line import variables
from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.stages.sizes import device_bytes, slot_bytes
from spmdctx.pipeline.stages.whole import PlannedPipeline, stages_of
from spmdctx.wording import bytes_text, counted


def stacked_notes(pipeline: PlannedPipeline) -> list[str]:
    """Returns notes on parameters whose layers lie on several stages."""
    return [*_sent(pipeline), *_whole(pipeline)]


def _sent(pipeline: PlannedPipeline) -> list[str]:
    """Returns a note on those of which each stage gets its layers, with all that lies on their stage."""
    invars = [var for var in pipeline.around.jaxpr.jaxpr.invars if is_array(var)]
    own = [var for var in invars if var in pipeline.homes]
    if not own:
        return []
    stages = sorted({stages_of(pipeline, var) for var in own})
    there = [var for var in invars if stages_of(pipeline, var) in stages and var in pipeline.placed]
    held = sum(device_bytes(var.aval, pipeline.placed[var], pipeline.mesh) for var in there)
    count, where = counted(len(own), "parameter"), ", ".join(map(str, stages))
    return [
        f"{count} stack layers of several stages. Between steps they lie whole on stage {where}, as their optimizer state does: "
        f"{bytes_text(held)} per device with all other state there. Each step sends every stage its layers. "
        "Layers that are not stacked lie on their own stages."
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
