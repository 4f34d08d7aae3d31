"""A compressed tar is unpacked once into a plain tar beside it, since nothing can be read from its middle.

Reading it in the order of a run would unpack it again for every image; keeping states of the unpacking in memory would
be lost with the process, so that every resumed run paid for it again. Photographs hardly compress, so the plain tar
takes about as much disk as the archive. It stays there: resumed runs and reports use it, and it may be deleted when
they are done. It is made anew when the archive has another date.
"""

import bz2
import gzip
import lzma
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from evaluator.errors import DatasetError
from evaluator.files import open_atomically
from evaluator.progress import progress

_MAGICS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_OPENERS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}  # type: ignore[dict-item]
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)
_PIECE = 1024**2  # bytes


def compression_of(magic: bytes) -> str | None:
    """Return how a file with these first bytes is compressed as a whole; None when it is not."""
    return next((method for prefix, method in _MAGICS.items() if magic.startswith(prefix)), None)


def unpacked_path(path: Path) -> Path:
    """Return where a compressed tar is unpacked to: beside it, or where that is not allowed in the temporary folder."""
    folder = path.parent if os.access(path.parent, os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"{path.name}.unpacked.tar"


def unpacked(path: Path, method: str) -> Path:
    """Return the plain tar of a compressed one, unpacking it where that has not been done.

    Raises DatasetError when the archive is damaged or holds no tar, EnvironmentFault when the disk is full.
    """
    target, date = unpacked_path(path), path.stat().st_mtime_ns
    if target.is_file() and target.stat().st_mtime_ns == date:
        return target
    if method not in _OPENERS:
        raise DatasetError(
            f"{path}: compressed with {method}, which cannot be unpacked here. Unpack it to a plain .tar"
        )
    with path.open("rb") as packed, _OPENERS[method](packed) as plain, open_atomically(target) as copy:
        total = -(-path.stat().st_size // _PIECE)
        with progress(f"unpack {path.name}", total, "MiB") as advance:
            done, piece = 0, _read(plain, path)
            _check_tar(piece, path)
            while piece:
                copy.write(piece)
                piece = _read(plain, path)
                now = min(packed.tell() // _PIECE, total)
                advance(now - done)
                done = now
            advance(total - done)
    os.utime(target, ns=(date, date))
    return target


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
