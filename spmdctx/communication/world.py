"""The world of a job: starts and leaves it, and tells its processes and its devices as ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import jax

from spmdctx._compat import has_used_devices, key_value_store
from spmdctx.communication.clusters import Cluster, detect
from spmdctx.communication.current import World, current_world, enter, is_initialized
from spmdctx.communication.files import raise_file_limit
from spmdctx.communication.groups import WORLD, forget_groups, own_ranks
from spmdctx.communication.meeting.place import bind_address, forget_service_address
from spmdctx.communication.parent import die_with_launcher
from spmdctx.communication.rendezvous import Link, meet
from spmdctx.communication.sigterm import end_when_told
from spmdctx.communication.transfers import enable_transfers
from spmdctx.communication.watch import Watch, connect_beside_jax, part_unwatched
from spmdctx.errors import CommunicationError, ContextError, UnsupportedError, message

_PLATFORM_OF_BACKEND = {"gloo": "cpu", "nccl": "gpu", "tpu": "tpu"}
_ASCEND = ("hccl", "mccl", "lccl")


def init(  # noqa: PLR0913  # what a job may say of itself
    backend: str | None = None,
    *,
    address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    timeout_s: float = 300,
    heartbeat_timeout_s: float = 30,
    watch: bool = True,
) -> None:
    """Starts communication between the processes of a job; call it before anything that uses a device.

    The job is read from the arguments, or from the environment that `spmdctx launch`, Open MPI's mpirun, Slurm's srun, Kubeflow
    or a JobSet have set. Without a job the world is this process with its devices. A second call changes nothing.

    Process 0 ends last: it waits, up to 30 s, until the others have left the job.

    With `watch`, a process that is killed or fails ends all others at once with an error that names it. The watch cannot see a
    machine that freezes; JAX detects it after `heartbeat_timeout_s`. SIGTERM ends a process, after saving where a
    `CheckpointManager` is open; JAX's preemption service is not started. To use that service, call `jax.distributed.initialize` first.

    Args:
        backend: "nccl" for GPUs, "gloo" for CPUs, "tpu"; None takes what JAX finds.
        address: "host:port" of process 0, where it accepts connections.
        num_processes: the number of processes in the job.
        process_id: the number of this process, from 0.
        local_device_ids: the GPUs of this process among those of its machine.
        timeout_s: how long to wait for all processes to connect.
        heartbeat_timeout_s: the silence after which JAX takes a process for dead.
        watch: whether processes watch each other.

    Raises:
        UnsupportedError: the backend is one of Ascend.
        ContextError: the backend is unknown, or the environment cannot be read.
        CommunicationError: the processes do not connect, or have no devices of the backend.
    """
    platform = _platform(backend)
    if is_initialized():
        return
    die_with_launcher(os.environ)
    end_when_told()
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    cluster = _cluster(address, num_processes, process_id, local_device_ids)
    settings: Any = jax.config
    platforms = str(settings.jax_platforms or "")
    if cluster is not None and not has_used_devices() and platforms.split(",")[0] == "cpu":
        enable_transfers(cluster)
    link = None
    if not jax.distributed.is_initialized():
        link = _start(cluster, platform, timeout_s, heartbeat_timeout_s)
    elif watch and cluster is not None and jax.process_count() > 1:
        link = connect_beside_jax(cluster, timeout_s)
    _check_platform(backend, platform)
    if link is not None and not watch:
        part_unwatched(jax.process_index(), link)
    watched = Watch(jax.process_index(), link) if link is not None and watch else None
    enter(World(cluster, _hosts(timeout_s), watched))


def release() -> None:
    """Leaves the world and forgets its groups; `init` has to be called again.

    Processes of a job wait for each other here and cannot come back.

    Raises:
        CommunicationError: `init` was not called.
    """
    world = current_world("release")
    forget_groups()
    if world.watch is not None:
        world.watch.leave()
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    enter(None)


def get_rank(group: str = WORLD) -> int:
    """Returns the rank of this process's first device in a group.

    Raises:
        CommunicationError: `init` was not called, the group is unknown, or it has none of this process's devices.
    """
    ranks, mine = _own(group, "get_rank")
    return ranks.index(min(mine))


def get_group_size(group: str = WORLD) -> int:
    """Returns the number of devices in a group.

    Raises:
        CommunicationError: `init` was not called, or the group is unknown.
    """
    size = len(current_world("get_group_size").devices)
    return len(own_ranks(group, _ranks_here()[0], size))


def get_local_rank(group: str = WORLD) -> int:
    """Returns the rank of this process's first device among the group's devices on its machine.

    Raises:
        CommunicationError: as `get_rank`.
    """
    ranks, mine = _own(group, "get_local_rank")
    here = _ranks_of_host()
    return [rank for rank in ranks if rank in here].index(min(mine))


def get_local_rank_size(group: str = WORLD) -> int:
    """Returns how many devices of the group this machine has.

    Raises:
        CommunicationError: as `get_rank`.
    """
    ranks, _ = _own(group, "get_local_rank_size")
    here = _ranks_of_host()
    return sum(rank in here for rank in ranks)


def get_world_rank_from_group_rank(group: str, group_rank_id: int) -> int:
    """Returns the rank in the world of a rank in a group.

    Raises:
        CommunicationError: `init` was not called, the group is unknown, or it does not have the rank.
        TypeError: the rank is not an int.
    """
    current_world("get_world_rank_from_group_rank")
    _check_rank("group_rank_id", group_rank_id)
    ranks = own_ranks(group, _ranks_here()[0], jax.device_count())
    if not 0 <= group_rank_id < len(ranks):
        raise CommunicationError(f"Group '{group}' has no rank {group_rank_id}.", need=f"a rank from 0 to {len(ranks) - 1}")
    return ranks[group_rank_id]


def get_group_rank_from_world_rank(world_rank_id: int, group: str) -> int:
    """Returns the rank in a group of a rank in the world.

    Raises:
        CommunicationError: `init` was not called, the group is unknown, or the rank is not in it.
        TypeError: the rank is not an int.
    """
    current_world("get_group_rank_from_world_rank")
    _check_rank("world_rank_id", world_rank_id)
    ranks = own_ranks(group, world_rank_id, jax.device_count())
    if world_rank_id not in ranks:
        raise CommunicationError(f"Rank {world_rank_id} is not in group '{group}'.", got=f"ranks {list(ranks)}")
    return ranks.index(world_rank_id)


def _platform(backend: str | None) -> str | None:
    if backend is None:
        return None
    if not isinstance(backend, str):
        raise TypeError(message("The backend is named by a string.", got=repr(backend)))
    name = backend.lower()
    if name in _ASCEND:
        raise UnsupportedError(
            f"'{name}' is the communication of Ascend devices and MindSpore's own CPUs, which JAX does not run on.",
            fix="nccl for GPUs, gloo for CPUs, tpu, or None for what is there",
        )
    if name not in _PLATFORM_OF_BACKEND:
        raise ContextError(f"There is no backend '{backend}'.", need="nccl, gloo, tpu or None")
    return _PLATFORM_OF_BACKEND[name]


def _cluster(address: str | None, count: int | None, number: int | None, devices: Sequence[int] | None) -> Cluster | None:
    """Returns the job that the arguments describe, completed from the environment."""
    if address is not None and count is not None and number is not None:
        return Cluster("the arguments of init", address, count, number, None if devices is None else tuple(devices))
    found = detect(os.environ)
    given = {"address": address, "num_processes": count, "process_id": number, "local_device_ids": devices}
    stated = {name: value for name, value in given.items() if value is not None}
    if found is None:
        if stated and set(stated) != {"local_device_ids"}:
            missing = [name for name in ("address", "num_processes", "process_id") if name not in stated]
            raise ContextError(f"init is told {', '.join(stated)}, but not {' and '.join(missing)}.")
        return None
    return found._replace(**stated)  # type: ignore[arg-type]  # the names are its fields


def _start(cluster: Cluster | None, platform: str | None, timeout_s: float, heartbeat_timeout_s: float) -> Link | None:
    """Starts JAX's part of the job; returns the connection to process 0 that the meeting has left."""
    if cluster is not None and has_used_devices():
        raise CommunicationError("init is called after JAX has used a device.", fix="call init() first, at the start of the script")
    if cluster is not None and cluster.num_processes > 1:
        raise_file_limit()
    met = None if cluster is None else meet(cluster, timeout_s)
    # JAX's own would catch SIGTERM and do nothing more: neither a launcher nor a user could stop the job.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        if cluster is not None and met is not None:
            on_socket = met.service != cluster.address
            jax.distributed.initialize(
                met.service,
                cluster.num_processes,
                cluster.process_id,
                cluster.local_device_ids,
                cluster_detection_method="deactivate",
                coordinator_bind_address=met.service if on_socket else bind_address(os.environ, cluster),
                initialization_timeout=int(timeout_s),
                heartbeat_timeout_seconds=int(heartbeat_timeout_s),
            )
        elif platform == "tpu":
            # The machines of a TPU pod know their job; nothing else does.
            jax.distributed.initialize(initialization_timeout=int(timeout_s), heartbeat_timeout_seconds=int(heartbeat_timeout_s))
    except (RuntimeError, ValueError) as error:
        if met is not None and met.link is not None:
            met.link.close()
        raise _not_started(cluster, timeout_s, error) from error
    finally:
        if cluster is not None and met is not None and not cluster.process_id:
            forget_service_address(met.service)
    return None if met is None else met.link


