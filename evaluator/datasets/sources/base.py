"""What a folder and an archive have in common: a tree of folders with images and a few other files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prelunet.evaluator.datasets.dataset import Reader
from prelunet.evaluator.errors import DatasetError
from prelunet.evaluator.terminal import escape_unprintable

# Of files that are no images: lists of labels, a devkit's files, the labels in webdataset shards.
LABEL_SUFFIXES = (".txt", ".csv", ".mat", ".cls", ".json")
MAX_LIST_BYTES = 256 * 1024**2  # bytes; the list of ImageNet's 1.3 million training images has 60 MB
_LONGEST_NAME = 80  # characters of each name in a message


class Source(Protocol):
    """A tree of folders and images; `subfolder` is a folder's name in it with '/', '' for the top."""

    def folders(self, subfolder: str) -> list[str]:
        """Return the names of the visible folders directly inside, sorted."""
        ...

    def images(self, subfolder: str) -> Iterator[tuple[str, int]]:
        """Yield name (relative to `subfolder`, with '/') and byte length of all images at any depth inside."""
        ...

    def reader(self, subfolder: str) -> Reader:
        """Return a reader of the names that `images` yields."""
        ...

    def other_files(self, subfolder: str) -> dict[str, int]:
        """Return name and byte length of the files directly inside that may hold labels, or are tars."""
        ...

    def read(self, name: str, limit: int) -> bytes:
        """Return the bytes of one of those, by its name from the top; DatasetError when it has more than `limit`."""
        ...


@dataclass(frozen=True)
class LabelFile:
    """A file that may give labels. place: of the file or its archive, for people; name: from the source's top."""

    source: Source
    subfolder: str
    name: str
    path: Path  # of the file itself, or where it would lie if the archive were a folder

    def data(self, limit: int = MAX_LIST_BYTES) -> bytes:
        """Return its bytes; DatasetError when it cannot be read, or has far too many of them to tell labels."""
        return self.source.read(join(self.subfolder, self.name), limit)

    @property
    def text(self) -> str:
        """Return its text; DatasetError when it is no text in UTF-8."""
        try:
            return self.data().decode("utf-8-sig")  # some programs begin their files with a byte order mark
        except UnicodeDecodeError as error:
            raise DatasetError(f"{self.path}: not a text in UTF-8. Give a list of labels with --labels FILE") from error

    def beside(self, name: str) -> "LabelFile | None":
        """Return the file of that name in the same folder, or None."""
        if name not in self.source.other_files(self.subfolder):
            return None
        return LabelFile(self.source, self.subfolder, name, self.path.with_name(name))


def join(subfolder: str, name: str) -> str:
    """Return the name from the top of a file or folder inside."""
    return f"{subfolder}/{name}" if subfolder else name


def describe_place(path: Path, subfolder: str) -> str:
    """Return where a folder of a source lies, for people."""
    return f"{path}/{subfolder}" if subfolder else str(path)


def too_large(place: str, limit: int) -> DatasetError:
    """Return the error for a file that has more bytes than a list of labels, or one label, ever has."""
    return DatasetError(f"{place}: more than {limit:,} bytes, too large to tell labels. Give the right file")


def format_names(names: Sequence[str]) -> str:
    """Return the first five names as text, shortened and printable: others may have chosen them."""
    return ", ".join(map(_shown, names[:5])) + (", …" if len(names) > 5 else "")


def _shown(name: str) -> str:
    return escape_unprintable(name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…")
