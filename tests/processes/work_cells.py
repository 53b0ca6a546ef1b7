"""Run by `spmdctx launch` on each process: the cells of the matrix, and all else that a job is asked."""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from spmdctx import communication
from spmdctx.plan.file import plan_json
from tests.processes.asked import everything
from tests.processes.cells import CELLS, run

out = Path(sys.argv[1])
communication.init("gloo")
process = jax.process_index()
jax.config.update("jax_enable_x64", True)
for cell in CELLS[jax.process_count(), jax.local_device_count()]:
    step, plan, args, found = run(cell)
    (out / f"{cell}.{process}.json").write_text(plan_json(plan))
    if process == 0:
        np.savez(out / f"{cell}.npz", **found)
    print(cell, flush=True)
jax.config.update("jax_enable_x64", False)
(out / f"asked.{process}.json").write_text(json.dumps(everything()))
