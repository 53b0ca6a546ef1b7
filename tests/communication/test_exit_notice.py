"""`sys.exit`: what nobody catches is told with its code, all else is as it was."""

import subprocess
import sys

import pytest

from spmdctx.communication import exit_notice as exits

SCRIPT = f"""
import atexit, os, runpy, sys
hook = runpy.run_path({exits.__file__!r})["ExitHook"](lambda code: os.write(1, f"told {{code}}".encode()))
atexit.register(lambda: print("left"))
try:
    sys.exit(9)
except SystemExit as error:
    kept = error
"""


@pytest.mark.parametrize(
    ("more", "code", "expected"),
    [
        ("sys.exit(3)", 3, "told 3left"),
        ("sys.exit('no data')", 1, "told 1left"),
        ("def main():\n    with open(os.devnull):\n        sys.exit(2)\nmain()", 2, "told 2left"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--x'])", 2, "told 2left"),
        ("sys.exit()", 0, "left"),
        ("sys.exit(0)", 0, "left"),
        ("pass", 0, "left"),
        ("hook.remove(); sys.exit(3)", 3, "left"),
        ("raise SystemExit(4)", 4, "left"),
    ],
)
def test_an_exit_that_ends_the_process_is_told(more, code, expected):
    done = subprocess.run([sys.executable, "-c", SCRIPT + more], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (code, expected)


def test_an_exit_that_is_caught_tells_nothing():
    told, before = [], sys.exit
    hook = exits.ExitHook(told.append)
    try:
        with pytest.raises(SystemExit) as caught:
            sys.exit(3)
        assert caught.value.code == 3
    finally:
        hook.remove()
    assert sys.exit is before
    assert told == []
