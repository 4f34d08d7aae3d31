"""A compressed tar is unpacked once into a plain tar beside it, since nothing can be read from its middle.

Reading it in the order of a run would unpack it again for every image; keeping states of the unpacking in memory would
be lost with the process, so that every resumed run paid for it again. Photographs hardly compress, so the plain tar
takes about as much disk as the archive. It stays there: resumed runs and reports use it, and it may be deleted when
they are done.

Its name carries the archive's sha256, so that it is never taken for the images of another archive: not of one with the
same name elsewhere, nor of one that has come in its place, whatever its date.
"""

import bz2
import gzip
import hashlib
import lzma
import os
import stat
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from prelunet.evaluator.errors import DatasetError, EnvironmentFault
from prelunet.evaluator.files import leftovers, open_atomically
from prelunet.evaluator.terminal import progress

_MAGICS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_OPENERS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}  # type: ignore[dict-item]
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)
_PIECE = 1024**2  # bytes
_DIGITS = 12  # of the sha256: 48 bits, for the few archives of one name that a person has
_SUFFIX = ".unpacked.tar"
_LARGEST_RATIO = 20  # photographs have about 1, bitmaps of drawings perhaps 10
_ALWAYS_ALLOWED = 1024**3  # bytes; a small archive of headers and zeros may well be packed better
_STALE_SECONDS = 3600.0  # seconds since a temporary file was written to; a living process writes all the time


def compression_of(magic: bytes) -> str | None:
    """Return how a file with these first bytes is compressed as a whole; None when it is not."""
    return next((method for prefix, method in _MAGICS.items() if magic.startswith(prefix)), None)


def is_unpacked_copy(path: Path) -> bool:
    """Whether a file is named as a tar that was unpacked here."""
    return path.name.endswith(_SUFFIX)


def unpacked_path(path: Path) -> Path:
    """Return where a compressed tar is unpacked to: beside it, or in this user's temporary folder.

    The latter where nothing may be written beside it. Raises EnvironmentFault when another has made that folder.
    """
    folder = path.parent if os.access(path.parent, os.W_OK) else _private_folder()
    return folder / f"{path.name}.{_sha256(path)[:_DIGITS]}{_SUFFIX}"


def ensure_unpacked(path: Path, method: str) -> Path:
    """Return the plain tar of a compressed one, unpacking it where that has not been done.

    Raises DatasetError when the archive is damaged, holds no tar, is far larger unpacked than any photographs would
    be, or when something else has the copy's name; EnvironmentFault when the disk is full.
    """
    if method not in _OPENERS:
        raise DatasetError(
            f"{path}: compressed with {method}, which cannot be unpacked here. Unpack it to a plain .tar"
        )
    target = unpacked_path(path)
    _remove_stale(path, target.parent)
    if not os.path.lexists(target):
        _unpack(path, method, target)
    elif not stat.S_ISREG(target.lstat().st_mode):
        raise DatasetError(f"{target}: should be {path.name} unpacked, but is no plain file. Remove or rename it")
    return target


def _unpack(path: Path, method: str, target: Path) -> None:
    size = path.stat().st_size
    limit = _LARGEST_RATIO * size + _ALWAYS_ALLOWED
    with path.open("rb") as packed, _OPENERS[method](packed) as plain, open_atomically(target) as copy:
        total = -(-size // _PIECE)
        with progress(f"unpack {path.name}", total, "MiB") as advance:
            done, piece = 0, _read(plain, path)
            _check_tar(piece, path)
            while piece:
                copy.write(piece)
                if copy.tell() > limit:
                    raise DatasetError(
                        f"{path}: {size:,} bytes that unpack to more than {limit:,}, which no photographs would do. If "
                        "it is what you expect, unpack it by hand and give the folder or the plain .tar"
                    )
                piece = _read(plain, path)
                now = min(packed.tell() // _PIECE, total)
                advance(now - done)
                done = now
            advance(total - done)


def _private_folder() -> Path:
    """Return a folder that only this user may write, below the temporary folder, which all may write."""
    folder = Path(tempfile.gettempdir()) / f"prelunet-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError as error:
        found = folder.lstat()  # not what a link leads to: anybody may have put it there
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise EnvironmentFault(
                f"{folder}: should be a folder that only this user may write. Remove it, set TMPDIR to another "
                "folder, or unpack the archive by hand"
            ) from error
    return folder


def _remove_stale(path: Path, folder: Path) -> None:
    """Remove what killed unpackings of this archive, or of another that had its name, have left."""
    for rest in leftovers(folder, [f"{path.name}.{'?' * _DIGITS}{_SUFFIX}"]):
        with suppress(FileNotFoundError):  # another process removed it first
            if time.time() - rest.lstat().st_mtime > _STALE_SECONDS:
                rest.unlink()


def _sha256(path: Path) -> str:
    """Return the sha256 of a large file, showing progress."""
    digest, total = hashlib.sha256(), -(-path.stat().st_size // _PIECE)
    with path.open("rb") as file, progress(f"check {path.name}", total, "MiB") as advance:
        while piece := file.read(_PIECE):
            digest.update(piece)
            advance()
    return digest.hexdigest()


def _read(plain: IO[bytes], path: Path) -> bytes:
    try:
        return plain.read(_PIECE)
    except _DAMAGED as error:
        raise DatasetError(f"{path}: damaged or cut ({error}). Get the archive again from its source") from error


def _check_tar(beginning: bytes, path: Path) -> None:
    """Refuse anything but a tar before it fills the disk."""
    try:
        tarfile.TarInfo.frombuf(beginning[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise DatasetError(
            f"{path}: compressed, but no tar. Give a folder, or a .tar, .tar.gz or .zip of one"
        ) from error
