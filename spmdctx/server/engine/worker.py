"""The actor of one worker: it runs the user's script, and Ray runs it again if its process is lost."""

from __future__ import annotations

import os
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from spmdctx.errors import CommunicationError
from spmdctx.server.engine.rays import answer, join_job
from spmdctx.server.state.presence import BEAT_S

_MOST_LINES = 200


class Script(NamedTuple):
    """What workers run: a script or module, its arguments, and the folder in which they run."""

    path: str
    arguments: Sequence[str]
    is_module: bool
    folder: str


class Ended(NamedTuple):
    """How a script has ended: its exit code, and the last lines of an error."""

    code: int
    error: str = ""


class Worker:
    """One worker; Ray calls its methods.

    Args:
        number: of the worker.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._scheduler, self._life = join_job()
        self._ended = threading.Event()
        answer(self._scheduler.begin.remote(number, self._life), "The scheduler")
        threading.Thread(target=self._beat, daemon=True).start()

    def run(self, script: Script) -> Ended:
        """Runs the script to its end; what it writes goes to the scheduler, line by line."""
        streams = [_Stream(number, name, self._say) for number, name in ((1, "out"), (2, "err"))]
        sys.argv = [script.path, *script.arguments]
        os.chdir(script.folder)
        sys.path.insert(0, script.folder if script.is_module else os.path.dirname(os.path.abspath(script.path)))
        try:
            if script.is_module:
                runpy.run_module(script.path, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script.path, run_name="__main__")
            ended = Ended(0)
        except SystemExit as error:
            ended = Ended(error.code if isinstance(error.code, int) else int(error.code is not None))
            if isinstance(error.code, str):
                sys.stderr.write(f"{error.code}\n")
        except BaseException as error:
            traceback.print_exc()
            ended = Ended(1, str(error))
        finally:
            for stream in streams:
                stream.close()
        self._ended.set()
        answer(self._scheduler.lost.remote(self._number), "The scheduler")
        return ended

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._scheduler.beat.remote(self._number, self._life)

    def _say(self, name: str, lines: Sequence[str]) -> None:
        with suppress(CommunicationError):  # where the scheduler is gone, nobody reads them, and the script must not wait
            answer(self._scheduler.say.remote(self._number, name, list(lines)), "The scheduler")


class _Stream:
    """Takes what is written to a file descriptor, by C++ too, and hands it on by lines."""

    def __init__(self, descriptor: int, name: str, say: Any) -> None:
        self._descriptor, self._name, self._say = descriptor, name, say
        sys.stdout.flush()
        sys.stderr.flush()
        self._former = os.dup(descriptor)
        source, target = os.pipe()
        os.dup2(target, descriptor)
        os.close(target)
        self._thread = threading.Thread(target=self._read, args=(source,), daemon=True)
        self._thread.start()

    def _read(self, source: int) -> None:
        with open(source, "rb", buffering=0) as pipe:
            left = b""
            while data := pipe.read(1 << 16):
                *lines, left = (left + data).split(b"\n")
                for start in range(0, len(lines), _MOST_LINES):
                    self._say(self._name, [line.decode(errors="replace") for line in lines[start : start + _MOST_LINES]])
            if left:
                self._say(self._name, [left.decode(errors="replace")])

    def close(self) -> None:
        """Gives the descriptor back, and waits until all is handed on."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._former, self._descriptor)
        os.close(self._former)
        self._thread.join(10)
