"""Runs a command, such as `ray start --block`, until it ends or the process that has asked for it does.

It is a program of its own, run by its path: it imports nothing that is slow.
"""

import os
import signal
import subprocess
import sys
import time

_LOOK_S = 0.5
_PATIENCE_S = 10.0


def main() -> int:
    """Runs the command of the arguments; returns its exit code."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Shells have what runs in the background ignore SIGINT.
        signal.signal(number, signal.default_int_handler)
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    try:
        while process.poll() is None and os.getppid() == parent:
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        pass
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
