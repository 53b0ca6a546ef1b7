"""A script that fails on the process that starts the communication, or ends on the other one, while the rest go on."""

import os
import signal
import sys
import time

import jax

from spmdctx import communication

communication.init("gloo")
how = sys.argv[1]
if how == "error" and jax.process_index() == 0:
    raise ValueError("no such file: train.txt")
if how == "exit" and jax.process_index() == 1:
    sys.exit(5)
if how == "terminated":
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
