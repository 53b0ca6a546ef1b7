"""A job with servers and workers as a RayJob: the head is MindSpore's Scheduler; servers and workers are groups that scale apart."""

from __future__ import annotations

import json
import re
from typing import Any

from spmdctx.errors import UnsupportedError
from spmdctx.k8s.job.environment import common
from spmdctx.k8s.job.options import JobOptions
from spmdctx.k8s.operators.pod import container, container_security, labels, metadata, pod_security, pod_spec, resources

_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
"""What no shell changes: the entrypoint passes several."""
AUTH_KEY = "auth_token"
"""The key in a Secret that KubeRay reads Ray's token from."""


def rayjob(options: JobOptions) -> dict[str, Any]:
    """Returns the RayJob; each attempt goes on from the newest state in the claim.

    Raises:
        UnsupportedError: an argument of the script has a letter that a shell would change, or the token has a key of its own.
    """
    servers = options.servers
    spec: dict[str, Any] = {
        "entrypoint": entrypoint(options),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "backoffLimit": 3 if options.restarts is None else options.restarts,
        "rayClusterSpec": {
            "rayVersion": servers.ray_version,
            "authOptions": _authentication(options),
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _template(options, "scheduler", has_devices=False)},
            "workerGroupSpecs": [
                _group(options, "ps", servers.servers, has_devices=False),
                _group(options, "worker", servers.workers, has_devices=True),
            ],
        },
        "submitterPodTemplate": _submitter(options),
    }
    if options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = options.ttl_s
    if options.deadline_s is not None:
        spec["activeDeadlineSeconds"] = options.deadline_s
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata(options), "spec": spec}


def state_folder(options: JobOptions) -> str:
    """Returns where servers save their state."""
    return f"{options.pods.checkpoint_path.rstrip('/')}/{options.name}"


def entrypoint(options: JobOptions) -> str:
    """Returns the command that the head runs.

    Raises:
        UnsupportedError: a part has a letter that a shell would change.
    """
    servers = options.servers
    parts = ["spmdctx", "launch", "--address", "auto", "--servers", str(servers.servers), "--workers", str(servers.workers)]
    parts += ["--devices-per-process", str(options.devices), "--folder", state_folder(options)]
    more = {"--mode": servers.mode, "--max-staleness": servers.max_staleness, "--save-every": servers.save_every}
    for name, value in more.items():
        if value not in ("", None):
            parts += [name, str(value)]
    parts += options.command
    unsafe = [part for part in parts if not _SAFE.fullmatch(part)]
    if unsafe:
        raise UnsupportedError(
            "The entrypoint of a RayJob passes shells, which would change this argument.",
            got=ascii(unsafe[0][:80]),
            need="letters, digits and _@%+=:,./-",
            fix="put such values into a file of the image, or into --env",
        )
    return " ".join(parts)


def _authentication(options: JobOptions) -> dict[str, Any]:
    if options.pods.token is None:
        return {"mode": "token"}
    secret, key = options.pods.token
    if key != AUTH_KEY:
        raise UnsupportedError(
            "KubeRay reads Ray's token from one key.", got=f"--token-secret {secret}:{key}", fix=f"--token-secret {secret}:{AUTH_KEY}"
        )
    return {"mode": "token", "secretName": secret}


def _group(options: JobOptions, role: str, count: int, *, has_devices: bool) -> dict[str, Any]:
    # KubeRay passes the value through a shell, which takes one pair of quotes.
    mark = json.dumps(json.dumps({role: 1}))
    return {
        "groupName": role,
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": count,
        "rayStartParams": {"resources": mark},
        "template": _template(options, role, has_devices=has_devices),
    }


def _template(options: JobOptions, role: str, *, has_devices: bool) -> dict[str, Any]:
    main = container(options, f"ray-{'head' if role == 'scheduler' else role}", common(options), [])
    main.pop("resources", None)
    if own := resources(options, has_devices):
        main["resources"] = own
    spec = pod_spec(options, [main])
    if not has_devices:
        spec.pop("tolerations", None)
    return {"metadata": {"labels": labels(options, role)}, "spec": spec}


def _submitter(options: JobOptions) -> dict[str, Any]:
    """Returns the pod that hands the job to the head: as few rights as the others have."""
    tmp = {"name": "tmp", "mountPath": "/tmp"}
    variables = [{"name": "HOME", "value": "/tmp"}]
    main = {
        "name": "ray-job-submitter",
        "image": options.image,
        "env": variables,
        "securityContext": container_security(),
        "volumeMounts": [tmp],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(options),
        "containers": [main],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    pull = options.pods.pull_secret
    return {
        "metadata": {"labels": labels(options, "submitter")},
        "spec": {**spec, **({"imagePullSecrets": [{"name": pull}]} if pull else {})},
    }
