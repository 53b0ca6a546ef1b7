"""Checkpoints of a training state: saved while training continues, found after a stop, and restored into any other split."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from spmdctx.checkpoint.files import (
    checked_directory,
    damage,
    not_ordinary,
    packed,
    read_contents,
    read_json,
    remove_unfinished,
    reporting,
    unpacked,
)
from spmdctx.checkpoint.parts.leaves import shared_leaves
from spmdctx.checkpoint.restored import Pending, Restored
from spmdctx.checkpoint.tree import StateTree, Stored, from_stored, shardings_by_path, stored_form, target_sharding, to_stored
from spmdctx.communication.sigterm import GracefulEnd
from spmdctx.errors import CheckpointError, listed, message
from spmdctx.plan.file import SavedPlan, parse_any_plan
from spmdctx.plan.plan import Plan


class CheckpointManager:
    """Saves a training state every so many steps, keeps the last ones, and resumes from the latest complete one.

    A script that is run again with the same command continues where it stopped:

        with spmdctx.CheckpointManager("run/checkpoints", every=100) as checkpoints:
            model, optimizer = step.init(create, batch=shapes)
            rngs = nnx.Rngs(0)
            state = {"model": model, "optimizer": optimizer, "rngs": rngs}
            restored = checkpoints.restore(state, data=batches)
            state, start = restored.state, restored.step
            for number in range(start, num_steps):
                loss = step(**state, batch=next(batches))
                checkpoints.save(number + 1, state, data=batches)

    nnx objects take the restored values over; pytrees, a linen TrainState among them, come back as new ones in `restored.state`.
    Where the result is dropped and nobody took these, a warning says so; the next save raises an error.

    Saving copies the state to the host and returns. A thread then writes the files; each process writes its own part. The folder
    gets its name when all files are complete. Files of a killed process are not a checkpoint: the next run's first save removes
    them, and older checkpoints stay as they are. Every file's size and checksum are stored and compared on restoring.

    All processes of a job make the manager, save and restore together, and see the same folder. Other jobs may restore from it
    meanwhile, but only one job may save.

    After SIGTERM, on any process of a job, the next call of `save` saves whatever the step is, and ends all processes with the exit
    code 75. A second SIGTERM ends the process at once, and so does `SPMDCTX_GRACE_S` (30) seconds without a call.

    Args:
        directory: folder of the checkpoints, with one folder for each step in it.
        every: save at steps that this number divides; other calls of `save` return at once.
        keep: how many checkpoints stay; None keeps all.
        save_on_sigterm: whether SIGTERM saves; a handler of your own comes first.
    """

    def __init__(self, directory: str | os.PathLike[str], *, every: int = 1, keep: int | None = 3, save_on_sigterm: bool = True) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if isinstance(value, bool) or not (isinstance(value, int) or (name == "keep" and value is None)):
                raise TypeError(message(f"{name} must be a number.", got=repr(value)))
            if value is not None and value < 1:
                raise CheckpointError(f"{name} must be at least 1.", got=repr(value))
        import orbax.checkpoint as ocp  # slow to import

        from spmdctx.checkpoint.handler import StateHandler

        self.directory = checked_directory(directory)
        self._every, self._has_saved = every, False
        self._pending: Pending | None = None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        with reporting("The folder of checkpoints cannot be used.", self.directory):
            self._manager = ocp.CheckpointManager(
                self.directory, options=options, item_names=("state",), item_handlers={"state": StateHandler()}
            )
        self._end = GracefulEnd() if save_on_sigterm else None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of the complete checkpoints, oldest first."""
        import orbax.checkpoint as ocp

        return tuple(sorted(ocp.utils.checkpoint_steps(self.directory)))

    def latest_step(self) -> int | None:
        """Returns the step of the latest complete checkpoint, the same on every process, or None if there is no checkpoint."""
        latest = max(self.steps(), default=None)
        if jax.process_count() > 1:  # a shared folder may show one process more than another
            latest = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if latest is None else latest)))
        return None if latest is None or latest < 0 else int(latest)

    def save(self, step: int, state: Any, *, data: Any = None, plan: SavedPlan | None = None, force: bool = False) -> bool:
        """Begins to save; the state may change, or be donated, as soon as this returns. Waits for a save that still runs.

        Args:
            step: how many steps are done.
            state: arrays, random keys and numbers in nnx objects, pytrees or both; a dict by the step's argument names gives
                its leaves the paths that they have in plans.
            data: the data position: JSON values and bytes, or an iterator with `get_state()` that gives them. Each process
                saves its own.
            plan: kept with the checkpoint; that of a pipeline, too.
            force: save at any step.

        Returns:
            Whether it saves at this step.

        Raises:
            TypeError: a step that is no int, or a leaf or a data position that cannot be stored.
            CheckpointError: the step is negative or saved already, the state is empty or holds an array that was donated, the last
                save failed, or nobody has taken the state that was restored last.
            SystemExit: SIGTERM has come, and the state is saved.
        """
        step = _checked_step(step)
        if self._pending is not None:
            self._pending.check()
        is_end = self._end is not None and self._end.is_here()
        if not force and step % self._every and not is_end:
            return False
        from spmdctx.checkpoint.handler import SaveState

        tree = StateTree(state)
        _check_alive(tree)
        forms = {path: stored_form(path, leaf) for path, leaf in zip(tree.paths, tree.leaves, strict=True)}
        shared = zip(tree.paths, tree.leaves, shared_leaves(tree), strict=True)
        arrays = _nested({path: to_stored(leaf, is_shared=own) for path, leaf, own in shared if forms[path].num_bytes})
        if not arrays:
            raise CheckpointError("The state holds nothing to save.", got=f"{len(forms)} leaves")
        contents = {"step": step, "leaves": forms, "processes": jax.process_count(), "plan": None if plan is None else plan.to_json()}
        own = {"data": packed(data.get_state() if hasattr(data, "get_state") else data)}
        self.wait()
        if step in self.steps():
            raise CheckpointError(f"Step {step} is saved already.", where=str(self.directory), fix="restore before training goes on")
        self._remove_unfinished()
        import orbax.checkpoint as ocp

        with reporting("A checkpoint could not be written.", self.directory):
            self._manager.save(step, args=ocp.args.Composite(state=SaveState(arrays, contents, own)), force=True)
        if self._end is not None and is_end:
            self.wait()
            self._end.leave(f"step {step}")
        return True

    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        shardings: Any = None,
        data: Any = None,
        verify: bool = True,
        partial: bool = False,
    ) -> Restored:
        """Reads a checkpoint into a state like the saved one; nnx objects in it take the values over, and the rest is returned.

        Each leaf comes back as the kind that `state` has in its place (array, number, key), and placed like it. The mesh, plan and
        number of processes that saved it do not matter. Whole entries of the first level, such as the optimizer, may be left out.

        Args:
            state: arrays, or shapes (`jax.ShapeDtypeStruct`).
            step: the checkpoint; by default the latest complete one. If there is none, `state` comes back, as of step 0.
            shardings: the placement of the leaves: a tree like `state` with states in place of nnx objects, such as
                `step.in_shardings` returns; by default the placement of the leaves of `state`.
            data: an iterator with `set_state()`, which is set to the saved data position.
            verify: read every file first and compare its checksum; without it only sizes are compared.
            partial: restore what `state` has, whatever else the checkpoint holds.

        Raises:
            CheckpointError: there is no such step; a file is missing or damaged, and named; the checkpoint does not have a leaf, or
                has it in another shape or dtype; or `state` has no place for some leaves of an entry.
        """
        self.wait()
        step = self.latest_step() if step is None else _checked_step(step)
        self._pending = None
        if step is None:
            return Restored(0, state)
        folder = self.directory / str(step) / "state"
        if not folder.parent.is_dir():
            raise CheckpointError(f"There is no checkpoint of step {step}.", where=str(self.directory), need=f"one of {list(self.steps())}")
        _check_files(folder, contents=verify)
        contents = read_contents(folder, step)
        with reporting("The data position of the checkpoint is damaged.", folder.parent):
            position = unpacked(_own_data(folder, contents["processes"]))
        tree = StateTree(state)
        if not partial:
            _check_places(tree, contents["leaves"], str(folder.parent))
        restored = self._read(step, tree, shardings_by_path(shardings), contents)
        if data is not None and hasattr(data, "set_state"):
            data.set_state(position)
        plan = None if contents["plan"] is None else parse_any_plan(contents["plan"], str(folder), Plan)
        self._pending = Pending(step, tree.returned, str(self.directory))
        return Restored(int(contents["step"]), restored, position, plan).waiting(self._pending)

    def wait(self) -> None:
        """Waits until what was saved is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            with reporting("A checkpoint could not be written.", self.directory):
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
        except CheckpointError:
            if jax.process_count() == 1:  # others may still write
                with suppress(CheckpointError):
                    remove_unfinished(self.directory)
            raise

    def close(self) -> None:
        """Waits for unfinished saves, and ends the threads."""
        try:
            self.wait()
            self._manager.close()
        finally:
            if self._end is not None:
                self._end.close()

    def _remove_unfinished(self) -> None:
        """Removes the files that a killed run has left, before the first save."""
        if self._has_saved:
            return
        self._has_saved = True
        if jax.process_index() == 0:
            remove_unfinished(self.directory)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"spmdctx checkpoints {self.directory}")

    def _read(self, step: int, tree: StateTree, given: Mapping[str, Any], contents: Mapping[str, Any]) -> Any:
        import orbax.checkpoint as ocp

        from spmdctx.checkpoint.handler import RestoreState

        forms = {path: Stored(tuple(shape), dtype, key) for path, (shape, dtype, key) in contents["leaves"].items()}
        _check_leaves(tree, forms, str(self.directory / str(step)))
        shapes, how = {}, {}
        found: dict[str, Any] = {path: np.zeros(forms[path].shape, forms[path].dtype) for path in tree.paths if not forms[path].num_bytes}
        for path, leaf in zip(tree.paths, tree.leaves, strict=True):
            if path in found:
                continue
            form, sharding = forms[path], target_sharding(leaf, given.get(path))
            if sharding is not None and not sharding.addressable_devices:  # another process reads it
                found[path] = jax.make_array_from_single_device_arrays(form.shape, sharding, [], dtype=leaf.dtype)
                continue
            shapes[path] = jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=sharding)
            host = ocp.RestoreArgs(restore_type=np.ndarray)
            how[path] = host if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding, global_shape=form.shape, dtype=leaf.dtype)
        try:
            args = ocp.args.Composite(state=RestoreState(_nested(shapes), _nested(how)))
            found |= _flat(self._manager.restore(step, args=args)["state"] if shapes else {}, list(shapes))
        except Exception as error:
            raise CheckpointError("The checkpoint cannot be read.", where=str(self.directory / str(step)), got=str(error)) from error
        pairs = zip(tree.paths, tree.leaves, strict=True)
        return tree.filled([from_stored(leaf, found[path], forms[path], given.get(path)) for path, leaf in pairs])


def _checked_step(step: object) -> int:
    if isinstance(step, bool) or not isinstance(step, int | np.integer):
        raise TypeError(message("The step counts those that are done: an int.", got=repr(step)))
    if step < 0:
        raise CheckpointError("The step counts those that are done.", got=str(step), need="0 or more")
    return int(step)


def _check_alive(tree: StateTree) -> None:
    """Refuses a state with arrays whose memory was reused or freed."""
    gone = [path for path, leaf in zip(tree.paths, tree.leaves, strict=True) if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    if gone:
        raise CheckpointError(
            "The state holds arrays that are deleted: a step that they were donated to has reused their memory, or delete() was called.",
            got=listed(gone),
            fix="save the state that the step returned, and call delete() later",
        )


def _check_files(folder: Path, *, contents: bool) -> None:
    """Checks the files, each process its own part; all processes learn what is wrong."""
    from spmdctx.checkpoint.handler import read_seals

    seals = read_seals(folder)
    own = dict(sorted(seals.items())[jax.process_index() :: jax.process_count()])
    wrong = not_ordinary(folder.parent) or damage(folder, own, contents=contents)
    if jax.process_count() > 1 and np.any(multihost_utils.process_allgather(np.bool_(wrong != ""))):
        wrong = wrong or "another process found a damaged file, and names it"
    if wrong:
        raise CheckpointError(
            "The checkpoint is damaged.",
            where=str(folder.parent),
            got=wrong,
            fix=f"remove the folder {folder.parent.name} to go on from the checkpoint before it",
        )


def _check_leaves(tree: StateTree, forms: Mapping[str, Stored], where: str) -> None:
    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
        form, own = forms.get(path), stored_form(path, leaf)
        if form is None:
            near = [name for name in forms if name.rpartition("/")[2] == path.rpartition("/")[2]]
            raise CheckpointError(
                f"The checkpoint has no leaf {path!r}.", where=where, got=", ".join([*near, *forms][:4]), need="a state like the saved one"
            )
        if form.shape != own.shape or form.key != own.key or not _same_type(form, own):
            raise CheckpointError(f"The checkpoint holds another {path!r}.", where=where, got=str(form), need=str(own))


def _check_places(tree: StateTree, saved: Iterable[str], where: str) -> None:
    """Refuses a state that has no place for leaves beside those it has."""
    branches, known = {path.partition("/")[0] for path in tree.paths}, set(tree.paths)
    left = [path for path in saved if path not in known and path.partition("/")[0] in branches]
    if left:
        raise CheckpointError(
            "The state has no place for what the checkpoint holds.",
            where=where,
            got=listed(left),
            fix="restore a state like the saved one, whole entries of its first level, or a part with partial=True",
        )


def _same_type(form: Stored, own: Stored) -> bool:
    """Returns whether dtypes are the same; Python's numbers, which are stored wide, fit scalars of their kind."""
    return form.dtype == own.dtype or (not form.shape and np.dtype(form.dtype).kind == np.dtype(own.dtype).kind)


def _own_data(folder: Path, num_saved: int) -> Any:
    """Reads the data position of this process.

    If another number of processes saved, this is the position that all of them had.
    """
    from spmdctx.checkpoint.handler import own_contents

    if num_saved == jax.process_count():
        return read_json(folder / own_contents(jax.process_index())).get("data")
    positions = [read_json(folder / own_contents(process)).get("data") for process in range(num_saved)]
    if any(position != positions[0] for position in positions):
        raise CheckpointError(
            "The processes that saved had data positions of their own, and now there is another number of processes.",
            where=str(folder.parent),
            got=f"{num_saved} processes saved, {jax.process_count()} restore",
            fix="save a data position that is the same on every process, such as the number of batches",
        )
    return positions[0]


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a dict of dicts from paths, which orbax shows to users who inspect a checkpoint."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = root
        *folders, name = path.split("/")
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return root


def _flat(tree: Any, paths: Sequence[str]) -> dict[str, Any]:
    found = {}
    for path in paths:
        node = tree
        for name in path.split("/"):
            node = node[name]
        found[path] = node
    return found
