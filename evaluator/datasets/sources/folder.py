"""A folder on disk as a source of samples."""

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prelunet.evaluator.datasets.sources.base import LABEL_SUFFIXES, LabelFile, too_large
from prelunet.evaluator.errors import DatasetError, PreluNetError, from_os_error
from prelunet.evaluator.imaging.decode import SUFFIXES


def is_image_name(name: str) -> bool:
    """Whether a file of this name counts as an image, by its suffix in any case."""
    return name.lower().endswith(SUFFIXES)


def is_visible(name: str) -> bool:
    """Whether a file or folder of this name counts at all: not hidden, not the rubbish of a Mac's archiver."""
    return not name.startswith(".") and name != "__MACOSX"


def reading_error(error: OSError, path: Path | str) -> PreluNetError:
    """Turn a failure to read part of a dataset into one of our errors, naming the file or folder."""
    fixes = {
        errno.ENOENT: "it is gone; restore it, or start anew without it",
        errno.EACCES: "permission denied; let this user read it",
        errno.EPERM: "not permitted; let this user read it",
        errno.ELOOP: "a link that leads to itself; remove it",
    }
    if error.errno in fixes:
        return DatasetError(f"{path}: {fixes[error.errno]}")
    return from_os_error(error)


@dataclass(frozen=True)
class FolderSource:
    """The tree below a folder. Links to files, and the class folders themselves as links, are followed."""

    root: Path

    def folders(self, subfolder: str) -> list[str]:
        """Return the names of the visible folders directly inside, sorted."""
        folder = self.root / subfolder
        try:
            with os.scandir(folder) as entries:
                return sorted(entry.name for entry in entries if is_visible(entry.name) and entry.is_dir())
        except OSError as error:
            raise reading_error(error, error.filename or folder) from error

    def images(self, subfolder: str) -> Iterator[tuple[str, int]]:
        """Yield name (relative to `subfolder`, with '/') and byte length of all images at any depth inside.

        Links to folders are followed at the first level only, where they are classes: deeper ones could be loops.
        """
        yield from _images(self.root / subfolder, "", follow=True)

    def reader(self, subfolder: str) -> "FolderReader":
        """Return a reader of the names that `images` yields."""
        return FolderReader(self.root / subfolder)

    def other_files(self, subfolder: str) -> dict[str, int]:
        """Return name and byte length of the files directly inside that may hold labels, or are tars."""
        folder = self.root / subfolder
        try:
            with os.scandir(folder) as entries:
                return {
                    entry.name: entry.stat().st_size
                    for entry in entries
                    if entry.name.endswith((*LABEL_SUFFIXES, ".tar")) and is_visible(entry.name) and entry.is_file()
                }
        except OSError as error:
            raise reading_error(error, error.filename or folder) from error

    def read(self, name: str, limit: int) -> bytes:
        """Return the bytes of one of those, by its name from the top; DatasetError when it has more than `limit`."""
        path = self.root / name
        try:
            with path.open("rb") as file:
                data = file.read(limit + 1)
        except OSError as error:
            raise reading_error(error, path) from error
        if len(data) > limit:
            raise too_large(str(path), limit)
        return data


def _images(folder: Path, prefix: str, *, follow: bool) -> Iterator[tuple[str, int]]:
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if is_visible(entry.name)]
        for entry in found:
            if entry.is_dir(follow_symlinks=follow):
                yield from _images(folder / entry.name, f"{prefix}{entry.name}/", follow=False)
            elif is_image_name(entry.name):
                status = entry.stat()
                if not stat.S_ISREG(status.st_mode):
                    raise DatasetError(f"{entry.path}: named as an image, but no plain file. Remove or rename it")
                yield prefix + entry.name, status.st_size
    except OSError as error:
        raise reading_error(error, error.filename or folder) from error


@dataclass(frozen=True)
class FolderReader:
    """Reads files below a folder."""

    root: Path

    def read(self, file: str) -> bytes:
        """Return the bytes of the file of that name; DatasetError when it is gone or cannot be read."""
        path = self.root / file
        try:
            return path.read_bytes()
        except OSError as error:
            raise reading_error(error, path) from error


def label_file(path: Path) -> LabelFile:
    """Return a file on disk that may give labels."""
    return LabelFile(FolderSource(path.parent), "", path.name, path)
