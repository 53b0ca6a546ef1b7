"""Frees a traced step of the devices that it was written for."""

from __future__ import annotations

import jax
import jax.extend.core as jexc

from spmdctx.trace.capture.portable.collectives import OVER_VMAP
from spmdctx.trace.capture.portable.one_device import OneDevice
from spmdctx.trace.capture.portable.placements import is_of_several, is_one_device
from spmdctx.trace.capture.portable.rewriting import Rewriting


def portable(step: jexc.ClosedJaxpr, num_devices: int | None) -> tuple[jexc.ClosedJaxpr, OneDevice]:
    """Returns a step that says nothing of one device if it is for several, or the other way around, and what it said.

    Without `num_devices`, it keeps what it says. Collectives over axes of vmap become reductions. A step that has none of this comes
    back as it is.
    """
    left_out = OneDevice()
    if num_devices is None:
        return Rewriting(OVER_VMAP).closed(step), left_out
    if num_devices == 1:
        left_out = OneDevice(is_of_several, "several devices")
    step = Rewriting({**OVER_VMAP, **left_out.handlers}).closed(step)
    if num_devices > 1 and (left_out.counts or is_one_device(jax.sharding.get_abstract_mesh())):
        step = Rewriting({}, strips=True).closed(step)
    return step, left_out
