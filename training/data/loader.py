"""Prefetched batches: built by threads if the images fit into memory, else by worker processes that decode them.

A batch is a function of (seed, step) only; the number of workers and the first step of a run do not affect it. The
training process selects the images of a batch and sends their samples to a worker. If a worker traversed the list of
all samples, reference counting alone would copy its memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ...evaluator.arrays import Float32Array, Int64Array, UInt8Array
from ...evaluator.datasets.dataset import Sample
from ...evaluator.errors import DatasetError
from ...evaluator.imaging.resize import DecodedImage
from ..recipe import Recipe
from .augmentation import SUBSTITUTE, color_shift, random_stream, training_view, view_keys_of_step
from .image_cache import UNREADABLE, ImageCache, central_view, default_workers, map_in_threads
from .worker_processes import map_in_processes

ViewKey = tuple[int | None, int]  # epoch, or None for the view of the evaluation; image index
Request = list[tuple[ViewKey, Sample]]  # the rows of a batch; with samples, so that a worker needs no list of them

MAX_SUBSTITUTES = 20  # substitutes tried for one row; if all fail, the dataset is gone and not just a few files


@dataclass(frozen=True)
class Batch:
    """images: uint8 (N, crop, crop, 3) RGB, mean not yet subtracted; labels: int64 (N,), class indices.

    shift: float32 (N, 3), color shift of each image in pixel values of 0-255, added after the mean is subtracted, or
    None; unreadable: file and reason of images that could not be read, see `Loader`.
    """

    images: UInt8Array
    labels: Int64Array
    shift: Float32Array | None = None
    unreadable: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class _UnreadableRow:
    """A row whose image could not be read; it is empty in the array of images."""

    index: int
    key: ViewKey
    file: str
    reason: str


# Images, and labels, shift and unreadable rows of them.
_Built = tuple[UInt8Array, tuple[Int64Array, Float32Array | None, list[_UnreadableRow]]]


class Loader:
    """The batches of a split, built ahead of their consumer."""

    def __init__(
        self,
        image_cache: ImageCache,
        recipe: Recipe,
        *,
        axes: Float32Array | None = None,
        workers: int | None = None,
        pin_memory: bool = False,
        local_processes: int = 1,
    ) -> None:
        """Create a loader; it starts its workers with the first batch.

        axes: of the color augmentation (`training.data.augmentation`), required to train if the recipe uses it;
        workers: number of prefetching workers, 0 for none, None for this process's share of all cores but one, at most
        16; pin_memory: whether images are in page-locked memory; local_processes: processes of this run on this
        machine, which share its cores and shared memory.
        """
        self.image_cache, self.recipe, self.axes = image_cache, recipe, axes if recipe.color else None
        self.workers = default_workers(local_processes) if workers is None else workers
        self.pin_memory, self.local_processes = pin_memory, local_processes

    def training_batches(self, first_step: int, rows: range | None = None) -> Iterator[Batch]:
        """Yield the batches from `first_step` to the end of the recipe, each a function of (seed, step) only.

        rows: the part of each global batch that this process builds, None for all of it.

        An image that has become unreadable is listed in `unreadable` each time it is due. Another image of the training
        set substitutes it, drawn from a stream of (seed, epoch, image) and in its own view of this epoch. So a batch is
        still a function of (seed, step) and the set of unreadable images. Raises DatasetError if MAX_SUBSTITUTES
        substitutes are unreadable too; EnvironmentFault if a worker process dies.
        """
        assert self.axes is not None or not self.recipe.color, "color augmentation requires axes"
        own = range(self.recipe.batch) if rows is None else rows
        keys: Iterable[list[ViewKey]] = (
            [*view_keys_of_step(self.recipe, step, len(self.image_cache))[own.start : own.stop]]
            for step in range(first_step, self.recipe.total_steps)
        )
        for images, (labels, shift, unreadable) in self._build_ahead(keys, len(own)):
            for row in unreadable:
                key, images[row.index] = self._substitute(row)
                labels[row.index] = self.image_cache.samples[key[1]].label
                if shift is not None:
                    shift[row.index] = self._shift([key])
            yield Batch(images, labels, shift, tuple((row.file, row.reason) for row in unreadable))

    def evaluation_batches(self, size: int, part: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """Yield the central views of all images in dataset order, up to `size` at a time.

        part: (rank, number of processes); this process yields its share of each size·processes images. All processes
        yield the same number of batches, of which the last may be empty. Images that have become unreadable are listed
        in `unreadable` and skipped.
        """
        number, processes = part

        def keys() -> Iterator[list[ViewKey]]:
            for start in range(0, len(self.image_cache), size * processes):
                images = range(len(self.image_cache))[start : start + size * processes]
                first, end = (len(images) * process // processes for process in (number, number + 1))
                yield [(None, index) for index in images[first:end]]

        for images, (labels, _, unreadable) in self._build_ahead(keys(), size):
            readable = np.setdiff1d(np.arange(len(images)), [row.index for row in unreadable])
            yield Batch(
                images[readable] if unreadable else images,
                labels[readable],
                None,
                tuple((row.file, row.reason) for row in unreadable),
            )

    def _build_ahead(self, keys: Iterable[list[ViewKey]], largest: int) -> Iterator[_Built]:
        """Yield what is built for each list of keys, in order; largest: its maximum length.

        Threads build the batches if all images fit into memory, else worker processes do.
        """
        requests = ([(key, self.image_cache.samples[key[1]]) for key in some] for some in keys)
        if self.workers and not self.image_cache.fits_in_memory:
            yield from map_in_processes(
                partial(self._build, cached=False),
                requests,
                self.workers,
                3 * largest * self.recipe.crop**2,
                pin_memory=self.pin_memory,
                local_processes=self.local_processes,
            )
            return
        build = partial(self._build, cached=True)
        built = map_in_threads(build, requests, self.workers) if self.workers else map(build, requests)
        for images, rest in built:
            yield (torch.from_numpy(images).pin_memory().numpy() if self.pin_memory else images), rest

    def _build(self, request: Request, *, cached: bool) -> _Built:
        """Build the rows of a request. cached: whether to use the image cache, which worker processes do not share."""
        images = np.zeros((len(request), self.recipe.crop, self.recipe.crop, 3), np.uint8)
        unreadable = []
        for index, (key, sample) in enumerate(request):
            try:
                image = self.image_cache.image(key[1]) if cached else self.image_cache.decode(sample)
                images[index] = self._view(image, key)
            except UNREADABLE as error:
                unreadable.append(_UnreadableRow(index, key, sample.file, str(error)))
        labels = np.array([sample.label for _, sample in request], dtype=np.int64)
        return images, (labels, self._shift([key for key, _ in request]), unreadable)

    def _view(self, image: DecodedImage, key: ViewKey) -> UInt8Array:
        epoch, index = key
        if epoch is None:
            return central_view(image, self.recipe.central_scale, self.recipe.crop)
        return training_view(image, self.recipe, epoch, index)

    def _shift(self, keys: list[ViewKey]) -> Float32Array | None:
        """Return the color shifts of training views, float32 (len(keys), 3), or None without color augmentation."""
        if self.axes is None:
            return None
        shifts = [color_shift(self.recipe, self.axes, epoch, index) for epoch, index in keys if epoch is not None]
        return np.array(shifts, dtype=np.float32).reshape(-1, 3)

    def _substitute(self, row: _UnreadableRow) -> tuple[ViewKey, UInt8Array]:
        """Return key and view of another image for a row of a training batch; see `training_batches`."""
        epoch, index = row.key
        assert epoch is not None, "only training batches get substitutes"
        random = random_stream(self.recipe.seed, SUBSTITUTE, epoch, index)
        for other in random.integers(len(self.image_cache), size=MAX_SUBSTITUTES):
            try:
                key = epoch, int(other)
                return key, self._view(self.image_cache.image(int(other)), key)
            except UNREADABLE:
                continue
        raise DatasetError(
            f"{self.image_cache.dataset.location}: {row.file} and {MAX_SUBSTITUTES} other images were readable when "
            f"training started, but none of them is now ({row.reason}). Check whether the dataset is still there; the "
            "same command resumes from the last saved state"
        )
