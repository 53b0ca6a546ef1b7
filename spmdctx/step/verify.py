"""Compares the numerical results of a split step with those of the same step on one device."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np

from spmdctx.ir.mesh import LogicalMesh
from spmdctx.step.entry import Entry
from spmdctx.step.processes import on_all, to_host
from spmdctx.trace.capture.capture import Captured
from spmdctx.trace.scope.mesh import auto_axes
from spmdctx.trace.specs import make_mesh, named_sharding

FLOOR = 1e-3
"""Floor for the size of a result in relative differences."""

_TOLERANCES = {"float64": 1e-5, "complex128": 1e-5, "float32": 1e-4, "complex64": 1e-4}
_HALF_TOLERANCE = 3e-2
_BY_NORM = 10
"""Factor by which the difference by norm may exceed the tolerance."""


class VerifyRow(NamedTuple):
    """One result: `difference` is max|a-b| / max(max|b|, 1e-3), b being the one-device result.

    `change` is the norm of a-b over the norm of b; `is_state` marks the next value of an argument.
    """

    path: str
    dtype: str
    difference: float
    change: float
    tolerance: float
    is_state: bool

    @property
    def ok(self) -> bool:
        """True if the difference is within the tolerance.

        State below float64 may pass by its norm instead. If a parameter's true gradient is zero, an adaptive optimizer moves it
        by a whole step in the direction of the rounding error.
        """
        by_norm = self.is_state and self.tolerance > _TOLERANCES["float64"]
        return self.difference <= self.tolerance or (by_norm and self.change <= _BY_NORM * self.tolerance)

    def __str__(self) -> str:
        """Returns the difference and its tolerance as text."""
        if self.ok and self.difference > self.tolerance:
            measured = (
                f"{self.difference:.1e}, by its norm {self.change:.1e} ({self.dtype}, tolerance {_BY_NORM * self.tolerance:.0e} by norm)"
            )
        else:
            measured = f"{self.difference:.1e} ({self.dtype}, tolerance {self.tolerance:.0e})"
        return f"{'' if self.ok else '! '}{self.path}: {measured}"


class VerifyReport(NamedTuple):
    """The result of `step.verify`; `explanations` say why a step that runs as asked has other results than on one device."""

    rows: tuple[VerifyRow, ...]
    num_devices: int
    reference: str = "on one"
    explanations: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if every result is within its tolerance."""
        return all(row.ok for row in self.rows)

    @property
    def worst(self) -> VerifyRow | None:
        """The result with the largest difference."""
        return max(self.rows, key=lambda row: row.difference, default=None)

    def __str__(self) -> str:
        verdict = "same" if self.ok else "NOT the same"
        lines = [f"{verdict} on {self.num_devices} devices as {self.reference}: {len(self.rows)} results"]
        shown = sorted(self.rows, key=lambda row: (row.ok, -row.difference))[:10]
        return "\n".join([*lines, *(f"  {row}" for row in shown), *(f"  why: {sentence}" for sentence in self.explanations)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


_DRAWS_APART = "each device, or micro-batch, draws random numbers of its own: the comparison is with whole arguments, not with one device"


def verify_entry(entry: Entry, leaves: Sequence[Any], plain: Captured | None = None) -> VerifyReport:
    """Runs an entry's program on all its devices and on the first one, and compares the results.

    A step with a shard_map over several devices cannot run on one, and one that draws random numbers apart has others there. They are
    compared with themselves on all devices with whole arguments.

    Args:
        entry: the step.
        leaves: its flat arguments.
        plain: the user's own step, where options of gradients make the entry's another one.

    Raises:
        ContextError: a device is missing.
    """
    program = entry.program
    captured = entry.captured
    regions = [region for region in entry.planned.program.manual if math.prod(size for _, size in region.mesh_axes) > 1]
    is_manual = captured.draws_apart or any(plain is None or not region.is_loss for region in regions)
    with auto_axes():
        # Copies: the step may have been told to reuse the memory of its arguments.
        split = entry.execute(_as_called(entry, leaves))
        whole = _whole_on_all(entry, leaves) if is_manual else _on_one_device(entry, leaves, plain)
    rows = tuple(
        _row(leaf.path, leaf.carried_from is not None, ours, reference)
        for leaf, ours, reference in zip(entry.captured.outputs, split, whole, strict=True)
    )
    report = VerifyReport(rows, program.mesh.devices.size, *(("with whole arguments",) if is_manual else ()))
    if captured.draws_apart:
        return report._replace(explanations=(_DRAWS_APART, *captured.deviations))
    return report if report.ok else report._replace(explanations=captured.deviations)


def _as_called(entry: Entry, leaves: Sequence[Any]) -> list[Any]:
    if entry.spans_processes:
        return [on_all(to_host(leaf), target) for leaf, target in zip(leaves, entry.program.in_shardings, strict=True)]
    return [_copied(leaf, entry.type_as_called(index, leaf).sharding) for index, leaf in enumerate(leaves)]


def _on_one_device(entry: Entry, leaves: Sequence[Any], plain: Captured | None) -> Sequence[Any]:
    """Runs the step on one device of this process, and returns the results of the entry's program in their order."""
    device = next(device for device in entry.program.mesh.devices.flat if device.process_index == jax.process_index())
    copied = [_copied(leaf, device) for leaf in leaves]
    with jax.set_mesh(make_mesh(LogicalMesh.of({"device": 1}), [device])):  # whatever mesh the user set
        whole: Sequence[Any] = jax.jit(jexc.jaxpr_as_fun(_unconstrained((plain or entry.captured).jaxpr)))(*copied)
    if plain is None:
        return whole
    made = {leaf.path: value for leaf, value in zip(plain.outputs, whole, strict=True)}
    # The user's own step leaves out the variables that it does not change.
    kept = [made.get(leaf.path, None if leaf.carried_from is None else copied[leaf.carried_from]) for leaf in entry.captured.outputs]
    return [jnp.asarray(value) for value in kept]


def _whole_on_all(entry: Entry, leaves: Sequence[Any]) -> Sequence[Any]:
    everywhere = named_sharding(entry.program.mesh, ())
    copied = [on_all(to_host(leaf), everywhere) if entry.spans_processes else _copied(leaf, everywhere) for leaf in leaves]
    whole: Sequence[Any] = jax.jit(jexc.jaxpr_as_fun(entry.captured.jaxpr))(*copied)
    return whole


def _copied(leaf: Any, target: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = jnp.array(np.array(to_host(jax.random.key_data(leaf))))
        return jax.device_put(jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf)), target)
    if isinstance(leaf, jax.Array):
        return jax.device_put(np.array(to_host(leaf)), target)
    return leaf if target is None else jax.device_put(leaf, target)


def _row(path: str, is_state: bool, ours: Any, reference: Any) -> VerifyRow:
    dtype = str(reference.dtype)
    if jnp.issubdtype(reference.dtype, jax.dtypes.prng_key):
        ours, reference = jax.random.key_data(ours), jax.random.key_data(reference)
    a, b = to_host(ours), to_host(reference)
    if not jnp.issubdtype(reference.dtype, jnp.inexact):
        return VerifyRow(path, dtype, float(np.count_nonzero(a != b)), 0.0, 0.0, False)
    kind = np.complex128 if jnp.issubdtype(reference.dtype, jnp.complexfloating) else np.float64
    a, b = a.astype(kind), b.astype(kind)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    distance = np.where(same, 0.0, np.abs(np.where(same, 0, a) - np.where(same, 0, b)))
    size = np.abs(b[np.isfinite(b)])
    largest = _finite(distance.max(initial=0.0)) / max(float(size.max(initial=0.0)), FLOOR)
    norm = _finite(np.linalg.norm(distance.ravel())) / max(float(np.linalg.norm(size.ravel())), FLOOR)
    return VerifyRow(path, dtype, largest, norm, _TOLERANCES.get(dtype, _HALF_TOLERANCE), is_state)


def _finite(value: Any) -> float:
    return math.inf if math.isnan(value) else float(value)


_PROGRAMS = (jexc.Jaxpr, jexc.ClosedJaxpr)


def _unconstrained(jaxpr: Any) -> Any:
    """Removes the sharding constraints of a program so that it runs on one device; bodies of shard_map stay as they are."""
    is_open = isinstance(jaxpr, jexc.Jaxpr)
    body = jaxpr if is_open else jaxpr.jaxpr
    plain = body.replace(eqns=[_without_constraint(eqn) for eqn in body.eqns])
    return plain if is_open else jexc.ClosedJaxpr(plain, jaxpr.consts)


def _without_constraint(eqn: Any) -> Any:
    if eqn.primitive.name == "sharding_constraint":
        return eqn.replace(primitive=jexc.primitives.copy_p, params={})
    params = {}
    for name, value in eqn.params.items():
        if isinstance(value, _PROGRAMS):
            params[name] = _unconstrained(value)
        elif isinstance(value, tuple) and any(isinstance(entry, _PROGRAMS) for entry in value):
            entries = [_unconstrained(entry) if isinstance(entry, _PROGRAMS) else entry for entry in value]
            params[name] = value._make(entries) if hasattr(value, "_make") else tuple(entries)
    return eqn.replace(params={**eqn.params, **params}) if params else eqn
