"""What a user says about a job on a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

CPU, GPU, TPU = "cpu", "nvidia.com/gpu", "google.com/tpu"
DEVICES = (CPU, GPU, "amd.com/gpu", TPU)
"""Kinds of devices: resources that a pod asks for, or CPU devices of JAX."""

JOBSET, TRAINER, RAY = "jobset", "trainer", "ray"
OPERATORS = (JOBSET, TRAINER, RAY)


class SecretVariable(NamedTuple):
    """A variable of the environment whose value is in a Secret of the cluster."""

    name: str
    secret: str
    key: str


@dataclass(frozen=True)
class Pods:
    """What all pods of a job have in common.

    Attributes:
        cpu: CPUs of each container, as Kubernetes writes quantities; empty asks for none.
        memory: likewise, of memory.
        claim: an existing PersistentVolumeClaim for checkpoints, which all pods can write; empty for none.
        checkpoint_path: where it is mounted.
        variables: names and values of further variables.
        secrets: variables that are read from Secrets.
        token: the Secret and the key in it that keeps strangers out of the job; None for none.
        user: the number of the user and the group that run the containers, not 0.
        grace_s: seconds from SIGTERM to SIGKILL.
        labels: further labels of the job and its pods.
        service_account: empty for the namespace's own.
        pull_secret: the Secret for the image's registry; empty for none.
        priority_class: empty for none.
    """

    cpu: str = ""
    memory: str = ""
    claim: str = ""
    checkpoint_path: str = "/checkpoints"
    variables: tuple[tuple[str, str], ...] = ()
    secrets: tuple[SecretVariable, ...] = ()
    token: tuple[str, str] | None = None
    user: int = 1000
    grace_s: int = 120
    labels: tuple[tuple[str, str], ...] = ()
    service_account: str = ""
    pull_secret: str = ""
    priority_class: str = ""


@dataclass(frozen=True)
class Servers:
    """The parameter server of a job: numbers of servers and workers, and the options of `spmdctx launch` for them."""

    servers: int = 0
    workers: int = 0
    mode: str = ""
    max_staleness: int | None = None
    save_every: int | None = None
    ray_version: str = "2.60.0"


@dataclass(frozen=True)
class JobOptions:
    """A job on a cluster; `spmdctx.k8s.job.check.checked` says whether it can be.

    Attributes:
        name: of the job, and the beginning of its pods' names.
        image: what the containers run.
        command: the script or module with its arguments, as Python gets them.
        processes: of the whole job; workers of a parameter server stand in `servers`.
        devices: of each process.
        device: one of `DEVICES`.
        topology: the TPUs of each slice, such as "v5e-16" or "v5e:4x4"; empty elsewhere.
        slices: how many slices of TPUs, or groups of pods, the job has.
        containers: how many processes share a pod, each in a container of its own.
        operator: one of `OPERATORS`; empty chooses by `servers`.
        runtime: the ClusterTrainingRuntime of a TrainJob.
        namespace: empty for the client's own.
        queue: the LocalQueue of Kueue; empty for none.
        restarts: how often a job that failed is started again; None for the default, where the operator has one.
        ttl_s: seconds after its end until the job is removed; None for never.
        deadline_s: seconds after which the job is ended; None for never.
    """

    name: str
    image: str
    command: tuple[str, ...]
    processes: int = 1
    devices: int = 1
    device: str = CPU
    topology: str = ""
    slices: int = 1
    containers: int = 1
    operator: str = ""
    runtime: str = "jax-distributed"
    namespace: str = ""
    queue: str = ""
    restarts: int | None = None
    ttl_s: int | None = None
    deadline_s: int | None = None
    pods: Pods = Pods()
    servers: Servers = Servers()

    @property
    def has_servers(self) -> bool:
        """Whether servers hold the state."""
        return self.servers.servers > 0

    @property
    def pods_per_slice(self) -> int:
        """The number of pods in each slice or group."""
        return self.processes // self.slices // self.containers

    def settled(self) -> JobOptions:
        """Returns the options with the operator chosen."""
        return replace(self, operator=self.operator or (RAY if self.has_servers or self.servers.workers else JOBSET))
