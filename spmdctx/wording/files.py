"""Reads and writes whole files, in folders where others may write too.

What is read is an ordinary file of bounded size: a pipe would hang the reader, and a device never end. What is written appears whole or not
at all. A file of another name takes the bytes and then replaces the former one, so a link in the target's place is replaced, and never
followed. Nobody else can have made that file: its name is drawn, and it must be new. Its writer holds a lock on it, by which later writers
tell what a killed one has left, and remove it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from spmdctx.errors import FileError
from spmdctx.wording import bytes_text

MOST_BYTES = 64 << 20
"""The bytes that a file may have which is read as a whole."""

_ENDING = ".writing"
_NO_FILES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_NO_NAME = (errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)
_READ, _WRITE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def open_file(path: str | os.PathLike[str]) -> int:
    """Opens an ordinary file for reading, and returns its descriptor.

    Raises:
        ValueError: it is none, or no file can have this name.
        OSError: the file system refuses.
    """
    try:
        _check_ordinary(os.stat(path))  # before it is opened, since opening may already act on a device
        found = os.open(path, _READ)
    except OSError as error:
        if error.errno in _NO_NAME:
            raise ValueError(error.strerror) from error
        raise
    try:
        _check_ordinary(os.fstat(found))
    except BaseException:
        os.close(found)
        raise
    return found


def read_file(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """Reads an ordinary file as a whole.

    Raises:
        ValueError: it is none, it is too large, or no file can have this name.
        OSError: the file system refuses.
    """
    with os.fdopen(open_file(path), "rb") as file:
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise ValueError(f"the file has more than {bytes_text(most_bytes)}")
    return found


def _check_ordinary(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"it is {_NO_FILES.get(stat.S_IFMT(found.st_mode), 'something else')}, and no file")


def is_inside(path: Path, folder: Path) -> bool:
    """Returns whether a path can be one, and lies in a folder when all links are followed."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a link to itself
        return False


def write_file(path: str | os.PathLike[str], content: str | bytes, check: Callable[[Path], object] | None = None) -> None:
    """Writes a file, text as UTF-8, and makes its folder; arguments and errors as for `replacing`.

    Raises:
        FileError: the file cannot be written.
    """
    with replacing(path, check) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuses a path at which `write_file` could write nothing, before what takes long; leaves everything as it was.

    Raises:
        FileError: no file can be written there.
    """
    with suppress(_TriedError), replacing(path):
        raise _TriedError


class _TriedError(Exception):
    """Ends the trial of a file."""


@contextmanager
def replacing(path: str | os.PathLike[str], check: Callable[[Path], object] | None = None) -> Iterator[BinaryIO]:
    """Gives a new file, which replaces the one at `path` once all is written; its folder is made.

    A reader never sees half of it. An error inside leaves everything as it was.

    Args:
        path: where the file is to be.
        check: reads the new file back before it replaces the former one, and raises an error if that fails.

    Raises:
        FileError: the file cannot be written.
    """
    scratch: Path | None = None
    try:
        target = Path(path)
        with making_folder(target.parent):
            mode = _mode_of(target)
            _remove_left(target)
            scratch, descriptor = _new_file(target)
            try:
                with os.fdopen(descriptor, "w+b") as file:
                    if mode is not None:
                        os.fchmod(descriptor, mode)
                    yield file
                    file.flush()
                    os.fsync(descriptor)
                    if check is not None:
                        check(scratch)
                    scratch.replace(target)  # while the lock is held
            finally:
                scratch.unlink(missing_ok=True)
        sync_folder(target.parent)
    except FileError:
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) or scratch is None:  # else it comes from inside
            raise _refused(path, error) from error
        raise


@contextmanager
def making_folder(folder: Path) -> Iterator[None]:
    """Makes a folder and those around it; removes those that it has made if an error comes from inside.

    Raises:
        FileError: it cannot be made.
    """
    missing: list[Path] = []
    try:
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        _remove_folders(missing)
        raise _refused(folder, error) from error
    try:
        yield
    except BaseException:
        _remove_folders(missing)
        raise


def _remove_folders(folders: Sequence[Path]) -> None:
    """Removes folders that are empty, the innermost first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Holds a lock on a folder, waiting for others who do; nothing is held where the file system has no locks.

    Raises:
        FileError: the folder cannot be opened.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(folder, error) from error
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _mode_of(target: Path) -> int | None:
    """Returns the permissions of the file that is to be replaced, or None if there is none."""
    try:
        found = target.stat()
    except FileNotFoundError:
        return None
    _check_ordinary(found)
    return stat.S_IMODE(found.st_mode) if not target.is_symlink() else None


def _prefix(target: Path) -> str:
    return f".{target.name[:40]}."


def _new_file(target: Path) -> tuple[Path, int]:
    """Makes a file beside the target, and locks it."""
    while True:
        scratch = target.with_name(f"{_prefix(target)}{secrets.token_hex(8)}{_ENDING}")
        descriptor = os.open(scratch, _WRITE, 0o666)
        if not _locked(descriptor) or os.fstat(descriptor).st_nlink:
            return scratch, descriptor
        os.close(descriptor)  # another writer took it for left


def _locked(descriptor: int) -> bool:
    """Locks a file, without waiting; returns whether that worked, which some file systems cannot."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_left(target: Path) -> None:
    """Removes what killed writers of the same file have left."""
    prefix = _prefix(target)
    for name in os.listdir(target.parent):
        if not (name.startswith(prefix) and name.endswith(_ENDING)):
            continue
        with suppress(OSError):
            descriptor = os.open(target.with_name(name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode) and _locked(descriptor):
                    target.with_name(name).unlink()
            finally:
                os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Has the names in a folder survive a loss of power, on file systems that can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _refused(path: str | os.PathLike[str], error: Exception) -> FileError:
    number, text = getattr(error, "errno", None), getattr(error, "strerror", None) or str(error)
    name = str(path) if str(path).isprintable() else ascii(str(path))
    fix = "free some space" if number in (errno.ENOSPC, errno.EDQUOT) else "name another folder" if number == errno.EROFS else ""
    made = FileError("The file cannot be written.", where=name, got=text, fix=fix)
    made.errno, made.strerror, made.filename = number, text, name
    return made
