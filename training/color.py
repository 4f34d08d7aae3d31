"""Krizhevsky's colour change: a view becomes brighter, darker or of another tint, as the training set's pixels vary.

Source: Krizhevsky, Sutskever, Hinton 2012, section 4.1 ("altering the intensities of the RGB channels"), which
PReLU-nets, section 4 "Training", takes over. To each pixel of a view the same [p1, p2, p3][a1·l1, a2·l2, a3·l3] is
added: p are the eigenvectors of the covariance of the RGB values, a are drawn from N(0, 0.1²) for each view anew. The
paper calls l the eigenvalues; here they are their square roots, as in the code that is in use since (fb.resnet.torch):
an eigenvalue is a variance, in levels², and would shift a view by hundreds of levels.
"""

from collections.abc import Sequence

import numpy as np

from prelunet.training.augmentation import COLOR, random_stream
from prelunet.training.pictures import FloatArray
from prelunet.training.recipe import Recipe


def color_axes(count: int, sums: Sequence[int], products: Sequence[Sequence[int]]) -> FloatArray:
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


def color_shift(recipe: Recipe, axes: FloatArray, epoch: int, index: int) -> FloatArray:
    """Return what is added to all pixels of image `index` in an epoch: float32 (3,), RGB, in levels of 0-255.

    axes: of `color_axes`; recipe.color: standard deviation of the coefficients, the paper's 0.1. A function of (seed,
    epoch, index) alone, drawn from a stream of its own: with the change off, all other views are the same.

    The sum is not cut at 0 and 255: it is taken after the mean is subtracted, in floats, which have no ends; and
    cutting would take the more away, the brighter or darker a pixel is, so that the mean would move.
    """
    coefficients = recipe.color * random_stream(recipe.seed, COLOR, epoch, index).standard_normal(3)
    shift = (axes * coefficients).sum(axis=1)  # not a matrix product: libraries order its sums differently
    return np.asarray(shift, dtype=np.float32)
