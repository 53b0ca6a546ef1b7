"""Compares the numerical results of a split step with those of the same step on one device."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np

from spmdctx.errors import ContextError, message
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.step.entry import Entry
from spmdctx.step.processes import on_all, to_host
from spmdctx.step.verify.noise.callbacks import Answers, for_one_run
from spmdctx.step.verify.noise.floor import Excess, Floor, distances, relative
from spmdctx.step.verify.noise.interpreter import largest_array, noisy_program
from spmdctx.step.verify.noise.rounding import Noise
from spmdctx.trace.capture.capture import Captured, OutputLeaf
from spmdctx.trace.scope.mesh import auto_axes
from spmdctx.trace.specs import make_mesh, named_sharding
from spmdctx.wording import counted, seconds_text
from spmdctx.wording.phases import line, log_of, tell
from spmdctx.wording.reports import Report

_LOG = log_of("step.verify")

_FIRST_SAMPLES, _MOST_SAMPLES = 6, 24
_AMPLITUDES = (1.0, 2.0)
"""Rounding errors by which samples move values, in turn."""


class VerifyRow(NamedTuple):
    """One result of the step, against its noise floor.

    Attributes:
        path: of the result, or of the argument whose next value it is.
        dtype: its type.
        difference: max|a-b| / max(max|b|, 1e-3), b being the one-device result; of whole numbers and keys, how many differ.
        noise: the same of b, against the one-device step whose operations round otherwise; None where all results are as near as the
            rounding of their last operation, so that the noise was not measured.
        size: how many elements it has.
        num_over: how many of them differ by more than their own noise.
        num_allowed: how many may.
        rtol: the difference that the caller accepts.
    """

    path: str
    dtype: str
    difference: float
    noise: float | None = None
    size: int = 1
    num_over: int = 0
    num_allowed: int = 0
    rtol: float = 0.0

    @property
    def ok(self) -> bool:
        """True if the difference is noise, or not above `rtol`."""
        return self.num_over <= self.num_allowed or self.difference <= self.rtol

    def __str__(self) -> str:
        """Returns the difference, the noise floor and the verdict in words."""
        words = f"{'' if self.ok else '! '}{self.path}: {self._difference} ({self.dtype})"
        return f"{words}; {self._reason}" if self.difference else words

    @property
    def _is_whole(self) -> bool:
        return self.dtype.startswith(("int", "uint", "bool", "key"))

    @property
    def _difference(self) -> str:
        if not self.difference:
            return "the same"
        return f"{self.difference:.0f} of {self.size} differ" if self._is_whole else f"differs by {self.difference:.1e}"

    @property
    def _reason(self) -> str:
        if self.noise is None:
            floor = "the last operation may round so"
        elif self._is_whole:
            floor = f"rounding alone changes {self.noise:.0f} on one device"
        else:
            floor = f"rounding alone moves it by up to {self.noise:.1e} on one device"
        if not self.ok:
            return f"{floor}, and {self.num_over} of {self.size} values are beyond their own noise"
        if self.num_over > self.num_allowed:
            return f"{floor}, and rtol accepts {self.rtol:.0e}"
        if self.noise is not None and self.noise > _DECIDED_BY_ROUNDING and not self._is_whole:
            return f"{floor}: rounding errors decide some of its values, as where a true gradient is zero"
        return floor


_DECIDED_BY_ROUNDING = 1e-2
"""Noise above which a report says that rounding decides values."""


class _Verified(NamedTuple):
    rows: tuple[VerifyRow, ...]
    num_devices: int
    reference: str = "on one"
    explanations: tuple[str, ...] = ()


class VerifyReport(_Verified, Report):
    """The result of `step.verify`; `explanations` say why a step that runs as asked has other results than on one device."""

    __slots__ = ()

    kind = "verify"

    def _figures(self) -> dict[str, Any]:
        return {"ok": self.ok, **self._asdict(), "rows": [{**row._asdict(), "ok": row.ok} for row in self.rows]}

    @property
    def ok(self) -> bool:
        """True if every result is the same but for rounding."""
        return all(row.ok for row in self.rows)

    @property
    def worst(self) -> VerifyRow | None:
        """The result with the largest difference; those that are not the same come first."""
        return max(self.rows, key=lambda row: (not row.ok, row.difference), default=None)

    def __str__(self) -> str:
        verdict = "same" if self.ok else "NOT the same"
        devices, results = counted(self.num_devices, "device"), counted(len(self.rows), "result")
        lines = [f"{verdict} on {devices} as {self.reference}: {results}"]
        shown = sorted(self.rows, key=lambda row: (row.ok, -row.difference))[:10]
        return "\n".join([*lines, *(f"  {row}" for row in shown), *(f"  why: {sentence}" for sentence in self.explanations)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


_DRAWS_APART = "each device, or micro-batch, draws random numbers of its own: the comparison is with whole arguments, not with one device"


_DRAWS_IN_PARTS = "each micro-batch draws random numbers of its own: the comparison is with the same micro-batches on one device"


_COLLECTIVES = "the step holds collectives, which one device does not have: the comparison is with whole arguments, not with one device"


def checked_rtol(rtol: Any) -> float:
    """Returns the relative difference that a caller accepts; None accepts nothing but noise.

    Raises:
        TypeError: it is no number.
        ContextError: it is negative, infinite or NaN.
    """
    if rtol is None:
        return 0.0
    if isinstance(rtol, bool) or not isinstance(rtol, int | float | np.floating | np.integer):
        raise TypeError(message("rtol must be a number.", got=f"{rtol!r} ({type(rtol).__name__})"))
    if not math.isfinite(rtol) or rtol < 0:
        raise ContextError("rtol must be finite and not negative.", got=repr(rtol), fix="give a relative difference, such as 1e-3")
    return float(rtol)


class _Reference(NamedTuple):
    """What a split step is compared with.

    Attributes:
        words: for the report.
        jaxpr: the program, which takes the step's flat arguments.
        place: puts a leaf where the program runs.
        around: a context to run it in.
        keeps_constraints: False if the program runs on one device.
    """

    words: str
    jaxpr: jexc.ClosedJaxpr
    place: Callable[[Any], Any]
    around: Callable[[], Any]
    keeps_constraints: bool


def verify_entry(entry: Entry, leaves: Sequence[Any], rtol: float = 0.0, plain: Captured | None = None) -> VerifyReport:
    """Runs an entry's program on all its devices, and its reference on one, and compares the results.

    What differs is judged by the noise floor: the reference runs again several times, each time with other rounding errors.

    Args:
        entry: the step.
        leaves: its flat arguments.
        rtol: a relative difference that is accepted above the noise, too.
        plain: the user's own step, where options of gradients make the entry's another one, as `Entry.on_one_device` gives it.

    Raises:
        ContextError: a device is missing.
    """
    start, name = time.perf_counter(), entry.captured.name
    with auto_axes(), line(f"Verifying {name}"):
        count = counted(entry.program.mesh.devices.size, "device")
        _tell(name, f"it runs on {count}")
        leaves = entry.gathered(leaves)
        # Copies: the step may have been told to reuse the memory of its arguments.
        split = [_host(result) for result in entry.execute(_as_called(entry, leaves))]
        if entry not in _PREPARED:
            _PREPARED[entry] = _Prepared(_reference(entry, plain))
        prepared = _PREPARED[entry]
        _tell(name, f"it is compiled, and runs {'with whole arguments' if prepared.reference.keeps_constraints else 'on one device'}")
        copied = [prepared.reference.place(leaf) for leaf in leaves]
        with prepared.reference.around():
            whole = prepared.run(copied)
            floors = [Floor(values, _spacing(leaf.dtype)) for values, leaf in zip(whole, entry.captured.outputs, strict=True)]
            differences = [distances(result, values) for result, values in zip(split, whole, strict=True)]
            excesses = _measured(floors, differences, prepared.samples(copied), name)
    rows = [
        VerifyRow(
            leaf.path,
            leaf.dtype,
            relative(difference, floor.reference),
            relative(floor.noise, floor.reference) if floor.num_samples else None,
            floor.reference.size,
            excess.num_over,
            excess.num_allowed,
            rtol,
        )
        for leaf, floor, difference, excess in zip(entry.captured.outputs, floors, differences, excesses, strict=True)
    ]
    report = VerifyReport(tuple(rows), entry.program.mesh.devices.size, prepared.reference.words)
    _LOG.info("%s was verified in %s: %s.", name, seconds_text(time.perf_counter() - start), str(report).partition("\n")[0])
    own = [
        *([_DRAWS_APART if prepared.reference.keeps_constraints else _DRAWS_IN_PARTS] if entry.captured.draws_apart else []),
        *([_COLLECTIVES] if entry.captured.is_rewritten and plain is None else []),
    ]
    if own:
        return report._replace(explanations=(*own, *entry.captured.deviations))
    return report if report.ok else report._replace(explanations=entry.captured.deviations)


def _tell(name: str, text: str) -> None:
    """Logs what is done next, and shows it in the line of a terminal."""
    _LOG.info("%s is verified: %s.", name, text)
    tell(text)


def _measured(
    floors: Sequence[Floor], differences: Sequence[np.ndarray], samples: Iterable[Sequence[np.ndarray]], name: str
) -> list[Excess]:
    """Takes samples of the noise until they explain every difference, or until there are no more."""

    def excesses() -> list[Excess]:
        return [floor.excess(difference) for floor, difference in zip(floors, differences, strict=True)]

    found = excesses()
    if all(excess.ok for excess in found):
        return found
    over = sum(not excess.ok for excess in found)
    _tell(name, f"{counted(over, 'result')} may differ by more than rounding, so rounding is measured by up to {_MOST_SAMPLES} more runs")
    for number, sample in enumerate(samples, 1):
        for floor, values in zip(floors, sample, strict=True):
            floor.add(values)
        tell(f"rounding measured by {counted(number, 'run')} of at most {_MOST_SAMPLES}")
        if number >= _FIRST_SAMPLES:
            found = excesses()
            if all(excess.ok for excess in found):
                break
    return found


class _Prepared:
    """A reference with its programs, which are compiled once for all calls of `verify` on an entry."""

    def __init__(self, reference: _Reference) -> None:
        self.reference, self._answers = reference, Answers()
        keeps = reference.keeps_constraints
        plain = for_one_run(reference.jaxpr, None, keep_constraints=keeps)
        recorded = for_one_run(reference.jaxpr, self._answers, keep_constraints=keeps)
        self._run = jax.jit(jexc.jaxpr_as_fun(recorded))
        self._noisy, self._largest = jax.jit(noisy_program(plain, self._answers)), largest_array(plain.jaxpr)

    def run(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        """Returns the results of the reference."""
        self._answers.clear()
        results = [_host(result) for result in self._run(*leaves)]
        jax.effects_barrier()
        return results

    def samples(self, leaves: Sequence[Any]) -> Iterator[list[np.ndarray]]:
        """Yields the results of the reference with other rounding errors each time."""
        for number in range(_MOST_SAMPLES):
            self._answers.rewind()
            noise = Noise.sample(number, self._largest, _AMPLITUDES[number % len(_AMPLITUDES)])
            yield [_host(result) for result in self._noisy(noise, *leaves)]


_PREPARED: WeakKeyDictionary[Entry, _Prepared] = WeakKeyDictionary()


def _reference(entry: Entry, plain: Captured | None) -> _Reference:
    """Chooses what a split step is compared with: the user's own step on one device.

    A step with a shard_map over several devices cannot run on one, and one that draws random numbers apart has others there, unless its
    reference draws apart too. They are compared with themselves on all devices with whole arguments.
    """
    captured, spans_processes = entry.captured, entry.spans_processes
    regions = [region for region in entry.regions if math.prod(size for _, size in region.mesh_axes) > 1]
    draws_others = captured.draws_apart and not (plain is not None and plain.draws_apart)
    if draws_others or any(plain is None or not region.is_loss for region in regions):
        everywhere = named_sharding(entry.program.mesh, ())

        def place(leaf: Any) -> Any:
            return on_all(to_host(leaf), everywhere) if spans_processes else _copied(leaf, everywhere)

        return _Reference("with whole arguments", captured.jaxpr, place, auto_axes, True)
    device = next(device for device in entry.program.mesh.devices.flat if device.process_index == jax.process_index())

    def around() -> Any:  # whatever mesh the user set
        return jax.set_mesh(make_mesh(LogicalMesh.of({"device": 1}), [device]))

    jaxpr = captured.jaxpr if plain is None else _as_results_of(captured, plain)
    return _Reference("on one", jaxpr, lambda leaf: _copied(leaf, device), around, False)


def _as_results_of(captured: Captured, plain: Captured) -> jexc.ClosedJaxpr:
    """Returns the user's own step with the results of the entry's: it leaves out the variables that it does not change."""
    body = plain.jaxpr.jaxpr
    made = {leaf.path: var for leaf, var in zip(plain.outputs, body.outvars, strict=True)}
    kept = [made[leaf.path] if leaf.path in made else body.invars[_carried_from(leaf)] for leaf in captured.outputs]
    return jexc.ClosedJaxpr(body.replace(outvars=kept), plain.jaxpr.consts)


def _carried_from(leaf: OutputLeaf) -> int:
    assert leaf.carried_from is not None, leaf.path
    return leaf.carried_from


def _as_called(entry: Entry, leaves: Sequence[Any]) -> list[Any]:
    if entry.spans_processes:
        return [on_all(to_host(leaf), target) for leaf, target in zip(leaves, entry.program.in_shardings, strict=True)]
    return [_copied(leaf, entry.type_as_called(index, leaf).sharding) for index, leaf in enumerate(leaves)]


def _copied(leaf: Any, target: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = jnp.array(np.array(to_host(jax.random.key_data(leaf))))
        return jax.device_put(jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf)), target)
    if isinstance(leaf, jax.Array):
        return jax.device_put(np.array(to_host(leaf)), target)
    return leaf if target is None else jax.device_put(leaf, target)


def _host(result: Any) -> np.ndarray:
    """Returns a result in the widest type of its kind."""
    if jnp.issubdtype(result.dtype, jax.dtypes.prng_key):
        result = jax.random.key_data(result)
    values = to_host(result)
    if not jnp.issubdtype(result.dtype, jnp.inexact):
        return np.asarray(values)
    return np.asarray(values, np.complex128 if jnp.issubdtype(result.dtype, jnp.complexfloating) else np.float64)


def _spacing(dtype: str) -> float | None:
    """Returns the spacing of a floating type at 1; None for other types."""
    if dtype.startswith("key"):
        return None
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.inexact):
        return None
    return float(jnp.finfo(dtype).eps)  # type: ignore[no-untyped-call]  # JAX gives it no types
