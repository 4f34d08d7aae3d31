"""Images in parquet files, as Hugging Face writes them. Only here is pyarrow imported, and only when it is needed.

An image is named by its file and row, `validation-00000-of-00014.parquet/0017`: the paths in the files need not be
unique. A row group can be read only from its start, so it is decoded in blocks, once if its rows are read about in
order, by any number of threads. Going back further than the blocks that are kept starts again.
"""

import os
import re
import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import DatasetError, import_from_extra
from .base import format_names
from .folder import reading_error

_BLOCK_BYTES = 4 * 2**20  # of images; the row groups of older files have 1000 photographs, 110 MB
_MAX_BLOCKS = 8  # kept: 32 MiB, about 300 photographs, far more than the distance between threads
_MAX_CURSORS = 2  # row groups that are being read, each with a page and a dictionary in memory
_BUFFER_BYTES = 2**20  # per row group; by default, pyarrow would read it whole


class RowGroups(NamedTuple):
    """The row groups of a file. starts: first row of each, and the number of rows; bytes_: of the images in each."""

    starts: "array[int]"
    bytes_: "array[int]"


@dataclass(frozen=True)
class ParquetFiles:
    """The files of one set. image_column: path of the encoded images; row_groups: by file name."""

    paths: tuple[Path, ...]
    schema: Any
    image_column: str
    row_groups: Mapping[str, RowGroups]

    def column(self, name: str) -> Iterator[tuple[str, Any]]:
        """Yield where it is, for messages, and the value of each row of a column."""
        for path in self.paths:
            with _damage(path):
                values = _open(path).read(columns=[name]).column(0).to_pylist()
                if len(values) != (rows := self.row_groups[path.name].starts[-1]):
                    raise ValueError(f"{len(values)} rows instead of {rows}")
            yield from ((f"{path}: row {row}", value) for row, value in enumerate(values))

    def images(self) -> "tuple[list[str], array[int], ParquetReader]":
        """Return the names, the mean size in bytes of the images in each one's row group, and the reader.

        The files store no size of an image: finding it would mean to read them all. Raises DatasetError without rows.
        """
        names, sizes = list[str](), array("q")
        for path in self.paths:
            starts, of_group = self.row_groups[path.name]
            names += (f"{path.name}/{row:0{len(str(starts[-1]))}}" for row in range(starts[-1]))
            for (start, end), size in zip(pairwise(starts), of_group, strict=True):
                sizes.extend([size // max(1, end - start)] * (end - start))
        if not names:
            raise DatasetError(f"{self.paths[0]}: no rows. Pass files with images")
        return names, sizes, ParquetReader(self.paths[0].parent, self.image_column, self.row_groups)


def open_parquet(paths: Sequence[Path], *, complete: bool) -> ParquetFiles:
    """Open files, sorted by name. complete: require as many as their names state: `…-of-00014.parquet`.

    Raises DatasetError when one is missing or damaged or has other columns than the first, or when not exactly one
    column contains images. Raises EnvironmentFault without pyarrow.
    """
    stated = re.search(r"-of-(\d+)", paths[0].name)
    if complete and stated and len(paths) != int(stated[1]):
        raise DatasetError(
            f"{paths[0].parent}: {len(paths)} files, but {paths[0].name} is one of {int(stated[1])}. Get all of them "
            "and keep no others here. To evaluate a part, use --limit, or pass one file as --data"
        )
    schema, column, row_groups = None, "", dict[str, RowGroups]()
    for path in paths:
        with _damage(path):
            file = _open(path)
        own = file.schema_arrow
        if schema is None:
            schema, column = own, _image_column(own, path)
        if not own.equals(schema) or huggingface_metadata(own) != huggingface_metadata(schema):
            raise DatasetError(f"{path}: has other columns or class names than {paths[0].name}. Remove one of them")
        with _damage(path):
            row_groups[path.name] = _row_groups(file, column)
    return ParquetFiles(tuple(paths), schema, column, row_groups)


def huggingface_metadata(schema: Any) -> bytes:
    """Return the JSON that Hugging Face's datasets add to a schema, or an empty object."""
    found: bytes = (schema.metadata or {}).get(b"huggingface", b"{}")
    return found


@dataclass
class _State:
    """What a reader keeps in one process: decoded blocks as (file name, first row, images), and started row groups."""

    process: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    blocks: deque[tuple[str, int, Any]] = field(default_factory=lambda: deque(maxlen=_MAX_BLOCKS))
    cursors: dict[tuple[str, int], tuple[int, Iterator[Any]]] = field(default_factory=dict)  # next row, blocks


@dataclass
class ParquetReader:
    """Reads images by name. Thread-safe. A forked or pickled copy keeps nothing."""

    folder: Path
    column: str
    row_groups: Mapping[str, RowGroups]
    _state: _State = field(default_factory=_State, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetReader, (self.folder, self.column, self.row_groups)

    def read(self, file: str) -> bytes:
        """Return the bytes of an image. Raises DatasetError when the file is missing, damaged or was replaced."""
        if (state := self._state).process != os.getpid():
            state = self._state = _State()
        name, _, row = file.rpartition("/")
        with _damage(self.folder / name), state.lock:
            first, images = self._block(state, name, int(row))
        image = images[int(row) - first].as_py()
        if image is None:
            raise _no_image(self.folder / name, int(row))
        if not isinstance(image, bytes):
            raise _replaced(self.folder / name)
        return image

    def _block(self, state: _State, name: str, row: int) -> tuple[int, Any]:
        """Return the first row and the images of the block with a row, decoding up to it unless it is kept."""
        blocks, cursors, starts = state.blocks, state.cursors, self.row_groups[name].starts
        for file, first, images in blocks:
            if file == name and first <= row < first + len(images):
                return first, images
        group = bisect_right(starts, row) - 1
        first, remaining = cursors.pop((name, group), (row + 1, iter(())))
        if first > row:
            parquet = _open(self.folder / name)
            if _row_groups(parquet, self.column) != self.row_groups[name]:
                raise _replaced(self.folder / name)
            first, remaining = starts[group], _blocks(parquet, group, self.column)
            if len(cursors) == _MAX_CURSORS:
                del cursors[next(iter(cursors))]
        for images in remaining:
            blocks.append((name, first, images))
            if row < first + len(images):
                if first + len(images) < starts[group + 1]:
                    cursors[name, group] = first + len(images), remaining
                return first, images
            first += len(images)
        raise _replaced(self.folder / name)


def _open(path: Path) -> Any:
    pq = import_from_extra("pyarrow.parquet")
    return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)


def _row_groups(file: Any, column: str) -> RowGroups:
    groups = range(file.metadata.num_row_groups)
    counts = (file.metadata.row_group(group).num_rows for group in groups)
    sizes = (_image_chunk(file, group, column).total_uncompressed_size for group in groups)
    return RowGroups(array("q", accumulate(counts, initial=0)), array("q", sizes))


def _image_chunk(file: Any, group: int, column: str) -> Any:
    """Return the metadata of the images in a row group."""
    metadata = file.metadata.row_group(group)
    chunks = map(metadata.column, range(metadata.num_columns))
    found = next((chunk for chunk in chunks if chunk.path_in_schema == column), None)
    if found is None:
        raise ValueError(f"no column {column}")
    return found


def _blocks(file: Any, group: int, column: str) -> Iterator[Any]:
    """Yield the images of a row group in order, pyarrow arrays of about _BLOCK_BYTES."""
    size = _image_chunk(file, group, column).total_uncompressed_size
    rows = max(1, _BLOCK_BYTES * file.metadata.row_group(group).num_rows // max(1, size))
    for batch in file.iter_batches(rows, row_groups=[group], columns=[column], use_threads=False):
        images = batch.column(0)
        yield images.field(0) if hasattr(images, "field") else images  # of the struct


def _image_column(schema: Any, path: Path) -> str:
    """Return the path of the only column of images: structs with `bytes` and `path`, or binary."""
    from pyarrow import types

    def is_bytes(kind: Any) -> bool:
        return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))

    found = dict[str, str]()
    for each in schema:
        if is_bytes(each.type):
            found[each.name] = each.name
        elif types.is_struct(each.type):
            parts = {part.name: part.type for part in each.type}
            if "path" in parts and is_bytes(parts.get("bytes", each.type)):
                found[each.name] = f"{each.name}.bytes"
    if not found:
        raise DatasetError(
            f"{path}: no image column (binary, or a struct with 'bytes' and 'path'), only {format_names(schema.names)}"
            ". Pass files that contain the images"
        )
    if len(found) > 1:
        raise DatasetError(
            f"{path}: the columns {format_names(list(found))} could all be the images. Keep one of them, e.g. with "
            "`remove_columns` of Hugging Face's datasets"
        )
    return next(iter(found.values()))


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Convert what pyarrow raises for a file that is missing, damaged, or written in a way that it cannot read."""
    try:
        yield
    except (OSError, ValueError, IndexError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno:
            raise reading_error(error, path) from error
        raise DatasetError(f"{path}: damaged or truncated ({error!s:.200}). Get a fresh copy of the file") from error


def _no_image(path: Path, row: int) -> DatasetError:
    return DatasetError(
        f"{path}: row {row} has no image. Remove such rows; if they have the path of a file, embed it, as "
        "`push_to_hub` of Hugging Face's datasets does"
    )


def _replaced(path: Path) -> DatasetError:
    return DatasetError(
        f"{path}: was replaced after the dataset was opened. Do not change images in use, and run the command again"
    )
