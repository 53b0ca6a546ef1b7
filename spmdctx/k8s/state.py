"""How a job on a cluster is, read from what its operator and its pods say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from spmdctx.k8s.job.environment import CONTAINER_INDEX, CONTAINERS_PER_POD, PODS_PER_JOB

WAITING, RUNNING, SUSPENDED, SUCCEEDED, FAILED = "waiting", "running", "suspended", "succeeded", "failed"


class Kind(NamedTuple):
    """A kind of job, as the API names it, and the operator that runs it."""

    name: str
    group: str
    version: str
    plural: str
    operator: str


JOB_KINDS = {
    "JobSet": Kind("JobSet", "jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
    "TrainJob": Kind("TrainJob", "trainer.kubeflow.org", "v1alpha1", "trainjobs", "Kubeflow Trainer v2"),
    "RayJob": Kind("RayJob", "ray.io", "v1", "rayjobs", "KubeRay"),
}


class PodState(NamedTuple):
    """A pod: its name, the component that it is of, its phase, the exit codes of containers that have ended, and its annotations."""

    name: str
    component: str
    phase: str
    exit_codes: tuple[int, ...]
    annotations: Mapping[str, str]


class State(NamedTuple):
    """A job: one of the five words above, how often it was started again, what its operator says, and its pods."""

    kind: str
    name: str
    word: str
    restarts: int
    reason: str
    pods: Sequence[PodState]


def state_of(kind: Kind, found: Mapping[str, Any], pods: Sequence[PodState]) -> State:
    """Returns the state of a job by its object and its pods."""
    status = found.get("status") or {}
    name = str(found["metadata"]["name"])
    if kind.name == "RayJob":
        return _of_ray(name, status, pods)
    conditions = {one.get("type"): one for one in status.get("conditions") or [] if one.get("status") == "True"}
    ends = (("Completed", SUCCEEDED), ("Complete", SUCCEEDED), ("Failed", FAILED), ("Suspended", SUSPENDED))
    for condition, word in ends:
        if condition in conditions:
            told = conditions[condition]
            reason = ": ".join(filter(None, (told.get("reason"), told.get("message"))))
            return State(kind.name, name, word, int(status.get("restarts") or 0), reason, pods)
    word = RUNNING if any(pod.phase == "Running" for pod in pods) else WAITING
    return State(kind.name, name, word, int(status.get("restarts") or 0), "", pods)


def _of_ray(name: str, status: Mapping[str, Any], pods: Sequence[PodState]) -> State:
    deployed, said = str(status.get("jobDeploymentStatus") or ""), str(status.get("jobStatus") or "")
    words = {"SUCCEEDED": SUCCEEDED, "FAILED": FAILED, "STOPPED": FAILED, "RUNNING": RUNNING}
    word = {"Suspended": SUSPENDED, "Failed": FAILED}.get(deployed) or words.get(said, WAITING)
    if deployed in ("Retrying", "Initializing") and word == FAILED:
        word = WAITING
    return State("RayJob", name, word, int(status.get("failed") or 0), str(status.get("message") or status.get("reason") or ""), pods)


_POD, _JOB = "batch.kubernetes.io/job-completion-index", "jobset.sigs.k8s.io/job-index"


def number_of(annotations: Mapping[str, str], container: str, variables: Mapping[str, str]) -> int | None:
    """Returns the number of the process in a container, None for a pod that has none; others beside it have none either."""
    pod = annotations.get(_POD, "")
    if not pod.isdecimal() or not (container == "node" or container == "main" or container.startswith("main-")):
        return None
    job = int(annotations.get(_JOB) or 0) if PODS_PER_JOB in variables else 0
    first = job * int(variables.get(PODS_PER_JOB) or 1) + int(pod)
    return first * int(variables.get(CONTAINERS_PER_POD) or 1) + int(variables.get(CONTAINER_INDEX) or 0)
