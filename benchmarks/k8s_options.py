"""A covering array over the options of jobs on Kubernetes: any two values that can go together stand together in some job."""

from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Any

from spmdctx.k8s.job.options import CPU, GPU, JOBSET, RAY, TPU, TRAINER, JobOptions, Pods, SecretVariable, Servers

_SECRETS = (SecretVariable("HF_TOKEN", "hub", "token"), SecretVariable("KEY", "store.example", "a.key"))
_PODS = {
    "cpu": ("", "4", "500m"),
    "memory": ("", "16Gi"),
    "claim": ("", "checkpoints"),
    "checkpoint_path": ("/checkpoints", "/mnt/run/state"),
    "variables": ((), (("GREETING", "say $(HOME) 'twice'"), ("HOME", "/tmp/home"))),
    "secrets": ((), _SECRETS),
    "token": (None, ("train", "token")),
    "user": (1000, 65532),
    "grace_s": (120, 1, 3600),
    "labels": ((), (("team", "vision"), ("example.com/cost", "a_b.c"))),
    "service_account": ("", "trainer"),
    "pull_secret": ("", "registry"),
    "priority_class": ("", "high"),
}
_JOB = {
    "name": ("t", "train-7b"),
    "image": ("train:1", "registry.example/team/train@sha256:00ff"),
    "command": (("train.py",), ("-m", "pkg.train", "--lr", "1e-3", "--text", "$(X) and 'y'")),
    "namespace": ("", "research"),
    "queue": ("", "gpus"),
    "deadline_s": (None, 3600),
}
_SIZES = (
    ("cpu", CPU, 1, 1, "", 1, 1),
    ("gpu", GPU, 4, 8, "", 1, 1),
    ("amd", "amd.com/gpu", 2, 8, "", 1, 1),
    ("groups", GPU, 8, 8, "", 2, 1),
    ("containers", GPU, 16, 1, "", 1, 8),
    ("both", CPU, 12, 2, "", 3, 2),
    ("tpu", TPU, 4, 4, "v5e-16", 1, 1),
    ("host", TPU, 1, 8, "v5e-8", 1, 1),
    ("cube", TPU, 8, 4, "v5p:2x4x4", 1, 1),
    ("slices", TPU, 8, 4, "v6e-16", 2, 1),
    ("unnamed", TPU, 2, 4, "", 1, 1),
)
"""Name, device, processes, devices, topology, slices, containers: what goes together."""

_OWN = {
    JOBSET: {"size": _SIZES, "restarts": (None, 0, 100), "ttl_s": (None, 0, 600)},
    TRAINER: {"size": tuple(size for size in _SIZES if size[5:] == (1, 1)), "runtime": ("jax-distributed", "spmdctx")},
    RAY: {
        "device": (CPU, GPU),
        "devices": (1, 4),
        "servers": (1, 2),
        "workers": (1, 4),
        "mode": ("", "sync", "async"),
        "save_every": (None, 5),
        "restarts": (None, 0, 2),
        "ttl_s": (None, 600),
    },
}

Row = dict[str, Any]


def dimensions(operator: str) -> dict[str, tuple[Any, ...]]:
    """Returns the values of each option with an operator."""
    found: dict[str, tuple[Any, ...]] = {**_JOB, **_PODS, **_OWN[operator]}
    if operator == RAY:
        found |= {
            "claim": ("checkpoints",),
            "token": (None, ("train", "auth_token")),
            "command": (("train.py",), ("-m", "pkg.train", "--lr", "1e-3")),
        }
    return found


def covering_rows(values: Mapping[str, tuple[Any, ...]]) -> list[Row]:
    """Returns rows in which any two values of any two options stand together, by taking the pair that is missing and what covers most."""
    names = list(values)
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(range(len(names)), 2)
        for i, j in product(range(len(values[names[a]])), range(len(values[names[b]])))
    }
    rows = []
    while missing:
        first = min(missing)
        chosen = dict(first)
        for place in range(len(names)):
            if place not in chosen:
                gains = [
                    (sum(tuple(sorted(((place, value), other))) in missing for other in chosen.items()), -value)
                    for value in range(len(values[names[place]]))
                ]
                chosen[place] = -max(gains)[1]
        pairs = set(combinations(sorted(chosen.items()), 2))
        missing -= pairs
        rows.append({names[place]: values[names[place]][value] for place, value in chosen.items()})
    return rows


def job_of(operator: str, row: Row) -> JobOptions:
    """Returns the options of a row."""
    row = dict(row)
    size = row.pop("size", None)
    if size is not None:
        row |= dict(zip(("device", "processes", "devices", "topology", "slices", "containers"), size[1:], strict=True))
    pods = Pods(**{name: row.pop(name) for name in _PODS})
    servers = {name: row.pop(name) for name in ("servers", "workers", "mode", "save_every") if name in row}
    late = {"max_staleness": 2} if servers.get("mode") == "async" else {}
    return JobOptions(**row, operator=operator, pods=pods, servers=Servers(**servers, **late))


def covering_jobs() -> Iterator[tuple[str, JobOptions]]:
    """Yields the jobs of the arrays of all operators, each with a name."""
    for operator in (JOBSET, TRAINER, RAY):
        for number, row in enumerate(covering_rows(dimensions(operator))):
            yield f"{operator}-{number}", job_of(operator, row)
