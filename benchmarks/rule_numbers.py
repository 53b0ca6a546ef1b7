"""Splits every op of JAX's own test programs in many legal ways, as spmdctx lowers them, and compares the numbers with one device's.

    python -m benchmarks.rule_numbers [--count 400] [--most 6] [--seed 0] [--only conv]

Draws `--count` of JAX's primitive harnesses and adds the small programs of `tests/rules`. Each op that has a rule gets at most `--most`
splits on each mesh (2x4 and 2x2x2). Batches of programs run in processes of their own, so that one that corrupts memory is seen;
what such a process had left is run again without that program. Exits with 1 where numbers are wrong or a process dies.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
BATCH = 20
_UNLIKE = ("rng_uniform", "random_", "eigh", "svd", "schur", "eig_", "householder", "approx_top_k")
"""Harnesses whose results have no one right value, or are too near to rounding errors; the small programs have these ops."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--most", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--names", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.names:
        _work(json.loads(options.names), options.most)
        return
    names = _drawn(options)
    print(f"{len(names)} programs, at most {options.most} splits of an op on each mesh", flush=True)
    totals: Counter[str] = Counter()
    started = time.time()
    for first in range(0, len(names), BATCH):
        _run(names[first : first + BATCH], options.most, totals)
        print(f"{time.time() - started:.0f} s: {dict(totals)}", flush=True)
    print(f"{totals['programs']} programs, {totals['runs']} splits, {totals['refused']} that JAX or XLA refuse,")
    print(f"{totals['wrong']} wrong, {totals['died']} processes died, {time.time() - started:.0f} s")
    sys.exit(int(bool(totals["wrong"] or totals["died"])))


def _drawn(options: argparse.Namespace) -> list[str]:
    done = _process(["--names", json.dumps(["list"])])
    harnesses = [name for name in json.loads(done.stdout.splitlines()[-1]) if options.only in name]
    chosen = [name for name in harnesses if not name.startswith("small/")]
    drawn = random.Random(options.seed).sample(chosen, min(options.count, len(chosen)))
    return sorted(drawn) + [name for name in harnesses if name.startswith("small/")]


def _run(names: list[str], most: int, totals: Counter[str]) -> None:
    while names:
        done = _process(["--names", json.dumps(names), "--most", str(most)])
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for row in rows:
            totals["programs"] += 1
            totals["runs"] += row["runs"]
            totals["refused"] += bool(row["refused"])
            if row["refused"]:
                print(f"refused {row['name']}: {row['refused']}", flush=True)
            totals["wrong"] += len(row["wrong"])
            for text in row["wrong"]:
                print(f"WRONG {row['name']}: {text}", flush=True)
        if done.returncode == 0:
            return
        totals["died"] += 1
        print(f"DIED in {names[len(rows)]}: {done.stderr[-300:]}", flush=True)
        names = names[len(rows) + 1 :]


def _process(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-m", "benchmarks.rule_numbers", *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


def _work(names: list[str], most: int) -> None:
    """Runs the named programs in this process, and prints a row for each; or lists all names."""
    programs = _programs()
    if names == ["list"]:
        print(json.dumps(list(programs)))
        return
    for name in names:
        print(json.dumps({"name": name, **_row(programs[name], most)}), flush=True)


def _programs() -> dict[str, Any]:
    """All programs by name: those of the tests, and JAX's harnesses that CPUs can run."""
    from benchmarks.harness_cases import all_harnesses
    from tests.rules.small_programs import FAMILIES

    found: dict[str, Any] = {f"small/{family}/{index}": small for family, smalls in FAMILIES.items() for index, small in enumerate(smalls)}
    for name, harness in all_harnesses().items():
        if harness.filter("cpu") and not any(part in name for part in _UNLIKE):
            found[name] = harness
    return found


def _row(program: Any, most: int) -> dict[str, Any]:
    import jax

    from tests.rules.sweep import Small, runs, traced, wrong

    refused, found, chosen = "", [], []
    try:
        if not isinstance(program, Small):
            args = program.dyn_args_maker(np.random.RandomState(0))
            program = Small(program.dyn_fun, tuple(map(jax.numpy.asarray, args)))
        made = traced(program)
        chosen = runs(made[0], most)
        tolerance = 1e-4 if all(np.dtype(value.dtype).itemsize > 2 for value in made[0].graph.values if value.dtype != "key") else 3e-2
        found = wrong([made], chosen, tolerance)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"[:300]
    return {"runs": len(chosen), "refused": refused, "wrong": found}


if __name__ == "__main__":
    main()
