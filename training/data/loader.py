"""Prefetched batches: built by threads if the images fit into memory, else by worker processes that decode them.

A batch is a function of (seed, step) only; the number of workers and the first step of a run do not affect it. The
training process selects the images of a batch and sends their samples to a worker. If a worker traversed the list of
all samples, reference counting alone would copy its memory.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from prelunet.evaluator.arrays import Float32Array, Int64Array, UInt8Array
from prelunet.evaluator.datasets.dataset import Sample
from prelunet.evaluator.errors import DatasetError
from prelunet.evaluator.imaging.resize import DecodedImage
from prelunet.training.data.augmentation import SUBSTITUTE, color_shift, random_stream, training_view, view_keys_of_step
from prelunet.training.data.image_cache import DEFAULT_WORKERS, UNREADABLE, ImageCache, central_view, map_in_threads
from prelunet.training.data.worker_processes import map_in_processes
from prelunet.training.recipe import Recipe

ViewKey = tuple[int | None, int]  # epoch, or None for the view of the evaluation; image index

MAX_SUBSTITUTES = 20  # substitutes tried for one row; if all fail, the dataset is gone and not just a few files


@dataclass(frozen=True)
class Batch:
    """images: uint8 (N, crop, crop, 3) RGB, mean not yet subtracted; labels: int64 (N,), class indices.

    shift: float32 (N, 3), color shift of each image in pixel values of 0-255, added after the mean is subtracted, or
    None; unreadable: file and reason of images that could not be read, see `training_batches`, `evaluation_batches`.
    """

    images: UInt8Array
    labels: Int64Array
    shift: Float32Array | None = None
    unreadable: tuple[tuple[str, str], ...] = ()


def training_batches(
    image_cache: ImageCache,
    recipe: Recipe,
    first_step: int,
    *,
    rows: range | None = None,
    axes: Float32Array | None = None,
    workers: int | None = None,
    pin_memory: bool = False,
    local_processes: int = 1,
) -> Iterator[Batch]:
    """Yield the batches from `first_step` to the end of the recipe, each a function of (seed, step) only.

    rows: the part of each global batch that this process builds, None for all of it; axes: of the color augmentation
    (`training.data.augmentation`), required if the recipe uses it; workers: number of prefetching workers, 0 for none,
    None for this process's share of all cores but one, at most 16; pin_memory: whether images are in page-locked
    memory; local_processes: processes of this run on this machine, which share its cores and shared memory.

    An image that has become unreadable is listed in `unreadable` each time it is due. Another image of the training set
    substitutes it, drawn from a stream of (seed, epoch, image) and in its own view of this epoch. So a batch is still a
    function of (seed, step) and the set of unreadable images. Raises DatasetError if MAX_SUBSTITUTES substitutes are
    unreadable too; EnvironmentFault if a worker process dies.
    """
    builder = _BatchBuilder(image_cache, recipe, axes if recipe.color else None)
    assert builder.axes is not None or not recipe.color, "color augmentation requires axes"
    keys = (_rows_of(recipe, step, len(image_cache), rows) for step in range(first_step, recipe.total_steps))
    largest = recipe.batch if rows is None else len(rows)
    for images, metadata in _build(
        builder, keys, largest, workers, pin_memory=pin_memory, local_processes=local_processes
    ):
        builder.substitute_unreadable(images, metadata)
        yield Batch(images, metadata.labels, metadata.shift, metadata.unreadable)


def evaluation_batches(
    image_cache: ImageCache,
    recipe: Recipe,
    size: int,
    *,
    part: tuple[int, int] = (0, 1),
    workers: int | None = None,
    pin_memory: bool = False,
    local_processes: int = 1,
) -> Iterator[Batch]:
    """Yield the central views of all images in dataset order, up to `size` at a time.

    part: (rank, number of processes); this process yields its share of each size·processes images. All processes yield
    the same number of batches, of which the last may be empty. Images that have become unreadable are listed in
    `unreadable` and skipped. workers, pin_memory, local_processes: see `training_batches`.
    """
    builder = _BatchBuilder(image_cache, recipe, None)
    number, processes = part
    together = size * processes
    starts = range(0, len(image_cache), together)
    for images, metadata in _build(
        builder,
        (_share(range(start, min(start + together, len(image_cache))), number, processes) for start in starts),
        size,
        workers,
        pin_memory=pin_memory,
        local_processes=local_processes,
    ):
        readable = np.setdiff1d(np.arange(len(images)), [row.index for row in metadata.unreadable_rows])
        yield Batch(
            images[readable] if metadata.unreadable_rows else images,
            metadata.labels[readable],
            None,
            metadata.unreadable,
        )


def build_batch(
    image_cache: ImageCache, recipe: Recipe, step: int, rows: range | None = None, axes: Float32Array | None = None
) -> Batch:
    """Return the batch of one step, counted from 0; see `training_batches`."""
    shortened = replace(recipe, steps=step + 1, epochs=None)
    return next(training_batches(image_cache, shortened, step, rows=rows, axes=axes, workers=0))


def _rows_of(recipe: Recipe, step: int, images: int, rows: range | None) -> list[ViewKey]:
    keys: list[ViewKey] = [*view_keys_of_step(recipe, step, images)]
    return keys if rows is None else keys[rows.start : rows.stop]


def _share(images: range, number: int, processes: int) -> list[ViewKey]:
    """Return the share of one process; the shares differ in length by at most 1."""
    edges = [len(images) * process // processes for process in (number, number + 1)]
    return [(None, index) for index in images[edges[0] : edges[1]]]


@dataclass(frozen=True)
class _BatchRequest:
    """The rows of a batch for a worker to build."""

    keys: list[ViewKey]
    samples: list[Sample]


@dataclass(frozen=True)
class _UnreadableRow:
    """A row whose image could not be read."""

    index: int
    key: ViewKey
    file: str
    reason: str


@dataclass(frozen=True)
class _BatchMetadata:
    """Everything of a batch but its images; rows with unreadable images are still empty."""

    labels: Int64Array
    shift: Float32Array | None
    unreadable_rows: list[_UnreadableRow]

    @property
    def unreadable(self) -> tuple[tuple[str, str], ...]:
        return tuple((row.file, row.reason) for row in self.unreadable_rows)


class _BatchBuilder:
    """Builder of the batches of a split. axes: of the color augmentation, None if it is off."""

    def __init__(self, image_cache: ImageCache, recipe: Recipe, axes: Float32Array | None) -> None:
        self.image_cache, self.recipe, self.axes = image_cache, recipe, axes

    def request(self, keys: list[ViewKey]) -> _BatchRequest:
        """Return the request for these rows."""
        return _BatchRequest(keys, [self.image_cache.samples[index] for _, index in keys])

    def from_memory(self, request: _BatchRequest) -> tuple[UInt8Array, _BatchMetadata]:
        """Build a request from cached images."""
        return self._make(request, lambda index, _sample: self.image_cache.image(index))

    def from_files(self, request: _BatchRequest) -> tuple[UInt8Array, _BatchMetadata]:
        """Build a request in a worker process, without caching images or touching the list of all samples."""
        return self._make(request, lambda _index, sample: self.image_cache.decode(sample))

    def _make(
        self, request: _BatchRequest, read: Callable[[int, Sample], DecodedImage]
    ) -> tuple[UInt8Array, _BatchMetadata]:
        images = np.zeros((len(request.keys), self.recipe.crop, self.recipe.crop, 3), np.uint8)
        unreadable_rows = []
        for row, (key, sample) in enumerate(zip(request.keys, request.samples, strict=True)):
            try:
                images[row] = self._view(read(key[1], sample), key)
            except UNREADABLE as error:
                unreadable_rows.append(_UnreadableRow(row, key, sample.file, str(error)))
        labels = np.array([sample.label for sample in request.samples], dtype=np.int64)
        return images, _BatchMetadata(labels, self._shift(request.keys), unreadable_rows)

    def _view(self, image: DecodedImage, key: ViewKey) -> UInt8Array:
        epoch, index = key
        if epoch is None:
            return central_view(image, self.recipe.evaluation_scale, self.recipe.crop)
        return training_view(image, self.recipe, epoch, index)

    def _shift(self, keys: list[ViewKey]) -> Float32Array | None:
        if self.axes is None:
            return None
        shifts = [color_shift(self.recipe, self.axes, epoch, index) for epoch, index in keys if epoch is not None]
        return np.array(shifts, dtype=np.float32).reshape(-1, 3)

    def substitute_unreadable(self, images: UInt8Array, metadata: _BatchMetadata) -> None:
        """Fill the empty rows of a training batch with other images; see `training_batches`."""
        for row in metadata.unreadable_rows:
            key, image = self._substitute(row)
            images[row.index] = self._view(image, key)
            metadata.labels[row.index] = self.image_cache.samples[key[1]].label
            if metadata.shift is not None:
                metadata.shift[row.index] = self._shift([key])

    def _substitute(self, row: _UnreadableRow) -> tuple[ViewKey, DecodedImage]:
        epoch, index = row.key
        assert epoch is not None, "only training batches get substitutes"
        random = random_stream(self.recipe.seed, SUBSTITUTE, epoch, index)
        for other in random.integers(len(self.image_cache), size=MAX_SUBSTITUTES):
            try:
                return (epoch, int(other)), self.image_cache.image(int(other))
            except UNREADABLE:
                continue
        raise DatasetError(
            f"{self.image_cache.dataset.location}: {row.file} and {MAX_SUBSTITUTES} other images were readable when "
            f"training started, but none of them is now ({row.reason}). Check whether the dataset is still there; the "
            "same command resumes from the last saved state"
        )


def _build(
    builder: _BatchBuilder,
    keys: Iterable[list[ViewKey]],
    largest: int,
    workers: int | None,
    *,
    pin_memory: bool,
    local_processes: int,
) -> Iterator[tuple[UInt8Array, _BatchMetadata]]:
    """Yield the images and metadata of each list of keys, in order. largest: maximum length of a list."""
    count = max(1, DEFAULT_WORKERS // local_processes) if workers is None else workers
    requests = map(builder.request, keys)
    if count and not builder.image_cache.fits_in_memory:
        size = 3 * largest * builder.recipe.crop**2
        yield from map_in_processes(
            builder.from_files, requests, count, size, pin_memory=pin_memory, local_processes=local_processes
        )
        return
    for images, metadata in (
        map_in_threads(builder.from_memory, requests, count) if count else map(builder.from_memory, requests)
    ):
        yield (torch.from_numpy(images).pin_memory().numpy() if pin_memory else images), metadata
