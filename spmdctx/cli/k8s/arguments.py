"""The arguments that describe a job on a cluster."""

from __future__ import annotations

import argparse
from typing import Any

from spmdctx.cli.parser.values import natural, positive
from spmdctx.context.servers import MODES
from spmdctx.errors import ContextError
from spmdctx.k8s.job.options import DEVICES, OPERATORS, RAY, JobOptions, Pods, SecretVariable, Servers
from spmdctx.k8s.operators.rayjob import AUTH_KEY


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a job."""
    parser.add_argument("script", nargs="?", help="a Python script of the image; its own arguments follow --")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module, as in python -m")
    parser.add_argument("--name", metavar="NAME", help="of the job (needed)")
    parser.add_argument("--image", metavar="IMAGE", help="what the pods run (needed)")
    parser.add_argument("--namespace", default="", metavar="NAME", help="where the job goes (default: the client's own)")
    parser.add_argument("--operator", default="", choices=OPERATORS, help="what runs the job (default: jobset, or ray with --servers)")
    _add_size(parser.add_argument_group("size"))
    _add_servers(parser.add_argument_group("parameter server", "Servers hold the state, workers run the script."))
    _add_pods(parser.add_argument_group("pods"))
    _add_life(parser.add_argument_group("life"))


def _add_size(group: Any) -> None:
    group.add_argument("--processes", type=positive, default=1, metavar="N", help="of the whole job (default: %(default)s)")
    group.add_argument("--devices-per-process", type=positive, default=1, metavar="N", help="devices of each (default: %(default)s)")
    group.add_argument("--device", default=DEVICES[0], choices=DEVICES, help="their kind (default: %(default)s)")
    group.add_argument("--topology", default="", metavar="SLICE", help="TPUs of each slice, such as v5e-16 or v5p:2x2x4")
    group.add_argument("--slices", type=positive, default=1, metavar="N", help="slices of TPUs, or groups of pods (default: %(default)s)")
    group.add_argument("--processes-per-pod", type=positive, default=1, metavar="N", help="each in a container (default: %(default)s)")
    group.add_argument("--cpu", default="", metavar="N", help="CPUs of each container, such as 4 or 500m (default: not said)")
    group.add_argument("--memory", default="", metavar="SIZE", help="memory of each container, such as 16Gi (default: not said)")


def _add_servers(group: Any) -> None:
    group.add_argument("--servers", type=positive, default=0, metavar="N", help="servers (default: none)")
    group.add_argument("--workers", type=positive, default=0, metavar="N", help="workers, with --servers (default: none)")
    group.add_argument("--mode", choices=MODES, default="", help="whether workers wait for each other (default: sync)")
    group.add_argument("--max-staleness", type=natural, metavar="N", help="updates by which values may be late in async (default: 4)")
    group.add_argument("--save-every", type=positive, metavar="N", help="updates between two saved states (default: 10)")
    group.add_argument("--ray-version", default=Servers().ray_version, metavar="VERSION", help="that of the image (default: %(default)s)")


def _add_pods(group: Any) -> None:
    own = Pods()
    group.add_argument("--claim", default="", metavar="NAME", help="a PersistentVolumeClaim for checkpoints (default: none)")
    group.add_argument("--checkpoint-path", default=own.checkpoint_path, metavar="PATH", help="where it is mounted (default: %(default)s)")
    group.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable; may be repeated")
    group.add_argument(
        "--secret-env", action="append", default=[], metavar="NAME=SECRET:KEY", help="a variable from a Secret; may be repeated"
    )
    group.add_argument("--token-secret", default="", metavar="SECRET[:KEY]", help="keeps strangers out of the job (default: none)")
    group.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help="of the job and its pods; may be repeated")
    group.add_argument("--service-account", default="", metavar="NAME", help="of the pods (default: the namespace's)")
    group.add_argument("--pull-secret", default="", metavar="NAME", help="for the image's registry (default: none)")
    group.add_argument("--priority-class", default="", metavar="NAME", help="of the pods (default: none)")
    group.add_argument(
        "--user", type=positive, default=own.user, metavar="N", help="user and group that run the script (default: %(default)s)"
    )


def _add_life(group: Any) -> None:
    group.add_argument("--queue", default="", metavar="NAME", help="a LocalQueue of Kueue (default: none)")
    group.add_argument(
        "--max-restarts", type=natural, metavar="N", help="times that a failed job is started again (default: the operator's)"
    )
    group.add_argument(
        "--grace", type=positive, default=Pods().grace_s, metavar="SECONDS", help="from SIGTERM to the end (default: %(default)s)"
    )
    group.add_argument("--deadline", type=positive, metavar="SECONDS", help="after it the job is ended (default: none)")
    group.add_argument("--ttl", type=natural, metavar="SECONDS", help="after its end the job is removed (default: never)")
    group.add_argument(
        "--runtime", default="jax-distributed", metavar="NAME", help="the ClusterTrainingRuntime of a TrainJob (default: %(default)s)"
    )


def add_name_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a job which is there."""
    parser.add_argument("name", help="the name of the job")
    parser.add_argument("--namespace", default="", metavar="NAME", help="where it is (default: the client's own)")
    add_context_argument(parser)


