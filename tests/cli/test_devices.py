"""How many devices a command runs on where nobody says: those of the environment, on every process of the job."""

import jax
import pytest

from spmdctx import communication
from spmdctx.cli.devices import expected_devices, start_devices
from spmdctx.cli.main import main
from spmdctx.errors import ContextError

jax.devices()  # started as every test expects them, before the environment says otherwise

JOB = {"SPMDCTX_ADDRESS": "127.0.0.1:4000", "SPMDCTX_NUM_PROCESSES": "3", "SPMDCTX_PROCESS_ID": "0"}


@pytest.mark.parametrize(
    ("flags", "job", "expected"),
    [
        ("", {}, 8),
        ("--xla_force_host_platform_device_count=4 --xla_a=1", {}, 4),
        ("", JOB, 3),
        ("--xla_force_host_platform_device_count=4", JOB, 12),
    ],
    ids=["nothing said", "of the flags", "one per process", "of the flags on each process"],
)
def test_devices_are_those_of_the_environment(monkeypatch, flags, job, expected):
    monkeypatch.setenv("XLA_FLAGS", flags)
    for name, text in job.items():
        monkeypatch.setenv(name, text)
    assert expected_devices() == expected


def test_a_command_plans_for_the_devices_of_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert main(["plan", "--layers", "1", "--seq", "12", "--batch-size", "4", "--parallel-mode", "data_parallel", "--json"]) == 0
    assert '"data": 2' in capsys.readouterr().out


def test_half_a_job_is_refused(monkeypatch):
    monkeypatch.setenv("SPMDCTX_NUM_PROCESSES", "2")
    with pytest.raises(ContextError, match="SPMDCTX_ADDRESS and SPMDCTX_PROCESS_ID is not"):
        start_devices(8)
    assert not communication.is_initialized()
