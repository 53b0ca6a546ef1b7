"""Makes an MSJob into a JobSet or, where it has servers, a RayJob, and names what has no counterpart."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmdctx.errors import ContextError, UnsupportedError
from spmdctx.k8s.job.forms import check_cpu, check_memory
from spmdctx.k8s.job.options import CPU, DEVICES, JobOptions, Pods, Servers
from spmdctx.k8s.manifest import Manifest, manifests
from spmdctx.k8s.mindspore.msjob import MSJob, Role, read_msjob

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_SHELLS = ("sh", "bash", "dash")
_OF_SHELL = re.compile(r"[;&|<>$`\\\n(){}*?!~]")
_OPERATORS_OWN = re.compile(r"MS_[A-Z_]+")
_ALONE = ("-u", "-s", "-B", "-E", "-I", "-O", "-OO", "-S")
_KEPT_IN_POD: dict[str, type] = {
    **dict.fromkeys(("nodeSelector", "affinity", "dnsConfig"), dict),
    **dict.fromkeys(("tolerations", "initContainers", "imagePullSecrets", "hostAliases"), list),
    "dnsPolicy": str,
}
_NAMES_OF_KINDS: dict[type, str] = {dict: "mapping", list: "list", str: "text"}
_KEPT_IN_CONTAINER = ("imagePullPolicy", "workingDir", "envFrom", "lifecycle", "livenessProbe", "startupProbe")
_REPLACED_IN_POD = ("containers", "volumes", "restartPolicy", "securityContext", "priorityClassName", "serviceAccountName")
_REPLACED_IN_CONTAINER = ("name", "image", "command", "args", "env", "resources", "volumeMounts", "ports", "securityContext")


@dataclass(frozen=True)
class Changes:
    """What the user changes while a job is converted; empty leaves it as it is.

    Attributes:
        image: one with JAX and spmdctx.
        device: in place of the devices that the job asks for.
        claim: for checkpoints.
        checkpoint_path: where it is mounted.
        namespace: of the new job.
        queue: the LocalQueue of Kueue.
    """

    image: str = ""
    device: str = ""
    claim: str = ""
    checkpoint_path: str = ""
    namespace: str = ""
    queue: str = ""


class Converted(NamedTuple):
    """The new objects, and what the user should know about each part that changed or was left out."""

    objects: list[Manifest]
    notes: list[str]


def convert(data: Mapping[str, Any], changes: Changes = Changes()) -> Converted:  # it is frozen
    """Converts an MSJob.

    Raises:
        ContextError: it is no MSJob, or one that cannot run.
        UnsupportedError: a part has no counterpart, and the job would not run without it.
    """
    job = read_msjob(data)
    options = _options(job, changes)
    made = manifests(options)
    _say_general(job, options, changes)
    if options.has_servers:
        cluster = made[0]["spec"]["rayClusterSpec"]
        ps, worker = cluster["workerGroupSpecs"]
        _fill(job, "PS", ps["template"], options)
        _fill(job, "Worker", worker["template"], options)
        if "Scheduler" in job.roles:
            _fill(job, "Scheduler", cluster["headGroupSpec"]["template"], options)
    else:
        template = made[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        _fill(job, "Worker", template, options)
        main = template["spec"]["containers"][0]
        main.pop("command")
        main |= {name: job.worker.words(name) for name in ("command", "args") if job.worker.words(name)}
        if job.worker.restart in ("Never", ""):
            made[0]["spec"]["failurePolicy"] = {"maxRestarts": options.restarts or 0}
        if job.policy.get("suspend") is True:
            made[0]["spec"]["suspend"] = True
    return Converted(made, list(dict.fromkeys(job.notes)))


def _options(job: MSJob, changes: Changes) -> JobOptions:
    worker, policy = job.worker, job.policy
    device, count = _devices(job, worker, changes)
    servers = job.roles["PS"].replicas if "PS" in job.roles else 0
    claim, path = _claim(job, changes)
    restarts = _number(policy, "backoffLimit")
    if restarts is None:
        restarts = 0 if worker.restart in ("Never", "") else None
    pods = Pods(claim=claim, checkpoint_path=path, priority_class=str(job.scheduling.get("priorityClass") or ""))
    return JobOptions(
        name=job.name,
        image=changes.image or str(worker.main.get("image") or ""),
        command=_script(worker) if servers else ("unused.py",),
        processes=1 if servers else worker.replicas,
        devices=count,
        device=device,
        namespace=changes.namespace or job.namespace,
        queue=changes.queue or str(job.scheduling.get("queue") or ""),
        restarts=restarts,
        ttl_s=_number(policy, "ttlSecondsAfterFinished"),
        deadline_s=_number(policy, "activeDeadlineSeconds"),
        pods=pods,
        servers=Servers(servers, worker.replicas) if servers else Servers(),
    )


def _number(policy: Mapping[str, Any], name: str) -> int | None:
    value = policy.get(name)
    return None if value is None else int(value) if str(value).isdecimal() else value


def _devices(job: MSJob, worker: Role, changes: Changes) -> tuple[str, int]:
    """Returns the kind of devices, and how many each worker has."""
    asked = {name: count for name, count in worker.devices.items() if count}
    if len(asked) > 1:
        raise UnsupportedError("The Worker asks for several kinds of devices.", got=", ".join(asked), need="one kind")
    found, count = next(iter(asked.items()), (CPU, 1))
    if changes.device:
        if changes.device != found:
            job.notes.append(f"Worker: {count} {found} become {count} {changes.device}.")
        return changes.device, count
    if found not in DEVICES:
        raise UnsupportedError(
            "JAX does not run on these devices.", got=f"{found}: {count}", fix="--device nvidia.com/gpu, or google.com/tpu"
        )
    return found, count


def _claim(job: MSJob, changes: Changes) -> tuple[str, str]:
    """Returns the claim for checkpoints and where it is mounted: the user's, or the first that the workers mount."""
    default = Pods().checkpoint_path
    if changes.claim:
        return changes.claim, changes.checkpoint_path or default
    volumes = {one["name"]: one for one in job.worker.volumes}
    for mount in job.worker.mounts:
        claim = job.worker.claim(volumes.get(mount["name"], {}))
        if claim and not mount.get("readOnly") and not mount.get("subPath"):
            return claim, str(mount["mountPath"])
    return "", changes.checkpoint_path or default


