"""Says what stacked layers cost: each stage that runs some of them holds their parameters whole."""

from __future__ import annotations

from spmdctx.pipeline.programs.slots import Holds, Slot
from spmdctx.pipeline.stages.sizes import slot_bytes
from spmdctx.pipeline.stages.whole import PlannedPipeline
from spmdctx.wording import bytes_text, counted


def stacked_note(pipeline: PlannedPipeline) -> list[str]:
    """Returns a note on parameters whose layers lie on several stages, with their bytes on one device and those of their sums."""
    leaves = [leaf for leaf in sorted(pipeline.step.loss.differentiated) if len(pipeline.readers(leaf)) > 1 and _is_stacked(pipeline, leaf)]
    if not leaves:
        return []
    sizes = slot_bytes(pipeline.planned[pipeline.readers(leaves[0])[0]], (Holds.LEAF, Holds.SUM))
    held = sum(sizes.get(Slot(holds, leaf), 0) for leaf in leaves for holds in (Holds.LEAF, Holds.SUM))
    paths = pipeline.step.loss.paths
    named = paths[leaves[0]] if len(leaves) == 1 else f"{paths[leaves[0]]} to {paths[leaves[-1]]}"
    count = counted(len(leaves), "parameter")
    return [
        f"{count} ({named}) stack layers of several stages. Each stage holds them and the sums of their gradients "
        f"whole, {bytes_text(held)} per device, and the first one their optimizer state. Layers that are not stacked take less."
    ]


def _is_stacked(pipeline: PlannedPipeline, leaf: int) -> bool:
    """Returns whether each chunk that reads a leaf takes slices of it alone."""
    for number in pipeline.readers(leaf):
        chunk = pipeline.chunks[number]
        body = chunk.program.jaxpr
        var = body.invars[chunk.leaves.index(leaf)]
        readers = [eqn for eqn in body.eqns if any(atom is var for atom in eqn.invars)]
        if not any(eqn.primitive.name == "slice" for eqn in readers):
            return False
    return True
