"""The template of a pod: what all pods of a job have alike, whichever operator makes them."""

from __future__ import annotations

from typing import Any

from spmdctx.k8s.job.environment import PORT, literal
from spmdctx.k8s.job.options import CPU, TPU, JobOptions
from spmdctx.k8s.job.topology import read_slice

MANAGED_BY, INSTANCE, COMPONENT = "app.kubernetes.io/managed-by", "app.kubernetes.io/instance", "app.kubernetes.io/component"
"""Labels of the job and of its pods, by which `spmdctx k8s` finds them again."""

_ACCELERATOR, _TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"


def labels(options: JobOptions, component: str = "") -> dict[str, str]:
    """Returns the labels of a job, or of the pods that are one component of it."""
    found = {"app.kubernetes.io/name": "spmdctx", INSTANCE: options.name, MANAGED_BY: "spmdctx"}
    return {**found, **({COMPONENT: component} if component else {}), **dict(options.pods.labels)}


def metadata(options: JobOptions) -> dict[str, Any]:
    """Returns the metadata of the job itself."""
    found: dict[str, Any] = {"name": options.name}
    if options.namespace:
        found["namespace"] = options.namespace
    queue = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    return {**found, "labels": {**labels(options), **queue}}


def pod_security(options: JobOptions) -> dict[str, Any]:
    """Returns the security context of a pod: never root, and the claim's files belong to the pod's group."""
    user = options.pods.user
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    """Returns the security context of a container: no rights, and nothing of the image can be changed."""
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def volumes(options: JobOptions) -> list[dict[str, Any]]:
    """Returns what can be written: folders of the pod's own, and the claim for checkpoints."""
    found: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if options.pods.claim:
        found.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": options.pods.claim}})
    return found


def mounts(options: JobOptions) -> list[dict[str, Any]]:
    """Returns where the volumes are."""
    found = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]
    if options.pods.claim:
        found.append({"name": "checkpoints", "mountPath": options.pods.checkpoint_path})
    return found


def resources(options: JobOptions, has_devices: bool = True) -> dict[str, Any]:
    """Returns what a container asks for, and is limited to: whole devices, and CPUs and memory where they are given."""
    amounts = {"cpu": options.pods.cpu, "memory": options.pods.memory}
    if has_devices and options.device != CPU:
        amounts[options.device] = str(options.devices)
    found = {name: amount for name, amount in amounts.items() if amount}
    return {"requests": found, "limits": dict(found)} if found else {}


def selectors(options: JobOptions) -> dict[str, str]:
    """Returns the labels of nodes that can run the pods: those of a slice of TPUs."""
    if options.device != TPU or not options.topology:
        return {}
    found = read_slice(options.topology)
    return {_ACCELERATOR: found.accelerator, _TOPOLOGY: found.topology}


def container(options: JobOptions, name: str, variables: list[dict[str, Any]], command: list[str]) -> dict[str, Any]:
    """Returns one container; an empty command leaves the image's, or the operator's."""
    found: dict[str, Any] = {"name": name, "image": options.image}
    if command:
        found["command"] = [literal(part) for part in command]
    found |= {"env": variables, "securityContext": container_security(), "volumeMounts": mounts(options)}
    own = resources(options)
    return {**found, **({"resources": own} if own else {})}


def pod_spec(options: JobOptions, containers: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the specification of a pod with these containers."""
    pods = options.pods
    found = {"automountServiceAccountToken": False, "enableServiceLinks": False, **placement(options)}
    found |= {"priorityClassName": pods.priority_class} if pods.priority_class else {}
    return {**found, "containers": containers, "volumes": volumes(options)}


def placement(options: JobOptions) -> dict[str, Any]:
    """Returns where pods may run, as whom, and how long they have to end."""
    pods = options.pods
    found: dict[str, Any] = {"terminationGracePeriodSeconds": pods.grace_s, "securityContext": pod_security(options)}
    if nodes := selectors(options):
        found["nodeSelector"] = nodes
    found |= tolerations(options)
    found |= {"serviceAccountName": pods.service_account} if pods.service_account else {}
    return found | ({"imagePullSecrets": [{"name": pods.pull_secret}]} if pods.pull_secret else {})


def tolerations(options: JobOptions) -> dict[str, Any]:
    """Returns that pods may run on nodes which keep others away from their devices."""
    if options.device == CPU:
        return {}
    return {"tolerations": [{"key": options.device, "operator": "Exists", "effect": "NoSchedule"}]}


def ports() -> list[dict[str, Any]]:
    """Returns the port at which process 0 meets the others."""
    return [{"name": "spmdctx", "containerPort": PORT, "protocol": "TCP"}]