def _script(worker: Role) -> tuple[str, ...]:
    """Returns the script of the workers with its arguments, as `spmdctx launch` takes them.

    Raises:
        UnsupportedError: the command is no call of Python.
    """
    words, text, folder = [*worker.words("command"), *worker.words("args")], _shell_text(worker), ""
    if text is not None:
        moved = re.fullmatch(r"cd\s+([\w./-]+)\s*(?:&&|;)\s*(.*)", text, re.DOTALL)
        folder, text = (moved[1], moved[2]) if moved else ("", text)
        if _OF_SHELL.search(text):
            raise _no_script(text, "it needs a shell")
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise _no_script(text, str(error)) from None
    if not words or not _PYTHON.fullmatch(os.path.basename(words[0])):
        raise _no_script(" ".join(words), "it does not call Python")
    rest = words[1:]
    while rest and rest[0] in _ALONE:
        rest = rest[1:]
    if not rest or (rest[0].startswith("-") and rest[0] != "-m"):
        raise _no_script(" ".join(words), "it has no script")
    if folder and rest[0] != "-m":
        rest = [os.path.join(folder, rest[0]), *rest[1:]]
    elif folder:
        raise _no_script(" ".join(words), f"its module lies in {folder}")
    return tuple(rest)


def _shell_text(worker: Role) -> str | None:
    """Returns what a shell is to run, where the command calls one with a text."""
    words = [*worker.words("command"), *worker.words("args")]
    if len(words) > 2 and os.path.basename(words[0]) in _SHELLS and re.fullmatch(r"-\w*c", words[1]):
        return words[2].strip()
    return None


