"""Checks what a user says about a job on a cluster, before anything is written or sent."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from spmdctx.errors import ContextError, UnsupportedError
from spmdctx.k8s.job.options import DEVICES, JOBSET, OPERATORS, RAY, TPU, TRAINER, JobOptions, Pods
from spmdctx.k8s.job.topology import read_slice

MOST_PROCESSES = 4096

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUANTITY = re.compile(r"\d{1,9}(\.\d{1,6})?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_SECRET_KEY = re.compile(r"[-._A-Za-z0-9]+")

_LONGEST_LABEL, _LONGEST_OBJECT = 63, 253
_LONGEST_RAY_JOB = 47
_OWN_VARIABLES = ("SPMDCTX_", "JAX_COORDINATOR_", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_NUM_CPU_DEVICES", "RAY_", "FQ_RAY_IP")
_OWN_LABELS = ("app.kubernetes.io/", "jobset.sigs.k8s.io/", "kueue.x-k8s.io/queue-name", "ray.io/", "trainer.kubeflow.org/")


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
    _match("--name", options.name, _LABEL, "small letters, digits and hyphens, from a letter on: it names a Service too (RFC 1035)")
    longest = longest_name(options)
    if len(longest) > _LONGEST_LABEL:
        over = len(longest) - _LONGEST_LABEL
        raise ContextError(
            "--name is too long for the names of its pods.", got=f"{options.name}, hence {longest}", need=f"at least {over} letters fewer"
        )
    if options.operator == RAY and len(options.name) > _LONGEST_RAY_JOB:
        raise ContextError("--name is too long for a RayJob.", got=options.name, need=f"at most {_LONGEST_RAY_JOB} letters")
    _match("--image", options.image, _IMAGE, "an image such as registry.example/train:1")
    if not options.command or not all(options.command):
        raise ContextError("A job needs a script.", need="spmdctx k8s manifest SCRIPT --name NAME --image IMAGE")
    if any("\0" in part for part in options.command):
        raise ContextError("The script or an argument holds a zero byte.")
    for option, text in (("--namespace", options.namespace), ("--queue", options.queue)):
        if text:
            _match(option, text, re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"), "small letters, digits and hyphens (RFC 1123)")
    _match("--runtime", options.runtime, _OBJECT, "the name of a ClusterTrainingRuntime", _LONGEST_OBJECT)


def check_name(name: str) -> str:
    """Returns the name of an object of the cluster.

    Raises:
        ContextError: there can be no such object.
    """
    _match("The name", name, _OBJECT, "small letters, digits, hyphens and dots (RFC 1123)", _LONGEST_OBJECT)
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
    for option, text in (("--cpu", pods.cpu), ("--memory", pods.memory)):
        if text:
            _match(option, text, _QUANTITY, "a quantity such as 4, 500m or 16Gi")
            if float(re.sub("[A-Za-z]", "", text)) == 0:
                raise ContextError(f"{option} must be more than nothing.", got=text)
    objects = (
        ("--claim", pods.claim),
        ("--service-account", pods.service_account),
        ("--pull-secret", pods.pull_secret),
        ("--priority-class", pods.priority_class),
    )
    for option, text in objects:
        if text:
            _match(option, text, _OBJECT, "the name of an object of the cluster (RFC 1123)", _LONGEST_OBJECT)
    if (
        not pods.checkpoint_path.startswith("/")
        or ":" in pods.checkpoint_path
        or pods.checkpoint_path.rstrip("/") in ("", "/tmp", "/dev/shm")
    ):
        raise ContextError(
            "--checkpoint-path must be a folder of its own.", got=ascii(pods.checkpoint_path[:80]), need="such as /checkpoints"
        )
    _check_number("--user", pods.user, 1, (1 << 31) - 1)
    _check_number("--grace", pods.grace_s, 1, 1 << 20)
    _check_variables(pods)
    for name, value in pods.labels:
        _match("--label", name, _LABEL_KEY, "a label such as team or example.com/team", _LONGEST_OBJECT)
        _match("--label", value, _LABEL_VALUE, "a value of at most 63 letters, digits, '-', '_' and '.'")
        if name.startswith(_OWN_LABELS):
            raise ContextError("--label sets a label that the manifest or the operator sets.", got=name)


def _check_variables(pods: Pods) -> None:
    names = [*(name for name, _ in pods.variables), *(one.name for one in pods.secrets)]
    for name in names:
        _match("--env", name, _VARIABLE, "letters, digits and underscores", _LONGEST_OBJECT)
        if name.startswith(_OWN_VARIABLES):
            raise ContextError("--env sets a variable that says where a process belongs.", got=name, fix="leave it to the manifest")
    _check_once("--env", names)
    tokens = () if pods.token is None else (pods.token,)
    for secret, key in (*((one.secret, one.key) for one in pods.secrets), *tokens):
        _match("--secret-env", secret, _OBJECT, "the name of a Secret", _LONGEST_OBJECT)
        _match("--secret-env", key, _SECRET_KEY, "a key in the Secret", _LONGEST_OBJECT)


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
    _match("--ray-version", servers.ray_version, re.compile(r"\d+\.\d+\.\d+"), "a version such as 2.60.0")


def _match(option: str, text: str, form: re.Pattern[str], need: str, longest: int = _LONGEST_LABEL) -> None:
    if option == "--image":
        longest = 1024
    if not isinstance(text, str) or len(text) > longest or not form.fullmatch(text):
        raise ContextError(f"{option} cannot be used as it is.", got=ascii(text)[:80], need=f"{need}, at most {longest} characters")
