"""What the manifest tells each container about its place in the job: `spmdctx.communication.init` reads it.

The names repeat those of `spmdctx.communication.clusters`, which imports JAX.
"""

from __future__ import annotations

from typing import Any

from spmdctx.k8s.job.options import CPU, JobOptions

ADDRESS, NUM_PROCESSES, PROCESS_ID = "SPMDCTX_ADDRESS", "SPMDCTX_NUM_PROCESSES", "SPMDCTX_PROCESS_ID"
JOB_INDEX, PODS_PER_JOB, POD_INDEX = "SPMDCTX_JOB_INDEX", "SPMDCTX_PODS_PER_JOB", "SPMDCTX_POD_INDEX"
CONTAINERS_PER_POD, CONTAINER_INDEX = "SPMDCTX_CONTAINERS_PER_POD", "SPMDCTX_CONTAINER_INDEX"
TOKEN, GRACE, CPU_DEVICES = "SPMDCTX_TOKEN", "SPMDCTX_GRACE_S", "JAX_NUM_CPU_DEVICES"
PORT = 55527

_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
_JOB_INDEX = "jobset.sigs.k8s.io/job-index"
_SAVING_S = 5
"""Seconds before SIGKILL at which a process that has not saved gives up."""


def placed(options: JobOptions, container: int) -> list[dict[str, Any]]:
    """Returns the variables by which a container of a JobSet finds its process: no rights on the cluster are needed for it."""
    number = _annotation(_COMPLETION_INDEX)
    found = [
        _plain(ADDRESS, f"{options.name}-workers-0-0.{options.name}:{PORT}"),
        _plain(NUM_PROCESSES, str(options.processes)),
    ]
    if options.slices == 1 and options.containers == 1:
        return [*found, {"name": PROCESS_ID, "valueFrom": number}]
    found.append({"name": POD_INDEX, "valueFrom": number})
    if options.slices > 1:
        found += [{"name": JOB_INDEX, "valueFrom": _annotation(_JOB_INDEX)}, _plain(PODS_PER_JOB, str(options.pods_per_slice))]
    if options.containers > 1:
        found += [_plain(CONTAINERS_PER_POD, str(options.containers)), _plain(CONTAINER_INDEX, str(container))]
    return found


def common(options: JobOptions) -> list[dict[str, Any]]:
    """Returns the variables that do not depend on the container; secrets are named, and never written."""
    pods = options.pods
    own = {"PYTHONUNBUFFERED": "1", "HOME": "/tmp"}
    if options.device == CPU:
        own["JAX_PLATFORMS"] = "cpu"
    given = dict(pods.variables)
    if not options.has_servers:
        given[GRACE] = str(max(1, pods.grace_s - _SAVING_S))
        given |= {CPU_DEVICES: str(options.devices)} if options.device == CPU else {}
    found = [_plain(name, value) for name, value in {**own, **given}.items()]
    found += [_secret(one.name, one.secret, one.key) for one in pods.secrets]
    if pods.token is not None and not options.has_servers:
        found.append(_secret(TOKEN, *pods.token))
    return found


def literal(text: str) -> str:
    """Returns a text that Kubernetes does not take for one with references to variables."""
    return text.replace("$(", "$$(")


def _plain(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": literal(value)}


def _secret(name: str, secret: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _annotation(name: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": f"metadata.annotations['{name}']"}}
