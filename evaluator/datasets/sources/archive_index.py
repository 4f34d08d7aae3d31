"""Where the images of archives lie, in few bytes: ImageNet has 1.3 million of them.

A dictionary of objects would take some 300 bytes an image; the table takes about 50 beside the names, which it shares
with the samples of the dataset.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


class ArchiveMember(NamedTuple):
    """Where a file lies in its archive, in bytes.

    start: of its data in a tar, of its local header in a zip; stored: length of the data there; size: of the file;
    zipped: behind a local header of its own; deflated: packed; crc: of the file, in a zip; volume: which archive, where
    a dataset is spread over several.
    """

    start: int
    stored_size: int
    size: int
    zipped: int = 0
    deflated: int = 0
    crc: int = 0
    volume: int = 0


def _columns() -> "list[array[int]]":
    """Return a column of 1, 4 or 8 bytes a member for each of its numbers."""
    return [array(code) for code in "qqqbbII"]


@dataclass
class ArchiveIndex:
    """Names, and beside them one column for each number of a member. `sort` it before anything is looked up."""

    names: list[str] = field(default_factory=list)
    columns: "list[array[int]]" = field(default_factory=_columns)

    def add(self, name: str, member: ArchiveMember) -> None:
        """Enter a member at the end."""
        self.names.append(name)
        for column, number in zip(self.columns, member, strict=True):
            column.append(number)

    def extend(self, prefix: str, volume: int, table: "ArchiveIndex") -> None:
        """Enter all members of one archive of several, with a beginning of their own for their names."""
        self.names.extend(prefix + name for name in table.names)
        for mine, theirs in zip(self.columns[:-1], table.columns[:-1], strict=True):
            mine.extend(theirs)
        self.columns[-1].extend([volume] * len(table.names))

    def sort(self) -> str | None:
        """Sort by name; return a name that is there twice, None when there is none."""
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        self.names = [self.names[place] for place in order]
        self.columns = [_picked(column, order) for column in self.columns]
        return next((name for name, following in pairwise(self.names) if name == following), None)

    @property
    def sizes(self) -> "array[int]":
        """Return the size of each file in bytes."""
        return self.columns[ArchiveMember._fields.index("size")]

    def subtree(self, subfolder: str) -> "ArchiveIndex":
        """Return the members at any depth in a folder, their names beginning there; '' is the top."""
        if not subfolder:
            return self
        first, end = (bisect_left(self.names, subfolder + edge) for edge in ("/", "0"))  # '0' comes right after '/'
        names = [name[len(subfolder) + 1 :] for name in self.names[first:end]]
        return ArchiveIndex(names, [column[first:end] for column in self.columns])

    def find(self, name: str) -> ArchiveMember | None:
        """Return the member of that name, None when there is none."""
        place = bisect_left(self.names, name)
        if place == len(self.names) or self.names[place] != name:
            return None
        return ArchiveMember(*(column[place] for column in self.columns))


def _picked(column: "array[int]", places: Iterable[int]) -> "array[int]":
    return array(column.typecode, (column[place] for place in places))
