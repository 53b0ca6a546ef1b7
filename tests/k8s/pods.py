"""Plays the pods of a job as processes of this machine: run as a module, it gets what each finds, and tells how each has ended.

Where the system allows it, they are in a network of their own, in which the pods' names lead to it: then nothing in their environment
differs from what the cluster would set. Elsewhere the address, and only that, is one of this machine.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

from spmdctx.communication.launch.environment import free_port
from tests.k8s.replay import containers_of

ROOT = Path(__file__).parents[2]
_KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_ENTER = 'ip link set lo up && mount --bind "$0" /etc/hosts && exec "$@"'


def play(manifest, folder, *, timeout_s):
    """Returns the exit code and the output of each process, in the order of their numbers."""
    containers = containers_of(manifest)
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {socket.gethostname()} {' '.join(sorted({one.host for one in containers}))}\n")
    prefix = ["unshare", "-Urnm", "sh", "-c", _ENTER, str(hosts)] if has_namespaces(hosts) else []
    own = {} if prefix else {"SPMDCTX_ADDRESS": f"127.0.0.1:{free_port()}"}
    pods = [{"environ": {**one.environ, **own}, "command": one.command} for one in containers]
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "tests.k8s.pods", str(timeout_s)],
        input=json.dumps(pods),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s + 30,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


@cache
def has_namespaces(hosts):
    words = ["unshare", "-Urnm", "sh", "-c", _ENTER, str(hosts), "true"]
    return shutil.which("unshare") is not None and subprocess.run(words, capture_output=True, timeout=30).returncode == 0


def run(pods, timeout_s):
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    running = []
    for pod in pods:
        program, *words = pod["command"]
        assert program == "python"
        running.append(
            subprocess.Popen(
                [sys.executable, *words],
                env={**kept, **pod["environ"]},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    end = time.monotonic() + timeout_s
    try:
        written = [process.communicate(timeout=max(0.1, end - time.monotonic()))[0] for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return [(process.returncode, text) for process, text in zip(running, written, strict=True)]


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin), float(sys.argv[1]))))
