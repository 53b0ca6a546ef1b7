"""Ways to plan a random program, and what must hold of each: right numbers, documented errors, an audit that holds, the same plan twice."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import spmdctx
from benchmarks.fuzz_programs import Program
from benchmarks.split_checks import FREE_LINKS, crash_text, plain_array
from spmdctx.plan.file import plan_json

SEARCHES = ("dynamic_programming", "sharding_propagation", "recursive_programming")
PLAIN = ("data_parallel", "semi_auto_parallel", "hybrid_parallel", "stand_alone")
LEVELS = ("level1", "level2", "level3")
TOLERANCES = {1.2e-7: 2e-4, 1e-3: 3e-2, 8e-3: 0.12, 0.125: 0.5, 0.25: 0.8}
"""Largest difference over the largest value, by the precision of the coarsest type on the way to a result."""


class Fault(NamedTuple):
    """One thing that does not hold: its kind, the options of the way, and what is wrong."""

    kind: str
    options: str
    text: str


class Outcome(NamedTuple):
    """What came of one way to plan a program: `refused` names a documented error."""

    options: str
    faults: tuple[Fault, ...] = ()
    refused: str = ""
    audited: bool = False
    is_split: bool = False


def ways(program: Program, rng: random.Random) -> Iterator[str]:
    """Yields the options of two ways to plan a program, as source: one that searches with dynamic programming, and another."""
    budgets = [int(program.bytes * share) for share in (0.2, 0.4, 0.7, 1.2, 3)] if rng.random() < 0.15 else []
    yield _searched(rng, "dynamic_programming") + (f", memory_bytes={max(64, rng.choice(budgets))}" if budgets else "")
    yield _searched(rng, rng.choice(SEARCHES[1:])) if rng.random() < 0.5 else _plain(rng, rng.choices(PLAIN, (4, 4, 1, 1))[0])


def _searched(rng: random.Random, search: str) -> str:
    options = [f"parallel_mode='auto_parallel', search_mode={search!r}, device_num={rng.choice((8, 8, 8, 8, 4, 2, 6, 5))}"]
    if rng.random() < 0.7:
        options.append("topology=FREE_LINKS")
    if rng.random() < 0.4:
        options.append(f"dataset_strategy={rng.choice(('data_parallel', 'full_batch'))!r}")
    if rng.random() < 0.2:
        options.append(_optimizer(rng))
    if rng.random() < 0.2:
        options.append(f"enable_alltoall={rng.random() < 0.7}")
    return ", ".join(options)


def _plain(rng: random.Random, mode: str) -> str:
    if mode == "stand_alone":
        return f"parallel_mode={mode!r}"
    options = [f"parallel_mode={mode!r}, device_num={rng.choice((8, 8, 8, 4, 2))}"]
    if mode == "semi_auto_parallel" and rng.random() < 0.3:
        options.append("dataset_strategy='full_batch'")
    if mode != "hybrid_parallel" and rng.random() < 0.4:
        options.append(_optimizer(rng))
    return ", ".join(options)


def _optimizer(rng: random.Random) -> str:
    config = f"{{'optimizer_level': {rng.choice(LEVELS)!r}, 'parallel_optimizer_threshold': 0}}"
    return f"enable_parallel_optimizer=True, parallel_optimizer_config={config}"


def options_of(source: str) -> dict[str, Any]:
    """Returns the options that a text stands for."""
    return dict(eval(f"dict({source})", {"FREE_LINKS": FREE_LINKS}))


class Reference:
    """The results on one device, and how much they change by noise in the arguments and by another order of sums."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.step, arguments = program.load()
        self.args = arguments()
        self.results = [_array(leaf) for leaf in jax.tree.leaves(jax.jit(self.step)(*self.args))]
        self._spread: list[float] | None = None

    @property
    def is_finite(self) -> bool:
        return all(bool(np.isfinite(one).all()) for one in self.results if one.dtype.kind in "fc")

    def spread(self) -> list[float]:
        """Returns for each result the largest difference of runs that should agree but for rounding."""
        if self._spread is None:
            runs = [self._noisy(seed) for seed in range(3)]
            with jax.disable_jit():
                runs.append([_array(leaf) for leaf in jax.tree.leaves(self.step(*self.args))])
            self._spread = [max(_difference(run[place], one) for run in runs) for place, one in enumerate(self.results)]
        return self._spread

    def _noisy(self, seed: int) -> list[np.ndarray]:
        random = np.random.default_rng(seed)

        def shaken(leaf: Any) -> Any:
            if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize < 2:
                return leaf
            eps = float(jnp.finfo(leaf.dtype).eps)
            return (leaf.astype(jnp.float32) * (1 + 2 * eps * random.choice((-1, 0, 1), leaf.shape))).astype(leaf.dtype)

        return [_array(leaf) for leaf in jax.tree.leaves(jax.jit(self.step)(*map(shaken, self.args)))]


