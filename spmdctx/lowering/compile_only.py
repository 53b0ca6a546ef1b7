"""Devices that exist only for the compiler: TPU and GPU meshes on a machine that has neither."""

from __future__ import annotations

import importlib
import importlib.util
import os
from glob import glob
from importlib.resources import files
from types import ModuleType

import jax
from jax.experimental import topologies

from spmdctx.errors import UnsupportedError

# Without chips, libtpu would ask the cloud's metadata server what it runs on; these answer in its place. The accelerator type
# names the machine only: any topology compiles under it.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_TPU_CHIPS = ("/dev/accel*", "/dev/vfio/[0-9]*")
_CUDA_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_GPU_KINDS = {"h100": "h100.txtpb"}


def tpu_devices(topology: str) -> list[jax.Device]:
    """Returns compile-only TPU devices, for use as `devices=`.

    On a machine without TPUs, sets the environment variables that libtpu needs, unless they are set already.

    Args:
        topology: Generation and chip grid as Cloud TPU writes them: "v5e:2x4", "v6e:16x16", "v5p:2x2x2".

    Raises:
        UnsupportedError: libtpu is not installed, or does not know the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UnsupportedError(
            "Compiling for TPU needs libtpu, which is not installed.",
            where=f"tpu_devices({topology!r})",
            fix="pip install libtpu, in the version that jax[tpu] names",
        )
    if not any(glob(pattern) for pattern in _TPU_CHIPS):
        for name, value in _TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except RuntimeError as error:
        raise UnsupportedError(
            "libtpu makes no such TPU topology.",
            got=f"{topology!r}: {_first_line(error)}",
            need='such as "v5e:2x4", "v6e:4x4", "v5p:2x2x2"',
        ) from error


def gpu_devices(num_devices: int, *, kind: str = "h100", devices_per_host: int = 8) -> list[jax.Device]:
    """Returns compile-only GPU devices, for use as `devices=`.

    They need JAX's CUDA plugin, but no driver, no GPU and no CUDA libraries.

    Args:
        num_devices: How many; more than `devices_per_host` must be whole hosts.
        kind: The GPU: "h100".
        devices_per_host: GPUs that NVLink joins.

    Raises:
        UnsupportedError: The plugin is not installed, `kind` is unknown, or the GPUs do not fill whole hosts.
    """
    if kind not in _GPU_KINDS:
        raise UnsupportedError("There is no description of this GPU.", got=repr(kind), need=", ".join(map(repr, _GPU_KINDS)))
    per_host = min(num_devices, devices_per_host)
    if num_devices < 1 or num_devices % per_host:
        raise UnsupportedError(
            "The GPUs do not fill whole hosts.",
            where="gpu_devices",
            got=f"{num_devices} GPUs, {devices_per_host} per host",
            need=f"a multiple of {devices_per_host}",
        )
    _register_cuda()
    target = files("spmdctx.lowering").joinpath(_GPU_KINDS[kind]).read_text(encoding="utf-8")
    hosts = num_devices // per_host
    found = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=target, topology=f"1x{hosts}x{per_host}")
    return list(found.devices)


def _register_cuda() -> None:
    """Registers the CUDA plugin with JAX, whatever JAX_PLATFORMS says; JAX itself gives up on it if there is no driver."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if _cuda_is_registered():
        return
    plugin = _cuda_plugin()
    if plugin is None:
        raise UnsupportedError(
            "Compiling for GPU needs JAX's CUDA plugin, which is not installed.",
            where="gpu_devices",
            fix="pip install jax-cuda12-plugin in jax's own version (it brings jax-cuda12-pjrt; nothing else is needed to compile)",
        )
    plugin.initialize()


def _cuda_is_registered() -> bool:
    # Asking for any topology makes JAX look for plugins, and starts no backend.
    try:
        topologies.get_topology_desc(platform="cuda", topology_name="", target_config="", topology="1x1x1")
    except NotImplementedError:
        return False
    except (RuntimeError, ValueError):
        return True
    return True


def _cuda_plugin() -> ModuleType | None:
    importlib.invalidate_caches()
    for name in _CUDA_PLUGINS:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
