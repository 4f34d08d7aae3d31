"""A .tar or .zip as a source of samples, read in place: nothing is ever extracted.

Opening reads the list of members once. Afterwards each read opens the file, reads by offset and closes it: no handle
is shared, so readers may be used from threads, forked and pickled. Refused are names that leave the archive ('..',
absolute), two images of one name, and whatever has an image's name but is no plain file (links, devices, sparse
files), because leaving it out would silently make the dataset another one.
"""

import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from evaluator.datasets.folders import is_image_name, is_visible, reading_error
from evaluator.errors import DatasetError, PreluNetError

_ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")  # the second begins a zip without members
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_ZIP_LOCAL_HEADER = struct.Struct("<26xHH")  # name and extra field lengths; APPNOTE.TXT, section 4.3.7
_ENCRYPTED = 0x1  # general purpose bit 0; APPNOTE.TXT, section 4.4.4
_MAX_DEFLATE_RATIO = 1032  # 258 bytes from two bits; zlib's technical notes
_END_BLOCK = bytes(tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class Member:
    """Where an image lies in its archive, in bytes.

    start: of its data in a tar, of its local header in a zip; stored: length of the data there; size: of the image.
    """

    start: int
    stored: int
    size: int
    zipped: bool = False  # behind a local header of its own
    deflated: bool = False
    crc: int = 0  # of the image, in a zip


@dataclass
class ArchiveSource:
    """The tree in an archive: folder → names of the folders directly inside ('' is the top), and image → member."""

    path: Path
    tree: dict[str, set[str]] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)

    def folders(self, inside: str) -> list[str]:
        """Return the names of the visible folders directly inside, sorted."""
        return sorted(self.tree.get(inside, ()))

    def images(self, inside: str) -> Iterator[tuple[str, int]]:
        """Yield name (relative to `inside`, with '/') and byte length of all images at any depth inside."""
        for name, member in self._below(inside):
            yield name, member.size

    def reader(self, inside: str) -> "ArchiveReader":
        """Return a reader of the names that `images` yields."""
        return ArchiveReader(self.path, dict(self._below(inside)))

    def _below(self, inside: str) -> Iterator[tuple[str, Member]]:
        prefix = f"{inside}/" if inside else ""
        for name, member in self.members.items():
            if name.startswith(prefix):
                yield name[len(prefix) :], member

    def add_folder(self, parts: tuple[str, ...]) -> None:
        """Enter a folder and all above it."""
        for depth in range(len(parts)):
            self.tree.setdefault("/".join(parts[:depth]), set()).add(parts[depth])

    def add_image(self, parts: tuple[str, ...], member: Member) -> None:
        """Enter an image and the folders above it."""
        name = "/".join(parts)
        if name in self.members:
            raise DatasetError(f"{self.path}: two members are named {name}. Pack the folder anew")
        self.members[name] = member
        self.add_folder(parts[:-1])


@dataclass(frozen=True)
class ArchiveReader:
    """Reads images out of an archive by offset."""

    path: Path
    members: Mapping[str, Member]

    def read(self, file: str) -> bytes:
        """Return the bytes of the image of that name; DatasetError when the archive is gone or damaged there."""
        member = self.members.get(file)
        if member is None:
            raise DatasetError(f"{self.path}: no member named {file}")
        try:
            with self.path.open("rb", buffering=0) as archive:
                data = _read_member(archive.fileno(), member)
        except OSError as error:
            raise reading_error(error, self.path) from error
        if data is None:
            raise DatasetError(f"{self.path}: the member {file} is damaged. Get the archive again from its source")
        return data


def _read_member(archive: int, member: Member) -> bytes | None:
    """Read one member; None when the bytes there are not the ones that the archive's list promised."""
    start = member.start
    if member.zipped:
        header = os.pread(archive, _ZIP_LOCAL_HEADER.size, start)
        if len(header) != _ZIP_LOCAL_HEADER.size or header[:4] != _ZIP_MAGICS[0]:
            return None
        start += len(header) + sum(_ZIP_LOCAL_HEADER.unpack(header))
    data = os.pread(archive, member.stored, start)
    if member.deflated:
        try:  # one byte more than promised is enough to see a lie; a bomb is not unpacked any further
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.size + 1)
        except zlib.error:
            return None
    if len(data) != member.size or (member.zipped and zlib.crc32(data) != member.crc):
        return None
    return data


