"""The same job for Kubeflow Trainer v2: a TrainJob, whose runtime numbers the processes."""

from __future__ import annotations

from typing import Any

from spmdctx.k8s.job.environment import common, literal
from spmdctx.k8s.job.options import JobOptions
from spmdctx.k8s.operators.pod import container_security, labels, metadata, mounts, placement, resources, volumes

NODE = "node"
"""What runtimes call the replicated job, and its container, that trains."""

_MANAGER = "spmdctx.io/manifest"


def trainjob(options: JobOptions) -> dict[str, Any]:
    """Returns the TrainJob; the runtime sets `JAX_NUM_PROCESSES` and the others, and says how often the job is started again."""
    trainer: dict[str, Any] = {
        "image": options.image,
        "command": ["python", *(literal(part) for part in options.command)],
        "numNodes": options.processes,
        "env": common(options),
    }
    if own := resources(options):
        trainer["resourcesPerNode"] = own
    spec: dict[str, Any] = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": options.runtime},
        "trainer": trainer,
        "runtimePatches": [{"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [_patch(options)]}}}}],
    }
    if options.deadline_s is not None:
        spec["activeDeadlineSeconds"] = options.deadline_s
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata(options), "spec": spec}


def _patch(options: JobOptions) -> dict[str, Any]:
    """Returns what the runtime's pods get besides what a TrainJob can say itself."""
    container = {"name": NODE, "securityContext": container_security(), "volumeMounts": mounts(options)}
    spec = {"containers": [container], "volumes": volumes(options), **placement(options)}
    template = {"metadata": {"labels": labels(options, "worker")}, "spec": spec}
    return {"name": NODE, "template": {"spec": {"template": template}}}
