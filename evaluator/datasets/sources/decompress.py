"""Unpack a compressed tar once into a plain tar next to it, because compressed data has no random access.

Reading images in a run's order would unpack the archive again for each of them. Decompressor states in memory would be
lost with the process, so every resumed run would rebuild them. Photographs hardly compress, so the plain tar takes
about as much disk space as the archive. It is kept: resumed runs and reports use it. The user may delete it when they
are done.

The copy's name contains the archive's sha256, so it is never used for another archive: neither for one with the same
name elsewhere, nor for one that replaced the archive, whatever its date.
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

from ...errors import DatasetError, EnvironmentFault
from ...files import leftovers, open_atomically
from ...terminal import progress

_MAGICS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_OPENERS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}  # type: ignore[dict-item]
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)
_PIECE = 1024**2  # bytes
_DIGITS = 12  # of the sha256: 48 bits are enough for the few archives that share a name
UNPACKED_SUFFIX = ".unpacked.tar"
_LARGEST_RATIO = 20  # photographs reach about 1, bitmaps of drawings perhaps 10
ALWAYS_ALLOWED = 1024**3  # bytes; small archives, mostly headers and zeros, may compress better
_STALE_SECONDS = 3600.0  # since the last write to a temporary file; a live process writes continuously


def compression_of(magic: bytes) -> str | None:
    """Return the compression method of a file with these first bytes, None if it is not compressed."""
    return next((method for prefix, method in _MAGICS.items() if magic.startswith(prefix)), None)


def unpacked_path(path: Path) -> Path:
    """Return the path of the unpacked copy: next to the archive if that folder is writable, else a temporary folder.

    Raises EnvironmentFault when another user owns the temporary folder or can write to it.
    """
    folder = path.parent if os.access(path.parent, os.W_OK) else _private_folder()
    return folder / f"{path.name}.{_sha256(path)[:_DIGITS]}{UNPACKED_SUFFIX}"


def ensure_unpacked(path: Path, method: str) -> Path:
    """Return the unpacked copy of a compressed tar, unpacking it if needed.

    Raises DatasetError when the archive is damaged, does not contain a tar, unpacks to far more than photographs would,
    or when something else has the copy's name. Raises EnvironmentFault when the disk is full.
    """
    if method not in _OPENERS:
        raise DatasetError(f"{path}: compressed with {method}, which is not supported. Unpack it to a plain .tar")
    target = unpacked_path(path)
    # Left by killed processes that were unpacking this archive or one of the same name.
    for leftover in leftovers(target.parent, [f"{path.name}.{'?' * _DIGITS}{UNPACKED_SUFFIX}"]):
        with suppress(FileNotFoundError):  # another process removed it first
            if time.time() - leftover.lstat().st_mtime > _STALE_SECONDS:
                leftover.unlink()
    if not os.path.lexists(target):
        _unpack(path, method, target)
    elif not stat.S_ISREG(target.lstat().st_mode):
        raise DatasetError(
            f"{target}: should be the unpacked {path.name}, but is not a regular file. Remove or rename it"
        )
    return target


def _unpack(path: Path, method: str, target: Path) -> None:
    size = path.stat().st_size
    limit = _LARGEST_RATIO * size + ALWAYS_ALLOWED
    with path.open("rb") as packed, _OPENERS[method](packed) as plain, open_atomically(target) as copy:
        total = -(-size // _PIECE)
        with progress(f"unpack {path.name}", total, "MiB") as advance:
            done, piece = 0, _read(plain, path)
            try:  # refuse anything but a tar before it fills the disk
                tarfile.TarInfo.frombuf(piece[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
            except tarfile.HeaderError as error:
                raise DatasetError(
                    f"{path}: compressed, but not a tar. Pass a folder, or a .tar, .tar.gz or .zip of one"
                ) from error
            while piece:
                copy.write(piece)
                if copy.tell() > limit:
                    raise DatasetError(
                        f"{path}: {size:,} bytes that unpack to more than {limit:,}, which photographs never do. If "
                        "this is expected, unpack the archive manually and pass the folder or the plain .tar"
                    )
                piece = _read(plain, path)
                now = min(packed.tell() // _PIECE, total)
                advance(now - done)
                done = now
            advance(total - done)


def _private_folder() -> Path:
    """Return a folder that only this user may write to, inside the shared temporary folder."""
    folder = Path(tempfile.gettempdir()) / f"prelunet-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError as error:
        status = folder.lstat()  # not stat: another user may have placed a link there
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise EnvironmentFault(
                f"{folder}: should be a folder that only this user may write to. Remove it, set TMPDIR to another "
                "folder, or unpack the archive manually"
            ) from error
    return folder


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
        raise DatasetError(f"{path}: damaged or truncated ({error}). Get a fresh copy of the archive") from error