def add_context_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names a cluster."""
    parser.add_argument("--context", default="", metavar="NAME", help="of the kubeconfig (default: its current one)")


def job_options(arguments: argparse.Namespace) -> JobOptions:
    """Returns the job that the arguments describe; nothing is checked yet but their form.

    Raises:
        ContextError: a pair cannot be read.
    """
    if not arguments.name or not arguments.image:
        raise ContextError("A job on a cluster has a name and an image.", need="--name NAME --image IMAGE")
    script = ["-m", arguments.script] if arguments.module else [arguments.script]
    secrets = [(name, *_pair("--secret-env", value, ":")) for name, value in (_pair("--secret-env", one) for one in arguments.secret_env)]
    pods = Pods(
        cpu=arguments.cpu,
        memory=arguments.memory,
        claim=arguments.claim,
        checkpoint_path=arguments.checkpoint_path,
        variables=tuple(_pair("--env", one) for one in arguments.env),
        secrets=tuple(SecretVariable(*one) for one in secrets),
        token=_token(arguments),
        user=arguments.user,
        grace_s=arguments.grace,
        labels=tuple(_pair("--label", one) for one in arguments.label),
        service_account=arguments.service_account,
        pull_secret=arguments.pull_secret,
        priority_class=arguments.priority_class,
    )
    servers = Servers(
        arguments.servers, arguments.workers, arguments.mode, arguments.max_staleness, arguments.save_every, arguments.ray_version
    )
    return JobOptions(
        name=arguments.name or "",
        image=arguments.image or "",
        command=(*script, *arguments.arguments) if arguments.script else (),
        processes=arguments.processes,
        devices=arguments.devices_per_process,
        device=arguments.device,
        topology=arguments.topology,
        slices=arguments.slices,
        containers=arguments.processes_per_pod,
        operator=arguments.operator,
        runtime=arguments.runtime,
        namespace=arguments.namespace,
        queue=arguments.queue,
        restarts=arguments.max_restarts,
        ttl_s=arguments.ttl,
        deadline_s=arguments.deadline,
        pods=pods,
        servers=servers,
    )


def _token(arguments: argparse.Namespace) -> tuple[str, str] | None:
    """Returns the Secret of the job's token, with the key that its operator reads where none is given."""
    if not arguments.token_secret:
        return None
    secret, _, key = arguments.token_secret.partition(":")
    return secret, key or (AUTH_KEY if arguments.servers or arguments.operator == RAY else "token")


def _pair(option: str, text: str, mark: str = "=") -> tuple[str, str]:
    name, found, value = text.partition(mark)
    if not found:
        raise ContextError(
            f"{option} takes pairs.", got=ascii(text[:80]), need="NAME=SECRET:KEY" if option == "--secret-env" else "NAME=VALUE"
        )
    return name, value