def _no_script(command: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        "The Worker's command cannot be given to servers and workers.",
        got=f"{command[:120]!a}: {why}",
        need="python SCRIPT ARGUMENTS, or sh -c with nothing else",
        fix="put the rest into the script",
    )


def _say_general(job: MSJob, options: JobOptions, changes: Changes) -> None:
    notes = job.notes
    if not changes.image:
        notes.append(f"The image {options.image} must have JAX and spmdctx: --image names another.")
    notes.append("The script must use JAX: scripts for MindSpore do not run as they are.")
    if "Scheduler" in job.roles and not options.has_servers:
        notes.append("Scheduler: process 0 does its work, so no pod of its own is made.")
    text = None if options.has_servers else _shell_text(job.worker)
    if text is not None and _OF_SHELL.search(text) and not re.search(r"\bexec\s+python", text):
        notes.append("Worker: its shell does not hand SIGTERM on; write exec before python, so that preempted processes save.")
    notes.append("The root file system cannot be written: results belong into /tmp or a volume.")
    if job.success == "" and not options.has_servers and options.processes > 1:
        notes.append("spec.successPolicy: the job succeeds when all processes have ended, not the first.")
    if job.is_dynamic:
        how = (
            f"spmdctx launch --scale changes numbers while it runs ({options.name})"
            if options.has_servers
            else "a checkpoint goes on with other numbers"
        )
        notes.append(f"spec.enableDynamicWorker: numbers are those of the manifest; {how}.")
    clean = job.policy.get("cleanPodPolicy")
    if clean not in (None, "None") and options.ttl_s is None and not options.has_servers:
        notes.append(f"spec.runPolicy.cleanPodPolicy {clean}: pods stay until the job is deleted; ttlSecondsAfterFinished deletes it.")
    for name in ("minAvailable", "minResources", "scheduleTimeoutSeconds"):
        if job.scheduling.get(name) is not None:
            notes.append(f"spec.runPolicy.schedulingPolicy.{name} has no counterpart: Kueue admits a job as a whole.")
    if job.scheduling.get("queue") and not changes.queue:
        notes.append(f"spec.runPolicy.schedulingPolicy.queue: {options.queue} must be a LocalQueue of Kueue.")
    if job.policy.get("suspend") is True and options.has_servers:
        notes.append("spec.runPolicy.suspend has no counterpart here, and is left out.")
    if job.worker.restart == "ExitCode":
        notes.append("restartPolicy ExitCode: the job is started again whatever the exit code is.")
    if job.worker.restart in ("OnFailure", "Always"):
        notes.append("restartPolicy: all processes are started again together, and go on from the last complete checkpoint.")


def _fill(job: MSJob, role: str, template: Manifest, options: JobOptions) -> None:
    """Puts what a role says about its pods into a template."""
    found = job.roles[role]
    spec, main = template["spec"], template["spec"]["containers"][0]
    template["metadata"]["labels"] = {**found.labels, **template["metadata"]["labels"]}
    _keep_fields(job, role, spec, main)
    main["env"] = _variables(job, role, main["env"], found.variables)
    _add_volumes(job, role, spec, main)
    own = _resources(found, options, role)
    main |= {"resources": own} if own else {}
    if spec.get("nodeSelector") and options.device not in (CPU, *found.devices):
        job.notes.append(f"{role}: nodeSelector stays as it is; see that such nodes have {options.device}.")
    for other in found.others:
        if options.has_servers:
            spec["containers"].append(dict(other))
            continue
        # A job ends when its containers have ended; a sidecar is stopped with the last of them.
        job.notes.append(f"{role}: the container {other['name']} becomes a sidecar, which ends with the process (Kubernetes 1.29).")
        spec["initContainers"] = [*spec.get("initContainers", []), {**other, "restartPolicy": "Always"}]


