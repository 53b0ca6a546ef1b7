"""What stays with this worker in a job: it is loaded from a saved state, renewed by what servers keep of each step, and saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmdctx.errors import CheckpointError
from spmdctx.server.engine.client import Client, Lost
from spmdctx.server.local.state import LocalState
from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.spec import raw
from spmdctx.server.remote import fetched
from spmdctx.server.state.folder import WORKERS_FILE, load_arrays, save_arrays

Steps = Mapping[int, Mapping[int, Any]]
"""Inputs of steps, by step and number."""


class LocalRun:
    """This worker's copy.

    Args:
        step: a part of whose state stays with workers.
        state: the copy.
        client: the connection to the servers.
    """

    def __init__(self, step: ServedStep, state: LocalState, client: Client) -> None:
        assert step.local is not None, "the step has something that stays with workers"
        self._state, self._client, self._held = state, client, step.local.held
        self._path_of = {number: step.captured.inputs[number].path for number in step.local.held}
        self._ahead: tuple[int, int, Sequence[Any]] | None = None
        self._failed: int | None = None
        self._reads_arguments = bool(step.local.given)

    @property
    def values(self) -> Mapping[int, Any]:
        """The arrays as they are now, by number."""
        return self._state.values

    @property
    def reads_arguments(self) -> bool:
        """Whether a step is done only with its arguments."""
        return self._reads_arguments

    def results(self, step: int) -> Mapping[int, Any]:
        """Returns the results that this worker has made in a step, by number; none if it has not done it."""
        return self._state.results.get(step, {})

    def begin(self, first: Sequence[Any]) -> None:
        """Saves the first arrays of a job, which are among the arguments of the step."""
        self._write(0, {number: first[number] for number in self._held})

    def bring(self, version: int, taken: Sequence[str], inputs: Steps, assigned: Steps) -> None:
        """Brings the arrays to a version.

        Args:
            version: not before the newest state that is saved.
            taken: the slots of what servers keep.
            inputs: of the steps before the version, those that are no state.
            assigned: arrays that the user has put in place of those of a step.

        Raises:
            CheckpointError: the saved state is damaged.
            Lost: a server was lost.
        """
        state, client = self._state, self._client
        if state.version > version or state.version < client.kept_from:
            self._load(client.kept_from)
        state.forget(client.kept_from)
        for kept in self._kept(state.version, version) if state.version < version else ():
            state.assign(self._own(assigned.get(state.version, {})))
            state.advance([kept[slot] for slot in taken], inputs.get(state.version, {}))
            if made := self.results(state.version - 1):
                client.report(state.version - 1, made)
        state.assign(self._own(assigned.get(version, {})))

    def start(self, generation: int) -> None:
        """Asks servers for what they keep of the step that this worker is in."""
        version = self._state.version
        self._ahead = (generation, version, self._client.start_kept(version, version + 1))

    def save(self, generation: int, version: int) -> None:
        """Saves the arrays, which are those of a version.

        Raises:
            CheckpointError: they cannot be saved; the job ends.
        """
        try:
            self._write(version, self._state.values)
        except CheckpointError as error:
            self._client.fail(f"Worker {self._client.worker} cannot save its arrays: {error}")
            raise
        self._client.saved(generation, version, WORKERS_FILE)

    def _kept(self, first: int, last: int) -> list[dict[str, Any]]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (self._client.generation, first) and last == first + 1:
            return self._client.finish_kept(ahead[2])
        return self._client.finish_kept(self._client.start_kept(first, last))

    def _load(self, version: int) -> None:
        self._ahead = None
        try:
            arrays = load_arrays(Path(self._client.job.folder), version, self._path_of.values())
        except CheckpointError:
            # A newer state may have taken its place; who asks again is told of it.
            if self._failed == version:
                raise
            self._failed = version
            raise Lost from None
        self._state.load(version, {number: arrays[path] for number, path in self._path_of.items()})

    def _write(self, version: int, values: Mapping[int, Any]) -> None:
        arrays = {self._path_of[number]: np.asarray(raw(fetched(value))) for number, value in values.items()}
        save_arrays(Path(self._client.job.folder), version, WORKERS_FILE, arrays)

    def _own(self, given: Mapping[int, Any]) -> dict[int, Any]:
        return {number: np.asarray(raw(fetched(value))) for number, value in given.items() if number in self._held}
