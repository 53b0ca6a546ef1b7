"""Shells complete the command line: bash is run, with the script that users read."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spmdctx.cli.main import main


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A folder with a command spmdctx of this tree, whatever is installed."""
    folder = tmp_path_factory.mktemp("bin")
    file = folder / "spmdctx"
    file.write_text(f"#!{sys.executable}\n# PYTHON_ARGCOMPLETE_OK\nimport sys\nfrom spmdctx.cli import main\nsys.exit(main())\n")
    file.chmod(0o755)
    return folder


def completed(folder, line):
    script = f"""
eval "$(spmdctx completion bash)"
COMP_LINE={line!r} COMP_POINT={len(line)} COMP_TYPE=9
COMP_WORDS=($COMP_LINE) COMP_CWORD=1
_python_argcomplete spmdctx
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)
    return {word.strip() for word in done.stdout.splitlines()}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("spmdctx ver", {"verify"}, {"plan"}),
        ("spmdctx plan --paral", {"--parallel-mode"}, {"--json"}),
        ("spmdctx plan --parallel-mode semi", {"semi_auto_parallel"}, {"data_parallel"}),
        ("spmdctx train --model llama2-7", {"llama2-7b", "llama2-70b"}, {"tiny"}),
        ("spmdctx k8s ", {"submit", "status", "logs"}, {"verify"}),
        ("spmdctx completion ", {"bash", "zsh", "fish"}, {"verify"}),
    ],
)
def test_bash_completes_commands_options_and_values(command, line, some, none):
    found = completed(command, line)
    assert some <= found
    assert not none & found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_each_shell(shell, capsys):
    assert main(["completion", shell, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "spmdctx.completion/1"
    assert "spmdctx" in data["script"]
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == data["script"]
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=data["script"], text=True, check=True)