def _array(leaf: Any) -> np.ndarray:
    found = plain_array(leaf)
    return found if found.dtype.kind in "biufc" else found.astype(np.float32)


def _difference(got: np.ndarray, want: np.ndarray) -> float:
    """Returns the largest difference; infinite where shapes, types or the places of numbers that are not finite differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if got.dtype.kind in "biu":
        return float((got != want).any())
    got, want = (one.astype(np.complex128 if one.dtype.kind == "c" else np.float64) for one in (got, want))
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.where(same, 0, got - want))
    return float(np.nan_to_num(apart, nan=np.inf).max(initial=0))


def compare(reference: Reference, got: Any) -> str:
    """Returns what differs from one device, or nothing."""
    results = [_array(leaf) for leaf in jax.tree.leaves(got)]
    if len(results) != len(reference.results):
        return f"{len(results)} results for {len(reference.results)}"
    eps = reference.program.eps
    for place, (own, want) in enumerate(zip(results, reference.results, strict=True)):
        precision = eps[min(place, len(eps) - 1)]
        tolerance = max((limit for known, limit in TOLERANCES.items() if known <= precision), default=2e-4)
        scale = (
            float(np.abs(want.astype(np.float64) if want.dtype.kind != "c" else want).max(initial=0)) if want.dtype.kind in "fc" else 0.0
        )
        difference = _difference(own, want)
        if difference <= tolerance * max(scale, 1e-3) * (want.dtype.kind in "fc"):
            continue
        noise = reference.spread()[place]
        if difference > 20 * noise:
            form = f"{want.dtype}{list(want.shape)} (got {own.dtype}{list(own.shape)})"
            return f"result {place}: {form} differs by {difference:.3g} of {scale:.3g}, noise {noise:.1g}"
    return ""


def try_way(reference: Reference, source: str) -> Outcome:
    """Plans, runs and audits a program in one way, and plans it once more."""
    options = options_of(source)
    faults: list[Fault] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = _held(reference, source, options, faults)
        faults += [
            Fault("warning", source, f"{one.category.__name__}: {one.message} ({one.filename}:{one.lineno})")
            for one in caught
            if issubclass(one.category, RuntimeWarning) and "spmdctx" in one.filename
        ]
        return outcome._replace(faults=tuple(faults))
    except spmdctx.SpmdctxError as error:
        return Outcome(source, refused=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    except Exception as error:
        return Outcome(source, (*faults, Fault("crash", source, crash_text(error))))


def _held(reference: Reference, source: str, options: Mapping[str, Any], faults: list[Fault]) -> Outcome:
    step, args = reference.step, reference.args
    made = spmdctx.parallel(step, **options)
    plan = made.plan(*args)
    again = spmdctx.parallel(step, **options).plan(*args)
    if plan_json(plan) != plan_json(again):
        faults.append(Fault("two plans", source, f"fingerprints {plan.fingerprint[:12]} and {again.fingerprint[:12]}"))
    wrong = compare(reference, made(*args))
    if wrong:
        faults.append(Fault("numbers", source, wrong))
    report = made.audit(*args)
    if not report.ok:
        faults.append(Fault("audit", source, " ".join(str(report).split())[:1500]))
    is_split = any(any(dim for dim in sharding) for sharding in (leaf.sharding for leaf in plan.inputs))
    return Outcome(source, audited=True, is_split=is_split)


def check(program: Program, rng: random.Random, report: Callable[[str], None] = lambda _: None) -> list[Outcome] | None:
    """Checks a program in two ways; None if one device itself gives no finite numbers. `report` hears of each way before it is tried."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reference = Reference(program)
        except Exception:
            return None
    if not reference.is_finite:
        return None
    outcomes = []
    for source in ways(program, rng):
        report(source)
        outcomes.append(try_way(reference, source))
    return outcomes
