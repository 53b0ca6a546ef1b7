"""Finds this process's place in its job from the environment that a launcher, Slurm, Open MPI or Kubernetes has set."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from spmdctx.communication.parent import LAUNCHER
from spmdctx.errors import ContextError

ADDRESS, NUM_PROCESSES, PROCESS_ID, LOCAL_DEVICES = (
    "SPMDCTX_ADDRESS",
    "SPMDCTX_NUM_PROCESSES",
    "SPMDCTX_PROCESS_ID",
    "SPMDCTX_LOCAL_DEVICE_IDS",
)
"""Set by `spmdctx launch`, or by the user. `SPMDCTX_ADDRESS` alone overrides an address found in any other way."""

JOB_INDEX, PODS_PER_JOB, POD_INDEX, CONTAINERS_PER_POD, CONTAINER_INDEX = (
    "SPMDCTX_JOB_INDEX",
    "SPMDCTX_PODS_PER_JOB",
    "SPMDCTX_POD_INDEX",
    "SPMDCTX_CONTAINERS_PER_POD",
    "SPMDCTX_CONTAINER_INDEX",
)
"""Set in manifests of `spmdctx k8s`, in place of `SPMDCTX_PROCESS_ID`, where a process is numbered by its job, pod and container."""

_FIRST_PORT, _NUM_PORTS = 61440, 4096
"""Ports above those that Linux gives to outgoing connections (32768 to 60999), so that the chosen one is most likely free."""
KUBERNETES_PORT = 55527
"""The port of process 0 in pods, which have an address of their own each."""
_HOST = re.compile(r"[A-Za-z0-9._%:\[\]-]+")
"""A name, or an address of either kind of IP."""
_ONE_HOST = re.compile(r"[\w.-]+")
_MAX_DIGITS = 9
"""Digits of a number of processes, a rank or a port; longer ones are no such number."""


class Cluster(NamedTuple):
    """One process of a job.

    `address` is "host:port" of process 0; `local_device_ids` restricts the process to these GPUs of its machine, None where it
    sees what it sees; `source` says who told.
    """

    source: str
    address: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None


def detect(environ: Mapping[str, str]) -> Cluster | None:
    """Returns the job that the environment describes, or None.

    Variables of `spmdctx launch` come first, also if set by hand. Then follow those that users and Kubeflow's trainer set for
    JAX, then Open MPI, Slurm, Kubeflow's JAXJob and JobSet. Slurm counts only inside a step, since a batch script is not a
    process of the job.

    Raises:
        ContextError: a part of the description is missing or is not a number.
    """
    for find in _FINDERS:
        found = find(environ)
        if found is not None:
            address = environ.get(ADDRESS, found.address)
            if not 0 <= found.process_id < found.num_processes:
                raise ContextError(
                    f"{found.source} says that this is process {found.process_id} of {found.num_processes}.",
                    need=f"a process from 0 to {found.num_processes - 1}",
                )
            return found._replace(address=_checked_address(address, found.source))
    if ADDRESS in environ:
        raise ContextError(
            f"{ADDRESS} is set, but nothing says how many processes there are.", fix=f"set {NUM_PROCESSES} and {PROCESS_ID} too"
        )
    return None


def _launched(environ: Mapping[str, str]) -> Cluster | None:
    if POD_INDEX in environ and PROCESS_ID not in environ:
        environ = {**environ, PROCESS_ID: str(_number_of_container(environ))}
    source = "spmdctx launch" if LAUNCHER in environ else "the SPMDCTX_ variables"
    return _stated(environ, source, ADDRESS, NUM_PROCESSES, PROCESS_ID)


def _number_of_container(environ: Mapping[str, str]) -> int:
    """Returns the number of a process that is one container of a pod: jobs count first, then pods, then containers.

    Raises:
        ContextError: there are several jobs and nothing says how many pods each has, or an index is too large.
    """
    job, per_pod, container = (
        _number(name, environ.get(name, default)) for name, default in ((JOB_INDEX, "0"), (CONTAINERS_PER_POD, "1"), (CONTAINER_INDEX, "0"))
    )
    pod = _of(environ, POD_INDEX)
    if job and PODS_PER_JOB not in environ:
        raise ContextError(f"{JOB_INDEX} is {job}, but {PODS_PER_JOB} is not set.", fix="set both, or neither")
    pods = _number(PODS_PER_JOB, environ.get(PODS_PER_JOB, str(pod + 1)))
    if pod >= pods or container >= per_pod:
        raise ContextError(
            "The indices of this container do not fit to the job.",
            got=f"pod {pod} of {pods}, container {container} of {per_pod}",
            need="indices from 0 on, below the counts",
        )
    return (job * pods + pod) * per_pod + container


def _stated_for_jax(environ: Mapping[str, str]) -> Cluster | None:
    address, port = environ.get("JAX_COORDINATOR_ADDRESS", ""), environ.get("JAX_COORDINATOR_PORT", "")
    if address and port and not address.rpartition(":")[2].isdecimal():
        environ = {**environ, "JAX_COORDINATOR_ADDRESS": f"{address}:{port}"}
    return _stated(environ, "the JAX_ variables", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def _stated(environ: Mapping[str, str], source: str, address: str, count: str, number: str) -> Cluster | None:
    """Returns a job whose address, number of processes and own number have a variable each, or None without a count."""
    if count not in environ:
        if number in environ:
            raise ContextError(f"{number} is set, but {count} is not.", fix="set all three, or none")
        return None
    missing = [name for name in (address, number) if name not in environ]
    if missing:
        raise ContextError(f"{count} is set, but {' and '.join(missing)} is not.", fix="set all three, or none")
    devices = environ.get(LOCAL_DEVICES)
    own = None if devices is None else tuple(_number(LOCAL_DEVICES, one) for one in devices.split(","))
    return Cluster(source, environ[address], _of(environ, count), _of(environ, number), own)


def _open_mpi(environ: Mapping[str, str]) -> Cluster | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    size = _of(environ, "OMPI_COMM_WORLD_SIZE")
    job = environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMIX_NAMESPACE", "")
    port = _port(_sum(job))
    launcher = environ.get("OMPI_MCA_orte_hnp_uri", "")
    short, long = re.search(r"tcp://([^,:]+)", launcher), re.search(r"tcp6://\[([^,\]]+)", launcher)
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size):
        host = "127.0.0.1"
    elif short:
        host = short[1]
    elif long:
        host = f"[{long[1]}]"
    elif ADDRESS in environ:
        host = ""
    else:
        raise ContextError("Open MPI does not say where process 0 runs.", fix=f"mpirun -x {ADDRESS}=HOST:PORT with the host of process 0")
    own = _own_gpu(environ, "OMPI_COMM_WORLD_LOCAL_RANK", environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    return Cluster("Open MPI", f"{host}:{port}", size, _of(environ, "OMPI_COMM_WORLD_RANK"), own)


def _slurm(environ: Mapping[str, str]) -> Cluster | None:
    if "SLURM_STEP_NODELIST" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    job, step = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0")
    hosts = environ["SLURM_STEP_NODELIST"]
    host = "127.0.0.1" if _ONE_HOST.fullmatch(hosts) else first_host(hosts)
    port = _port(_sum(f"{job}.{step}"))
    own = _own_gpu(environ, "SLURM_LOCALID", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return Cluster("Slurm", f"{host}:{port}", _of(environ, "SLURM_STEP_NUM_TASKS"), _of(environ, "SLURM_PROCID"), own)


def _jax_job(environ: Mapping[str, str]) -> Cluster | None:
    """Returns a job of Kubeflow's training operator, or None."""
    if "COORDINATOR_ADDRESS" not in environ or "NUM_PROCESSES" not in environ or "PROCESS_ID" not in environ:
        return None
    address = f"{environ['COORDINATOR_ADDRESS']}:{environ.get('COORDINATOR_PORT', str(KUBERNETES_PORT))}"
    return Cluster("Kubeflow", address, _of(environ, "NUM_PROCESSES"), _of(environ, "PROCESS_ID"))


