"""Reads an MSJob, the job of MindSpore's operator, and says what of it has no counterpart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spmdctx.errors import ContextError
from spmdctx.k8s.job.forms import check_label_form, is_own_label

GROUP, KIND = "mindspore.gitee.com", "MSJob"
MAIN = "mindspore"
"""What the operator calls the container of each role that trains."""

_NAME_OF_ROLE = {"scheduler": "Scheduler", "ps": "PS", "worker": "Worker"}
_SPEC = ("runPolicy", "successPolicy", "msReplicaSpecs", "enableDynamicWorker")
_POLICY = ("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy", "suspend")
_SCHEDULING = ("queue", "priorityClass", "minAvailable", "minResources", "scheduleTimeoutSeconds")
_ROLE = ("replicas", "restartPolicy", "template")
_RESTARTS = ("", "Never", "OnFailure", "Always", "ExitCode")
_DEVICE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Role:
    """One role: how many pods, when they are started again, their template, and in it the container that trains."""

    replicas: int
    restart: str
    labels: Mapping[str, str]
    pod: Mapping[str, Any]
    main: Mapping[str, Any]

    @property
    def others(self) -> list[Mapping[str, Any]]:
        """The other containers."""
        return [one for one in _named("containers", self.pod.get("containers")) if one is not self.main]

    def amounts(self, kind: str) -> Mapping[str, Any]:
        """Returns the `requests` or the `limits` of the container."""
        return _mapping(kind, _mapping("resources", self.main.get("resources")).get(kind))

    def claim(self, volume: Mapping[str, Any]) -> str:
        """Returns the claim that a volume is, if it is one that can be written."""
        source = _mapping("persistentVolumeClaim", volume.get("persistentVolumeClaim"))
        name = source.get("claimName")
        return name if isinstance(name, str) and not source.get("readOnly") else ""

    @property
    def volumes(self) -> list[Mapping[str, Any]]:
        """The pod's volumes."""
        return _named("volumes", self.pod.get("volumes"))

    @property
    def mounts(self) -> list[Mapping[str, Any]]:
        """Where the container has them."""
        found = _named("volumeMounts", self.main.get("volumeMounts"))
        if any(not isinstance(one.get("mountPath"), str) for one in found):
            raise ContextError("A volumeMount of the MSJob has no mountPath.")
        return found

    @property
    def variables(self) -> list[Mapping[str, Any]]:
        """The container's variables."""
        return _named("env", self.main.get("env"))

    def words(self, name: str) -> list[str]:
        """Returns the container's `command` or `args`."""
        found = self.main.get(name) or []
        if not isinstance(found, list) or any(isinstance(one, dict | list) or one is None for one in found):
            raise ContextError(f"{name} of the MSJob must be a list of texts.", got=ascii(found)[:80])
        return [str(one) for one in found]

    @property
    def devices(self) -> dict[str, int]:
        """Devices that the container asks for, by the name of the resource."""
        found = {**self.amounts("requests"), **self.amounts("limits")}
        return {name: _count(name, number) for name, number in found.items() if _DEVICE.fullmatch(name)}


@dataclass
class MSJob:
    """An MSJob; `notes` name what has no counterpart, and what becomes another thing."""

    name: str
    namespace: str
    roles: dict[str, Role]
    policy: Mapping[str, Any]
    scheduling: Mapping[str, Any]
    success: str
    is_dynamic: bool
    notes: list[str] = field(default_factory=list)

    @property
    def worker(self) -> Role:
        """The workers."""
        return self.roles["Worker"]


