"""Workers, servers and whole nodes of a job are killed at random steps: it comes to the bits of a job that was left alone.

    python -m benchmarks.ps_faults [--kills 20] [--seed 0] [--only processes|nodes]

One job loses processes on one machine, another one nodes of a cluster of Ray, whose nodes are processes of this machine. The recovery of a
kill is the time from it until a worker has seen the second new step done: the first may have been on its way.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from benchmarks.ps_jobs import Running, actors

STEPS_A_KILL, FIRST, PAUSE_S = 24, 6, 0.05
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 2000}
HEALTH |= {"health_check_failure_threshold": 3}


Killer = Callable[[str], Callable[[], None]]
"""Finds what is to be killed, and returns what kills it."""


class Kill(NamedTuple):
    """One kill: what was killed, the last step that was seen done before, and the seconds until the job went on."""

    kind: str
    step: int
    seconds: float


def train(num_kills: int, *arguments: str) -> Running:
    """Starts a job of 2 servers and 3 workers in a folder of its own, with steps for so many kills."""
    steps = FIRST + STEPS_A_KILL * num_kills
    folder = tempfile.mkdtemp(prefix="ps-faults-")
    common = ["--servers", "2", "--workers", "3", "--folder", folder, "--timeout", "500"]
    return Running([*common, *arguments, "-m", "benchmarks.ps_work", str(steps), "--pause", str(PAUSE_S)])


def undisturbed(num_kills: int) -> Running:
    """Runs a job of as many steps that is left alone."""
    with train(num_kills) as job:
        job.finish(500)
    return job


def suffer(job: Running, kinds: list[str], rng: random.Random, killer: Killer) -> list[Kill]:
    """Kills what is named, one after the other, each some steps after the last."""
    found = []
    for number, kind in enumerate(kinds):
        job.wait_for(max(FIRST + number * STEPS_A_KILL, job.last) + rng.randrange(STEPS_A_KILL // 2))
        kill = killer(kind)
        time.sleep(rng.random() * 2 * PAUSE_S)
        step, start = job.last, time.monotonic()
        kill()
        job.wait_for(job.last + 2)
        found.append(Kill(kind, step, time.monotonic() - start))
    return found


@contextmanager
def cluster() -> Iterator[tuple[str, Killer]]:
    """Starts a head, two nodes for servers and two for workers; gives its address, and what kills a node and adds another one."""
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    from ray.cluster_utils import Cluster

    whole = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20, "_system_config": HEALTH},
    )

    def node(kind: str) -> Any:
        return whole.add_node(num_cpus=1, resources={kind: 1}, object_store_memory=100 << 20)

    kinds = {"node of servers": "ps", "node of workers": "worker"}
    nodes = {kind: [node(kind), node(kind)] for kind in kinds.values()}

    def killer(kind: str) -> Callable[[], None]:
        own, actor = nodes[kinds[kind]], {"ps": "Server", "worker": "Worker"}[kinds[kind]]
        lost = max(own, key=lambda one: len(actors(actor, one.all_processes["raylet"][0].process.pid)))
        own.append(node(kinds[kind]))
        own.remove(lost)
        return lambda: whole.remove_node(lost, allow_graceful=False)

    try:
        yield whole.address, killer
    finally:
        whole.shutdown()


def report(title: str, kills: list[Kill], job: Running, whole: Running) -> bool:
    """Prints each kill, and whether the steps after it and the end are those of the job that was left alone."""
    code = job.finish()
    ends = [kill.step for kill in kills[1:]] + [max(whole.losses)]
    print(f"{title}: exit code {code}")
    print("kind               at step  recovery s  bit-identical")
    is_right = code == 0 and set(job.states) == set(whole.states) and len(job.states) == 3
    for kill, end in zip(kills, ends, strict=True):
        same = all(job.losses.get(step) == whole.losses.get(step) for step in range(kill.step, end + 1))
        print(f"{kill.kind:18} {kill.step:7} {kill.seconds:11.1f}  {'yes' if same else 'NO'}")
        is_right &= same
    print(f"last state bit-identical: {'yes' if set(job.states) == set(whole.states) else 'NO'}; other lines: {len(job.other)}\n")
    for line in job.other[:5]:
        print("   ", line[:300])
    return is_right


def main() -> int:
    """Runs both jobs, each beside one that is left alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("processes", "nodes"))
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    num_nodes = arguments.kills // 4
    processes = [rng.choice(["Worker", "Server"]) for _ in range(arguments.kills - num_nodes)]
    nodes = [rng.choice(["node of servers", "node of workers"]) for _ in range(num_nodes)]
    right = True
    if processes and arguments.only != "nodes":
        whole = undisturbed(len(processes))
        with train(len(processes)) as job:
            right = report("processes", suffer(job, processes, rng, lambda kind: partial(job.kill, kind, rng.randrange(3))), job, whole)
    if nodes and arguments.only != "processes":
        whole = undisturbed(len(nodes))
        with cluster() as (address, killer), train(len(nodes), "--address", address) as job:
            right &= report("nodes", suffer(job, nodes, rng, killer), job, whole)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
