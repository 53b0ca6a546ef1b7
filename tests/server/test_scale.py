"""Requests for other numbers of servers and workers, and the folder by which a job gets them."""

import subprocess
import sys
import threading

import pytest

from spmdctx.cli.main import main
from spmdctx.errors import CheckpointError, CommunicationError, ContextError
from spmdctx.server import scale as scaling
from spmdctx.server.scale import Wanted, begin, end, scale, taken


def answered(folder, **numbers):
    found = []

    def job():
        while not found:
            found.extend(one for one in [taken(folder)] if one is not None)

    thread = threading.Thread(target=job)
    thread.start()
    scale(folder, **numbers)
    thread.join(10)
    return found[0]


def test_a_job_gets_the_numbers_once(tmp_path):
    begin(tmp_path)
    assert answered(tmp_path, servers=3, workers=2) == Wanted(3, 2)
    assert answered(tmp_path, workers=5) == Wanted(None, 5)
    assert taken(tmp_path) is None


@pytest.fixture(autouse=True)
def ended(tmp_path):
    yield
    end(tmp_path)


def test_a_folder_has_one_job_at_a_time(tmp_path):
    begin(tmp_path)
    code = "import sys, pathlib; from spmdctx.server.scale import begin; begin(pathlib.Path(sys.argv[1]))"
    other = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "Another job runs in this folder" in other.stderr
    end(tmp_path)
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60).returncode == 0
    begin(tmp_path)  # the one before has ended, without a word


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        begin(tmp_path / "file" / "folder")


def test_no_job_and_a_job_that_is_gone_are_named(tmp_path, monkeypatch):
    with pytest.raises(CommunicationError, match="No job runs here"):
        scale(tmp_path, servers=2)
    begin(tmp_path)
    monkeypatch.setattr(scaling, "_PATIENCE_S", 0.1)
    with pytest.raises(CommunicationError, match="is gone"):
        scale(tmp_path, servers=2)
    assert taken(tmp_path) is None
    end(tmp_path)
    end(tmp_path)
    begin(tmp_path)
    end(tmp_path)
    with pytest.raises(CommunicationError, match="No job runs here"):
        scale(tmp_path, workers=2)


@pytest.mark.parametrize("numbers", [{"servers": 0}, {"workers": -1}])
def test_a_job_has_at_least_one_of_each(tmp_path, numbers):
    begin(tmp_path)
    with pytest.raises(ContextError, match="at least one"):
        scale(tmp_path, **numbers)


def test_requests_of_a_former_job_are_void_and_damaged_ones_say_nothing(tmp_path):
    (tmp_path / "scale.json").write_text('{"servers": 3}')
    begin(tmp_path)
    assert taken(tmp_path) is None
    (tmp_path / "scale.json").write_text('{"servers": "3", "workers": true}')
    assert taken(tmp_path) == Wanted(None, None)
    (tmp_path / "scale.json").write_text("{")
    assert taken(tmp_path) == Wanted(None, None)


@pytest.mark.parametrize("arguments", [["--scale", "x"], ["--scale", "x", "--servers", "2", "train.py"], []])
def test_the_command_refuses_what_makes_no_sense(arguments, capsys):
    assert main(["launch", *arguments]) != 0
    assert "need" in capsys.readouterr().err
