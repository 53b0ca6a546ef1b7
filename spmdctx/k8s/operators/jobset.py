"""A job of processes that are all alike, as a JobSet: one Indexed job for each slice of TPUs, or one."""

from __future__ import annotations

from typing import Any

from spmdctx.errors import SAVED
from spmdctx.k8s.job.environment import common, placed
from spmdctx.k8s.job.options import TPU, JobOptions
from spmdctx.k8s.operators.pod import container, labels, metadata, pod_spec, ports

DEFAULT_RESTARTS = 10
_EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"


def jobset(options: JobOptions) -> dict[str, Any]:
    """Returns the JobSet.

    Its pods find each other by its headless Service. When a pod fails, all are started again; a pod that was preempted, or that has
    saved after SIGTERM, does not count towards the number of restarts.
    """
    found = metadata(options)
    if options.device == TPU and options.slices > 1:
        found["annotations"] = {_EXCLUSIVE: "cloud.google.com/gke-nodepool"}
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": failure_policy(DEFAULT_RESTARTS if options.restarts is None else options.restarts),
        "replicatedJobs": [{"name": "workers", "replicas": options.slices, "template": {"spec": _job(options)}}],
    }
    if options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = options.ttl_s
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": found, "spec": spec}


def failure_policy(restarts: int) -> dict[str, Any]:
    """Returns how often all pods are started again; those that the cluster has taken away do not count."""
    preempted = {"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {"maxRestarts": restarts, "rules": [preempted]}


def pod_failure_policy() -> dict[str, Any]:
    """Returns which ends of a pod are preemptions: the job ends with the reason PodFailurePolicy."""
    return {
        "rules": [
            {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [SAVED]}},
        ]
    }


def _job(options: JobOptions) -> dict[str, Any]:
    count = options.pods_per_slice
    containers = []
    for number in range(options.containers):
        name = "main" if number == 0 else f"main-{number}"
        variables = [*placed(options, number), *common(options)]
        containers.append(container(options, name, variables, ["python", *options.command]))
    containers[0]["ports"] = ports()
    found: dict[str, Any] = {
        "completionMode": "Indexed",
        "parallelism": count,
        "completions": count,
        "backoffLimit": 0,
        "podFailurePolicy": pod_failure_policy(),
    }
    if options.deadline_s is not None:
        found["activeDeadlineSeconds"] = options.deadline_s
    template = {"metadata": {"labels": labels(options, "worker")}, "spec": {"restartPolicy": "Never", **pod_spec(options, containers)}}
    return {**found, "template": template}
