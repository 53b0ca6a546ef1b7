"""Options of jobs with servers act, or are refused."""

import pytest

from spmdctx.cli.main import main
from spmdctx.errors import CommunicationError
from spmdctx.server.engine.job import gpus_of_worker


@pytest.mark.parametrize("start", [["-n", "2"], ["--scale", "run", "--servers", "2"]])
@pytest.mark.parametrize(
    "option", [["--mode", "async"], ["--save-every", "3"], ["--folder", "kept"], ["--address", "a:1"], ["--max-staleness", "0"]]
)
def test_options_of_servers_are_refused_where_none_are_started(start, option, capsys):
    script = [] if "--scale" in start else ["train.py"]
    assert main(["launch", *start, *option, *script]) != 0
    said = capsys.readouterr().err
    assert "Only a job with servers takes these options." in said
    assert option[0] in said.partition("got:")[2].partition("need:")[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--address", "a:1"], "need a folder that all its machines see"), (["--max-staleness", "2"], "are never late")],
)
def test_options_that_need_others_name_them(options, words, capsys):
    assert main(["launch", "--servers", "2", "--workers", "2", *options, "train.py"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "num_gpus", "wanted"), [({}, 0, 0), ({}, 8, 2), ({"JAX_PLATFORMS": "cpu"}, 8, 0), ({"JAX_PLATFORMS": "cuda"}, 6, 2)]
)
def test_workers_have_the_gpus_that_the_cluster_has(environ, num_gpus, wanted):
    assert gpus_of_worker(environ, num_gpus, 3, 2) == wanted


def test_too_few_gpus_are_one_error_and_no_endless_wait():
    with pytest.raises(CommunicationError, match=r"(?s)fewer GPUs.*JAX_PLATFORMS=cpu"):
        gpus_of_worker({}, 5, 3, 2)
