"""Files appear whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest

import evaluator.files
from evaluator.errors import EnvironmentFault, UsageError
from evaluator.files import open_atomically, write_atomically


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_is_seen_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"old")
    with open_atomically(path) as file:
        file.write(b"half")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"half"


@pytest.mark.parametrize("fault", [RuntimeError("ours"), KeyboardInterrupt()])
def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, fault: BaseException) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"old")

    def fail_half_way() -> None:
        with open_atomically(path) as file:
            file.write(b"half")
            raise fault

    with pytest.raises(type(fault)):
        fail_half_way()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_with_the_name_of_the_file_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(evaluator.files.os, "fsync", full)
    with pytest.raises(EnvironmentFault, match=r"run\.json: the disk is full; free some space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_that_names_another_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="source"), open_atomically(tmp_path / "copy"):
        (tmp_path / "source").read_bytes()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the folder .*nowhere does not exist"):
        write_atomically(tmp_path / "nowhere" / "run.json", b"")


def test_a_folder_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    for path in (tmp_path, Path(os.devnull)):
        with pytest.raises(UsageError, match="not a regular file"):
            write_atomically(path, b"")
    assert Path(os.devnull).is_char_device()


def test_a_link_keeps_pointing_to_the_file_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(tmp_path / "step-100")
    write_atomically(tmp_path / "latest", b"weights")
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "step-100").read_bytes() == b"weights"


def test_others_may_read_the_file_as_the_umask_says(tmp_path: Path) -> None:
    plain, atomic = tmp_path / "plain", tmp_path / "atomic"
    plain.write_bytes(b"")
    write_atomically(atomic, b"")
    assert stat.S_IMODE(atomic.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
