"""Damaged settings: YAML contexts and topologies, environments of launchers, and options."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import yaml

import spmdctx
from benchmarks.damaged_values import any_value, damaged_bytes, damaged_data
from spmdctx.communication.clusters import detect
from spmdctx.context.options import ALGO_BY_NAME, ALGO_OPTIONS, BY_NAME, OPTIONS, checked
from spmdctx.machine.presets import topology
from spmdctx.machine.topology import Topology, read_topology, topology_text

Input = tuple[str, Callable[[], str]]

CONTEXT: dict[str, Any] = {
    "use_parallel": True,
    "parallel": {
        "parallel_mode": 1,
        "device_num": 8,
        "enable_alltoall": True,
        "comm_fusion": {"allreduce": {"mode": "index", "config": [2, 3]}},
    },
    "parallel_config": {
        "data_parallel": 2,
        "model_parallel": 4,
        "pipeline_stage": 1,
        "micro_batch_num": 4,
        "recompute": {"recompute": True},
    },
    "context": {"max_device_memory": "58GB"},
    "runner_config": {"gradient_accumulation_steps": 2},
}
PLAIN: dict[str, Any] = {
    "parallel_mode": "auto_parallel",
    "device_num": 8,
    "dataset_strategy": [[8, 1], [8]],
    "all_reduce_fusion_config": [2, 4],
    "parallel_optimizer_config": {"optimizer_weight_shard_size": -1, "optimizer_level": "level2"},
    "mem_coeff": 0.5,
}


def bomb(chance: random.Random, key: str) -> str:
    """Returns YAML whose aliases or merges stand for many values."""
    width, depth = chance.randint(2, 12), chance.randint(2, 12)
    if chance.random() < 0.5:
        rows = ["a0: &a0 [x, y]"] + [f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * width)}]" for at in range(1, depth)]
    else:
        rows = ["a0: &a0 {x: 1, y: 2}"] + [
            f"a{at}: &a{at} {{<<: [{', '.join([f'*a{at - 1}'] * width)}], k{at}: 1}}" for at in range(1, depth)
        ]
    return "\n".join([*rows, f"{key}: *a{depth - 1}"]) + "\n"


def odd_yaml(chance: random.Random, names: list[str]) -> tuple[str, bytes]:
    """Returns YAML that no configuration has."""
    key = chance.choice(names)
    values = (
        *(
            "2020-99-99",
            "2020-01-01",
            "!!int abc",
            "!!int _",
            "!!int ''",
            "!!float x",
            "!!float 1:2:3",
            "!!binary ====",
            "!!binary x",
            "!!timestamp x",
        ),
        *(
            "!!set {a, b}",
            "!!omap [a: 1]",
            "!!pairs [a: 1]",
            "!!null x",
            "!!bool x",
            "!!python/object/apply:os.getcwd []",
            "!!python/name:os.system",
        ),
        *(
            "&a [*a]",
            "&a {b: *a}",
            "*none",
            "? [1, 2]",
            "{[1]: 2}",
            "{{}: 1}",
            "[" * 5000,
            "{a: " * 900,
            "9" * 5000,
            "0x" + "f" * 5000,
            ".inf",
            ".nan",
            "-.inf",
        ),
        *(
            "1:1" + ":1" * 2000,
            "1_0",
            "0o17",
            "0b1",
            "~",
            "yes",
            "'8'",
            '"\\ud800"',
            '"\\x00"',
            "|\n  x",
            "8 # x",
            "[1, 2",
            "@x",
            "`x`",
            "%x",
            "- - - 1",
        ),
        *("x" * 100_000, "[" + "1, " * 30_000 + "1]", "!<tag:yaml.org,2002:int> 8", "!x 8", "<<", "{<<: 3}", "{<<: [3]}", "{<<: {a: 1}}"),
    )
    return f"{key}: odd", f"{key}: {chance.choice(values)}\n".encode()


def damaged_yaml(chance: random.Random, content: dict[str, Any], names: list[str]) -> tuple[str, bytes]:
    """Returns what was done, and damaged YAML."""
    text = yaml.safe_dump(content, sort_keys=False)
    way = chance.choice(("bytes", "bytes", "data", "data", "data", "odd", "bomb", "twins"))
    if way == "bytes":
        return damaged_bytes(chance, text.encode())
    if way == "odd":
        said, row = odd_yaml(chance, names)
        return said, row if chance.random() < 0.5 else text.encode() + row
    if way == "bomb":
        return way, bomb(chance, chance.choice(names)).encode()
    if way == "twins":
        rows = text.splitlines(keepends=True)
        top = chance.choice([row for row in rows if row[0] not in " -"])
        return way, (text + top).encode()
    said, found = damaged_data(chance, content, chance.choice((1, 1, 2, 3)))
    return said, yaml.safe_dump(found, sort_keys=False, allow_unicode=True).encode("utf-8", "replace")


def context_kind(folder: Path) -> Callable[[random.Random], Input]:
    """YAML configurations."""
    path = folder / "context.yaml"
    names = [*CONTEXT, *PLAIN, "parallel_config.foo", "foo"]

    def make(chance: random.Random) -> Input:
        said, data = damaged_yaml(chance, chance.choice((CONTEXT, PLAIN)), names)
        path.write_bytes(data)

        def read() -> str:
            spmdctx.reset_auto_parallel_context()
            try:
                spmdctx.load_context(path)
                if said == "twins":
                    return "a key that stands twice was read"
                for option in OPTIONS:
                    spmdctx.get_auto_parallel_context(option.name)
            finally:
                spmdctx.reset_auto_parallel_context()
            return ""

        return said, read

    return make


def topology_kind(folder: Path) -> Callable[[random.Random], Input]:
    """Topologies, as YAML and JSON."""
    path = folder / "topology.yaml"
    good = topology("tpu-v5e")
    content = yaml.safe_load(topology_text(good))

    def make(chance: random.Random) -> Input:
        said, data = damaged_yaml(chance, content, list(content))
        path.write_bytes(data)

        def read() -> str:
            found = read_topology(path)
            if said == "twins":
                return "a key that stands twice was read"
            path.write_text(topology_text(found), encoding="utf-8")
            if read_topology(path) != found:
                return "another topology was written than read"
            hash(found), found.compiler
            return ""

        def construct() -> str:
            field = chance.choice(dataclasses.fields(Topology)).name
            dataclasses.replace(good, **{field: any_value(chance)})
            return ""

        return said, construct if chance.random() < 0.2 else read

    return make


ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {"SPMDCTX_ADDRESS": "h:1234", "SPMDCTX_NUM_PROCESSES": "4", "SPMDCTX_PROCESS_ID": "1", "SPMDCTX_LOCAL_DEVICE_IDS": "0,1"},
    {
        **{"SPMDCTX_ADDRESS": "h:1234", "SPMDCTX_NUM_PROCESSES": "16", "SPMDCTX_JOB_INDEX": "1", "SPMDCTX_PODS_PER_JOB": "4"},
        **{"SPMDCTX_POD_INDEX": "3", "SPMDCTX_CONTAINERS_PER_POD": "2", "SPMDCTX_CONTAINER_INDEX": "1"},
    },
    {"JAX_COORDINATOR_ADDRESS": "h:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"},
    {
        **{"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        **{
            "OMPI_MCA_ess_base_jobid": "77",
            "OMPI_MCA_orte_hnp_uri": "0.0;tcp://10.0.0.1,10.0.0.2:99;tcp6://[fe80::1]:99",
            "CUDA_VISIBLE_DEVICES": "0,1",
        },
    },
    {
        **{"SLURM_STEP_NODELIST": "node[007-009,12],other", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    },
    {"COORDINATOR_ADDRESS": "job-0", "COORDINATOR_PORT": "55", "NUM_PROCESSES": "4", "PROCESS_ID": "1"},
    {
        **{"JOBSET_NAME": "t", "REPLICATED_JOB_NAME": "w", "JOB_COMPLETION_INDEX": "1", "NUM_PROCESSES": "4", "JOB_INDEX": "1"},
        **{"PODS_PER_JOB": "2"},
    },
)
TEXTS = (
    *(
        "",
        " ",
        "0",
        "-1",
        "3",
        "x",
        "4x",
        "1.5",
        "1e3",
        "9" * 50,
        "9" * 5000,
        "٣",
        "²",
        "+1",
        "1_0",
        "\udcff",
        "ä",
        "\t1",
        "0x1",
        "None",
        "null",
        "nan",
    ),
    *(
        "h:0",
        "h:65536",
        "h:99999",
        ":1",
        "h:",
        "h",
        "::1:5",
        "[::1]:5",
        "h:1:2",
        "h:-1",
        "h:1 ",
        "h h:1",
        "a" * 300 + ":1",
        "h:\u0661",
        "[",
        "[a",
        "n[",
        "n[]",
        "n[1",
    ),
    *(
        "n[1-",
        ",",
        "n,m",
        "]",
        "\0",
        "\n",
        "tcp://",
        "0.0;tcp://,",
        "tcp6://[",
        "2(x2)",
        "(x2)",
        "0,,1",
        ",",
        "0,1,",
        "0,x",
        "999999999999",
    ),
)


def environment_kind(_: Path) -> Callable[[random.Random], Input]:
    """Environments of launchers, Slurm, Open MPI and Kubernetes."""

    def make(chance: random.Random) -> Input:
        own = dict(chance.choice(ENVIRONMENTS))
        if chance.random() < 0.2:
            own |= chance.choice(ENVIRONMENTS)
        for _ in range(chance.choice((1, 1, 2, 3))):
            name = chance.choice(list(own) or ["SPMDCTX_ADDRESS"])
            if chance.random() < 0.25:
                own.pop(name, None)
            else:
                own[name] = chance.choice(TEXTS)

        def read() -> str:
            found = detect(own)
            if found is None:
                return ""
            host, _, port = found.address.rpartition(":")
            numbers = (found.num_processes, found.process_id, *(found.local_device_ids or ()))
            if not 0 <= found.process_id < found.num_processes or not all(0 <= number < 10**9 for number in numbers):
                return f"no such job: {found}"
            is_host = bool(host) and host.isprintable() and host.isascii() and not set(host) & set(" ,/\\@")
            return "" if is_host and 0 < int(port) < 1 << 16 else f"no such address: {found}"

        return str(own)[:300], read

    return make


def options_kind(_: Path) -> Callable[[random.Random], Input]:
    """Every option of the context, of the algorithms and of `parallel`."""
    devices = jax.devices()
    own: tuple[str, ...] = (
        "devices",
        "mesh",
        "memory_bytes",
        "max_mesh_axes",
        "strict",
        "layerwise_parallel",
        "topology",
        "batch_argnames",
    )
    names = ("a", "b", "data", "model", "", "ä", "数据", "\\", "\ud800", "a b", "a" * 300, "\0", "a\nb", "None", "*")
    sizes = (0, 1, 2, 4, 8, -1, 2**31, 10**30, True, 1.5, "2", None, [2])

    def one(chance: random.Random) -> tuple[str, Any]:
        if chance.random() < 0.5:
            return chance.choice(OPTIONS).name, any_value(chance)
        name = chance.choice(own)
        if name == "mesh" and chance.random() < 0.8:
            return name, {chance.choice(names): chance.choice(sizes) for _ in range(chance.choice((1, 2, 3, 12, 70)))}
        if name == "devices" and chance.random() < 0.8:
            return name, chance.choice(
                (devices, devices[:3], devices[:1] * 8, [0, 1], 8, "cpu", [], [None], [devices], {"a": devices[0]}, iter(devices))
            )
        return name, any_value(chance)

    def make(chance: random.Random) -> Input:
        found = dict(one(chance) for _ in range(chance.choice((1, 1, 2, 3))))
        way = chance.random()

        def read() -> str:
            if way < 0.2:
                checked({option.name: any_value(chance) for option in chance.sample(ALGO_OPTIONS, 2)}, ALGO_BY_NAME)
            elif way < 0.4:
                spmdctx.reset_auto_parallel_context()
                try:
                    spmdctx.set_auto_parallel_context(**{name: value for name, value in found.items() if name in BY_NAME})
                finally:
                    spmdctx.reset_auto_parallel_context()
            elif way < 0.45:
                spmdctx.get_auto_parallel_context(any_value(chance))
            else:
                spmdctx.parallel(lambda x: x, **found)
            return ""

        return str({name: str(value)[:60] for name, value in found.items()})[:300], read

    return make


KINDS: dict[str, Callable[[Path], Callable[[random.Random], Input]]] = {
    "context": context_kind,
    "topology": topology_kind,
    "environment": environment_kind,
    "options": options_kind,
}
