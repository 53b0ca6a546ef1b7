"""Files are read only where they are files, and written whole or not at all: on full and read-only disks, over planted links, and alone."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import contextmanager

import pytest

from spmdctx.errors import FileError, is_laid_out
from spmdctx.wording import files
from spmdctx.wording.files import check_writable, is_inside, read_file, replacing, write_file


def make_special(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.fspath(path))
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "link to a pipe":
        os.mkfifo(path.with_name("p"))
        path.symlink_to("p")


SPECIAL = ("pipe", "folder", "device", "socket", "link to itself", "link to a pipe")


@pytest.fixture
def short(tmp_path, monkeypatch):
    """A short path, as sockets need it."""
    monkeypatch.chdir(tmp_path)
    return files.Path("x.json")


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_not_read(short, kind):
    make_special(short, kind)
    with pytest.raises(ValueError, match=r"and no file|symbolic links"):
        read_file(short)


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_not_replaced(short, kind):
    make_special(short, kind)
    before = os.lstat(short)
    with pytest.raises(FileError) as caught:
        write_file(short, "new")
    assert is_laid_out(caught.value)
    assert (os.lstat(short).st_ino, os.lstat(short).st_mode) == (before.st_ino, before.st_mode)
    assert {path.name for path in short.parent.iterdir()} <= {"x.json", "p"}


@pytest.mark.parametrize("name", ["a\0b", "", ".", "\ud800", "x" * 300])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    with pytest.raises(FileError, match="cannot be written"):
        write_file(f"{tmp_path}/{name}", "new")
    with pytest.raises((ValueError, OSError), match=r"."):
        read_file(f"{tmp_path}/{name}")
    assert not list(tmp_path.iterdir())


def test_a_large_file_is_not_read_whole(tmp_path):
    with (tmp_path / "x").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"more than 64\.0 MiB"):
        read_file(tmp_path / "x")


def test_a_planted_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "other").write_text("theirs")
    (tmp_path / "x").symlink_to("other")
    write_file(tmp_path / "x", "mine")
    assert (tmp_path / "other").read_text() == "theirs"
    assert (tmp_path / "x").read_text() == "mine"
    assert not (tmp_path / "x").is_symlink()


def test_a_planted_file_of_the_temporary_name_is_not_written(tmp_path, monkeypatch):
    (tmp_path / "other").write_text("theirs")
    names = iter(["known", "known", "new"])
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: next(names))
    (tmp_path / ".x.known.writing").symlink_to("other")
    with pytest.raises(FileError, match="File exists"):
        write_file(tmp_path / "x", "mine")
    assert (tmp_path / "other").read_text() == "theirs"


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    (tmp_path / ".x.0123.writing").write_text("left")
    with replacing(tmp_path / "x") as first:
        first.write(b"first")
        write_file(tmp_path / "x", "second")
        assert len(list(tmp_path.iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "first"


def test_permissions_stay(tmp_path):
    (tmp_path / "x").write_text("old")
    (tmp_path / "x").chmod(0o600)
    write_file(tmp_path / "x", "new")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600


@contextmanager
def failing(monkeypatch, name, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        yield


@pytest.mark.parametrize(
    ("call", "number"), [("fsync", errno.ENOSPC), ("fsync", errno.EIO), ("replace", errno.EROFS), ("open", errno.EDQUOT)]
)
def test_a_failed_write_leaves_the_former_file_and_nothing_else(tmp_path, monkeypatch, call, number):
    (tmp_path / "x").write_text("old")
    with failing(monkeypatch, call, number), pytest.raises(FileError, match=os.strerror(number)) as caught:
        write_file(tmp_path / "x", "new")
    assert caught.value.errno == number
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_folders_that_were_made_for_a_file_go_with_it(tmp_path, monkeypatch):
    with failing(monkeypatch, "fsync", errno.ENOSPC), pytest.raises(FileError):
        write_file(tmp_path / "a" / "b" / "x", "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyError("mine"), ValueError("mine"), KeyboardInterrupt()])
def test_an_error_from_inside_stays_itself(tmp_path, error):
    with pytest.raises(type(error)) as caught, replacing(tmp_path / "x"):
        raise error
    assert caught.value is error
    assert not list(tmp_path.iterdir())


def test_a_check_refuses_before_the_file_has_its_name(tmp_path):
    def check(path):
        assert path.read_text() == "new"
        raise KeyError("bad")

    with pytest.raises(KeyError):
        write_file(tmp_path / "x", "new", check)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("path", "inside"), [("a/b", True), ("a/../../x", False), ("out", False), ("loop", False)])
def test_a_path_is_inside_when_its_links_are(tmp_path, path, inside):
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    (folder / "loop").symlink_to("loop")
    (tmp_path / "f2").mkdir()
    assert is_inside(folder / path, folder) == inside
    assert not is_inside(tmp_path / "f2" / "x", folder)


def test_a_place_that_can_be_written_is_tried_without_a_trace(tmp_path):
    (tmp_path / "there").write_text("old")
    check_writable(tmp_path / "there")
    check_writable(tmp_path / "new" / "folder" / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "old"


@pytest.mark.parametrize("place", ["there/file", "folder", "there/folder/file"])
def test_a_place_that_cannot_be_written_is_refused_as_it_is_when_written(tmp_path, place):
    (tmp_path / "there").write_text("old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError) as tried:
        check_writable(tmp_path / place)
    with pytest.raises(FileError) as written:
        write_file(tmp_path / place, "new")
    assert str(tried.value) == str(written.value)
    assert {path.name for path in tmp_path.iterdir()} == {"there", "folder"}
