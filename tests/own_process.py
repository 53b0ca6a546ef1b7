"""Numbers that a script of its own process prints: the benchmarks' programs are the zoo's, made larger for good."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[1])


def numbers(script):
    """The integers on each line."""
    env = {**os.environ, "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=540)
    return [[*map(int, line.split())] for line in done.stdout.splitlines()]
