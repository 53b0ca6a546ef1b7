"""XLA on TPU v5e and v6e keeps large images of convolutions in the chip's own memory.

What XLA does: what a convolution makes may be on the chip as a whole, up to tens of MiB, where the next convolution reads it. On v5e
    112 MiB are given to values, and on v6e 96; v5p has 48, which images seldom fit into. Values come and go, so that less is taken at
    the peak of memory: 36 to 110 MiB on v5e, 32 to 72 on v6e, none to 41 on v5p. Images larger than the chip's memory leave it empty.
    Images stay from the forward pass to the backward one where there is room, while other values that live as long do not.
Seen in: libtpu 0.0.42.1: live buffers of 34 programs of ResNets, U-Nets, autoencoders and ConvNeXts (benchmarks/RESULTS.md).
Switch: none: the name of the device tells
Priced by: cost.price.memory, cost.memory.lives, search.problem.memory.stored
Written or prevented by: nothing
Checked by: tests/machine/xla/test_images_on_chip.py, benchmarks/memory_intervals.py
"""

from __future__ import annotations

from spmdctx.ir.graph import Graph
from spmdctx.machine.xla.memory.on_chip import OnChip
from spmdctx.machine.xla.memory.tiles import in_images

_MIB = 2**20

_IMAGE_PARTS = {"tpu-v5e": OnChip(80 * _MIB, 64 * _MIB), "tpu-v6e": OnChip(40 * _MIB, 32 * _MIB)}
"""What images and other values have of the chip's memory together, and how large an image may be, by device.

Measured on: compiled programs of 34 plans of convolutional models.
Checked by: benchmarks/memory_intervals.py
"""

IMAGES_SHARE = 0.9
"""How much of the images that may be on the chip is there, as others wait for room.

Measured on: ResNets whose images are all on the chip, v5e: 3 MiB stay in memory.
Checked by: benchmarks/memory_intervals.py
"""


def images_on_chip(graph: Graph, device: str, others: OnChip) -> OnChip:
    """Returns the chip's part of images and other values together; that of the `others` alone where a step has no images."""
    own = _IMAGE_PARTS.get(device.removesuffix("-measured"))
    if own is None or not others.total_bytes or not in_images(graph):
        return others
    return OnChip(max(own.total_bytes, others.total_bytes), max(own.largest_bytes, others.largest_bytes))
