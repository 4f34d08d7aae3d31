"""Unpack a compressed tar once into a plain tar next to it, because compressed data has no random access.

Reading images in a run's order would unpack the archive again for each of them. Decompressor states in memory would be
lost with the process, so every resumed run would rebuild them. Photographs hardly compress, so the plain tar takes
about as much disk space as the archive. It is kept: resumed runs and reports use it. The user may delete it when they
are done.

The copy's name contains the archive's sha256, so it is never used for another archive: also not for one that replaced
the archive, whatever its date.
"""

import bz2
import glob
import gzip
import hashlib
import lzma
import os
import tarfile
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
_STALE_SECONDS = 3600.0  # since the last write to a temporary file; a live process writes continuously


def compression_of(magic: bytes) -> str | None:
    """Return the compression method of a file with these first bytes, None if it is not compressed."""
    return next((method for prefix, method in _MAGICS.items() if magic.startswith(prefix)), None)


def unpacked_path(path: Path) -> Path:
    """Return the path of the unpacked copy, next to the archive."""
    return path.with_name(f"{path.name}.{_sha256(path)[:_DIGITS]}{UNPACKED_SUFFIX}")


def ensure_unpacked(path: Path, method: str) -> Path:
    """Return the unpacked copy of a compressed tar, unpacking it if needed.

    Raises DatasetError when the archive is damaged or does not contain a tar, EnvironmentFault when the disk is full or
    nothing may be written next to the archive.
    """
    if method not in _OPENERS:
        raise DatasetError(f"{path}: compressed with {method}, which is not supported. Unpack it to a plain .tar")
    if not os.access(path.parent, os.W_OK):
        raise EnvironmentFault(
            f"{path}: compressed, and {path.parent}, where a plain copy is needed, is not writable. Link the archive "
            "into a folder that is, or unpack it to a plain .tar"
        )
    target = unpacked_path(path)
    # Left by killed processes that were unpacking this archive or one of the same name.
    for leftover in leftovers(target.parent, [f"{glob.escape(path.name)}.{'?' * _DIGITS}{UNPACKED_SUFFIX}"]):
        with suppress(FileNotFoundError):  # another process removed it first
            if time.time() - leftover.lstat().st_mtime > _STALE_SECONDS:
                leftover.unlink()
    if not target.exists():
        _unpack(path, method, target)
    return target


def _unpack(path: Path, method: str, target: Path) -> None:
    with path.open("rb") as packed, _OPENERS[method](packed) as plain, open_atomically(target) as copy:
        total = -(-path.stat().st_size // _PIECE)
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
                piece = _read(plain, path)
                now = min(packed.tell() // _PIECE, total)
                advance(now - done)
                done = now
            advance(total - done)


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
