"""Reading of regular files only, atomic writes (a temporary file beside the target, fsync, rename), locked folders."""

import errno
import fcntl
import hashlib
import os
import secrets
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from .errors import EnvironmentFault, RunFolderError, UsageError, from_os_error

MAX_TEXT_BYTES = 2**26  # of a file that a person writes: options, a recipe, a class list
OpenFile: TypeAlias = Callable[[Path], BinaryIO]  # opens a file for reading, or raises OSError


class NotRegularFileError(OSError):
    """A path names a pipe, a socket or a device. Opening or reading one may wait or continue forever."""

    def __init__(self, path: str | Path) -> None:
        problem = "not a regular file, but a pipe, a socket or a device: save its content in a file"
        super().__init__(errno.EINVAL, problem, os.fspath(path))


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file for reading. Raises OSError, also for what is not a file (NotRegularFileError)."""
    mode = Path(path).stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a folder fails by itself
        raise NotRegularFileError(path)
    # Does not wait even if a pipe takes the file's place now.
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def walk_without_links(
    top: Path, *, depth: int | None = None, limit: int | None = None
) -> Iterator[tuple[Path, list[str], OpenFile]]:
    """Yield each folder: its path below `top`, the names of its files, and a function that opens one of them.

    depth: of folders below `top`; limit: number of folders. No link is followed, and files are opened relative to the
    folder in which they were found, so nothing outside `top` is read. The function works until the next folder.
    """
    for place, folders, files, descriptor in islice(os.fwalk(top), limit):
        below = Path(place).relative_to(top)
        if len(below.parts) == depth:
            folders.clear()
        yield below, files, partial(_open_in, descriptor)


def _open_in(folder: int, path: Path) -> BinaryIO:
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)

    return open(path.name, "rb", opener=opener)


def read_regular(path: Path, limit: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a file. Raises OSError as `open_regular`, and for more than `limit` bytes."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes, so it is another kind of file", os.fspath(path))
    return content


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, 64 hexadecimal digits; UsageError if it cannot be read."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Give the path of an existing file") from error


def require_regular_file(path: Path) -> None:
    """Raise UsageError for what `open_regular` refuses, where a library opens the path itself.

    A missing file and a folder pass: opening them fails at once, and the reader reports what it looked for.
    """
    try:
        open_regular(path).close()
    except NotRegularFileError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except OSError:
        return


def read_toml(path: Path, fix: str) -> dict[str, Any]:
    """Read a TOML file; raises UsageError, which ends with `fix` if the file cannot be read."""
    try:
        return tomllib.loads(read_regular(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({getattr(error, 'strerror', error)}). {fix}") from error
    except (ValueError, RecursionError) as error:  # ValueError: also of an integer with thousands of digits
        raise UsageError(f"{path}: invalid TOML ({error})") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically: no reader sees a partial file, not even after a crash.

    An existing file is replaced. Raises UsageError if the folder is missing or `path` is not a regular file,
    EnvironmentFault if the disk is full or not writable. After an error, nothing is left behind and an old file stays.
    """
    with open_atomically(path) as file:
        file.write(data)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; it appears under its name only if the block ends without an error.

    The same guarantees and errors as `write_atomically`, for data that should not be in memory twice.
    """
    target = require_writable(path)
    # Not tempfile: it creates files that only their owner can read, whatever the umask.
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        descriptor = os.open(target.parent, os.O_RDONLY)  # the new name is in the folder, which needs its own fsync
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException as error:
        with suppress(OSError):  # an error here (read-only file system) would hide the original one
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in {None, os.fspath(temporary)}:
            raise from_os_error(OSError(error.errno, error.strerror, os.fspath(path))) from error
        raise


def require_writable(path: Path) -> Path:
    """Return the file that a path resolves to; UsageError if it is clear that it cannot be written.

    For checking the output before long work.
    """
    target = Path(os.path.realpath(path))  # follows links, as a plain open would; resolve() fails on a loop
    if not target.parent.is_dir():
        raise UsageError(f"{path}: the folder {target.parent} does not exist. Create it, or choose another path")
    if target.exists() and not target.is_file():  # a rename would replace a folder or a device such as /dev/null
        raise UsageError(f"{path}: not a regular file, so it cannot be replaced. Choose another path")
    return target


def require_new(path: Path, *, force: bool) -> None:
    """Raise UsageError if a verb's output file cannot be written, or already exists without `--force`."""
    if require_writable(path).exists() and not force:
        raise UsageError(f"{path}: already exists. Choose another name, or replace it with --force")


def create_folder(folder: Path, option: str) -> None:
    """Create a folder and its missing parents; UsageError if a file is in the way.

    option: the command-line option that names the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(
            f"{folder}: there is a file in the place of a folder. Move it away, or choose another folder with {option}"
        ) from error


def leftovers(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the temporary files that a killed process left for files with these names."""
    return [path for name in names for path in folder.glob(f".{name[:200]}.{'[0-9a-f]' * 8}.tmp")]


def remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """Remove those temporary files. Hold the folder's lock, since another process may be writing them."""
    for path in leftovers(folder, names):
        path.unlink(missing_ok=True)


@contextmanager
def locked_folder(folder: Path, option: str) -> Iterator[None]:
    """Lock a folder for this process; the system releases the lock when the process dies.

    option: the command-line option that names the folder. Raises RunFolderError if another process holds the lock,
    EnvironmentFault if the file system has no locks. The lock is on the folder itself, without a lock file.
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


def check_not_input(output: Path, inputs: Iterable[Path]) -> None:
    """Raise UsageError if the output is one of the inputs, under any name or link."""
    for path in inputs:
        try:
            same = output.samefile(path)
        except (OSError, ValueError):  # a missing file or an invalid path, which its reader will report
            continue
        if same:
            raise UsageError(f"{output}: is the input itself ({path}); choose another name")
