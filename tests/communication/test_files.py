"""The limit of open files of a process that joins a job."""

import resource

import pytest

from spmdctx.communication.files import raise_file_limit


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 1_048_576), (65_536, 1_048_576)),
        ((1024, 4096), (4096, 4096)),
        ((100_000, 1_048_576), None),
        ((256, 256), None),
        ((1024, resource.RLIM_INFINITY), (65_536, resource.RLIM_INFINITY)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_the_soft_limit_rises_to_the_hard_one_within_reason(monkeypatch, before, after):
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: found.append(limits))
    raise_file_limit()
    assert found == ([] if after is None else [after])
