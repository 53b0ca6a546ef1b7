"""`spmdctx env`: complete enough for a bug report, and without secrets."""

import json
import os
import subprocess
import sys

import jax
import pytest

import spmdctx
from spmdctx.cli.about.environment import read_environment, shown_variables
from spmdctx.cli.main import main


def test_the_report_names_versions_devices_and_options(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "off")
    file = tmp_path / "context.yaml"
    file.write_text("parallel_mode: auto_parallel\ngradients_mean: false\n")
    assert main(["env", "--json", "--config", str(file)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "spmdctx.env/1"
    assert data["versions"]["spmdctx"] == spmdctx.__version__
    assert data["versions"]["jax"] == jax.__version__
    assert data["devices"][0] | {"runtime": "", "memory_bytes": None} == {
        **{"platform": "cpu", "kind": jax.devices()[0].device_kind, "count": jax.local_device_count()},
        **{"runtime": "", "memory_bytes": None},
    }
    assert data["variables"]["JAX_TRACEBACK_FILTERING"] == "off"
    assert data["options"] == {"parallel_mode": "auto_parallel"}


def test_the_text_says_the_same_in_a_process_of_its_own():
    words = [sys.executable, "-m", "spmdctx", "env"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    text = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
    assert f"  jax {jax.__version__}\n" in text
    assert "  3 x cpu (cpu" in text
    assert "  XLA_FLAGS=--xla_force_host_platform_device_count=3\n" in text
    assert "all at their defaults" in text


@pytest.mark.parametrize(
    "name", ["RAY_AUTH_TOKEN", "MS_PASSWORD", "SPMDCTX_API_KEY", "JAX_secret_thing", "TPU_CREDENTIALS", "CUDA_COOKIE", "NCCL_Passwd"]
)
def test_secrets_are_masked(name):
    assert shown_variables({name: "hunter2"}) == {name: "***"}


def test_variables_of_others_are_left_out_and_users_of_addresses_masked():
    found = shown_variables({"HOME": "/home/someone", "AWS_REGION": "x", "SPMDCTX_ADDRESS": "grpc://me:hunter2@host:1", "XLA_FLAGS": "--a"})
    assert found == {"SPMDCTX_ADDRESS": "grpc://***@host:1", "XLA_FLAGS": "--a"}


def test_a_backend_that_does_not_start_is_reported(monkeypatch):
    def broken():
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(jax, "local_devices", broken)
    found = read_environment({}, {})
    assert found.devices == ()
    assert "none: RuntimeError: Unable to initialize backend 'tpu'" in str(found)
