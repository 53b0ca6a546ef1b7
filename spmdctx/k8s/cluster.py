"""The client's side of a cluster: it hands jobs over, asks how they are, reads what they write, and deletes them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from spmdctx.errors import CommunicationError, ContextError, UnsupportedError
from spmdctx.k8s.job.check import check_name
from spmdctx.k8s.operators.pod import COMPONENT, INSTANCE
from spmdctx.k8s.state import JOB_KINDS, Kind, PodState, State, number_of, state_of

_TIMEOUT_S = 30


class Written(NamedTuple):
    """A line that a container has written."""

    pod: str
    line: str


class Cluster:
    """A cluster, by the official client.

    Args:
        context: of the user's kubeconfig; empty for its current one, or for the cluster that this process runs in.
        namespace: empty for the context's own.

    Raises:
        UnsupportedError: the client is not installed.
        CommunicationError: nothing says where the cluster is.
    """

    def __init__(self, context: str = "", namespace: str = "") -> None:
        self._client = _import("kubernetes.client")
        settings, own = _settings(context)
        settings.retries = 0  # each would be a warning of the library's
        self.namespace = namespace or own or "default"
        connection = self._client.ApiClient(settings)
        self._objects, self._core = self._client.CustomObjectsApi(connection), self._client.CoreV1Api(connection)

    def submit(self, objects: Sequence[Mapping[str, Any]], *, dry_run: bool = False) -> list[str]:
        """Creates objects; returns their kinds and names.

        The server refuses fields that it does not know, instead of leaving them out.

        Raises:
            ContextError: an object is of another kind, exists already, or is refused.
            CommunicationError: the cluster is not reached, or does not let the user.
        """
        for one in objects:
            if one.get("kind") not in JOB_KINDS:
                raise ContextError(
                    "Only jobs are submitted.", got=str(one.get("kind")), need=" or ".join(JOB_KINDS), fix="kubectl apply for others"
                )
        made = []
        for one in objects:
            kind, name = JOB_KINDS[one["kind"]], str(one["metadata"]["name"])
            namespace = one["metadata"].get("namespace") or self.namespace
            with self._asked(f"{kind.name} {namespace}/{name}", kind):
                more = {"dry_run": "All"} if dry_run else {}
                self._objects.create_namespaced_custom_object(
                    kind.group,
                    kind.version,
                    namespace,
                    kind.plural,
                    dict(one),
                    field_validation="Strict",
                    _request_timeout=_TIMEOUT_S,
                    **more,
                )
            made.append(f"{kind.name} {namespace}/{name}")
        return made

    def status(self, name: str) -> State:
        """Returns how a job is.

        Raises:
            ContextError: there is no such job.
            CommunicationError: the cluster is not reached, or does not let the user.
        """
        kind, found = self._find(name)
        return state_of(kind, found, [_pod_state(pod) for pod in self._pods(name)])

    def logs(self, name: str, process: int | None = None, *, follow: bool = False, tail: int | None = None) -> Iterator[Written]:
        """Yields what a process of a job writes; by default process 0, or what `spmdctx launch` writes where there are servers.

        Raises:
            ContextError: there is no such job, or no such process.
            CommunicationError: the cluster is not reached, or does not let the user.
        """
        kind, _ = self._find(name)
        pod, container = self._chosen(kind, name, process)
        with self._asked(f"pod {self.namespace}/{pod}"):
            more = {} if tail is None else {"tail_lines": tail}
            stream = self._core.read_namespaced_pod_log(
                pod, self.namespace, container=container, follow=follow, _preload_content=False, **more
            )
            for line in _lines(stream):
                yield Written(pod, line)

    def delete(self, name: str) -> str:
        """Deletes a job with its pods; claims and what is in them stay. Returns its kind and name.

        Raises:
            ContextError: there is no such job.
            CommunicationError: the cluster is not reached, or does not let the user.
        """
        kind, _ = self._find(name)
        with self._asked(f"{kind.name} {self.namespace}/{name}", kind):
            self._objects.delete_namespaced_custom_object(
                kind.group, kind.version, self.namespace, kind.plural, name, propagation_policy="Foreground", _request_timeout=_TIMEOUT_S
            )
        return f"{kind.name} {self.namespace}/{name}"

    def _find(self, name: str) -> tuple[Kind, Mapping[str, Any]]:
        """Returns the job of this name, of whichever operator; a TrainJob comes before the JobSet that it has made."""
        check_name(name)
        for kind in (JOB_KINDS["TrainJob"], JOB_KINDS["RayJob"], JOB_KINDS["JobSet"]):
            try:
                with self._asked(f"{kind.name} {self.namespace}/{name}"):
                    found = self._objects.get_namespaced_custom_object(
                        kind.group, kind.version, self.namespace, kind.plural, name, _request_timeout=_TIMEOUT_S
                    )
            except _Missing:
                continue
            return kind, found
        raise ContextError("There is no such job.", got=f"{self.namespace}/{name}", need=f"a {', '.join(JOB_KINDS)} of this name")

    def _pods(self, name: str) -> list[Any]:
        with self._asked(f"pods of {self.namespace}/{name}"):
            found = self._core.list_namespaced_pod(self.namespace, label_selector=f"{INSTANCE}={name}", _request_timeout=_TIMEOUT_S)
        return sorted(found.items, key=lambda pod: str(pod.metadata.creation_timestamp))

    def _chosen(self, kind: Kind, name: str, process: int | None) -> tuple[str, str]:
        """Returns the pod and the container that are asked for; of several attempts the last."""
        pods = self._pods(name)
        if kind.name == "RayJob" and process is None:
            found = [(pod.metadata.name, pod.spec.containers[0].name) for pod in pods if pod.metadata.labels.get(COMPONENT) == "submitter"]
            wanted = "the pod that submits"
        elif kind.name == "RayJob":
            found = [(pod.metadata.name, pod.spec.containers[0].name) for pod in pods if pod.metadata.labels.get(COMPONENT) == "worker"]
            found = found[process : process + 1] if process is not None else []
            wanted = f"a pod {process} of workers"
        else:
            wanted = f"process {process or 0}"
            found = [
                (pod.metadata.name, container.name)
                for pod in pods
                for container in pod.spec.containers
                if number_of(_pod_state(pod).annotations, container.name, _variables(container)) == (process or 0)
            ]
        if not found:
            raise ContextError(
                f"The job has no pod for this yet: {wanted}.", got=f"{len(pods)} pods of {self.namespace}/{name}", fix="spmdctx k8s status"
            )
        return found[-1]

    @contextmanager
    def _asked(self, what: str, kind: Kind | None = None) -> Iterator[None]:
        """Turns the client's errors into errors that say what was asked for."""
        refused = self._client.ApiException
        unreached = _import("urllib3.exceptions").HTTPError
        try:
            yield
        except refused as error:
            raise _refusal(what, kind, error) from None
        except unreached as error:
            raise CommunicationError("The cluster is not reached.", where=what, got=str(error).splitlines()[0][:200]) from None