def _job_set(environ: Mapping[str, str]) -> Cluster | None:
    """Returns a JobSet whose pods get their names by the downward API, or None; process 0 is the first pod of the first job."""
    if "JOBSET_NAME" not in environ:
        return None
    needed = ("REPLICATED_JOB_NAME", "JOB_COMPLETION_INDEX", "NUM_PROCESSES")
    missing = [name for name in needed if name not in environ]
    if missing:
        raise ContextError(
            f"JOBSET_NAME is set, but {' and '.join(missing)} is not.",
            fix='completionMode: Indexed sets JOB_COMPLETION_INDEX; set the others under "env" of the container',
        )
    name, count = environ["JOBSET_NAME"], _of(environ, "NUM_PROCESSES")
    job, pods = (_number(key, environ.get(key, default)) for key, default in (("JOB_INDEX", "0"), ("PODS_PER_JOB", str(count))))
    host = f"{name}-{environ['REPLICATED_JOB_NAME']}-0-0.{name}"
    return Cluster("JobSet", f"{host}:{KUBERNETES_PORT}", count, job * pods + _of(environ, "JOB_COMPLETION_INDEX"))


_FINDERS: tuple[Callable[[Mapping[str, str]], Cluster | None], ...] = (_launched, _stated_for_jax, _open_mpi, _slurm, _jax_job, _job_set)


