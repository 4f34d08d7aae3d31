"""A .tar or .zip as a source of samples, read in place.

Opening an archive reads its list of members once. Each later read opens the file, reads at an offset and closes it. No
handle is shared, so readers can be used from threads, forked and pickled. Names that leave the archive ('..',
absolute) and duplicate names are refused. So are entries with an image's name that are not regular files (links,
devices, sparse files), because skipping them would silently change the dataset.
"""

import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ...errors import DatasetError, PreluNetError
from .archive_index import ArchiveIndex, ArchiveMember
from .base import LABEL_SUFFIXES, suffix_of
from .decompress import UNPACKED_SUFFIX, compression_of, ensure_unpacked
from .folder import is_image_name, is_visible, reading_error

_ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")  # the second is of a zip without members
_ZIP_LOCAL_HEADER = struct.Struct("<26xHH")  # name and extra field lengths; APPNOTE.TXT, section 4.3.7
_ENCRYPTED = 0x1  # general purpose bit 0; APPNOTE.TXT, section 4.4.4
_END_BLOCK = bytes(tarfile.BLOCKSIZE)


@dataclass
class ArchiveSource:
    """The tree in an archive. tree: folder → names of the folders directly in it; '' is the top."""

    path: Path
    tree: dict[str, set[str]] = field(default_factory=dict)
    members: ArchiveIndex = field(default_factory=ArchiveIndex)  # the images
    labels: ArchiveIndex = field(default_factory=ArchiveIndex)  # possible label files
    others: Counter[str] = field(default_factory=Counter)  # all further files, by suffix
    _tables: dict[str, ArchiveIndex] = field(default_factory=dict, repr=False)

    def folders(self, subfolder: str) -> list[str]:
        """Return the names of the visible folders directly in a folder, sorted."""
        return sorted(self.tree.get(subfolder, ()))

    def images(self, subfolder: str) -> Iterator[tuple[str, int]]:
        """Yield name (relative to `subfolder`, with '/') and size in bytes of all images in a folder, at any depth."""
        table = self._subtree(subfolder)
        yield from zip(table.names, table.sizes, strict=True)

    def skipped(self, _subfolder: str) -> Counter[str]:
        """Count the visible files by suffix that are not images, anywhere in the archive; '' for none."""
        return self.others

    def reader(self, subfolder: str) -> "ArchiveReader":
        """Return a reader for the names that `images` yields; it shares the names."""
        return ArchiveReader((self.path,), self._subtree(subfolder))

    def other_files(self, subfolder: str) -> dict[str, int]:
        """Return name → size in bytes of the possible label files directly in a folder."""
        table = self.labels.subtree(subfolder)
        return {name: size for name, size in zip(table.names, table.sizes, strict=True) if "/" not in name}

    def read(self, name: str) -> bytes:
        """Return the bytes of one of these files, by its path from the top."""
        return ArchiveReader((self.path,), self.labels).read(name)

    def _subtree(self, subfolder: str) -> ArchiveIndex:
        if subfolder not in self._tables:
            self._tables = {subfolder: self.members.subtree(subfolder)}  # only the last one is kept, to limit memory
        return self._tables[subfolder]

    def add_folder(self, parts: tuple[str, ...]) -> None:
        for depth in range(len(parts)):
            self.tree.setdefault("/".join(parts[:depth]), set()).add(parts[depth])

    def add_image(self, parts: tuple[str, ...], member: ArchiveMember) -> None:
        self.members.add("/".join(parts), member)
        self.add_folder(parts[:-1])


@dataclass(frozen=True)
class ArchiveReader:
    """Reads images from archives by offset. paths: of the volumes."""

    paths: tuple[Path, ...]
    members: ArchiveIndex

    def read(self, file: str) -> bytes:
        """Return the bytes of an image. Raises DatasetError when the archive is missing or damaged there."""
        member = self.members.find(file)
        if member is None:
            raise DatasetError(f"{self.paths[0]}: no member named {file}")
        path = self.paths[member.volume]
        try:
            with path.open("rb", buffering=0) as archive:
                data = _read_member(archive.fileno(), member)
        except OSError as error:
            raise reading_error(error, path) from error
        if data is None:
            raise DatasetError(f"{path}: the member {file} is damaged. Get a fresh copy of the archive")
        return data


def _read_member(archive: int, member: ArchiveMember) -> bytes | None:
    """Read one member. Return None when its bytes do not match the archive's list of members."""
    start = member.start
    if member.zipped:
        header = os.pread(archive, _ZIP_LOCAL_HEADER.size, start)
        if len(header) != _ZIP_LOCAL_HEADER.size or header[:4] != _ZIP_MAGICS[0]:
            return None
        start += len(header) + sum(_ZIP_LOCAL_HEADER.unpack(header))
    data = os.pread(archive, member.stored_size, start)
    if member.deflated:
        try:  # one extra byte reveals a wrong size; a decompression bomb is unpacked no further
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.size + 1)
        except zlib.error:
            return None
    if len(data) != member.size or (member.zipped and zlib.crc32(data) != member.crc):
        return None
    return data


