"""Training views and their order, as pure functions of (seed, epoch, image).

No random state is carried along: resuming, the number of workers and what is in memory change nothing.
Source: PReLU-nets, section 4 "Training": scale jitter, random crop, horizontal flip.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.imaging.resize import Picture, resize_part, resized_size
from prelunet.training.pictures import TRAINING_CAP, UInt8Array
from prelunet.training.recipe import Recipe

ORDER, VIEW, DROPOUT, COLOR, SUBSTITUTE = range(5)  # independent random streams of one seed


def random_stream(seed: int, stream: int, first: int, second: int = 0) -> np.random.Generator:
    """Return the generator of one purpose: four numbers always, since numpy takes (1, 2) and (1, 2, 0) for the same."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, stream, first, second))))


def training_view(image: Picture, recipe: Recipe, epoch: int, index: int) -> UInt8Array:
    """Return what the net sees of image `index` in an epoch: uint8 (crop, crop, 3).

    A scale of the recipe's range, any crop of the resized image, mirrored in half of the cases. Only the crop is ever
    resized: benchmarks/loading.py has what that saves.
    """
    random = random_stream(recipe.seed, VIEW, epoch, index)
    low, high = recipe.scales
    height, width = (image.height, image.width) if not isinstance(image, np.ndarray) else image.shape[:2]
    scale = int(random.integers(low, high, endpoint=True))
    sides = resized_size(height, width, scale, TRAINING_CAP)
    top, left = (int(random.integers(0, side - recipe.crop, endpoint=True)) for side in sides)
    mirrored = recipe.mirror and random.random() < 0.5
    view = resize_part(image, scale, (top, left), (recipe.crop, recipe.crop), TRAINING_CAP)
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
