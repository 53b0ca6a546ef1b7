"""A pipelined training that is stopped and goes on: run by `spmdctx launch`; each step's loss goes to a file, bit for bit.

Arguments: the folder, the number of steps, that of stages (1 for none), and "step:process" for a process to kill itself there.
"""

import os
import signal
import sys
import time
from pathlib import Path

import jax

import spmdctx
from spmdctx import communication
from tests.processes import work_pipeline as work

communication.init("gloo")
jax.config.update("jax_enable_x64", True)
folder, num_steps, stages = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
kill_step, kill_process = map(int, (sys.argv[4] if len(sys.argv) > 4 else "-1:-1").split(":"))
data = work.batches(num_steps + 1)
options = {"pipeline_stages": stages} if stages > 1 else {"grad_accumulation_step": work.MICRO}
step = spmdctx.parallel(work.train_step, parallel_mode="auto_parallel", topology="cpu", **options)
params, state = step.init(work.create, jax.random.key(0), batch=data[0])
with spmdctx.CheckpointManager(folder / "checkpoints", every=2) as checkpoints:
    restored = checkpoints.restore({"params": params, "state": state})
    params, state = restored.state["params"], restored.state["state"]
    for number in range(restored.step + 1, num_steps + 1):
        if (number, jax.process_index()) == (kill_step, kill_process):
            checkpoints.wait()
            (folder / f"killed.{number}").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        params, state, value, _ = step(params, state, data[number])
        if jax.process_index() == 0:
            with (folder / "losses.txt").open("a") as lines:
                lines.write(f"{stages} {number} {float(value).hex()}\n")
        checkpoints.save(number, {"params": params, "state": state})
