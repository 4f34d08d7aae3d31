"""Training views and their order, as pure functions of (seed, epoch, image).

No random state is carried along: resuming, the number of workers and what is in memory change nothing.
Source: PReLU-nets, section 4 "Training": scale jitter, random crop, horizontal flip.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.arrays import Float32Array, UInt8Array
from prelunet.evaluator.imaging.resize import DecodedImage, resize_part, resized_size
from prelunet.training.data.image_cache import TRAINING_LONG_SIDE_CAP
from prelunet.training.recipe import Recipe

ORDER, VIEW, DROPOUT, COLOR, SUBSTITUTE = range(5)  # independent random streams of one seed


def random_stream(seed: int, stream: int, first: int, second: int = 0) -> np.random.Generator:
    """Return the generator of one purpose: four numbers always, since numpy takes (1, 2) and (1, 2, 0) for the same."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, stream, first, second))))


def training_view(image: DecodedImage, recipe: Recipe, epoch: int, index: int) -> UInt8Array:
    """Return what the net sees of image `index` in an epoch: uint8 (crop, crop, 3).

    A scale of the recipe's range, any crop of the resized image, mirrored in half of the cases. Only the crop is ever
    resized: benchmarks/training/loading.py has what that saves.
    """
    random = random_stream(recipe.seed, VIEW, epoch, index)
    low, high = recipe.scales
    height, width = (image.height, image.width) if not isinstance(image, np.ndarray) else image.shape[:2]
    scale = int(random.integers(low, high, endpoint=True))
    sides = resized_size(height, width, scale, TRAINING_LONG_SIDE_CAP)
    top, left = (int(random.integers(0, side - recipe.crop, endpoint=True)) for side in sides)
    mirrored = recipe.mirror and random.random() < 0.5
    view = resize_part(image, scale, (top, left), (recipe.crop, recipe.crop), TRAINING_LONG_SIDE_CAP)
    return view[:, ::-1] if mirrored else view


@lru_cache(maxsize=2)  # a batch may span two epochs; a million images take 20 ms to permute
def epoch_order(seed: int, epoch: int, images: int) -> npt.NDArray[np.int64]:
    """Return the order of the images in an epoch: a permutation of 0 … images−1."""
    return random_stream(seed, ORDER, epoch).permutation(images)


def view_keys_of_step(recipe: Recipe, step: int, images: int) -> list[tuple[int, int]]:
    """Return (epoch, image index) of each place in a batch; epochs follow one another without a gap."""
    places = range(step * recipe.batch, (step + 1) * recipe.batch)
    orders = {epoch: epoch_order(recipe.seed, epoch, images) for epoch in {place // images for place in places}}
    return [(place // images, int(orders[place // images][place % images])) for place in places]


# Krizhevsky's colour change: a view becomes brighter, darker or of another tint, as the training set's pixels vary.
#
# Source: Krizhevsky, Sutskever, Hinton 2012, section 4.1 ("altering the intensities of the RGB channels"), which PReLU-
# nets, section 4 "Training", takes over. To each pixel of a view the same [p1, p2, p3][a1·l1, a2·l2, a3·l3] is added: p
# are the eigenvectors of the covariance of the RGB values, a are drawn from N(0, 0.1²) for each view anew. The paper
# calls l the eigenvalues; here they are their square roots, as in the code that is in use since (fb.resnet.torch): an
# eigenvalue is a variance, in levels², and would shift a view by hundreds of levels.


def color_axes(count: int, sums: Sequence[int], products: Sequence[Sequence[int]]) -> Float32Array:
    """Return the axes along which RGB values vary: float32 (3, 3), columns of length sqrt(eigenvalue), longest first.

    count: of pixels; sums: of each channel's values, 0-255; products: 3x3, sums of the products of two channels. Whole
    numbers of any size, so that the covariance is rounded once. Axes times their transpose are the covariance. Of the
    two directions of an axis it is the one whose largest component is positive.
    """
    # E[xy] − E[x]·E[y] in floats would lose what an almost even set has; over count² both are whole.
    numerators = [[count * products[i][j] - sums[i] * sums[j] for j in range(3)] for i in range(3)]
    covariance = np.array([[entry / count**2 for entry in row] for row in numerators])
    values, vectors = np.linalg.eigh(covariance)
    axes = vectors * np.sqrt(np.maximum(values, 0))  # rounding may leave −1e-13 where there is no variation
    axes = axes[:, ::-1]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None], axis=0)
    return np.asarray(axes * np.where(largest < 0, -1, 1), dtype=np.float32)


def color_shift(recipe: Recipe, axes: Float32Array, epoch: int, index: int) -> Float32Array:
    """Return what is added to all pixels of image `index` in an epoch: float32 (3,), RGB, in levels of 0-255.

    axes: of `color_axes`; recipe.color: standard deviation of the coefficients, the paper's 0.1. A function of (seed,
    epoch, index) alone, drawn from a stream of its own: with the change off, all other views are the same.

    The sum is not cut at 0 and 255: it is taken after the mean is subtracted, in floats, which have no ends; and
    cutting would take the more away, the brighter or darker a pixel is, so that the mean would move.
    """
    coefficients = recipe.color * random_stream(recipe.seed, COLOR, epoch, index).standard_normal(3)
    shift = (axes * coefficients).sum(axis=1)  # not a matrix product: libraries order its sums differently
    return np.asarray(shift, dtype=np.float32)


# Dropout as a pure function of (seed, step, row), so that a row loses the same units whichever process trains on it.
#
# Source: PReLU-nets, section 4 "Training": 50 % on the first two fc layers.


def dropout_factors(
    seed: int, step: int, rows: range, width: int, rate: float
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return what the outputs of fc1 and of fc2 are multiplied by in a step, float32 (rows, width) each.

    rows: places in the step's global batch; rate: probability of 0, in [0, 1). The others are 1/(1−rate), so that the
    expectation stays and evaluation needs no factor. Drawn with 16 bits: the probability is exact to 2⁻¹⁷.
    """
    # One stream for a step, drawn from row 0 on: a stream for each row would cost more than its numbers.
    size = (rows.stop, 2 * width)
    drawn = random_stream(seed, DROPOUT, step).integers(2**16, size=size, dtype=np.uint16)[rows.start :]
    factors = (drawn >= round(rate * 2**16)) * np.float32(1 / (1 - rate))
    return factors[:, :width], factors[:, width:]
