"""Training views and their order, as pure functions of (seed, epoch, image).

There is no random state: resuming, the number of workers and the image cache do not affect the views.
Source: PReLU-nets, section 4 "Training": scale jitter, random crop, horizontal flip.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ...evaluator.arrays import Float32Array, UInt8Array
from ...evaluator.imaging.resize import DecodedImage, resize_part, resized_size
from ..recipe import Recipe
from .image_cache import TRAINING_LONG_SIDE_CAP

ORDER, VIEW, DROPOUT, COLOR, SUBSTITUTE = range(5)  # independent random streams of one seed


def random_stream(seed: int, stream: int, first: int, second: int = 0) -> np.random.Generator:
    """Return the generator of one stream; always four numbers, since numpy treats (1, 2) and (1, 2, 0) as equal."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, stream, first, second))))


def training_view(image: DecodedImage, recipe: Recipe, epoch: int, index: int) -> UInt8Array:
    """Return the view of image `index` in an epoch: uint8 (crop, crop, 3).

    The scale is drawn from the recipe's range, the crop is any crop of the resized image, and half of the views are
    mirrored. Only the cropped part is resized; benchmarks/results/loading.md states the saving.
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
    """Return the order of the images in an epoch, a permutation of 0 … images−1."""
    return random_stream(seed, ORDER, epoch).permutation(images)


def view_keys_of_step(recipe: Recipe, step: int, images: int) -> list[tuple[int, int]]:
    """Return (epoch, image index) of each row of a batch. Batches run across the end of an epoch."""
    positions = range(step * recipe.batch, (step + 1) * recipe.batch)
    orders = {
        epoch: epoch_order(recipe.seed, epoch, images) for epoch in {position // images for position in positions}
    }
    return [(position // images, int(orders[position // images][position % images])) for position in positions]


# Krizhevsky's color augmentation: shifts brightness and tint of a view along the axes on which the training set varies.
#
# Source: Krizhevsky, Sutskever, Hinton 2012, section 4.1 ("altering the intensities of the RGB channels"), used in
# PReLU-nets, section 4 "Training". The vector [p1, p2, p3][a1·l1, a2·l2, a3·l3] is added to every pixel of a view: p
# are the eigenvectors of the covariance of the RGB values, a are drawn from N(0, 0.1²) once per view. In the paper l
# are the eigenvalues; here they are their square roots, the standard deviations, as in Krizhevsky's own cuda-convnet
# (`color_stdevs`): an eigenvalue is a variance, in squared pixel values, and would shift a view by hundreds.
# fb.resnet.torch multiplies by the eigenvalues of pixels from 0 to 1: shifts that are 2 to 15 times smaller.


def color_axes(count: int, sums: Sequence[int], products: Sequence[Sequence[int]]) -> Float32Array:
    """Return the axes along which RGB values vary: float32 (3, 3), columns of length sqrt(eigenvalue), longest first.

    count: number of pixels; sums: of each channel's values, 0-255; products: 3x3, sums of the products of two channels.
    These are Python integers, so that the covariance is rounded only once. The axes times their transpose are the
    covariance. The sign of an axis makes its largest component positive.
    """
    # In floats, E[xy] − E[x]·E[y] cancels for nearly uniform images; multiplied by count², both terms are integers.
    numerators = [[count * products[i][j] - sums[i] * sums[j] for j in range(3)] for i in range(3)]
    covariance = np.array([[entry / count**2 for entry in row] for row in numerators])
    values, vectors = np.linalg.eigh(covariance)
    axes = vectors * np.sqrt(np.maximum(values, 0))  # rounding may leave −1e-13 where there is no variation
    axes = axes[:, ::-1]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None], axis=0)
    return np.asarray(axes * np.where(largest < 0, -1, 1), dtype=np.float32)


def color_shift(recipe: Recipe, axes: Float32Array, epoch: int, index: int) -> Float32Array:
    """Return the shift of all pixels of image `index` in an epoch: float32 (3,), RGB, in pixel values of 0-255.

    axes: from `color_axes`; recipe.color: standard deviation of the coefficients, 0.1 in the paper. The shift depends
    on (seed, epoch, index) only and has its own random stream, so turning it off leaves everything else unchanged.

    It is added in floats after the mean is subtracted, so the sum is not clipped to 0-255. Clipping would affect bright
    and dark pixels most and shift the mean.
    """
    coefficients = recipe.color * random_stream(recipe.seed, COLOR, epoch, index).standard_normal(3)
    shift = (axes * coefficients).sum(axis=1)  # a matrix product would depend on the library's summation order
    return np.asarray(shift, dtype=np.float32)


# Dropout as a pure function of (seed, step, row), so that it does not depend on which process trains on a row.
#
# Source: PReLU-nets, section 4 "Training": 50 % on the first two fc layers.


def dropout_factors(
    seed: int, step: int, rows: range, widths: tuple[int, int], rate: float
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the dropout factors of the outputs of fc1 and fc2 in a step, float32 (rows, width) each.

    rows: of the step's global batch; widths: of fc1 and fc2; rate: probability of a factor of 0, in [0, 1). The other
    factors are 1/(1−rate), which preserves the expectation, so evaluation needs no factor. The probability is exact to
    2⁻¹⁷ (16-bit draws).
    """
    # One stream per step, drawn from row 0: creating a stream per row would cost more than drawing the numbers.
    size = (rows.stop, sum(widths))
    drawn = random_stream(seed, DROPOUT, step).integers(2**16, size=size, dtype=np.uint16)[rows.start :]
    factors = (drawn >= round(rate * 2**16)) * np.float32(1 / (1 - rate))
    return factors[:, : widths[0]], factors[:, widths[0] :]
