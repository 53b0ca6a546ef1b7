"""Jobs as their pods run them, on this machine, beside the same training by `spmdctx launch`: the losses are equal to the bit.

    python -m benchmarks.k8s_run [--only jobset,slices,containers,trainjob,rayjob]

Each pod is a process, or a node of Ray, with exactly the environment that its manifest and its operator give it (`tests/k8s/replay.py`).
Exits with 1 if a loss differs or a process fails.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spmdctx.k8s import JobOptions, manifests
from spmdctx.k8s.job.options import TRAINER, Pods, Servers
from tests.k8s.pods import play
from tests.k8s.replay import containers_of, ray_resources
from tests.processes.jobs import run_module

STEPS, LIMIT_S = 6, 120
TRAINING, SERVED = "tests.processes.work_train", "benchmarks.ps_work"
KINDS: dict[str, dict[str, Any]] = {
    "jobset": {},
    "slices": {"slices": 2},
    "containers": {"containers": 2},
    "trainjob": {"operator": TRAINER},
}
STORE_BYTES = 100 << 20


def launched() -> list[str]:
    """Returns the losses of the training by `spmdctx launch`."""
    folder = Path(tempfile.mkdtemp(prefix="k8s-run-"))
    run_module(TRAINING, [str(folder), str(STEPS)], 2, 2, timeout_s=LIMIT_S)
    return (folder / "losses.txt").read_text().splitlines()


def as_pods(kind: str) -> list[str]:
    """Returns the losses of the training by two pods, or two containers of one."""
    folder = Path(tempfile.mkdtemp(prefix="k8s-run-"))
    pods = Pods(token=("train", "token"))
    job = JobOptions("demo", "train:1", ("-m", TRAINING, str(folder), str(STEPS)), processes=2, devices=2, pods=pods, **KINDS[kind])
    for code, text in play(manifests(job)[0], folder, timeout_s=LIMIT_S):
        if code:
            print(text)
    found = folder / "losses.txt"
    return found.read_text().splitlines() if found.exists() else []


def served(words: list[str], environ: dict[str, str]) -> list[str]:
    """Returns what workers say: losses and the last state, each to the bit."""
    done = subprocess.run(
        [sys.executable, "-m", *words], env={**os.environ, **environ}, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False
    )
    if done.returncode:
        print(done.stdout, done.stderr)
    return sorted({line.partition("] ")[2] for line in done.stdout.splitlines() if "STEP" in line or "STATE" in line})


def launched_with_servers() -> list[str]:
    """Returns what workers say by `spmdctx launch` on a cluster of its own."""
    folder = tempfile.mkdtemp(prefix="k8s-run-")
    words = ["spmdctx", "launch", "--servers", "2", "--workers", "2", "--folder", folder, "-m", SERVED, str(STEPS)]
    return served(words, {"JAX_PLATFORMS": "cpu"})


def as_rayjob() -> list[str]:
    """Returns what workers say where the head runs the entrypoint, and nodes of Ray are the pods of the groups."""
    claim = tempfile.mkdtemp(prefix="k8s-run-")
    pods = Pods(claim="c", checkpoint_path=claim)
    (manifest,) = manifests(JobOptions("demo", "train:1", ("-m", SERVED, str(STEPS)), servers=Servers(2, 2), pods=pods))
    with cluster(manifest) as address:
        environ = {
            name: text for name, text in containers_of(manifest)[0].environ.items() if not name.startswith("RAY_") and name != "HOME"
        }
        return served(manifest["spec"]["entrypoint"].split(), {**environ, "RAY_ADDRESS": address})


@contextmanager
def cluster(manifest: dict[str, Any]) -> Iterator[str]:
    """Starts a head and a node for each pod of each group, as their parameters of `ray start` say; gives the address."""
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    from ray.cluster_utils import Cluster

    spec = manifest["spec"]["rayClusterSpec"]
    cpus = int(spec["headGroupSpec"]["rayStartParams"]["num-cpus"])
    whole = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False, "object_store_memory": STORE_BYTES})
    try:
        for group in spec["workerGroupSpecs"]:
            for _ in range(group["replicas"]):
                whole.add_node(num_cpus=1, resources=ray_resources(group), object_store_memory=STORE_BYTES)
        yield whole.address
    finally:
        whole.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join((*KINDS, "rayjob")))
    asked = parser.parse_args().only.split(",")
    right = True
    expected: dict[Callable[[], list[str]], list[str]] = {}
    for kind in asked:
        by_launch = launched_with_servers if kind == "rayjob" else launched
        if by_launch not in expected:
            expected[by_launch] = by_launch()
        start = time.perf_counter()
        found = as_rayjob() if kind == "rayjob" else as_pods(kind)
        same = bool(found) and found == expected[by_launch]
        right &= same
        print(f"{kind:10} {len(found)} lines {'equal to the bit' if same else 'DIFFER'}, {time.perf_counter() - start:.1f} s", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
