"""The whole acceptance matrix, cell by cell: `python -m benchmarks.matrix [--only 'transformer.*-8'] [--json FILE]`.

A row per cell, auto_parallel by every search: whether outputs and new state equal one device's, the share
of FLOPs split n ways, whether the audit holds, and the causes where one of them does not. Ends with the shares over the
matrix; exits with 1 where a cell differs from one device, too little is split, or fewer than 95 % of the audits hold.
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
import traceback
from pathlib import Path

import jax

from tests.zoo.matrix import ALL_CELLS, Cell, Outcome, covering_cells, run_cell

MIN_AUDITS = 0.95


def main() -> int:
    """Runs the cells that the arguments choose."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose name it matches, such as 'transformer.*-8'")
    parser.add_argument("--pairwise", action="store_true", help="the covering array that the tests run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON lines")
    arguments = parser.parse_args()
    cells = [cell for cell in (covering_cells() if arguments.pairwise else ALL_CELLS) if re.search(arguments.only, str(cell))]
    print(f"{len(cells)} cells, jax {jax.__version__}, {os.cpu_count()} cores")
    print(f"{'cell':<62} {'equal':<9} {'split':<6} {'audit':<6} seconds  causes", flush=True)
    rows = [_row(cell) for cell in cells]
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return _summary(rows)


def _row(cell: Cell) -> dict[str, object]:
    start = time.perf_counter()
    try:
        outcome = run_cell(cell)
        row = _judged(cell, outcome)
    except Exception as error:  # a cell that fails is a row too
        last = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} ({Path(last.filename).name}:{last.lineno})"
        row = {"cell": str(cell), "equal": False, "difference": None, "split": 0.0, "split_ok": False, "audit": False, "causes": [cause]}
    row["seconds"] = round(time.perf_counter() - start, 1)
    difference = "error" if row["difference"] is None else f"{row['difference']:.1e}"
    causes = "; ".join(map(str, row["causes"]))  # type: ignore[arg-type]  # a row read from JSON
    print(f"{cell!s:<62} {difference:<9} {row['split']:<6.3f} {'ok' if row['audit'] else 'NO':<6} {row['seconds']:<8} {causes}", flush=True)
    jax.clear_caches()
    return row


def _judged(cell: Cell, outcome: Outcome) -> dict[str, object]:
    split_ok = outcome.split_share >= cell.min_split_share
    causes = []
    if not outcome.equal:
        causes.append(f"{outcome.place} differs")
    if not split_ok:
        causes.append(f"{outcome.split_share:.2f} of the FLOPs split")
    if not outcome.audit.ok:
        causes.append(f"found {outcome.audit.found_share:.2f}, unplanned {outcome.audit.unplanned_share:.2f}")
        worst = sorted(outcome.audit.unplanned, key=lambda one: -one.total_bytes)[:3]
        causes += [f"unplanned {one.kind} {'+'.join(one.axes)} {one.total_bytes} B {one.source}" for one in worst]
        causes += [
            f"missing {one.kind} {'+'.join(one.axes)} {one.payload_bytes}x{one.repeats} B {one.source}"
            for one in sorted(outcome.audit.missing, key=lambda one: -one.payload_bytes * one.repeats)[:3]
        ]
    return {
        "cell": str(cell),
        "equal": outcome.equal,
        "difference": outcome.difference,
        "split": outcome.split_share,
        "split_ok": split_ok,
        "audit": outcome.audit.ok,
        "causes": causes,
    }


def _summary(rows: list[dict[str, object]]) -> int:
    count = len(rows)
    equal, split, audits = (sum(bool(row[name]) for row in rows) for name in ("equal", "split_ok", "audit"))
    print(f"equal to one device {equal}/{count}, split as far as they must {split}/{count}, audit ok {audits}/{count}")
    return 0 if equal == split == count and audits >= MIN_AUDITS * count else 1


if __name__ == "__main__":
    sys.exit(main())
