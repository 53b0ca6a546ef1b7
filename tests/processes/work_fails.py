"""A script that fails on the process that starts the communication, while the others go on."""

import time

import jax

from spmdctx import communication

communication.init("gloo")
if jax.process_index() == 0:
    raise ValueError("no such file: train.txt")
time.sleep(60)
