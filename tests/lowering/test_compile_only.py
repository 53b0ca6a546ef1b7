import importlib
from types import SimpleNamespace

import jax
import pytest

from spmdctx.errors import UnsupportedError
from spmdctx.lowering import compile_only as targets
from tests.audit.compile_only import need_gpu, need_tpu


@pytest.mark.parametrize(("topology", "num_devices"), [("v5e:2x4", 8), ("v5p:2x2x2", 8), ("v6e:16x16", 256)])
def test_tpu_devices_compile(topology, num_devices):
    devices = need_tpu(topology)
    assert len(devices) == num_devices
    assert {device.platform for device in devices} == {"tpu"}
    sharding = jax.sharding.SingleDeviceSharding(devices[0])
    compiled = jax.jit(lambda x: x + 1, in_shardings=sharding).lower(jax.ShapeDtypeStruct((8, 128), "float32")).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 8 * 128 * 4


@pytest.mark.parametrize("num_devices", [1, 8, 16])
def test_gpu_devices_compile(num_devices):
    devices = need_gpu(num_devices)
    assert len(devices) == num_devices
    assert {device.device_kind for device in devices} == {"NVIDIA H100 80GB HBM3"}
    sharding = jax.sharding.SingleDeviceSharding(devices[0])
    compiled = jax.jit(lambda x: x + 1, in_shardings=sharding).lower(jax.ShapeDtypeStruct((8, 128), "float32")).compile()
    assert "HloModule" in compiled.as_text()


def test_compile_only_devices_leave_the_default_backend_alone():
    need_tpu()
    need_gpu()
    assert {device.platform for device in jax.devices()} == {"cpu"}


def test_an_unknown_tpu_topology_is_named():
    need_tpu()
    with pytest.raises(UnsupportedError, match="nonsense:2x4"):
        targets.tpu_devices("nonsense:2x4")


def test_missing_libtpu_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install libtpu"):
        targets.tpu_devices("v5e:2x4")


def test_a_missing_cuda_plugin_says_what_to_install(monkeypatch):
    def without_plugins(name, package=None):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(targets, "_cuda_is_registered", lambda: False)
    monkeypatch.setattr(targets.importlib, "import_module", without_plugins)
    with pytest.raises(UnsupportedError, match="pip install jax-cuda12-plugin"):
        targets.gpu_devices(8)


@pytest.mark.parametrize("num_devices", [0, -8, 12])
def test_gpus_that_fill_no_whole_hosts_are_refused(num_devices):
    with pytest.raises(UnsupportedError, match="whole hosts"):
        targets.gpu_devices(num_devices)


def test_an_unknown_gpu_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedError, match="'h100'"):
        targets.gpu_devices(8, kind="b9000")


def test_the_environment_of_a_machine_with_tpus_is_left_alone(monkeypatch):
    need_tpu()
    monkeypatch.setattr(targets, "glob", lambda pattern: ["/dev/accel0"])
    for name in targets._TPU_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setattr(targets.topologies, "get_topology_desc", lambda **_: SimpleNamespace(devices=[]))
    targets.tpu_devices("v5e:2x4")
    assert "TPU_SKIP_MDS_QUERY" not in targets.os.environ
