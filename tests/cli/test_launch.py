"""Options of jobs with servers act, or are refused."""

import pytest

from spmdctx.cli.main import main


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
