"""Training views and their order, as pure functions of (seed, epoch, image).

No random state is carried along: resuming, the number of threads and what is in memory change nothing.
Source: PReLU-nets, section 4 "Training": scale jitter, random crop, horizontal flip.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from evaluator.imaging.resize import Picture, resize_shorter_side
from training.pictures import TRAINING_CAP, WORKERS, Pictures, UInt8Array, map_ahead
from training.recipe import Recipe

ORDER, VIEW, DROPOUT = 0, 1, 2  # independent random streams of one seed


@dataclass(frozen=True)
class Batch:
    """images: uint8 (N, crop, crop, 3) RGB, mean not yet subtracted; labels: int64 (N,), class indices."""

    images: UInt8Array
    labels: npt.NDArray[np.int64]


def random_stream(seed: int, stream: int, first: int, second: int = 0) -> np.random.Generator:
    """Return the generator of one purpose: four numbers always, since numpy takes (1, 2) and (1, 2, 0) for the same."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, stream, first, second))))


def training_view(image: Picture, recipe: Recipe, epoch: int, index: int) -> UInt8Array:
    """Return what the net sees of image `index` in an epoch: uint8 (crop, crop, 3).

    A scale of the recipe's range, any crop of the resized image, mirrored in half of the cases.
    """
    random = random_stream(recipe.seed, VIEW, epoch, index)
    low, high = recipe.scales
    resized, _ = resize_shorter_side(image, int(random.integers(low, high, endpoint=True)), TRAINING_CAP)
    top, left = (int(random.integers(0, side - recipe.crop, endpoint=True)) for side in resized.shape[:2])
    mirrored = recipe.mirror and random.random() < 0.5
    view = resized[top : top + recipe.crop, left : left + recipe.crop]
    return view[:, ::-1] if mirrored else view


@lru_cache(maxsize=2)  # a batch may span two epochs; a million images take 20 ms to permute
def epoch_order(seed: int, epoch: int, images: int) -> npt.NDArray[np.int64]:
    """Return the order of the images in an epoch: a permutation of 0 … images−1."""
    return random_stream(seed, ORDER, epoch).permutation(images)


def places_of_step(recipe: Recipe, step: int, images: int) -> list[tuple[int, int]]:
    """Return (epoch, image index) of each place in a batch; epochs follow one another without a gap."""
    places = range(step * recipe.batch, (step + 1) * recipe.batch)
    orders = {epoch: epoch_order(recipe.seed, epoch, images) for epoch in {place // images for place in places}}
    return [(place // images, int(orders[place // images][place % images])) for place in places]


def make_batch(pictures: Pictures, recipe: Recipe, step: int) -> Batch:
    """Return the batch of a step, counted from 0."""
    places = places_of_step(recipe, step, len(pictures))
    views = [training_view(pictures.picture(index), recipe, epoch, index) for epoch, index in places]
    labels = [pictures.samples[index].label for _, index in places]
    return Batch(np.stack(views), np.array(labels, dtype=np.int64))


def training_batches(pictures: Pictures, recipe: Recipe, first_step: int, workers: int = WORKERS) -> Iterator[Batch]:
    """Yield the batches from `first_step` to the recipe's end, made ahead of time by threads."""
    return map_ahead(lambda step: make_batch(pictures, recipe, step), range(first_step, recipe.steps), workers)


def evaluation_batches(pictures: Pictures, recipe: Recipe, size: int, workers: int = WORKERS) -> Iterator[Batch]:
    """Yield the central views of all images in dataset order, up to `size` at a time."""

    def make(start: int) -> Batch:
        some = range(start, min(start + size, len(pictures)))
        views = [pictures.central_view(index, recipe.evaluation_scale, recipe.crop) for index in some]
        labels = [pictures.samples[index].label for index in some]
        return Batch(np.stack(views), np.array(labels, dtype=np.int64))

    return map_ahead(make, range(0, len(pictures), size), workers)