class _Missing(ContextError):
    """There is no such object, or no such kind of objects."""


def _refusal(what: str, kind: Kind | None, error: Any) -> ContextError | CommunicationError:
    said = _message(error)
    if error.status == 404:
        fix = "" if kind is None else f"install {kind.operator}, or choose another --operator; check --namespace"
        return _Missing("The cluster does not have this.", where=what, got=said, fix=fix)
    if error.status == 409:
        return ContextError("There is such a job already.", where=what, fix="spmdctx k8s delete, or another --name")
    if error.status in (400, 422):
        return ContextError("The cluster refuses this object.", where=what, got=said)
    return CommunicationError("The cluster does not answer as it should.", where=what, got=f"{error.status} {said}")


def _message(error: Any) -> str:
    """Returns what the server says, which is JSON if it comes from Kubernetes."""
    try:
        return str(importlib.import_module("json").loads(error.body)["message"])[:400]
    except (ValueError, TypeError, KeyError):
        return str(error.reason)[:200]


def _settings(context: str) -> tuple[Any, str]:
    """Returns how the cluster is reached, and the namespace of the context."""
    config, settings = _import("kubernetes.config"), _import("kubernetes.client").Configuration()
    files = os.environ.get("KUBECONFIG") or None
    try:
        config.load_kube_config(files, context or None, settings)
        contexts, active = config.list_kube_config_contexts(files)
        chosen = next((one for one in contexts if one["name"] == context), active)
        return settings, str(chosen["context"].get("namespace") or "")
    except config.ConfigException as error:
        try:
            config.load_incluster_config(settings)
        except config.ConfigException:
            raise CommunicationError(
                "Nothing says where the cluster is.", got=str(error).splitlines()[0], fix="KUBECONFIG=FILE, or --context NAME"
            ) from None
        return settings, ""


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            "Clusters are reached by Kubernetes's client, which is not installed.", got=str(error), fix="pip install 'spmdctx[k8s]'"
        ) from None


def _pod_state(pod: Any) -> PodState:
    statuses = (pod.status.container_statuses or []) if pod.status else []
    return PodState(
        pod.metadata.name,
        str((pod.metadata.labels or {}).get(COMPONENT, "")),
        str(pod.status.phase if pod.status else "Unknown"),
        tuple(one.state.terminated.exit_code for one in statuses if one.state and one.state.terminated),
        dict(pod.metadata.annotations or {}),
    )


def _variables(container: Any) -> dict[str, str]:
    return {one.name: one.value or "" for one in container.env or []}


def _lines(stream: Any) -> Iterator[str]:
    left = b""
    for data in stream.stream(amt=None) if hasattr(stream, "stream") else [stream.read()]:
        *lines, left = (left + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    if left:
        yield left.decode(errors="replace")
