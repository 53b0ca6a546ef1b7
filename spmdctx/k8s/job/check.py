"""Checks what a user says about a job on a cluster, before anything is written or sent."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from spmdctx.errors import ContextError, UnsupportedError
from spmdctx.k8s.job.forms import (
    LABEL,
    LONGEST_LABEL,
    LONGEST_OBJECT,
    NAMESPACE,
    OBJECT,
    SECRET_KEY,
    check_cpu,
    check_folder,
    check_image,
    check_label,
    check_memory,
    check_object,
    check_text,
    check_variable,
    match,
)
from spmdctx.k8s.job.options import DEVICES, JOBSET, OPERATORS, RAY, TPU, TRAINER, JobOptions, Pods
from spmdctx.k8s.job.topology import read_slice

MOST_PROCESSES = 4096

_LONGEST_RAY_JOB = 47
_RAY_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+(rc[0-9]+)?")


def checked(options: JobOptions) -> JobOptions:
    """Returns the options with the operator chosen.

    Raises:
        ContextError: an option is wrong, or two contradict each other.
        UnsupportedError: the operator cannot run such a job.
    """
    options = options.settled()
    if options.operator not in OPERATORS:
        raise ContextError("--operator names none.", got=ascii(options.operator[:80]), need=f"one of {', '.join(OPERATORS)}")
    _check_counts(options)
    _check_names(options)
    _check_pods(options.pods)
    if options.operator == RAY:
        _check_ray(options)
    else:
        _check_collective(options)
    if options.operator == TRAINER:
        _check_trainer(options)
    return options


def _check_names(options: JobOptions) -> None:
    match("--name", options.name, LABEL, "small letters, digits and hyphens, from a letter on: it names a Service too (RFC 1035)")
    longest = longest_name(options)
    if len(longest) > LONGEST_LABEL:
        over = len(longest) - LONGEST_LABEL
        raise ContextError(
            "--name is too long for the names of its pods.", got=f"{options.name}, hence {longest}", need=f"at least {over} letters fewer"
        )
    if options.operator == RAY and len(options.name) > _LONGEST_RAY_JOB:
        raise ContextError("--name is too long for a RayJob.", got=options.name, need=f"at most {_LONGEST_RAY_JOB} letters")
    check_image(options.image)
    if not options.command or not all(options.command):
        raise ContextError("A job needs a script.", need="spmdctx k8s manifest SCRIPT --name NAME --image IMAGE")
    for part in options.command:
        check_text("The script or an argument", part)
    if options.namespace:
        match("--namespace", options.namespace, NAMESPACE, "small letters, digits and hyphens (RFC 1123)")
    if options.queue:
        match("--queue", options.queue, OBJECT, "small letters, digits, hyphens and dots (RFC 1123)")
    check_object("--runtime", options.runtime, "the name of a ClusterTrainingRuntime")


def check_name(name: str) -> str:
    """Returns the name of an object of the cluster.

    Raises:
        ContextError: there can be no such object.
    """
    check_object("The name", name, "small letters, digits, hyphens and dots (RFC 1123)")
    return name


def longest_name(options: JobOptions) -> str:
    """Returns the longest name that a pod of the job gets, as far as it is known, with letters for what is added by chance."""
    role = {JOBSET: "workers", TRAINER: "node"}.get(options.operator)
    if role is None:
        return options.name
    return f"{options.name}-{role}-{options.slices - 1}-{max(0, options.pods_per_slice - 1)}-abcde"


def _check_counts(options: JobOptions) -> None:
    counts = {
        "--processes": options.processes,
        "--devices-per-process": options.devices,
        "--slices": options.slices,
        "--processes-per-pod": options.containers,
    }
    for option, count in counts.items():
        _check_number(option, count, 1, MOST_PROCESSES)
    more = {"--max-restarts": options.restarts, "--ttl": options.ttl_s}
    for option, number in more.items():
        if number is not None:
            _check_number(option, number, 0, 1 << 30)
    if options.deadline_s is not None:
        _check_number("--deadline", options.deadline_s, 1, 1 << 30)
    if options.device not in DEVICES:
        raise ContextError("--device names no kind of devices.", got=ascii(options.device[:80]), need=f"one of {', '.join(DEVICES)}")
    if options.processes % (options.slices * options.containers):
        raise ContextError(
            "The processes cannot be dealt out evenly.",
            got=f"{options.processes} processes, {options.slices} slices, {options.containers} in a pod",
            need="--processes that --slices times --processes-per-pod divides",
        )


def _check_number(option: str, number: object, least: int, most: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise ContextError(f"{option} must be a whole number.", got=ascii(number)[:80], need=f"from {least} to {most}")


def _check_pods(pods: Pods) -> None:
    if pods.cpu:
        check_cpu(pods.cpu)
    if pods.memory:
        check_memory(pods.memory)
    objects = (
        ("--claim", pods.claim),
        ("--service-account", pods.service_account),
        ("--pull-secret", pods.pull_secret),
        ("--priority-class", pods.priority_class),
    )
    for option, text in objects:
        if text:
            check_object(option, text, "the name of an object of the cluster (RFC 1123)")
    check_folder(pods.checkpoint_path)
    _check_number("--user", pods.user, 1, (1 << 31) - 1)
    _check_number("--grace", pods.grace_s, 1, 1 << 20)
    _check_variables(pods)
    for name, value in pods.labels:
        check_label(name, value)
    _check_once("--label", (name for name, _ in pods.labels))


def _check_variables(pods: Pods) -> None:
    names = [*(name for name, _ in pods.variables), *(one.name for one in pods.secrets)]
    for name in names:
        check_variable(name)
    for _, value in pods.variables:
        check_text("--env", value)
    _check_once("--env", names)
    tokens = () if pods.token is None else (pods.token,)
    for secret, key in (*((one.secret, one.key) for one in pods.secrets), *tokens):
        check_object("--secret-env", secret, "the name of a Secret")
        match("--secret-env", key, SECRET_KEY, "a key in the Secret", LONGEST_OBJECT)


def _check_once(option: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ContextError(f"{option} sets a name twice.", got=", ".join(twice[:3]))


def _check_collective(options: JobOptions) -> None:
    servers = options.servers
    if servers.servers or servers.workers:
        raise UnsupportedError(
            f"The operator {options.operator} has no servers and workers.",
            got="--servers or --workers",
            fix="--operator ray, or leave it out",
        )
    if servers.mode or servers.max_staleness is not None or servers.save_every is not None:
        raise ContextError(
            "Only a job with servers takes these options.", got="--mode, --max-staleness or --save-every", need="--servers N"
        )
    if options.device != TPU:
        if options.topology:
            raise ContextError("Only TPUs have a topology.", got=f"--topology {options.topology}, --device {options.device}")
        return
    if options.containers > 1:
        raise UnsupportedError("The TPUs of a host belong to one process.", got="--processes-per-pod", fix="leave it out")
    if options.topology:
        _check_slice(options)


def _check_slice(options: JobOptions) -> None:
    found = read_slice(options.topology)
    chips = options.pods_per_slice * options.devices
    if chips != found.chips:
        raise ContextError(
            "The processes and the topology have different numbers of chips.",
            got=f"{options.pods_per_slice} processes a slice with {options.devices} chips each; {options.topology} has {found.chips}",
            need=" or ".join(
                f"--processes {options.slices * found.chips // one} --devices-per-process {one}"
                for one in _hosts(found.chips, found.per_host)
            ),
        )
    if options.devices not in _hosts(found.chips, found.per_host):
        hosts = ", ".join(map(str, _hosts(found.chips, found.per_host)))
        raise ContextError(
            "No host of this slice has so many chips.", got=f"--devices-per-process {options.devices}", need=f"one of {hosts}"
        )


def _hosts(chips: int, per_host: tuple[int, ...]) -> list[int]:
    """Returns how many chips a host of a slice may have; hosts of 1 and 8 chips stand alone."""
    return [one for one in per_host if one == chips or (one == 4 and chips % 4 == 0)]


def _check_trainer(options: JobOptions) -> None:
    if options.slices > 1 or options.containers > 1:
        raise UnsupportedError(
            "Kubeflow Trainer's runtime for JAX has one job, with one process in a pod.",
            got="--slices or --processes-per-pod",
            fix="--operator jobset",
        )
    if options.restarts is not None:
        raise UnsupportedError(
            "A TrainJob is started again as its runtime says.",
            got=f"--max-restarts {options.restarts}",
            fix="--runtime NAME of a ClusterTrainingRuntime with failurePolicy.maxRestarts, or --operator jobset",
        )
    if options.ttl_s is not None:
        raise UnsupportedError("A TrainJob is not removed by itself.", got="--ttl", fix="--operator jobset")


def _check_ray(options: JobOptions) -> None:
    servers = options.servers
    if not servers.servers or not servers.workers:
        raise ContextError("A RayJob has servers and workers.", need="--servers N --workers N, or --operator jobset")
    _check_number("--servers", servers.servers, 1, MOST_PROCESSES)
    _check_number("--workers", servers.workers, 1, MOST_PROCESSES)
    if options.processes != 1 or options.slices != 1 or options.containers != 1:
        raise ContextError(
            "A job with servers counts workers, not processes.", got="--processes, --slices or --processes-per-pod", need="--workers N"
        )
    if options.device == TPU or options.topology:
        raise UnsupportedError("Workers of a parameter server run on CPUs or GPUs.", got="TPUs")
    if servers.mode not in ("", "sync", "async"):
        raise ContextError("--mode names none.", got=ascii(servers.mode[:80]), need="sync or async")
    if servers.max_staleness is not None and servers.mode != "async":
        raise ContextError("Workers that wait for each other are never late.", got="--max-staleness", need="--mode async")
    if not options.pods.claim:
        raise ContextError(
            "Servers save into a folder that all pods see.", need="--claim NAME of a PersistentVolumeClaim that many pods can write"
        )
    match("--ray-version", servers.ray_version, _RAY_VERSION, "a version such as 2.60.0")
    if servers.save_every is not None:
        _check_number("--save-every", servers.save_every, 1, 1 << 30)
    if servers.max_staleness is not None:
        _check_number("--max-staleness", servers.max_staleness, 0, 1 << 30)
