"""Files appear complete or not at all."""

import errno
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import prelunet.evaluator.files
from prelunet.evaluator.datasets.labels.class_file import read_class_list
from prelunet.evaluator.datasets.sources.folder import FolderSource
from prelunet.evaluator.engine.runtimes.onnx_metadata import read_metadata
from prelunet.evaluator.errors import EnvironmentFault, PreluNetError, RunFolderError, UsageError
from prelunet.evaluator.files import (
    create_folder,
    locked_folder,
    open_atomically,
    read_regular,
    read_toml,
    remove_leftovers,
    require_regular_file,
    sha256_of,
    write_atomically,
)
from prelunet.evaluator.image_input import encoded_image
from prelunet.evaluator.rpc.tls import read_small_file
from prelunet.evaluator.serving.options import ModelFile, require_files
from prelunet.evaluator.verbs.options import read_config


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_is_visible_until_the_new_one_is_complete(tmp_path: Path) -> None:
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


def test_a_full_disk_is_reported_with_the_file_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prelunet.evaluator.files.os, "fsync", full)
    with pytest.raises(EnvironmentFault, match=r"run\.json: the disk is full; free some space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_that_names_another_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="source"), open_atomically(tmp_path / "copy"):
        (tmp_path / "source").read_bytes()


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_in_the_place_of_a_folder_is_reported_with_the_option(tmp_path: Path, inside: bool) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "inner" if inside else tmp_path / "file"
    with pytest.raises(UsageError, match=rf"{folder}: there is a file in the place of a folder.*another .* --out"):
        create_folder(folder, "--out")
    create_folder(tmp_path / "new" / "inner", "--out")
    create_folder(tmp_path / "new" / "inner", "--out")
    assert (tmp_path / "new" / "inner").is_dir()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the folder .*nowhere does not exist"):
        write_atomically(tmp_path / "nowhere" / "run.json", b"")


def test_a_folder_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    for path in (tmp_path, Path(os.devnull)):
        with pytest.raises(UsageError, match="not a regular file"):
            write_atomically(path, b"")
    assert Path(os.devnull).is_char_device()


READERS = {
    "class list": read_class_list,
    "options": lambda path: read_config(None, path),
    "image": encoded_image,
    "image of a folder": lambda path: FolderSource(path.parent).read(path.name),
    "model": read_metadata,
    "model of a server": lambda path: require_files([ModelFile("a", path)]),
    "recipe": lambda path: read_toml(path, ""),
    "sha256": sha256_of,
    "tokens": read_small_file,
    "a library's": require_regular_file,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_pipes_sockets_and_devices_are_refused_without_waiting(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name is at most 107 bytes
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for path in (Path("pipe"), Path("link"), Path("socket"), Path("/dev/zero")):
            with pytest.raises(PreluNetError, match=rf"{path}: .*not a regular file"):
                read(path)


def test_a_file_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"12345")
    assert read_regular(tmp_path / "text", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes, so it is another kind of file"):
        read_regular(tmp_path / "text", 4)


def test_regular_files_pass_and_so_do_paths_that_opening_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "link", "loop", "nowhere", "file/inside", "."):
        require_regular_file(tmp_path / name)


def test_a_link_keeps_pointing_to_the_file_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(tmp_path / "step-100")
    write_atomically(tmp_path / "latest", b"weights")
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "step-100").read_bytes() == b"weights"


def test_the_umask_decides_who_may_read_the_file(tmp_path: Path) -> None:
    plain, atomic = tmp_path / "plain", tmp_path / "atomic"
    plain.write_bytes(b"")
    write_atomically(atomic, b"")
    assert stat.S_IMODE(atomic.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_on_a_read_only_file_system_the_error_names_the_requested_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))

    monkeypatch.setattr(Path, "open", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(EnvironmentFault, match=r"run\.json: the file system is read-only") as caught:
        write_atomically(tmp_path / "run.json", b"new")
    assert ".tmp" not in str(caught.value)


def test_a_link_that_leads_to_itself_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    write_atomically(tmp_path / "loop", b"new")
    assert (tmp_path / "loop").read_bytes() == b"new"


HOLD = """
import sys, time
from pathlib import Path
from prelunet.evaluator.files import locked_folder
with locked_folder(Path(sys.argv[1]), "--out"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_locked_by_one_process_and_released_when_it_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(RunFolderError, match=r"another process is writing this run.*folder with --run"),
            locked_folder(tmp_path, "--run"),
        ):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with locked_folder(tmp_path, "--run"):
        pass
    assert list(tmp_path.iterdir()) == []  # the lock leaves no file


def test_on_a_file_system_without_locks_the_error_asks_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(prelunet.evaluator.files.fcntl, "flock", no_locks)
    with (
        pytest.raises(EnvironmentFault, match=r"cannot be locked.*another file system with --out"),
        locked_folder(tmp_path, "--out"),
    ):
        pass


def test_only_the_temporary_files_of_the_named_files_are_removed(tmp_path: Path) -> None:
    ours = [tmp_path / ".run.json.0a1b2c3d.tmp", tmp_path / ".state.pt.ffffffff.tmp"]
    others = [tmp_path / name for name in (".run.json.swp", ".run.json.mine.tmp", ".notes.0a1b2c3d.tmp", "run.json")]
    for path in (*ours, *others):
        path.touch()
    remove_leftovers(tmp_path, ("run.json", "state.pt"))
    assert sorted(tmp_path.iterdir()) == sorted(others)
