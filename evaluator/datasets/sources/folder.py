"""A folder on disk as a source of samples."""

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import DatasetError, PreluNetError, from_os_error
from ...files import open_regular
from ...imaging.decode import BEGINNING, SUFFIXES, begins_like_an_image
from .base import LABEL_SUFFIXES, PARQUET, TAR, LabelFile, format_names, suffix_of

# Of macOS's archiver, of Synology (thumbnails), of ext4 and of Windows.
_OF_SYSTEMS = {"__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "System Volume Information"}


def is_image_name(name: str) -> bool:
    """Return whether a file name has an image suffix, in any case."""
    return name.lower().endswith(SUFFIXES)


def is_visible(name: str) -> bool:
    """Return whether a file or folder is considered: it is neither hidden nor one that a system keeps for itself."""
    return not name.startswith(".") and name not in _OF_SYSTEMS


def reading_error(error: OSError, path: Path | str) -> PreluNetError:
    """Convert a failure to read part of a dataset into a PreluNetError that names the file or folder."""
    fixes = {
        errno.ENOENT: "no longer exists; restore it, or start again without it",
        errno.EACCES: "permission denied; make it readable for this user",
        errno.EPERM: "not permitted; make it readable for this user",
        errno.ELOOP: "a link that points to itself; remove it",
    }
    if error.errno in fixes:
        return DatasetError(f"{path}: {fixes[error.errno]}")
    return from_os_error(error)


@dataclass(frozen=True)
class FolderSource:
    """The tree below a folder. Follows links to files and folders."""

    root: Path

    def folders(self, subfolder: str) -> list[str]:
        """Return the names of the visible folders directly in a folder, sorted."""
        folder = self.root / subfolder
        try:
            with os.scandir(folder) as entries:
                return sorted(entry.name for entry in entries if is_visible(entry.name) and entry.is_dir())
        except OSError as error:
            raise reading_error(error, error.filename or folder) from error

    def images(self, subfolder: str) -> Iterator[tuple[str, int]]:
        """Yield name (relative to `subfolder`, with '/') and size in bytes of all images in a folder, at any depth.

        Links to folders are followed, unless they lead to a folder that they lie in. A file without a suffix is one if
        it begins like one.
        """
        folder, dangling = self.root / subfolder, list[str]()
        for name, entry in self._files(subfolder):
            try:
                if not (is_image_name(name) or (not suffix_of(name) and _begins_like_an_image(entry))):
                    continue
                status = entry.stat()
            except FileNotFoundError as error:
                if not entry.is_symlink():
                    raise reading_error(error, entry.path) from error
                dangling.append(name)
                continue
            except OSError as error:
                raise reading_error(error, entry.path) from error
            if not stat.S_ISREG(status.st_mode):
                raise DatasetError(f"{entry.path}: named like an image, but not a regular file. Remove it")
            yield name, status.st_size
        if dangling:
            raise DatasetError(
                f"{folder}: links to images that do not exist: {len(dangling):,}, {format_names(sorted(dangling))}. "
                "The copy may lack what they point to: fetch it (as with git annex and DVC), copy again with rsync -L, "
                "or remove the links"
            )

    def skipped(self, subfolder: str) -> Counter[str]:
        """Count the visible files by suffix that `images` skipped there, without possible label files; '' for none."""
        others = ((suffix_of(name), entry) for name, entry in self._files(subfolder) if not is_image_name(name))
        return Counter(
            suffix
            for suffix, entry in others
            if suffix not in {*LABEL_SUFFIXES, TAR, PARQUET} and (suffix or not _begins_like_an_image(entry))
        )

    def _files(self, subfolder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield name (relative to `subfolder`) and entry of all visible files in a folder, at any depth."""
        folder = self.root / subfolder
        try:
            around = frozenset(map(_identity, self.root.resolve().parents))
            yield from _files(folder, "", around | ({_identity(self.root)} if subfolder else set()))
        except OSError as error:
            raise reading_error(error, error.filename or folder) from error

    def reader(self, subfolder: str) -> "FolderSource":
        """Return a reader for the names that `images` yields."""
        return FolderSource(self.root / subfolder)

    def other_files(self, subfolder: str) -> dict[str, int]:
        """Return name → size in bytes of the shards and possible label files directly in a folder."""
        folder = self.root / subfolder
        try:
            with os.scandir(folder) as entries:
                return {
                    entry.name: entry.stat().st_size
                    for entry in entries
                    if entry.name.endswith((*LABEL_SUFFIXES, TAR, PARQUET))
                    and is_visible(entry.name)
                    and entry.is_file()
                }
        except OSError as error:
            raise reading_error(error, error.filename or folder) from error

    def read(self, name: str) -> bytes:
        """Return the bytes of a file, by its path from the top. Raises DatasetError when it cannot be read."""
        path = self.root / name
        try:
            with open_regular(path) as file:
                return file.read()
        except OSError as error:
            raise reading_error(error, path) from error


def _files(folder: Path, prefix: str, around: frozenset[tuple[int, int]]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files of a folder. around: the folders that it lies in, through which a link would never end."""
    if (identity := _identity(folder)) in around:
        return
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if is_visible(entry.name)]
    for entry in found:
        if entry.is_dir():
            yield from _files(folder / entry.name, f"{prefix}{entry.name}/", around | {identity})
        else:
            yield prefix + entry.name, entry


def _begins_like_an_image(entry: os.DirEntry[str]) -> bool:
    if not entry.is_file():
        return False
    with open_regular(Path(entry.path)) as file:
        return begins_like_an_image(file.read(BEGINNING))


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def label_file(path: Path) -> LabelFile:
    return LabelFile(FolderSource(path.parent), "", path.name, path)