def open_archive(path: Path) -> ArchiveSource:
    """Read the list of members of a .tar or .zip, told apart by their first bytes.

    Raises DatasetError when the file is neither, is compressed as a whole, damaged, cut, or holds what is refused.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(6)
            for prefix, method in _COMPRESSED.items():
                if magic.startswith(prefix):
                    raise DatasetError(
                        f"{path}: compressed with {method}, so images cannot be read in place. "
                        "Unpack it to a plain .tar, which is hardly larger"
                    )
            file.seek(0)
            return _list_zip(path, file) if magic[:4] in _ZIP_MAGICS else _list_tar(path, file)
    except PreluNetError:
        raise
    except OSError as error:
        raise reading_error(error, path) from error
    except Exception as error:  # on damaged bytes the archive modules raise far more than their own classes
        raise DatasetError(
            f"{path}: not a .tar or .zip, or a damaged one ({str(error) or type(error).__name__}). "
            "Give a folder of class folders, or an archive of one"
        ) from error


def _list_tar(path: Path, file: BinaryIO) -> ArchiveSource:
    source = ArchiveSource(path)
    with tarfile.open(fileobj=file, mode="r:") as archive:
        end = 0
        while (member := archive.next()) is not None:
            if archive.offset <= end:  # a negative size: read in circles by many a tarfile (CVE-2025-8194)
                raise _damaged(path, end)
            end = archive.offset
            archive.members.clear()  # type: ignore[attr-defined]  # or it would keep about 1 KB for each of them
            parts = _parts(path, member.name)
            if member.isdir():
                _add_visible_folder(source, parts)
            elif _is_image(parts):
                if not member.isreg() or member.issparse():
                    raise _no_plain_file(path, member.name, "tar --dereference --hard-dereference -cf")
                source.add_image(parts, Member(member.offset_data, member.size, member.size))
        # tarfile takes a damaged or cut header for the end; the true end is marked by a block of zeros.
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != _END_BLOCK:
            raise _damaged(path, archive.offset)
    return source


def _list_zip(path: Path, file: BinaryIO) -> ArchiveSource:
    source = ArchiveSource(path)
    archive_size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            parts = _parts(path, info.filename)
            if info.is_dir():
                _add_visible_folder(source, parts)
            elif _is_image(parts):
                source.add_image(parts, _zip_member(path, info, archive_size))
    return source


def _zip_member(path: Path, info: zipfile.ZipInfo, archive_size: int) -> Member:
    """Return where a zip's image lies; DatasetError when it cannot be read in place or its numbers cannot be true."""
    if stat.S_IFMT(info.external_attr >> 16) not in {0, stat.S_IFREG}:
        raise _no_plain_file(path, info.filename, "zip -r (without --symlinks)")
    if info.flag_bits & _ENCRYPTED or info.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise DatasetError(
            f"{path}: {info.filename} is encrypted, or packed by another method than deflate. "
            "Pack the folder anew with: zip -r"
        )
    deflated = info.compress_type == zipfile.ZIP_DEFLATED
    largest = info.compress_size * (_MAX_DEFLATE_RATIO if deflated else 1)
    if info.header_offset < 0 or info.compress_size > archive_size or info.file_size > largest:
        raise _damaged(path, max(info.header_offset, 0))
    return Member(info.header_offset, info.compress_size, info.file_size, True, deflated, info.CRC)


def _parts(path: Path, name: str) -> tuple[str, ...]:
    """Split a member's name; DatasetError when it leads out of the archive."""
    parts = tuple(part for part in name.split("/") if part not in {"", "."})
    if name.startswith("/") or ".." in parts:
        raise DatasetError(f"{path}: the member {name!r} leads out of the archive. Pack the folder with relative names")
    return parts


def _is_image(parts: tuple[str, ...]) -> bool:
    return bool(parts) and is_image_name(parts[-1]) and all(map(is_visible, parts))


def _add_visible_folder(source: ArchiveSource, parts: tuple[str, ...]) -> None:
    if all(map(is_visible, parts)):
        source.add_folder(parts)


def _no_plain_file(path: Path, name: str, command: str) -> DatasetError:
    return DatasetError(
        f"{path}: {name} has an image's name but is no plain file. Pack the folder anew with: {command}"
    )


def _damaged(path: Path, position: int) -> DatasetError:
    return DatasetError(f"{path}: damaged or cut at byte {position}. Get the archive again from its source")
