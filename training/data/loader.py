"""Batches, made ahead of the training: by threads of pictures that fit into memory, else by processes that decode.

A batch is a function of (seed, step) alone; who makes it, how many of them there are and where a run begins change
nothing. The training's process decides what is in a batch and tells a worker the names of its files: a worker that
went through the list of all images would come to own a copy of it, merely by counting references.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from prelunet.evaluator.arrays import Float32Array, Int64Array, UInt8Array
from prelunet.evaluator.datasets.dataset import Sample
from prelunet.evaluator.errors import DatasetError
from prelunet.evaluator.imaging.resize import Picture
from prelunet.training.data.augmentation import SUBSTITUTE, color_shift, places_of_step, random_stream, training_view
from prelunet.training.data.image_cache import UNREADABLE, WORKERS, Pictures, central_view, map_ahead
from prelunet.training.data.worker_processes import map_in_processes
from prelunet.training.recipe import Recipe

Place = tuple[int | None, int]  # epoch, or None for the view of the evaluation; image index

TRIES = 20  # images that fail one after another for one place: then the dataset is gone, not a few of its files


@dataclass(frozen=True)
class Batch:
    """images: uint8 (N, crop, crop, 3) RGB, mean not yet subtracted; labels: int64 (N,), class indices.

    shift: float32 (N, 3), the colour change, in levels of 0-255, for every pixel after the mean is subtracted; None
    without it. lost: file and reason of images that could not be read; see `training_batches`, `evaluation_batches`.
    """

    images: UInt8Array
    labels: Int64Array
    shift: Float32Array | None = None
    lost: tuple[tuple[str, str], ...] = ()


def training_batches(
    pictures: Pictures,
    recipe: Recipe,
    first_step: int,
    *,
    rows: range | None = None,
    axes: Float32Array | None = None,
    workers: int | None = None,
    pin: bool = False,
    here: int = 1,
) -> Iterator[Batch]:
    """Yield the batches from `first_step` to the recipe's end, each a function of (seed, step) alone.

    rows: the part of each global batch that this process makes, None for all of it; axes: of the colour change
    (`training.data.augmentation`), needed where the recipe has one; workers: how many make batches ahead, 0 for nobody,
    None for this process's share of all cores but one, of 16 at most; pin: whether images lie in memory from which a
    GPU copies by itself; here: processes of this training on this machine, which share its cores and its shared memory.

    An image that cannot be read any more is named in `lost`, each time, and another of the training set takes its
    place: one drawn from a stream of (seed, epoch, image), in the view that it would have in this epoch, so that the
    batch stays a function of (seed, step) and of which images are broken. Raises DatasetError when TRIES of them cannot
    be read either, EnvironmentFault when a worker process dies.
    """
    maker = _Maker(pictures, recipe, axes if recipe.color else None)
    assert maker.axes is not None or not recipe.color, "a colour change needs its axes"
    places = (_rows_of(recipe, step, len(pictures), rows) for step in range(first_step, recipe.length))
    largest = recipe.batch if rows is None else len(rows)
    for images, rest in _made(maker, places, largest, workers, pin=pin, here=here):
        maker.mend(images, rest)
        yield Batch(images, rest.labels, rest.shift, rest.lost)


def evaluation_batches(
    pictures: Pictures,
    recipe: Recipe,
    size: int,
    *,
    part: tuple[int, int] = (0, 1),
    workers: int | None = None,
    pin: bool = False,
    here: int = 1,
) -> Iterator[Batch]:
    """Yield the central views of all images in dataset order, up to `size` at a time.

    part: number of this process and of all processes: of each size·processes images it makes its share. All yield
    equally many batches, the last ones perhaps without an image. Images that cannot be read any more are named in
    `lost` and left out. workers, pin, here: see `training_batches`.
    """
    maker = _Maker(pictures, recipe, None)
    number, processes = part
    together = size * processes
    starts = range(0, len(pictures), together)
    for images, rest in _made(
        maker,
        (_share(range(start, min(start + together, len(pictures))), number, processes) for start in starts),
        size,
        workers,
        pin=pin,
        here=here,
    ):
        whole = np.setdiff1d(np.arange(len(images)), [gap.row for gap in rest.gaps])
        yield Batch(images[whole] if rest.gaps else images, rest.labels[whole], None, rest.lost)


def make_batch(
    pictures: Pictures, recipe: Recipe, step: int, rows: range | None = None, axes: Float32Array | None = None
) -> Batch:
    """Return the batch of one step, counted from 0; see `training_batches`."""
    only = replace(recipe, steps=step + 1, epochs=None)
    return next(training_batches(pictures, only, step, rows=rows, axes=axes, workers=0))


def _rows_of(recipe: Recipe, step: int, images: int, rows: range | None) -> list[Place]:
    places: list[Place] = [*places_of_step(recipe, step, images)]
    return places if rows is None else places[rows.start : rows.stop]


def _share(images: range, number: int, processes: int) -> list[Place]:
    """Return the part of one of several processes, whose lengths differ by 1 at most."""
    edges = [len(images) * process // processes for process in (number, number + 1)]
    return [(None, index) for index in images[edges[0] : edges[1]]]


@dataclass(frozen=True)
class _Order:
    """What a worker is asked to make."""

    places: list[Place]
    samples: list[Sample]


@dataclass(frozen=True)
class _Gap:
    """A row whose image could not be read."""

    row: int
    place: Place
    file: str
    reason: str


@dataclass(frozen=True)
class _Rest:
    """What a worker makes beside the images; a batch, but for the gaps."""

    labels: Int64Array
    shift: Float32Array | None
    gaps: list[_Gap]

    @property
    def lost(self) -> tuple[tuple[str, str], ...]:
        return tuple((gap.file, gap.reason) for gap in self.gaps)


class _Maker:
    """Makes views of the pictures of a split. axes: of the colour change, None without it."""

    def __init__(self, pictures: Pictures, recipe: Recipe, axes: Float32Array | None) -> None:
        self.pictures, self.recipe, self.axes = pictures, recipe, axes

    def order(self, places: list[Place]) -> _Order:
        """Return all that a worker must know to make these."""
        return _Order(places, [self.pictures.samples[index] for _, index in places])

    def from_memory(self, order: _Order) -> tuple[UInt8Array, _Rest]:
        """Make what is ordered, of pictures that are kept as far as they fit."""
        return self._make(order, lambda index, _sample: self.pictures.picture(index))

    def from_files(self, order: _Order) -> tuple[UInt8Array, _Rest]:
        """Make what is ordered in a worker process, which keeps nothing and leaves the list of all samples alone."""
        return self._make(order, lambda _index, sample: self.pictures.decode(sample))

    def _make(self, order: _Order, read: Callable[[int, Sample], Picture]) -> tuple[UInt8Array, _Rest]:
        images = np.zeros((len(order.places), self.recipe.crop, self.recipe.crop, 3), np.uint8)
        gaps = []
        for row, (place, sample) in enumerate(zip(order.places, order.samples, strict=True)):
            try:
                images[row] = self._view(read(place[1], sample), place)
            except UNREADABLE as error:
                gaps.append(_Gap(row, place, sample.file, str(error)))
        labels = np.array([sample.label for sample in order.samples], dtype=np.int64)
        return images, _Rest(labels, self._shift(order.places), gaps)

    def _view(self, picture: Picture, place: Place) -> UInt8Array:
        epoch, index = place
        if epoch is None:
            return central_view(picture, self.recipe.evaluation_scale, self.recipe.crop)
        return training_view(picture, self.recipe, epoch, index)

    def _shift(self, places: list[Place]) -> Float32Array | None:
        if self.axes is None:
            return None
        shifts = [color_shift(self.recipe, self.axes, epoch, index) for epoch, index in places if epoch is not None]
        return np.array(shifts, dtype=np.float32).reshape(-1, 3)

    def mend(self, images: UInt8Array, rest: _Rest) -> None:
        """Put other images into the gaps of a training batch; see `training_batches`."""
        for gap in rest.gaps:
            place, picture = self._substitute(gap)
            images[gap.row] = self._view(picture, place)
            rest.labels[gap.row] = self.pictures.samples[place[1]].label
            if rest.shift is not None:
                rest.shift[gap.row] = self._shift([place])

    def _substitute(self, gap: _Gap) -> tuple[Place, Picture]:
        epoch, index = gap.place
        assert epoch is not None, "only training batches are mended"
        random = random_stream(self.recipe.seed, SUBSTITUTE, epoch, index)
        for other in random.integers(len(self.pictures), size=TRIES):
            try:
                return (epoch, int(other)), self.pictures.picture(int(other))
            except UNREADABLE:
                continue
        raise DatasetError(
            f"{self.pictures.dataset.location}: {gap.file} could be read when the training began, and {TRIES} other "
            f"images, too, but none of them now ({gap.reason}). See whether the dataset is still there; the same "
            "command goes on from the last saved state"
        )


def _made(
    maker: _Maker, places: Iterable[list[Place]], largest: int, workers: int | None, *, pin: bool, here: int
) -> Iterator[tuple[UInt8Array, _Rest]]:
    """Yield what is made of each list of places, in their order. largest: places of a list at most."""
    count = max(1, WORKERS // here) if workers is None else workers
    orders = map(maker.order, places)
    if count and not maker.pictures.fit:
        size = 3 * largest * maker.recipe.crop**2
        yield from map_in_processes(maker.from_files, orders, count, size, pin=pin, here=here)
        return
    for images, rest in map_ahead(maker.from_memory, orders, count) if count else map(maker.from_memory, orders):
        yield (torch.from_numpy(images).pin_memory().numpy() if pin else images), rest
