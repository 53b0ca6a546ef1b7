"""Traces a step with gradient options twice: first to see what each loss reads, then to differentiate it as the options ask."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core as jexc
from jax.extend import source_info_util

from spmdctx.errors import ContextWarning
from spmdctx.gradients.loss import Loss, LossCall, Traced
from spmdctx.gradients.marker import mark
from spmdctx.gradients.micro_batches import run_micro_batches
from spmdctx.gradients.operands import SeenCall, find_operands, operands_of
from spmdctx.gradients.options import GradientOptions, gradient_options
from spmdctx.gradients.parts import traced_in_parts
from spmdctx.gradients.reduce import buckets_of
from spmdctx.gradients.replicas import gradient_order, run_on_replicas
from spmdctx.gradients.results import Row, state_notes, turn_notes
from spmdctx.gradients.roles import refine, with_roles
from spmdctx.gradients.scope import Carrier, asked_for_carrier, carried_by, plainly
from spmdctx.ir.primitives import LOSS_VALUE
from spmdctx.ops.scope import traced_locally, traced_whole
from spmdctx.rules.control_flow import bodies_of, opened
from spmdctx.trace.build.jaxprs.divisors import divisors_in
from spmdctx.trace.build.origins import source_line
from spmdctx.trace.capture.arguments import Call, Static
from spmdctx.trace.capture.capture import Captured, LossGradient, capture_call
from spmdctx.trace.capture.layerwise import is_layerwise
from spmdctx.trace.capture.target import Target
from spmdctx.trace.marker import tracing_in
from spmdctx.trace.scope.mesh import get_mesh
from spmdctx.trace.scope.settings import Settings
from spmdctx.wording.user_warnings import warn_user


def capture_step(target: Target, call: Call, static: Static, settings: Settings) -> Captured:
    """Traces one call of a step, its gradients as the context asks.

    Args:
        target: the step.
        call: its dynamic arguments.
        static: its static ones.
        settings: of the step.

    Raises:
        StrategyError: a loss that cannot be split.
        UnsupportedError: a loss inside a vmap over the batch.
    """
    options = gradient_options(settings.context, settings.num_devices, settings.mesh)
    if not options.acts:
        with asked_for_carrier() as asked:
            captured = capture_call(target, call, static, settings.num_devices)
        if not asked:
            return refine(captured, settings)
    captured, calls = seen_losses(target, call, static, settings, lambda _: options)
    if not calls:
        return refine(replace(captured, notes=(*captured.notes, *_without_calls(captured, options))), settings)
    start = time.perf_counter()
    second = _Second(calls, options)
    again = capture_again(second, target, call, static, captured, settings.num_devices)
    notes = tuple(dict.fromkeys((*captured.notes, *again.notes, *second.notes)))
    seconds = captured.trace_s + time.perf_counter() - start
    sums = second.sums and not settings.context.is_set("gradients_mean")
    return replace(
        again,
        notes=notes,
        trace_s=seconds,
        gradients=tuple(second.gradients),
        warnings=(f"{_summed(options)} {_ASKS_FOR_MEAN}",) if sums else (),
        deviations=(*((_summed(options),) if second.sums else ()), *captured.deviations, *second.deviations),
        is_rewritten=True,
        draws_apart=second.draws_apart,
    )


def seen_losses(
    target: Target, call: Call, static: Static, settings: Settings, options_of: Callable[[Sequence[SeenCall]], GradientOptions]
) -> tuple[Captured, list[SeenCall]]:
    """Traces a step to see what each of its losses reads; returns the step with the roles that they show, and the calls.

    Args:
        target: the step.
        call: its dynamic arguments.
        static: its static ones.
        settings: of the step.
        options_of: gives the options of gradients, which may depend on the calls.

    Raises:
        StrategyError: a loss that cannot be split.
        UnsupportedError: a loss inside a vmap over the batch.
    """
    first = _First(options_of(()))
    with carried_by(first):
        captured = capture_call(target, call, static, settings.num_devices)
    if not first.calls:
        return captured, []
    start = time.perf_counter()
    own = frozenset(index for index, leaf in enumerate(captured.inputs) if is_layerwise(leaf, settings.layerwise_parallel))
    found = find_operands(captured, first.calls, options_of(first.calls), own)
    return replace(found, trace_s=found.trace_s + time.perf_counter() - start), first.calls


def capture_again(carrier: Carrier, target: Target, call: Call, static: Static, first: Captured, num_devices: int) -> Captured:
    """Traces a step a second time, its losses carried out by `carrier`; roles are those of the first trace."""
    with carried_by(carrier), _said_before():
        again = capture_call(target, call, static, num_devices)
    return with_roles(again, first)


def capture_plainly(target: Target, call: Call, static: Static) -> Captured:
    """Traces one call of a step as it runs on one device: without options of gradients, and with no guess about its batch."""
    with warnings.catch_warnings(), tracing_in("stand_alone"):
        warnings.simplefilter("ignore", ContextWarning)
        return capture_call(target, call, static, 1)


def capture_in_micro_batches(target: Target, call: Call, static: Static, settings: Settings, count: int) -> Captured:
    """Traces one call of a step as it runs on one device, its losses over `count` micro-batches one after the other.

    Raises:
        StrategyError: a loss that cannot be split.
        UnsupportedError: a loss inside a vmap over the batch.
    """
    context = replace(settings.context, pipeline_stages=1, grad_accumulation_step=count)
    with warnings.catch_warnings(), tracing_in("stand_alone"):
        warnings.simplefilter("ignore", ContextWarning)
        return capture_step(target, call, static, replace(settings, context=context))


_ASKS_FOR_MEAN = "Set gradients_mean=True for the gradient of one device; set gradients_mean=False to keep the sum without this warning."


def _summed(options: GradientOptions) -> str:
    return (
        f"gradients_mean=False: gradients are summed over the {options.num_replicas} devices, which for a loss that is a mean "
        f"over the batch makes {options.num_replicas} times its gradient."
    )


def _without_calls(captured: Captured, options: GradientOptions) -> list[str]:
    """Says of gradient options that a step without `spmdctx.value_and_grad` does not read."""
    if not any("transpose(" in str(eqn.source_info.name_stack) for eqn in _equations(captured.jaxpr.jaxpr)):
        return []
    names = [f"grad_accumulation_step={options.micro_batches}"] if options.micro_batches > 1 else []
    names += ["gradients_mean=True"] if options.is_local and options.mean else []
    sentences = [
        f"{name} has no effect on gradients of jax.grad or nnx.grad: call spmdctx.value_and_grad or spmdctx.grad." for name in names
    ]
    for sentence in sentences:
        warn_user(sentence)
    return sentences


@contextmanager
def _said_before() -> Iterator[None]:
    """Silences the warnings of the second trace, which the first has already given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextWarning)
        yield