def read_msjob(data: Mapping[str, Any]) -> MSJob:
    """Returns the job that an object describes.

    Raises:
        ContextError: it is no MSJob, or one that its own operator would not run.
    """
    version = str(data.get("apiVersion", ""))
    if data.get("kind") != KIND or version.partition("/")[0] != GROUP:
        raise ContextError("This is no MSJob.", got=f"{version} {data.get('kind')}", need=f"{GROUP}/v1 {KIND}")
    about, spec = _mapping("metadata", data.get("metadata")), _mapping("spec", data.get("spec"))
    policy = _mapping("runPolicy", spec.get("runPolicy"))
    scheduling = _mapping("schedulingPolicy", policy.get("schedulingPolicy"))
    notes: list[str] = []
    _name_unknown(notes, "spec", spec, _SPEC)
    _name_unknown(notes, "spec.runPolicy", policy, _POLICY)
    _name_unknown(notes, "spec.runPolicy.schedulingPolicy", scheduling, _SCHEDULING)
    if about.get("annotations"):
        notes.append("metadata.annotations are left out: they speak to MindSpore's operator or to its scheduler.")
    roles = {}
    for name, role in _mapping("msReplicaSpecs", spec.get("msReplicaSpecs")).items():
        known = _NAME_OF_ROLE.get(str(name).lower())
        if known is None:
            raise ContextError("An MSJob has no such role.", got=ascii(name)[:80], need=f"one of {', '.join(_NAME_OF_ROLE.values())}")
        roles[known] = _role(notes, known, _mapping(known, role))
    if "Worker" not in roles:
        raise ContextError("The MSJob has no Worker.", got=", ".join(roles) or "no role")
    if "Scheduler" in roles and roles["Scheduler"].replicas != 1:
        raise ContextError("An MSJob has one Scheduler.", got=str(roles["Scheduler"].replicas))
    if not about.get("name"):
        raise ContextError("The MSJob has no name.", need="metadata.name")
    success = str(spec.get("successPolicy") or "")
    if success not in ("", "AllWorkers"):
        raise ContextError("An MSJob has no such successPolicy.", got=ascii(success[:80]), need="AllWorkers or none")
    return MSJob(
        str(about["name"]),
        str(about.get("namespace") or ""),
        roles,
        policy,
        scheduling,
        success,
        spec.get("enableDynamicWorker") is True,
        notes,
    )


def _role(notes: list[str], name: str, role: Mapping[str, Any]) -> Role:
    _name_unknown(notes, name, role, _ROLE)
    template = _mapping(f"{name}.template", role.get("template"))
    pod = _mapping(f"{name}.template.spec", template.get("spec"))
    containers = _named(f"{name}.template.spec.containers", pod.get("containers"))
    main = [one for one in containers if one.get("name") == MAIN]
    if len(main) != 1:
        raise ContextError(f"{name} must have one container with the name {MAIN}.", got=f"{len(main)} of {len(containers)}")
    restart = str(role.get("restartPolicy") or "")
    if restart not in _RESTARTS:
        raise ContextError(f"{name} has no such restartPolicy.", got=ascii(restart[:80]), need=f"one of {', '.join(_RESTARTS[1:])}")
    labels = _labels(notes, name, _mapping("metadata", template.get("metadata")).get("labels"))
    replicas = role.get("replicas")
    return Role(1 if replicas is None else _count(f"{name}.replicas", replicas, 1), restart, labels, pod, main[0])


def _labels(notes: list[str], role: str, value: object) -> dict[str, str]:
    """Returns the labels of a role's pods, without those that the manifest or the operator sets; notes name these."""
    found = {str(key): "" if text is None else str(text) for key, text in _mapping(f"{role}: labels", value).items()}
    for name, text in found.items():
        check_label_form(f"{role}: the label {ascii(name)[:80]}", name, text)
    own = [name for name in found if is_own_label(name)]
    notes += [f"{role}: the label {name} is left out: the manifest or the operator sets it." for name in own]
    return {name: text for name, text in found.items() if name not in own}


def _name_unknown(notes: list[str], where: str, found: Mapping[str, Any], known: Iterable[str]) -> None:
    notes += [f"{where}.{name} has no counterpart, and is left out." for name in found if name not in known]


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ContextError(f"{name} of the MSJob must be a mapping.", got=ascii(value)[:80])
    return value


def _named(name: str, value: object) -> list[Mapping[str, Any]]:
    """Returns a list of mappings that have a name each."""
    found = [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in found):
        raise ContextError(f"{name} of the MSJob must be a list of things with names.", got=ascii(value)[:80])
    return found


def _count(name: str, value: object, least: int = 0) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or len(text) > 6 or int(text) < least:
        raise ContextError(f"{name} of the MSJob must be a whole number from {least} on.", got=ascii(value)[:80])
    return int(text)
