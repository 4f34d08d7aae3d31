"""A compact index of the images in archives, because ImageNet has 1.3 million of them.

A dictionary of objects would take about 300 bytes per image. This table takes about 50, plus the names, which it shares
with the samples of the dataset.
"""

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


class ArchiveMember(NamedTuple):
    """The location of a file in its archive, in bytes.

    start: offset of the data in a tar, of the local header in a zip; stored_size: length of the stored data; size: of
    the file; zipped: whether a local header precedes the data; deflated: whether the data is compressed; crc: of the
    file, in a zip; volume: number of the archive, for a dataset of several archives.
    """

    start: int
    stored_size: int
    size: int
    zipped: int = 0
    deflated: int = 0
    crc: int = 0
    volume: int = 0


@dataclass
class ArchiveIndex:
    """Names, and one column per field of a member, of 1, 4 or 8 bytes per member. Call `sort` before any lookup."""

    names: list[str] = field(default_factory=list)
    columns: "list[array[int]]" = field(default_factory=lambda: [array(code) for code in "qqqbbII"])

    def add(self, name: str, member: ArchiveMember) -> None:
        """Append a member."""
        self.names.append(name)
        for column, number in zip(self.columns, member, strict=True):
            column.append(number)

    def extend(self, prefix: str, volume: int, table: "ArchiveIndex") -> None:
        """Append all members of one of several archives, with a prefix for their names."""
        self.names.extend(prefix + name for name in table.names)
        for column, added in zip(self.columns[:-1], table.columns[:-1], strict=True):
            column.extend(added)
        self.columns[-1].extend([volume] * len(table.names))

    def sort(self) -> str | None:
        """Sort by name. Return a name that occurs twice, or None."""
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        self.names = [self.names[position] for position in order]
        self.columns = [array(column.typecode, map(column.__getitem__, order)) for column in self.columns]
        return next((name for name, following in pairwise(self.names) if name == following), None)

    @property
    def sizes(self) -> "array[int]":
        return self.columns[ArchiveMember._fields.index("size")]

    def subtree(self, subfolder: str) -> "ArchiveIndex":
        """Return the members in a folder, at any depth, with names relative to the folder; '' is the top."""
        if not subfolder:
            return self
        first, end = (bisect_left(self.names, subfolder + edge) for edge in ("/", "0"))  # '0' comes right after '/'
        names = [name[len(subfolder) + 1 :] for name in self.names[first:end]]
        return ArchiveIndex(names, [column[first:end] for column in self.columns])

    def find(self, name: str) -> ArchiveMember | None:
        """Return the member with this name, or None."""
        position = bisect_left(self.names, name)
        if position == len(self.names) or self.names[position] != name:
            return None
        return ArchiveMember(*(column[position] for column in self.columns))
