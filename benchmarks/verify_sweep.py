"""Right steps that `verify` must not accuse: `python -m benchmarks.verify_sweep [--only REGEX] [--json FILE] [--again]`.

A row for each program, optimizer, type and way of planning: the verdict, the largest difference, its noise, and how many
values are beyond their own noise, and may be. Rows go to a file of JSON lines; a second run goes on where the first one stopped. Exits
with 1 where a step is accused, or fails.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

import spmdctx
from benchmarks.verify_programs import OPTIMIZERS, OWN, TYPES, VALUE_AND_GRAD, ZOO
from spmdctx.errors import ContextError
from spmdctx.machine.presets import PRESETS

FREE = replace(PRESETS["cpu"], device="slow devices with fast links", peak_flops_per_s=1e8, memory_bytes_per_s=1e8, latency_s=1e-9)
"""Communication costs next to nothing: the search splits all it can."""

_ALL_STATE = {"optimizer_level": "level3", "parallel_optimizer_threshold": 0}

MODES: dict[str, dict[str, Any]] = {
    "auto": {"parallel_mode": "auto_parallel", "topology": FREE},
    "batch": {"parallel_mode": "auto_parallel", "topology": FREE, "dataset_strategy": "data_parallel"},
    "data": {"parallel_mode": "data_parallel"},
    "zero3": {"parallel_mode": "semi_auto_parallel", "enable_parallel_optimizer": True, "parallel_optimizer_config": _ALL_STATE},
    "local": {"parallel_mode": "data_parallel", "gradients_mean": True},
    "micro": {"parallel_mode": "semi_auto_parallel", "grad_accumulation_step": 2},
}


_GOOD = ("same", "refused", "not made")


class Case(NamedTuple):
    """One step and the way in which it is planned."""

    program: str
    optimizer: str
    dtype: str
    mode: str

    def __str__(self) -> str:
        return "-".join(self)


def cases() -> Iterator[Case]:
    """Yields every case once; those that show most kinds come first."""
    seen: set[Case] = set()
    for case in _in_order():
        if case not in seen:
            seen.add(case)
            yield case


def _in_order() -> Iterator[Case]:
    modes = ("auto", "data", "batch")
    models = {program.split("-")[0]: program for program in reversed(ZOO)}
    for number, program in enumerate((*OWN, *models.values(), *ZOO)):
        yield Case(program, "adamw", "bfloat16" if number % 2 else "float32", modes[number % 3])
    for number, optimizer in enumerate(OPTIMIZERS):
        yield Case(("haiku", "attention", "scanned")[number % 3], optimizer, ("bfloat16", "float32")[number % 2], modes[number // 2 % 3])
    yield from (Case(program, "adamw", dtype, "auto") for program in (*OWN, *ZOO) for dtype in ("bfloat16", "float32"))
    yield from (Case(program, "adamw", "float16", "batch") for program in OWN)
    yield from (Case("haiku", "adamw", dtype, mode) for dtype in ("float32", "bfloat16") for mode in MODES)
    for program in ("haiku", "attention", "scanned"):
        yield from (Case(program, optimizer, dtype, mode) for optimizer in OPTIMIZERS for dtype in TYPES for mode in ("data", "auto"))
    yield from (Case(program, "adamw", dtype, mode) for program in ("attention", "scanned") for dtype in TYPES for mode in MODES)
    yield from (Case(program, "adamw", dtype, mode) for mode in ("batch", "data") for dtype in TYPES for program in ZOO)


def main() -> int:
    """Verifies the steps that the arguments choose."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name it matches, such as 'haiku-.*-bfloat16-'")
    parser.add_argument("--count", type=int, default=0, help="the first so many of these (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where rows are kept, as JSON lines; outside of the repository")
    parser.add_argument("--again", action="store_true", help="run again the steps that were accused or failed")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no case after so many (default: no limit)")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if re.search(arguments.only, str(case))]
    chosen = chosen[: arguments.count or len(chosen)]
    known = _known(arguments.json, arguments.again)
    print(f"{len(chosen)} cases, jax {jax.__version__}, {os.cpu_count()} cores")
    print(f"{'case':<46} {'verdict':<8} {'differs':<8} {'noise':<8} {'over':<8} seconds  worst result", flush=True)
    start, rows = time.monotonic(), []
    for case in chosen:
        if str(case) not in known:
            if arguments.minutes and time.monotonic() - start > 60 * arguments.minutes:
                continue
            known[str(case)] = _row(case)
            _show(known[str(case)])
            if arguments.json:
                with arguments.json.open("a") as stream:
                    stream.write(json.dumps(known[str(case)]) + "\n")
        rows.append(known[str(case)])
    return _summary(rows)


def _known(file: Path | None, again: bool) -> dict[str, dict[str, Any]]:
    if file is None or not file.exists():
        return {}
    rows = {row["case"]: row for row in map(json.loads, file.read_text().splitlines())}
    return {name: row for name, row in rows.items() if not (again and row["verdict"] not in _GOOD)}


def _row(case: Case) -> dict[str, Any]:
    start = time.process_time()
    row: dict[str, Any] = {"case": str(case), "verdict": "error", "differs": None, "noise": None, "over": [0, 0], "worst": ""}
    try:
        row |= _verified(case)
    except NotImplementedError as error:  # a model's own start has no form in this type
        row |= {"verdict": "not made", "worst": str(error).splitlines()[0][:200]}
    except ContextError as error:
        row |= {"verdict": "refused", "worst": str(error).splitlines()[0]}
    except Exception as error:  # a case that fails is a row too
        if not _runs_alone(case):
            row["verdict"] = "not made"
        row["worst"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    row["seconds"] = round(time.process_time() - start, 1)
    jax.clear_caches()
    return row


def _made(case: Case) -> tuple[Any, Any]:
    make = {**OWN, **ZOO}[case.program]
    return make(TYPES[case.dtype], OPTIMIZERS[case.optimizer](), VALUE_AND_GRAD.get(case.mode, jax.value_and_grad))


def _runs_alone(case: Case) -> bool:
    """Returns whether one device runs the step by itself."""
    fn, args = _made(case)
    try:
        jax.block_until_ready(jax.jit(lambda *own: fn(*own))(*args))
    except Exception:  # whatever JAX says of what a backend does not have
        return False
    return True


def _verified(case: Case) -> dict[str, Any]:
    fn, args = _made(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = spmdctx.parallel(fn, **MODES[case.mode]).verify(*args)
    worst = report.worst
    assert worst is not None
    found = {"verdict": "same" if report.ok else "ACCUSED", "differs": worst.difference, "noise": worst.noise, "worst": str(worst)}
    return found | {
        "over": max((row.num_over, row.num_allowed) for row in report.rows),
        "accused": [str(row) for row in report.rows if not row.ok],
    }


def _show(row: dict[str, Any]) -> None:
    numbers = " ".join(f"{'' if row[name] is None else format(row[name], '.1e'):<8}" for name in ("differs", "noise"))
    print(
        f"{row['case']:<46} {row['verdict']:<8} {numbers} {'/'.join(map(str, row['over'])):<8} {row['seconds']:<8} {row['worst'][:150]}",
        flush=True,
    )


def _summary(rows: list[dict[str, Any]]) -> int:
    bad = [row for row in rows if row["verdict"] not in _GOOD]
    good, seconds = sum(row["verdict"] == "same" for row in rows), sum(row["seconds"] for row in rows)
    print(f"{good} the same, {len(bad)} accused or failed, {len(rows) - good - len(bad)} refused or not made, {seconds:.0f} s")
    for row in bad:
        print(f"  {row['case']}: {row['worst']}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