def _not_started(cluster: Cluster | None, timeout_s: float, error: Exception) -> CommunicationError:
    if cluster is None:
        return CommunicationError("This machine does not know of a job with TPUs.", got=str(error).splitlines()[0])
    return CommunicationError(
        f"The job of {cluster.num_processes} processes did not come together.",
        where=f"process {cluster.process_id}, told by {cluster.source}",
        got=str(error).splitlines()[0],
        need=f"all processes within {timeout_s:g} s, at {cluster.address}",
    )


def _check_platform(backend: str | None, platform: str | None) -> None:
    found = jax.default_backend()
    if platform is not None and found != platform:
        raise CommunicationError(
            f"Backend '{backend}' is for {platform}s, but the devices are {found}s.".replace("cpus", "CPUs").replace("gpus", "GPUs"),
            fix="init() without a backend, or JAX_PLATFORMS",
        )


def _hosts(timeout_s: float) -> tuple[str, ...]:
    """Returns the machine of each process."""
    if jax.process_count() == 1:
        return (socket.gethostname(),)
    store = key_value_store()
    store.set(f"spmdctx/host/{jax.process_index()}", socket.gethostname())
    return tuple(store.get(f"spmdctx/host/{index}", timeout_s) or "" for index in range(jax.process_count()))


def _ranks_here() -> list[int]:
    own = jax.process_index()
    return [rank for rank, device in enumerate(jax.devices()) if device.process_index == own]


def _ranks_of_host() -> frozenset[int]:
    hosts = current_world("_ranks_of_host").hosts
    own = hosts[jax.process_index()]
    return frozenset(rank for rank, device in enumerate(jax.devices()) if hosts[device.process_index] == own)


def _own(group: str, what: str) -> tuple[tuple[int, ...], frozenset[int]]:
    """Returns the ranks of a group, and this process's devices among them."""
    size = len(current_world(what).devices)
    mine = _ranks_here()
    for rank in mine:
        ranks = own_ranks(group, rank, size)
        if rank in ranks:
            return ranks, frozenset(mine) & frozenset(ranks)
    raise CommunicationError(f"Group '{group}' has no device of process {jax.process_index()}.", got=f"the process's ranks {mine}")


def _check_rank(name: str, rank: Any) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(message(f"{name} must be an int.", got=repr(rank)))
