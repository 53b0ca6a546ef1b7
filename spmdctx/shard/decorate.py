"""`shard()` itself: checks the user's strategies for a function or module and wraps it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from flax import linen, nnx

from spmdctx.errors import StrategyError, UnsupportedError, message
from spmdctx.ir.layout import Layout
from spmdctx.shard.batches import on_own_batch
from spmdctx.shard.call import Eager, Spec, Strategies, call_marked
from spmdctx.shard.modules import shard_linen, shard_nnx
from spmdctx.wording.user_warnings import warn_user

F = TypeVar("F", bound=Callable[..., Any])


def shard(  # noqa: PLR0913  # MindSpore's arguments
    fn: F,
    in_strategy: tuple[Spec, ...] | None,
    out_strategy: tuple[Spec, ...] | None = None,
    parameter_plan: Mapping[str, Spec] | None = None,
    device: str | None = None,
    level: int = 0,
    cross_batch: bool = False,
    fusion: int | None = None,
) -> F:
    """Gives a function or a Flax module the strategies by which its arguments, results and parameters are split.

        matmul = shard(jnp.matmul, ((2, 4), (4, 1)))
        mlp = shard(mlp, ((2, 1),), parameter_plan={"up/kernel": (1, 4), "down/kernel": (4, 1)})

    Dimensions that belong together inside `fn` are split over the same devices. If the product of all slices is smaller than
    the number of devices, the computation is repeated on the rest. Strategies have an effect only in steps that run in
    semi_auto_parallel or auto_parallel. A direct call in those modes compiles `fn` and runs it split.

    Args:
        fn: a function, a `flax.nnx` module or a `flax.linen` module. Modules come back as the same type, with the same
            parameter paths; an nnx module shares its variables with the one that is returned.
        in_strategy: for each flattened array argument of the call, the slices of each dimension, a `Layout`, or None (free).
        out_strategy: the same for each flattened array of the result. Partial sums that it splits are reduce-scattered.
        parameter_plan: strategies by path pattern (`layers/*/kernel`): the module's variables, or the flattened
            arguments of a function (`params/up/kernel`). The first pattern that matches counts.
        device: for compatibility with MindSpore; without effect.
        level: for compatibility with MindSpore; without effect.
        cross_batch: for functions. Reductions over the batch stay inside each device's part of it, as `in_strategy` splits
            dimension 0. No device waits for another's statistics. Floating results without the batch are means over the parts.
        fusion: the number of a group whose reductions run together, apart from others. Gradients of parameters that regions with
            this number use form one bucket. Sums of the forward and of the backward pass that do not depend on each other form
            one collective. On CPU no sums are grouped, and no backend groups gathers; the plan's notes say so. 0 leaves it to
            the context.

    Raises:
        TypeError: an argument has the wrong type.
        StrategyError: out_strategy is given without in_strategy, slices < 1, or fusion < 0. Planning the step finds strategies that
            do not fit their tensors.
    """
    if not callable(fn):
        raise TypeError(message("shard() takes a function or a module.", got=f"fn of type {type(fn).__name__}"))
    if out_strategy is not None and in_strategy is None:
        raise StrategyError("out_strategy is given without in_strategy.", fix="give in_strategy too; None entries leave arguments free")
    strategies = Strategies(
        None if in_strategy is None else _checked_specs("in_strategy", in_strategy),
        None if out_strategy is None else _checked_specs("out_strategy", out_strategy),
        _checked_plan(parameter_plan),
        _checked_fusion(fusion),
    )
    _check_hints(device, level)
    fn = _with_own_batch(fn, strategies, cross_batch)
    if isinstance(fn, nnx.Module):
        return cast(F, shard_nnx(fn, strategies))
    if isinstance(fn, linen.Module):
        return cast(F, shard_linen(fn, strategies))
    return _shard_function(fn, strategies)


def _with_own_batch(fn: F, strategies: Strategies, cross_batch: Any) -> F:
    """Returns a function whose reductions do not cross the parts of the batch if `cross_batch` is set."""
    if type(cross_batch) is not bool:
        raise TypeError(message("cross_batch must be bool.", got=_typed(cross_batch)))
    if not cross_batch:
        return fn
    if isinstance(fn, nnx.Module | linen.Module):
        raise UnsupportedError(
            "cross_batch is of functions, and this is a module.",
            got=type(fn).__name__,
            fix="shard the function that reduces over the batch",
        )
    if strategies.in_strategy is None:
        raise StrategyError(
            "cross_batch needs in_strategy, which says how the batch is split.",
            got="no in_strategy",
            fix="pass one entry per array",
        )
    label = getattr(fn, "__name__", type(fn).__name__)
    own = on_own_batch(fn, strategies.in_strategy, label)
    return functools.update_wrapper(own, fn, updated=())  # type: ignore[return-value]  # the wrapper stands for the function


def _shard_function(fn: F, strategies: Strategies) -> F:
    label = getattr(fn, "__name__", type(fn).__name__)
    names = _argument_names(fn)

    def sharded(*args: Any, **kwargs: Any) -> Any:
        return call_marked(strategies, label, lambda region: fn, args, kwargs, names=names, eager=Eager(sharded))

    return functools.update_wrapper(sharded, fn, updated=())  # type: ignore[return-value]  # the wrapper stands for the function


def _argument_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the positional arguments, as far as the signature tells them."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(item.name for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD))


def _typed(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"


def _checked_specs(name: str, specs: Any) -> tuple[Spec, ...]:
    if not isinstance(specs, tuple):
        raise TypeError(message(f"{name} must be a tuple with one entry per tensor.", got=_typed(specs)))
    if specs and all(type(entry) is int for entry in specs):
        raise TypeError(message(f"{name} needs one entry per tensor.", got=f"{name} {specs}", fix=f"use ({specs},) for a single tensor"))
    return tuple(_checked_spec(f"entry {index} of {name}", entry) for index, entry in enumerate(specs))


def _checked_spec(where: str, spec: Any) -> Spec:
    if spec is None:
        return None
    if isinstance(spec, Layout):
        if spec.alias_tensor_map is None:
            raise StrategyError(f"The Layout in {where} names no tensor dimensions.", fix='call it: layout("axis", "None")')
        return spec
    if not isinstance(spec, tuple):
        raise TypeError(
            message("A strategy is a tuple of ints, a Layout or None.", where=where, got=f"{spec!r} of type {type(spec).__name__}")
        )
    for entry in spec:
        if type(entry) is not int:
            raise TypeError(message("A strategy holds ints.", where=where, got=f"{entry!r} of type {type(entry).__name__}"))
        if entry < 1:
            raise StrategyError(f"A strategy splits a dimension into {entry} slices.", where=where, got=f"{spec}", need="at least 1 slice")
    return spec


def _checked_plan(plan: Any) -> tuple[tuple[str, Spec], ...]:
    if plan is None:
        return ()
    if not isinstance(plan, Mapping):
        raise TypeError(message("parameter_plan maps path patterns to strategies.", got=f"{plan!r} of type {type(plan).__name__}"))
    for pattern in plan:
        if not isinstance(pattern, str):
            raise TypeError(
                message("parameter_plan maps path patterns to strategies.", got=f"a key {pattern!r} of type {type(pattern).__name__}")
            )
    return tuple((pattern, _checked_spec(f"parameter_plan[{pattern!r}]", spec)) for pattern, spec in plan.items())


def _checked_fusion(fusion: Any) -> int:
    if fusion is not None and type(fusion) is not int:
        raise TypeError(message("fusion must be int.", got=_typed(fusion)))
    if fusion is not None and fusion < 0:
        raise StrategyError("fusion is the number of a bucket of gradients.", got=str(fusion), need="at least 0; 0 is none")
    return fusion or 0


def _check_hints(device: Any, level: Any) -> None:
    """Checks the types of MindSpore's hints, and warns that those that ask for something have no effect."""
    hints = (
        ("device", device, str, None),
        ("level", level, int, 0),
    )
    for name, value, kind, default in hints:
        if value is default:
            continue
        if type(value) is not kind:
            raise TypeError(message(f"{name} must be {kind.__name__}.", got=_typed(value)))
        if value != default:
            warn_user(f"shard(): {name}={value!r} has no effect: XLA decides this by itself.")
