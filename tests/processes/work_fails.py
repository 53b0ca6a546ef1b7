"""A script that fails on the process that starts the communication, or ends on the other one, while the rest go on."""

import os
import signal
import sys
import time

import jax

from spmdctx import communication

how = sys.argv[1]
if how == "beside":  # JAX is connected by the user
    address, *place = (os.environ[f"SPMDCTX_{name}"] for name in ("ADDRESS", "NUM_PROCESSES", "PROCESS_ID"))
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(address, *map(int, place), cluster_detection_method="deactivate")
communication.init("gloo")
if how == "error" and jax.process_index() == 0:
    raise ValueError("no such file: train.txt")
if how == "exit" and jax.process_index() == 1:
    sys.exit(5)
if how == "beside" and jax.process_index() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "terminated":
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
