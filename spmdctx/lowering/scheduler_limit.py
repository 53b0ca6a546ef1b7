"""Tells XLA's scheduler how much memory the plan foresees, so that it hides communication within that.

`machine.xla.memory.scheduler_limit` tells how the scheduler behaves with and without a limit. Backends other than TPU get no limit: on
GPU the option of that kind changed little, and CPU has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdctx._compat import is_compile_only
from spmdctx.lowering.compile_options import Options
from spmdctx.machine.xla.memory.scheduler_limit import LIMIT, MOST_RERUNS, OWN_PERCENT, RERUNS

_SLACK = 1.08
"""The factor by which a schedule may exceed what a plan foresees. No plan took longer at 1.08; some took 5 % longer at 1.0.

Measured on: 40 plans for v5e:2x4 that are not random.
Checked by: benchmarks/fidelity_plans.py
"""


def scheduler_options(devices: Sequence[Any], peak_bytes: int, device_bytes: int, budget_bytes: int | None = None) -> Options:
    """Returns the `compiler_options=` that hold the schedule to a plan's memory; none if no limit is needed or the compiler has no option.

    Args:
        devices: the devices to compile for, all of one kind.
        peak_bytes: the memory of one device that the plan foresees.
        device_bytes: the memory that the compiler knows a device to have.
        budget_bytes: the memory that the user allows.
    """
    if len(devices) < 2 or devices[0].platform != "tpu":
        return {}
    limit = _SLACK * peak_bytes if budget_bytes is None else min(_SLACK * peak_bytes, max(budget_bytes, peak_bytes))
    percent = max(1, math.ceil(100 * limit / device_bytes))
    if percent >= OWN_PERCENT or not _knows(_nearest(devices), (LIMIT, RERUNS)):
        return {}
    return {LIMIT: percent, RERUNS: MOST_RERUNS}


def _nearest(devices: Sequence[Any]) -> Any:
    """Returns a device that this process can compile for alone."""
    if is_compile_only(devices[0]):
        return devices[0]
    return next((device for device in devices if device.process_index == jax.process_index()), devices[0])


@cache
def _knows(device: Any, names: tuple[str, ...]) -> bool:
    """Returns whether the device's compiler has these options.

    A compiler refuses programs with options that it does not know, and other versions may have others.
    """
    place = NamedSharding(Mesh(np.array([device]), ("all",)), PartitionSpec())
    probe = jax.jit(lambda value: value, in_shardings=place, out_shardings=place, compiler_options=dict.fromkeys(names, 1))
    try:
        probe.lower(jax.ShapeDtypeStruct((), "float32")).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
