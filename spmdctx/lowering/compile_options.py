"""Makes the compile options of each backend; the compilers know different names, and refuse those that they do not know.

`machine.xla.options` has the table from the context's fusion of collectives to the compilers' combiners, and tells how these count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spmdctx.context.state import AutoParallelContext
from spmdctx.context.values import FusionEntry
from spmdctx.machine.devices import Device, backend_of
from spmdctx.machine.presets import MIB
from spmdctx.machine.xla.options import BYTE_THRESHOLDS, COUNT_THRESHOLDS, MANY_OPERANDS, UNLIMITED
from spmdctx.wording.user_warnings import warn_user

Options = dict[str, int | str]

_AUTO_MB = 64
_COMM_FUSION_KEYS = {"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reducescatter"}


class FusionBytes(NamedTuple):
    """The largest combined collective of each kind, in bytes; 0 combines nothing, None leaves it to the compiler."""

    all_reduce: int | None
    all_gather: int | None
    reduce_scatter: int | None


def fusion_bytes(context: AutoParallelContext) -> FusionBytes:
    """Returns the bytes that comm_fusion and all_reduce_fusion_config ask for.

    Buckets by index are kept apart by the program, so no size limits them.
    """
    if context.parallel_mode == "stand_alone":
        return FusionBytes(None, None, None)
    chosen = context.comm_fusion if context.is_set("comm_fusion") else None
    if chosen is not None and not chosen.openstate:
        return FusionBytes(0, 0, 0)
    gathers, scatters = (None, None) if chosen is None else (_entry_bytes(chosen.allgather), _entry_bytes(chosen.reducescatter))
    if context.fuses_by_index:
        return FusionBytes(UNLIMITED, gathers, scatters)
    return FusionBytes(None if chosen is None else _entry_bytes(chosen.allreduce), gathers, scatters)


def _entry_bytes(entry: FusionEntry) -> int:
    return (entry.config if isinstance(entry.config, int) else _AUTO_MB) * MIB


def compile_options(devices: Iterable[Device], context: AutoParallelContext, scatter_ways: int = 1, has_buckets: bool = False) -> Options:
    """Returns the `compiler_options=` of `jax.jit` for these devices; the keys are the backend's own.

    Args:
        devices: the devices to compile for.
        context: the context of the step.
        scatter_ways: the number of pieces into which the step's reduce_scatters cut a gradient.
        has_buckets: whether gradients are reduced in buckets, whose size must not be limited.
    """
    backend = backend_of(devices)
    options: Options = {}
    sizes = fusion_bytes(context)
    if has_buckets and sizes.all_reduce is None:
        sizes = sizes._replace(all_reduce=UNLIMITED)
    for kind, size in sizes._asdict().items():
        name = BYTE_THRESHOLDS.get((backend, kind))
        if name is None or size is None:
            continue
        options[name] = size // scatter_ways if (backend, kind) == ("gpu", "reduce_scatter") else size
        if size:
            options[COUNT_THRESHOLDS[backend]] = MANY_OPERANDS
    return options


def without_option(backend: str, context: AutoParallelContext) -> tuple[str, ...]:
    """Returns a sentence for each kind of collective whose fusion the user set by size, or off, but the backend has no option for."""
    asked = context.comm_fusion
    if context.parallel_mode == "stand_alone" or not context.is_set("comm_fusion"):
        return ()
    return tuple(
        f"comm_fusion[{name!r}] has no effect: the {backend.upper()} compiler has no option for it."
        for kind, name in _COMM_FUSION_KEYS.items()
        if (backend, kind) not in BYTE_THRESHOLDS
        and (getattr(asked, name).mode == "size" if asked.openstate else (backend, kind) != ("tpu", "all_gather"))
    )


def warn_without_option(backend: str, context: AutoParallelContext) -> tuple[str, ...]:
    """Warns with a ContextWarning for each sentence of `without_option`, and returns the sentences for the plan's notes."""
    sentences = without_option(backend, context)
    for sentence in sentences:
        warn_user(sentence)
    return sentences
