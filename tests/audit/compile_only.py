"""Compile-only devices for tests; a test is skipped, by name, only where the compiler is not installed."""

import importlib.util

import pytest

from spmdctx.lowering.compile_only import gpu_devices, tpu_devices


def need_tpu(topology="v5e:2x4"):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    return tpu_devices(topology)


def need_gpu(num_devices=8):
    try:
        found = any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))
    except ModuleNotFoundError:
        found = False
    if not found:
        pytest.skip("jax-cuda12-plugin is not installed")
    return gpu_devices(num_devices)
