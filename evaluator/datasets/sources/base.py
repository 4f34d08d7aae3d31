"""The common interface of folders and archives: a tree of folders with images and a few other files."""

import codecs
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from ...errors import DatasetError
from ...terminal import escape_unprintable
from ..dataset import Reader

# Suffixes of files other than images: label lists, devkit files, labels in webdataset shards.
LABEL_SUFFIXES = (".txt", ".csv", ".mat", ".cls", ".json", ".jsonl")
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
TAR, PARQUET = ".tar", ".parquet"  # files of these contain images and their labels
_LONGEST_SUFFIX = 12  # characters
_LONGEST_NAME = 80  # characters of a name in a message


class Source(Protocol):
    """A tree of folders and images. `subfolder` is a relative path in it with '/'; '' is the top."""

    def folders(self, subfolder: str) -> list[str]:
        """Return the names of the visible folders directly in a folder, sorted."""
        ...

    def images(self, subfolder: str) -> Iterator[tuple[str, int]]:
        """Yield name (relative to `subfolder`, with '/') and size in bytes of all images in a folder, at any depth."""
        ...

    def skipped(self, subfolder: str) -> Counter[str]:
        """Count the visible files by suffix that `images` skipped there, without possible label files; '' for none."""
        ...

    def reader(self, subfolder: str) -> Reader:
        """Return a reader for the names that `images` yields."""
        ...

    def other_files(self, subfolder: str) -> dict[str, int]:
        """Return name → size in bytes of the shards and possible label files directly in a folder."""
        ...

    def read(self, name: str) -> bytes:
        """Return the bytes of one of these files, by its path from the top."""
        ...


@dataclass(frozen=True)
class LabelFile:
    """A possible label file. subfolder: its folder in the source; name: of the file in that folder."""

    source: Source
    subfolder: str
    name: str
    path: Path  # of the file itself, or its path if the archive were a folder

    def data(self) -> bytes:
        """Return the content. Raises DatasetError when it cannot be read."""
        return self.source.read(join(self.subfolder, self.name))

    @property
    def text(self) -> str:
        """Return the content as text. Raises DatasetError when it is not UTF-8."""
        try:
            data = self.data()
            return data.decode("utf-16" if data.startswith(UTF_16) else "utf-8-sig")  # programs of Windows write both
        except UnicodeDecodeError as error:
            raise DatasetError(
                f"{self.path}: not UTF-8 text, or UTF-16 with its mark. Pass a list of labels with --labels FILE"
            ) from error

    def beside(self, name: str) -> "LabelFile | None":
        """Return the file with this name in the same folder, or None."""
        if name not in self.source.other_files(self.subfolder):
            return None
        return LabelFile(self.source, self.subfolder, name, self.path.with_name(name))


def suffix_of(name: str) -> str:
    """Return a name's suffix in lower case, with its dot; '' if it has none, or a long one, which is no suffix."""
    suffix = PurePosixPath(name).suffix.lower()
    return suffix if len(suffix) <= _LONGEST_SUFFIX else ""


def join(subfolder: str, name: str) -> str:
    return f"{subfolder}/{name}" if subfolder else name


def describe_place(path: Path, subfolder: str) -> str:
    return f"{path}/{subfolder}" if subfolder else str(path)


def format_names(names: Sequence[str]) -> str:
    """Return the first five names as text, shortened and escaped, because names are untrusted."""
    short = (name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…" for name in names[:5])
    return ", ".join(map(escape_unprintable, short)) + (", …" if len(names) > 5 else "")