class _First:
    """Takes every loss as global, and marks what enters it."""

    def __init__(self, options: GradientOptions) -> None:
        self.calls: list[SeenCall] = []
        self._axes = options.mesh.axes if options.is_local else ()
        self._num_replicas = options.num_replicas

    def run(self, loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = len(self.calls)
        call = LossCall(loss.with_value(), args, kwargs, self._num_replicas)
        avals = [jax.typeof(value) for value in call.values]
        traced = plainly(lambda: traced_whole(lambda: call.trace(avals), self._axes))
        others = [const for const in traced.jaxpr.consts if isinstance(const, jax.core.Tracer)]
        asked = [index for index, made in enumerate(traced.results) if made.part != "value" or loss.gives_value]
        primals = [primal for made in traced.results if made.part == "gradients" and (primal := call.primal(made)) is not None]
        self.calls.append(
            SeenCall(
                where=source_line(source_info_util.current()),
                paths=call.paths,
                avals=avals,
                results=[traced.results[index] for index in asked],
                out_avals=[traced.jaxpr.out_avals[index] for index in asked],
                differentiated=frozenset(primals),
                is_manual=any(eqn.primitive.name == "shard_map" for eqn in _equations(traced.jaxpr.jaxpr)),
                micro_size=loss.micro_size,
                num_parts=loss.num_parts,
                divisors=divisors_in(traced.jaxpr.jaxpr),
            )
        )
        marked = iter([mark(value, number, index) for index, value in enumerate([*call.values, *others])])
        leaves = [next(marked) for _ in call.values]
        consts = [next(marked) if isinstance(const, jax.core.Tracer) else const for const in traced.jaxpr.consts]
        results = jexc.jaxpr_as_fun(jexc.ClosedJaxpr(traced.jaxpr.jaxpr, consts))(*leaves)
        parts = [made.part for made in traced.results]
        results = [mark(one, number, LOSS_VALUE) if part == "value" else one for part, one in zip(parts, results, strict=True)]
        return loss.without_value(call.finish(results))


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yields all equations, including those of bodies."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies_of(eqn.params):
            yield from _equations(opened(body))


class _Second:
    """Differentiates every loss as the options ask, knowing what enters it."""

    def __init__(self, calls: Sequence[SeenCall], options: GradientOptions) -> None:
        self._calls, self._options = iter(calls), options
        self.notes: list[str] = []
        self.deviations: list[str] = []
        self.gradients: list[LossGradient] = []
        self.sums = self.draws_apart = False

    def run(self, loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen, options = next(self._calls), self._options
        if seen.is_manual or not seen.has_batch:
            return self._alike(seen, loss, args, kwargs)
        call = LossCall(loss, args, kwargs, options.num_replicas)
        operands = operands_of(seen)
        self.draws_apart = self.draws_apart or any(operand.is_key for operand in operands)
        axes = options.mesh.axes if options.is_local else ()

        def trace(avals: Sequence[Any]) -> Traced:
            traced: Traced = plainly(lambda: traced_locally(lambda: call.trace(avals, axes), axes))
            return traced

        traced, rows = traced_in_parts(seen, call, trace, operands, options)
        self.deviations += [note for note in seen.fixed_notes(traced.jaxpr.jaxpr) if note not in self.deviations]
        self.deviations += turn_notes(call, traced, rows, options.micro_batches)
        self.notes += [*self.deviations, *([call.note] if call.note else []), *state_notes(call, rows)]
        if options.is_local:
            order = gradient_order(call, traced, rows)
            self.sums = self.sums or (bool(order) and not options.mean)
            self.notes += self._notes([_named(rows[index]) for index in order])
            self.gradients += self._gradients([rows[index] for index in order])
            return call.finish(run_on_replicas(call, traced, operands, rows, order, options, get_mesh()))
        results = run_micro_batches(call, traced, operands, rows, call.values, options)
        return call.finish([_cast(value, aval.dtype) for value, aval in zip(results, traced.jaxpr.out_avals, strict=True)])

    def _gradients(self, rows: Sequence[Row]) -> list[LossGradient]:
        """Returns the reduced gradients in the order of their first use, with the buckets of those that are reduced whole."""
        buckets = {index: number for number, bucket in enumerate(buckets_of(range(len(rows)), self._options)) for index in bucket}
        has_buckets = self._options.buckets is not None
        return [
            LossGradient(_named(row), buckets[index] if has_buckets and row.scatter_dim is None else None) for index, row in enumerate(rows)
        ]

    def _notes(self, paths: Sequence[str]) -> list[str]:
        """Returns notes on how the gradients at `paths`, in the order of their first use, are reduced."""
        options, notes = self._options, []
        if options.buckets is not None:
            buckets = [", ".join(f"{index} {paths[index]}" for index in bucket) for bucket in buckets_of(range(len(paths)), options)]
            notes.append(f"Gradients are reduced in {len(buckets)} buckets, in the order of their first use: {' | '.join(buckets)}.")
        if options.scatters and options.buckets is not None:
            notes.append("Gradients that the parallel optimizer splits are reduce-scattered one by one, outside of the buckets.")
        if options.accumulates_whole:
            notes.append("gradient_accumulation_shard has no effect in data_parallel with optimizer_weight_shard_size.")
        if not options.mean:
            notes.append(_summed(options))
        return notes

    def _alike(self, seen: SeenCall, loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a loss that is the same on every device, or that the user split."""
        options = self._options
        result = plainly(lambda: loss.call(args, kwargs))
        if seen.is_manual:
            self.notes.append(f"The loss at {seen.where} holds a shard_map of its own: its gradients are left as they are.")
            return result
        self.notes.append(f"The loss at {seen.where} reads nothing of the batch: it is computed once, and no gradient is reduced.")
        if not options.is_local or options.mean or options.repeated_mean:
            return result
        self.sums = True
        self.notes.append(_summed(options))
        parts = loss.parts(result)
        gradients = jax.tree.map(lambda gradient: gradient * options.num_replicas, parts["gradients"])
        return loss.whole({**parts, "gradients": gradients})


def _named(row: Row) -> str:
    return row.path.removeprefix("gradients/").removesuffix("/value")


def _cast(value: Any, dtype: Any) -> Any:
    return value if value.dtype == dtype else value.astype(dtype)