def _keep_fields(job: MSJob, role: str, spec: Manifest, main: Manifest) -> None:
    """Takes over fields of the pod and of its container that mean the same, and names the others."""
    found, notes = job.roles[role], job.notes
    for name, value in found.pod.items():
        if name in _KEPT_IN_POD:
            if value is not None and not isinstance(value, _KEPT_IN_POD[name]):
                raise ContextError(f"{role}: {name} of the pod must be a {_NAMES_OF_KINDS[_KEPT_IN_POD[name]]}.", got=ascii(value)[:80])
            spec[name] = _joined(spec.get(name), value)
        elif name not in _REPLACED_IN_POD:
            notes.append(f"{role}: {name} of the pod is left out.")
        elif name in ("securityContext", "serviceAccountName", "priorityClassName"):
            notes.append(f"{role}: {name} of the pod is replaced by the manifest's own.")
    for name, value in found.main.items():
        if name in _KEPT_IN_CONTAINER:
            main[name] = value
        elif name not in _REPLACED_IN_CONTAINER:
            notes.append(f"{role}: {name} of the container is left out.")
        elif name in ("ports", "securityContext"):
            notes.append(f"{role}: {name} of the container: the manifest's own.")


def _joined(own: object, given: object) -> object:
    """Returns what the manifest and the MSJob say of one field together."""
    if isinstance(own, list) and isinstance(given, list):
        return [*own, *given]
    return {**own, **given} if isinstance(own, dict) and isinstance(given, dict) else given


def _variables(job: MSJob, role: str, made: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    names = {one["name"] for one in made}
    kept = []
    for one in given:
        if _OPERATORS_OWN.fullmatch(one["name"]) or one["name"].startswith("SPMDCTX_"):
            job.notes.append(f"{role}: {one['name']} is left out, since the manifest says where a process belongs.")
        elif not isinstance(one.get("value", ""), str):
            raise ContextError(f"{role}: the value of a variable must be a text.", got=f"{one['name']}: {one['value']!a}", fix="quote it")
        elif one["name"] not in names:
            kept.append(one)
    return [*made, *kept]


def _add_volumes(job: MSJob, role: str, spec: Manifest, main: Manifest) -> None:
    """Adds the role's volumes; those that the manifest has already, it keeps."""
    claimed = {one["persistentVolumeClaim"]["claimName"] for one in spec["volumes"] if "persistentVolumeClaim" in one}
    taken = {one["mountPath"] for one in main["volumeMounts"]}
    left, names = set(), {one["name"] for one in spec["volumes"]}
    for volume in job.roles[role].volumes:
        if job.roles[role].claim(volume) in claimed:
            left.add(volume["name"])
            continue
        if volume["name"] in names:
            raise ContextError(f"{role}: the manifest has a volume of this name itself.", got=volume["name"], fix="rename it")
        if "hostPath" in volume:
            job.notes.append(f"{role}: the volume {volume['name']} is a folder of the node, which restricted namespaces do not allow.")
        spec["volumes"].append(volume)
    for mount in job.roles[role].mounts:
        if mount["name"] not in left or mount["mountPath"] not in taken:
            if mount["mountPath"] in taken:
                job.notes.append(f"{role}: the manifest mounts a folder at {mount['mountPath']} itself; {mount['name']} is left out there.")
                continue
            name = "checkpoints" if mount["name"] in left else mount["name"]
            main["volumeMounts"].append({**mount, "name": name})


def _resources(given: Role, options: JobOptions, role: str) -> Manifest:
    """Returns what the role asks for, with the devices of the new job in place of its own.

    Raises:
        ContextError: an amount is none.
    """
    found: Manifest = {}
    for kind in ("requests", "limits"):
        amounts = {name: str(amount) for name, amount in given.amounts(kind).items() if "/" not in name}
        for name, check in (("cpu", check_cpu), ("memory", check_memory)):
            if name in amounts:
                check(amounts[name], f"{role}: {kind}.{name}")
        if role == "Worker" and options.device != CPU:
            amounts[options.device] = str(options.devices)
        if amounts:
            found[kind] = amounts
    return found
