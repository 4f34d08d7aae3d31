"""What a folder and an archive have in common: a tree of folders with images and a few other files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol as Interface

from prelunet.evaluator.datasets.dataset import Reader
from prelunet.evaluator.errors import DatasetError
from prelunet.evaluator.terminal import printable

# Of files that are no images: lists of labels, a devkit's files, the labels in webdataset shards.
LABEL_SUFFIXES = (".txt", ".csv", ".mat", ".cls", ".json")
LARGEST_LIST = 256 * 1024**2  # bytes; the list of ImageNet's 1.3 million training images has 60 MB
_LONGEST_NAME = 80  # characters of each name in a message


class Source(Interface):
    """A tree of folders and images; `inside` is a folder's name in it with '/', '' for the top."""

    def folders(self, inside: str) -> list[str]:
        """Return the names of the visible folders directly inside, sorted."""
        ...

    def images(self, inside: str) -> Iterator[tuple[str, int]]:
        """Yield name (relative to `inside`, with '/') and byte length of all images at any depth inside."""
        ...

    def reader(self, inside: str) -> Reader:
        """Return a reader of the names that `images` yields."""
        ...

    def others(self, inside: str) -> dict[str, int]:
        """Return name and byte length of the files directly inside that may hold labels, or are tars."""
        ...

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of one of those, by its name from the top; DatasetError when it has more than `most`."""
        ...


@dataclass(frozen=True)
class LabelFile:
    """A file that may give labels. place: of the file or its archive, for people; name: from the source's top."""

    source: Source
    inside: str
    name: str
    path: Path  # of the file itself, or where it would lie if the archive were a folder

    def data(self, most: int = LARGEST_LIST) -> bytes:
        """Return its bytes; DatasetError when it cannot be read, or has far too many of them to tell labels."""
        return self.source.read(join(self.inside, self.name), most)

    @property
    def text(self) -> str:
        """Return its text; DatasetError when it is no text in UTF-8."""
        try:
            return self.data().decode("utf-8-sig")  # some programs begin their files with a byte order mark
        except UnicodeDecodeError as error:
            raise DatasetError(f"{self.path}: not a text in UTF-8. Give a list of labels with --labels FILE") from error

    def beside(self, name: str) -> "LabelFile | None":
        """Return the file of that name in the same folder, or None."""
        if name not in self.source.others(self.inside):
            return None
        return LabelFile(self.source, self.inside, name, self.path.with_name(name))


def join(inside: str, name: str) -> str:
    """Return the name from the top of a file or folder inside."""
    return f"{inside}/{name}" if inside else name


def place_of(path: Path, inside: str) -> str:
    """Return where a folder of a source lies, for people."""
    return f"{path}/{inside}" if inside else str(path)


def too_large(place: str, most: int) -> DatasetError:
    """Return the error for a file that has more bytes than a list of labels, or one label, ever has."""
    return DatasetError(f"{place}: more than {most:,} bytes, too large to tell labels. Give the right file")


def some(names: Sequence[str]) -> str:
    """Return the first five names as text, shortened and printable: others may have chosen them."""
    return ", ".join(map(_shown, names[:5])) + (", …" if len(names) > 5 else "")


def _shown(name: str) -> str:
    return printable(name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…")