def first_host(hosts: str) -> str:
    """Returns the first of Slurm's list of hosts, such as `node[007-009,12],other`."""
    found = re.match(r"([^,\[]+)(?:\[(\w+))?([^,\[\]]*)", hosts)
    if found is None:
        raise ContextError("Slurm's list of hosts cannot be read.", got=ascii(f"SLURM_STEP_NODELIST={hosts[:200]}"))
    prefix, number = found[1], found[2]
    if number is None:
        return prefix
    rest = re.match(r"[^\]]*\]([^,\[]*)", hosts[found.end(2) :])
    return f"{prefix}{number}{rest[1] if rest else ''}"


def _own_gpu(environ: Mapping[str, str], local_rank: str, per_machine: str) -> tuple[int, ...] | None:
    """Returns this process's GPU by its number on the machine if several processes share the machine.

    Returns None if the launcher has already assigned the GPUs.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    number = _of(environ, local_rank)
    alone = re.match(r"1(?!\d)", per_machine) is not None
    return None if alone or (visible is not None and number >= len(visible.split(","))) else (number,)


def _sum(text: str) -> int:
    """Returns a number for a text that all processes of a job have, also one that no encoding takes."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def _port(number: int) -> int:
    """Returns a port that all processes of a job derive alike, and most likely no other job uses."""
    return _FIRST_PORT + number % _NUM_PORTS


def _of(environ: Mapping[str, str], name: str) -> int:
    if name not in environ:
        raise ContextError(f"{name} is not set, though other variables of the same launcher are.")
    return _number(name, environ[name])


def ports_of(cluster: Cluster) -> Iterator[int]:
    """Yields ports for a process of a job; no two processes of the job have one in common."""
    first = _port(_sum(cluster.address)) - _FIRST_PORT + 1
    for place in range(cluster.process_id, _NUM_PORTS - 1, cluster.num_processes):
        yield _FIRST_PORT + (first + place) % _NUM_PORTS


def _number(name: str, text: str) -> int:
    if not text.strip().isdecimal() or not text.isascii() or len(text.strip()) > _MAX_DIGITS:
        raise ContextError(f"{name} must be a number of at most {_MAX_DIGITS} digits.", got=ascii(text[:40]))
    return int(text)


def _checked_address(address: str, source: str) -> str:
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host) or not port.isdecimal() or not port.isascii() or len(port) > _MAX_DIGITS or not 0 < int(port) < 1 << 16:
        raise ContextError(f"{source} gives no address of process 0.", got=ascii(address[:200]), need="host:port, with a port below 65536")
    return address
