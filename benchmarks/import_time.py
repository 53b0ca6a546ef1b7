"""How long it takes to import spmdctx and to print the command line's help: processor time of fresh processes, in turns.

`python -m benchmarks.import_time`. Ratios are to `import jax, flax, optax` of the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

BASE = "import jax, flax, optax"
COMMANDS = {
    BASE: ["-c", BASE],
    "import spmdctx": ["-c", "import spmdctx"],
    "import jax, flax, optax, spmdctx": ["-c", f"{BASE}, spmdctx"],
    "from spmdctx import parallel": ["-c", "from spmdctx import parallel"],
    "the same after jax, flax, optax": ["-c", f"{BASE}; from spmdctx import parallel"],
    "a step is made": ["-c", f"{BASE}; from spmdctx import parallel; parallel(abs, parallel_mode='auto_parallel')"],
    "spmdctx --help": ["-m", "spmdctx", "--help"],
    "spmdctx plan --help": ["-m", "spmdctx", "plan", "--help"],
    "spmdctx k8s submit --help": ["-m", "spmdctx", "k8s", "submit", "--help"],
}


def processor_s(words: list[str]) -> float:
    """Returns user and system seconds of one Python process."""
    before = os.times()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5, help="processes of each kind, of which the median counts (default: %(default)s)")
    count = parser.parse_args().count
    rounds = [{name: processor_s(words) for name, words in COMMANDS.items()} for _ in range(count)]
    medians = {name: statistics.median(one[name] for one in rounds) for name in COMMANDS}
    for name, seconds in medians.items():
        print(f"{name:34} {seconds:6.2f} s  {seconds / medians[BASE]:5.2f}")


if __name__ == "__main__":
    main()
