"""Run by `spmdctx launch` on each process: the cells of the matrix, and what a step can be asked on several processes."""

import sys
from pathlib import Path

import jax
import numpy as np

from spmdctx import communication
from spmdctx.plan.file import plan_json
from tests.processes.cells import CELLS, run

out = Path(sys.argv[1])
communication.init("gloo")
process = jax.process_index()
jax.config.update("jax_enable_x64", True)
for cell in CELLS:
    step, plan, args, found = run(cell)
    (out / f"{cell}.{process}.json").write_text(plan_json(plan))
    if process == 0:
        np.savez(out / f"{cell}.npz", **found)
    print(cell, flush=True)