def open_archive(path: Path) -> ArchiveSource:
    """Read the list of members of a .tar or .zip, detected by its first bytes. A compressed tar is unpacked first.

    The source's path is that of the archive that is read: for a compressed tar, that of the unpacked copy.
    Raises DatasetError when the file is not an archive, is damaged or truncated, or contains a refused entry.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(6)
            if method := compression_of(magic):
                return open_archive(ensure_unpacked(path, method))
            file.seek(0)
            source = _list_zip(path, file) if magic[:4] in _ZIP_MAGICS else _list_tar(path, file)
        if twice := source.members.sort() or source.labels.sort():  # sorted members are required by lookups
            raise DatasetError(f"{path}: two members are named {twice}. Repack the folder")
        return source
    except PreluNetError:
        raise
    except OSError as error:
        raise reading_error(error, path) from error
    except Exception as error:  # for damaged files the archive modules raise many other exceptions
        raise DatasetError(
            f"{path}: not a .tar or .zip, or a damaged one ({str(error) or type(error).__name__}). "
            "Get a fresh copy, or pass a folder or an archive of images"
        ) from error


def _list_tar(path: Path, file: BinaryIO) -> ArchiveSource:
    source, size = ArchiveSource(path), os.fstat(file.fileno()).st_size
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for header in _tar_headers(path, archive, size):
            parts = _visible_parts(path, header.name)
            if not parts:
                continue
            if header.isreg() and not header.issparse():
                member = ArchiveMember(header.offset_data, header.size, header.size)
                if is_image_name(parts[-1]):
                    source.add_image(parts, member)
                elif parts[-1].endswith(LABEL_SUFFIXES):
                    source.labels.add("/".join(parts), member)
                else:
                    source.others[suffix_of(parts[-1])] += 1
            elif header.isdir():
                source.add_folder(parts)
            elif is_image_name(parts[-1]):
                raise _not_regular_file(path, header.name, "tar --dereference --hard-dereference -cf")
        # tarfile treats a damaged or truncated header as the end; a block of zeros marks the real end.
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != _END_BLOCK:
            raise _damaged(path, min(archive.offset, size))
    return source


def _tar_headers(path: Path, archive: tarfile.TarFile, size: int) -> Iterator[tarfile.TarInfo]:
    """Yield the headers, which are not kept: they take about 1 KB per member."""
    end = 0
    while True:
        try:
            header = archive.next()
        except tarfile.ReadError as error:  # the file ends inside a member
            raise _damaged(path, min(archive.offset, size)) from error
        if header is None:
            return
        if archive.offset <= end:  # a negative size, on which many versions of tarfile loop (CVE-2025-8194)
            raise _damaged(path, end)
        end = archive.offset
        archive.members.clear()  # type: ignore[attr-defined]
        yield header


def _list_zip(path: Path, file: BinaryIO) -> ArchiveSource:
    source = ArchiveSource(path)
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            parts = _visible_parts(path, info.filename)
            if not parts:
                continue
            if info.is_dir():
                source.add_folder(parts)
            elif is_image_name(parts[-1]):
                source.add_image(parts, _zip_member(path, info))
            elif parts[-1].endswith(LABEL_SUFFIXES) and _is_plain(info) and _is_readable(info):
                source.labels.add("/".join(parts), _zip_member(path, info))
            else:
                source.others[suffix_of(parts[-1])] += 1
    return source


def _zip_member(path: Path, info: zipfile.ZipInfo) -> ArchiveMember:
    """Return the location of a file in a zip. Raises DatasetError if it is not readable in place."""
    if not _is_plain(info):
        raise _not_regular_file(path, info.filename, "zip -r (without --symlinks)")
    if not _is_readable(info):
        raise DatasetError(
            f"{path}: {info.filename} is encrypted, or compressed with a method other than deflate. "
            "Repack the folder with: zip -r"
        )
    if info.header_offset < 0:
        raise _damaged(path, 0)
    deflated = int(info.compress_type == zipfile.ZIP_DEFLATED)
    return ArchiveMember(info.header_offset, info.compress_size, info.file_size, 1, deflated, info.CRC)


def _is_plain(info: zipfile.ZipInfo) -> bool:
    return stat.S_IFMT(info.external_attr >> 16) in {0, stat.S_IFREG}


def _is_readable(info: zipfile.ZipInfo) -> bool:
    return not info.flag_bits & _ENCRYPTED and info.compress_type in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}


def _visible_parts(path: Path, name: str) -> tuple[str, ...]:
    """Split a member's name; () if it is not visible. Raises DatasetError when it points outside the archive."""
    parts = tuple(part for part in name.split("/") if part not in {"", "."})
    if name.startswith("/") or ".." in parts:
        raise DatasetError(f"{path}: the member {name!r} points outside the archive. Repack with relative names")
    return parts if all(map(is_visible, parts)) else ()


def _not_regular_file(path: Path, name: str, command: str) -> DatasetError:
    return DatasetError(
        f"{path}: {name} has an image's name but is not a regular file. Repack the folder with: {command}"
    )


def _damaged(path: Path, position: int) -> DatasetError:
    fix = "Delete this copy to unpack it again, or get" if path.name.endswith(UNPACKED_SUFFIX) else "Get"
    return DatasetError(f"{path}: damaged or truncated at byte {position}. {fix} a fresh copy of the archive")
