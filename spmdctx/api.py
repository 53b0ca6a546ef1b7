"""The functions that users call to make a step parallel: `parallel` and `plan`.

What plans and runs a step is imported when the first step is made, which takes as long as importing JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from spmdctx.trace.collector import no_garbage_collection

if TYPE_CHECKING:
    from spmdctx.plan.plan import Plan
    from spmdctx.step.options import ParallelOptions
    from spmdctx.step.step import ParallelStep

__all__ = ["parallel", "plan"]


P = ParamSpec("P")
R = TypeVar("R")


@overload
def parallel(fn: Callable[P, R], **options: Unpack[ParallelOptions]) -> ParallelStep[P, R]: ...
@overload
def parallel(fn: None = None, **options: Unpack[ParallelOptions]) -> Callable[[Callable[P, R]], ParallelStep[P, R]]: ...
def parallel(
    fn: Callable[P, R] | None = None, *others: object, **options: Unpack[ParallelOptions]
) -> ParallelStep[P, R] | Callable[[Callable[P, R]], ParallelStep[P, R]]:
    """Makes a step run split over devices, as the auto-parallel context says. A decorator, with or without options.

    Args:
        fn: a function, a method, or a function of jax.jit or nnx.jit.
        options: every option of the context, which for this step overrides the context, and:
            devices: real, virtual or compile-only devices; default `jax.devices()`.
            mesh: a Mesh, an AbstractMesh or {"axis": size}.
            topology: "tpu-v5e", "tpu-v5p", "tpu-v6e", "h100", "h200", "a100", "cpu" or a Topology; default that of the devices.
            memory_bytes: budget per device.
            max_mesh_axes: the most axes (1 to 3) of a mesh that dynamic_programming tries; default 3 for small programs, else 2.
            strict: refuse primitives without a sharding rule; otherwise every device computes them whole.
            batch_argnums, batch_argnames: the batch arguments; found by default, by what the loss does with their rows.
            donate_argnums, donate_argnames: arguments whose memory the step may reuse; none by default.
            static_argnums, static_argnames: compile-time constants.
            layerwise_parallel: path patterns of parameters that stay split in hybrid_parallel.
            rules: logical axis rules, {"embed": "model", "norm": None} or a list of pairs, by which Flax's logical names are pins.

    Raises:
        ContextError: an option is unknown or a value is bad.
        TypeError: a value has a wrong type, or an option is given without its name.
    """
    with no_garbage_collection():
        from spmdctx.step.options import options_by_name
        from spmdctx.step.step import ParallelStep

    unnamed = others or ((fn,) if isinstance(fn, str | Mapping) else ())
    if unnamed:
        raise options_by_name("spmdctx.parallel", unnamed[0])
    if fn is None:
        return lambda function: parallel(function, **options)
    if isinstance(fn, ParallelStep):
        return fn.with_options(**options)
    return ParallelStep(fn, options)


def plan(fn: Callable[..., Any], *args: Any, **options: Unpack[ParallelOptions]) -> Plan:
    """Plans a step without running it: `plan(train_step, state, batch, device_num=64, topology="tpu-v5p")`.

    Args:
        fn: as for `parallel`.
        args: the step's arguments, arrays or `jax.ShapeDtypeStruct`.
        options: as for `parallel`.
    """
    return parallel(fn, **options).plan(*args)
