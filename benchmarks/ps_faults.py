"""Workers, servers and whole nodes of a job are killed at random steps: it comes to the bits of a job that was left alone.

    python -m benchmarks.ps_faults [--kills 20] [--seed 0] [--only processes|nodes|async]

One job loses processes on one machine, another one nodes of a cluster of Ray, whose nodes are processes of this machine. The recovery of a
kill is the longest time between two finished steps from it to the next kill, less the usual time of a step.

    python -m benchmarks.ps_faults --only async

kills processes of a job whose workers do not wait for each other. Each update counts, so that those that were lost can be counted, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from benchmarks.ps_jobs import Running, actors, below

STEPS_A_KILL, FIRST, PAUSE_S = 24, 6, 0.05
STALENESS, SAVE_EVERY = 4, 10
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 2000}
HEALTH |= {"health_check_failure_threshold": 3}


Killer = Callable[[str], Callable[[], None]]
"""Finds what is to be killed, and returns what kills it."""


class Kill(NamedTuple):
    """One kill: what was killed, and the last step that was seen done before."""

    kind: str
    step: int


def train(num_kills: int, *arguments: str) -> Running:
    """Starts a job of 2 servers and 3 workers in a folder of its own, with steps for so many kills."""
    steps = FIRST + STEPS_A_KILL * (num_kills + 2)
    folder = tempfile.mkdtemp(prefix="ps-faults-")
    common = ["--servers", "2", "--workers", "3", "--folder", folder, "--timeout", "500"]
    counts = ["--counts"] if "async" in arguments else []
    return Running([*common, *arguments, "-m", "benchmarks.ps_work", str(steps), "--pause", str(PAUSE_S), *counts])


def undisturbed(num_kills: int) -> Running:
    """Runs a job of as many steps that is left alone."""
    with train(num_kills) as job:
        job.finish(500)
    return job


def suffer(job: Running, kinds: list[str], rng: random.Random, killer: Killer) -> list[Kill]:
    """Kills what is named, one after the other, each some steps after the last."""
    found = []
    for number, kind in enumerate(kinds):
        kill = killer(kind)
        job.wait_for(max(FIRST + number * STEPS_A_KILL, job.last) + rng.randrange(STEPS_A_KILL // 2))
        time.sleep(rng.random() * 2 * PAUSE_S)
        found.append(Kill(kind, job.last))
        kill()
        job.wait_for(job.last + 2)
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

    def raylet(node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    kinds = {"node of servers": "ps", "node of workers": "worker"}
    nodes = {kind: [node(kind), node(kind)] for kind in kinds.values()}

    def killer(kind: str) -> Callable[[], None]:
        own, actor = nodes[kinds[kind]], {"ps": "Server", "worker": "Worker"}[kinds[kind]]
        own.append(node(kinds[kind]))

        def kill() -> None:
            lost = max(own, key=lambda one: len(actors(actor, raylet(one))))
            own.remove(lost)
            for pid in below(raylet(lost)):  # all at once, as where a machine is switched off
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            whole.remove_node(lost, allow_graceful=False)

        return kill

    try:
        yield whole.address, killer
    finally:
        whole.shutdown()


def report(title: str, kills: list[Kill], job: Running, whole: Running) -> bool:
    """Prints each kill, and whether the steps after it and the end are those of the job that was left alone."""
    code = job.finish()
    ends = [kill.step for kill in kills[1:]] + [max(whole.losses)]
    usual = statistics.median(whole.gaps(1, max(whole.times)))
    load = os.getloadavg()
    print(f"{title}: exit code {code}; {1e3 * usual:.0f} ms a step without kills; load {load[0]:.1f}, {load[1]:.1f} in 5 minutes")
    print("kind               at step  recovery s  bit-identical")
    is_right = code == 0 and set(job.states) == set(whole.states) and len(job.states) == 3
    for kill, end in zip(kills, ends, strict=True):
        seconds = max(job.gaps(kill.step, end)) - usual
        same = all(job.losses.get(step) == whole.losses.get(step) for step in range(kill.step, end + 1))
        print(f"{kill.kind:18} {kill.step:7} {seconds:11.1f}  {'yes' if same else 'NO'}")
        is_right &= same
    print(f"last state bit-identical: {'yes' if set(job.states) == set(whole.states) else 'NO'}; other lines: {len(job.other)}\n")
    for line in job.other[:5]:
        print("   ", line[:300])
    return is_right


def counted(num_kills: int, rng: random.Random) -> bool:
    """Kills processes of a job in which each update counts; prints what was lost, and what may be."""
    kinds = [rng.choice(["Worker", "Server"]) for _ in range(num_kills)]
    with train(num_kills, "--json", "--mode", "async", "--max-staleness", str(STALENESS), "--save-every", str(SAVE_EVERY)) as job:
        suffer(job, kinds, rng, lambda kind: partial(job.kill, kind, rng.randrange(3)))
        code = job.finish()
    said = json.loads("\n".join(job.other[job.other.index("{") :]))
    counts = [max(map(int, own)) for own in zip(*(state.split() for state in job.states), strict=True)]
    lost, servers = [said["updates"] - count for count in counts], kinds.count("Server")
    # A state is saved while updates go on: those that are under way when it is asked for come on top.
    most = servers * (SAVE_EVERY + 3 * (STALENESS + 1))
    late = max(map(int, said["staleness"]))
    print(f"async: exit code {code}, {said['updates']} updates; killed: {num_kills - servers} workers, {servers} servers")
    print(f"updates lost of each array: {', '.join(map(str, lost))}, at most {most}; late by {late} at most, bound {STALENESS}")
    return code == 0 and late <= STALENESS and min(lost) >= 0 and max(lost) <= most


def main() -> int:
    """Runs both jobs, each beside one that is left alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("processes", "nodes", "async"))
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    if arguments.only == "async":
        return 0 if counted(arguments.kills, rng) else 1
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
