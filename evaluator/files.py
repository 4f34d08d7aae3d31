"""Files that are whole or absent: written under a temporary name beside the target, fsynced, then renamed.

And what tells one file from another: its sha256. And folders that one process at a time may write.
"""

import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from prelunet.evaluator.errors import EnvironmentFault, RunFolderError, UsageError, from_os_error


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, 64 hexadecimal digits; UsageError when it cannot be read."""
    require_regular_file(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Give the path of a file that is there") from error


def require_regular_file(path: Path) -> None:
    """Refuse a pipe, a socket or a device with a UsageError: reading one may wait, or go on, without end.

    What is missing, and a folder, pass: opening them fails at once, and the reader says what it looked for.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UsageError(f"{path}: is no plain file, but a pipe, a socket or a device. Give the path of a file")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that no reader, and no crash, ever meets half of it.

    An existing file is replaced. Raises UsageError when the folder is missing or `path` is no regular file,
    EnvironmentFault when the disk is full or not writable; then nothing is left behind and an old file stays.
    """
    with open_atomically(path) as file:
        file.write(data)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name only when the block ends without an error.

    The same promises and errors as `write_atomically`; for data that should not be in memory twice.
    """
    target = require_writable(path)
    # Not tempfile: it creates files that only their owner may read, whatever the umask says.
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        _fsync_folder(target.parent)
    except BaseException as error:
        with suppress(OSError):  # of a read-only file system, which would hide what happened before
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in {None, os.fspath(temporary)}:
            raise from_os_error(OSError(error.errno, error.strerror, os.fspath(path))) from error
        raise


def require_writable(path: Path) -> Path:
    """Return the file that a path leads to; UsageError when it can be told already that it cannot be written.

    For what takes long before it writes.
    """
    target = Path(os.path.realpath(path))  # through a link, as a plain open would write; resolve() fails on a loop
    if not target.parent.is_dir():
        raise UsageError(f"{path}: the folder {target.parent} does not exist. Create it, or choose another path")
    if target.exists() and not target.is_file():  # a rename would replace a folder or a device such as /dev/null
        raise UsageError(f"{path}: not a regular file, so it cannot be replaced. Choose another path")
    return target


def create_folder(folder: Path, option: str) -> None:
    """Make a folder with those above it where they are missing; UsageError where a file is in the way.

    option: of the command line that names the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(
            f"{folder}: there is a file in the place of a folder. Move it away, or choose another folder with {option}"
        ) from error


def leftovers(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the temporary files that a killed process left of files with these names."""
    return [path for name in names for path in folder.glob(f".{name[:200]}.{'[0-9a-f]' * 8}.tmp")]


def remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """Remove those temporary files; only for who holds the folder's lock, since another process may be writing them."""
    for path in leftovers(folder, names):
        path.unlink(missing_ok=True)


@contextmanager
def locked_folder(folder: Path, option: str) -> Iterator[None]:
    """Hold a folder for this process alone; the system gives it back when the process dies.

    option: of the command line that names the folder. Raises RunFolderError when another process holds it,
    EnvironmentFault where there are no locks. No file is made for it: the lock is on the folder itself.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFolderError(
                f"{folder}: another process is writing this run. Wait for it, or choose another folder with {option}"
            ) from error
        except OSError as error:
            raise EnvironmentFault(
                f"{folder}: cannot be locked ({error.strerror}). Choose a folder on another file system with {option}"
            ) from error
        yield
    finally:
        os.close(descriptor)


def _fsync_folder(folder: Path) -> None:
    """Make a rename last: the new name is in the folder, which is written on its own."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Where a file may be written: not over one of those that it is made of.


def check_not_input(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to write over an input, by whatever name or link it goes; UsageError."""
    for path in inputs:
        try:
            same = output.samefile(path)
        except (OSError, ValueError):  # one is not there, or no path at all, which whoever reads it will say
            continue
        if same:
            raise UsageError(f"{output}: is the input itself ({path}); choose another name")
