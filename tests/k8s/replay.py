"""The pods that operators make of a manifest, by their rules of naming: what each container finds in its environment.

Sources of the rules: the Job controller (batch/v1, Indexed), JobSet v1alpha2, the jax plugin of Kubeflow Trainer v2, and KubeRay v1.
"""

import copy
import json
import re
import shlex
from typing import NamedTuple

SECRETS = {("train", "token"): "0123456789abcdef-secret", ("hub", "token"): "hub", ("store.example", "a.key"): "key", ("store", "key"): "k"}
TRAINER_PORT = 6666


class Container(NamedTuple):
    """A container: its pod's name in the cluster's DNS, its role, and its environment, command and resources."""

    host: str
    role: str
    environ: dict[str, str]
    command: list[str]
    limits: dict[str, str]


def containers_of(manifest):
    """Every container in which a process of the job runs."""
    return {"JobSet": _jobset, "TrainJob": _trainjob, "RayJob": _rayjob}[manifest["kind"]](manifest)


def _jobset(manifest):
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    subdomain = spec.get("network", {}).get("subdomain", name)
    found = []
    for replicated in spec["replicatedJobs"]:
        for job in range(replicated.get("replicas", 1)):
            inner = replicated["template"]["spec"]
            assert inner["completionMode"] == "Indexed"
            assert inner["parallelism"] == inner["completions"]
            for index in range(inner["completions"]):
                annotations = {
                    "jobset.sigs.k8s.io/jobset-name": name,
                    "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
                    "jobset.sigs.k8s.io/job-index": str(job),
                    "batch.kubernetes.io/job-completion-index": str(index),
                }
                host = f"{name}-{replicated['name']}-{job}-{index}.{subdomain}"
                more = {"JOB_COMPLETION_INDEX": str(index)}
                for container in inner["template"]["spec"]["containers"]:
                    environ = {**_resolved(container, annotations), **more}
                    found.append(_container(host, replicated["name"], container, environ))
    return found


def _trainjob(manifest):
    """By the runtime jax-distributed: one replicated job "node" with a container "node", whose variables the plugin sets last."""
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    trainer, count = spec["trainer"], spec["trainer"].get("numNodes", 1)
    container = {"name": "node", "env": copy.deepcopy(trainer.get("env", [])), "command": trainer["command"]}
    container["resources"] = trainer.get("resourcesPerNode", {})
    for patch in spec.get("runtimePatches", ()):
        for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            assert job["name"] == "node", "the runtime has no such job"
            for one in job["template"]["spec"]["template"]["spec"]["containers"]:
                assert one["name"] == "node", "the runtime has no such container"
                container["env"] += one.get("env", [])
    found = []
    for index in range(count):
        annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
        own = {
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(index),
            "JAX_COORDINATOR_ADDRESS": f"{name}-node-0-0.{name}:{TRAINER_PORT}",
            "JAX_COORDINATOR_PORT": str(TRAINER_PORT),
            "JAX_DISTRIBUTED_BACKEND": "gloo",
            "JOB_COMPLETION_INDEX": str(index),
        }
        environ = {**_resolved(container, annotations), **own}
        found.append(_container(f"{name}-node-0-{index}.{name}", "node", container, environ))
    return found


def _rayjob(manifest):
    name, cluster = manifest["metadata"]["name"], manifest["spec"]["rayClusterSpec"]
    assert cluster["authOptions"]["mode"] == "token"
    service = f"{name}-abcde-head-svc"
    common = {"RAY_CLUSTER_NAME": f"{name}-abcde", "RAY_PORT": "6379", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32}
    groups = [("head", 1, cluster["headGroupSpec"])]
    groups += [(group["groupName"], group["replicas"], group) for group in cluster["workerGroupSpecs"]]
    found = []
    for role, count, group in groups:
        container = group["template"]["spec"]["containers"][0]
        for index in range(count):
            if role == "head":
                own = {"RAY_ADDRESS": "127.0.0.1:6379", "RAY_IP": "127.0.0.1"}
            else:
                own = {"RAY_ADDRESS": f"{service}.default.svc.cluster.local:6379", "FQ_RAY_IP": f"{service}.default.svc.cluster.local"}
            environ = {**_resolved(container, {}), **common, **own, "REDIS_PASSWORD": ""}
            found.append(_container(f"{name}-abcde-{role}-{index}", role, container, environ))
    return found


def ray_resources(group):
    """The resources that `ray start` is told for a group: a shell takes one pair of quotes, then it is JSON."""
    (text,) = shlex.split(group["rayStartParams"]["resources"])
    return json.loads(text)


def _container(host, role, container, environ):
    return Container(host, role, environ, container.get("command", []), container.get("resources", {}).get("limits", {}))


def _resolved(container, annotations):
    environ = {}
    for one in container.get("env", []):
        environ[one["name"]] = _expanded(one["value"], environ) if "value" in one else _from(one["valueFrom"], annotations)
    return environ


def _from(source, annotations):
    if "secretKeyRef" in source:
        return SECRETS[source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]]
    (name,) = re.findall(r"^metadata\.annotations\['([^']+)'\]$", source["fieldRef"]["fieldPath"])
    return annotations.get(name, "")


def _expanded(text, environ):
    """As Kubernetes writes variables of the same container into others: `$(NAME)`, and `$$(NAME)` for the text itself."""
    known = re.compile(r"\$\$\(|\$\((\w+)\)")
    return known.sub(lambda found: "$(" if found[1] is None else environ.get(found[1], found[0]), text)
