"""A confidence sequence for the difference of two errors on the same images, which are looked at in random order.

Ordinary intervals, computed again and again, are wrong sooner or later: whoever looks often enough is fooled by chance.
A confidence sequence is right at all times at once, with 95 % probability, so an evaluation may stop as soon as it has
seen enough. It is about the difference over a finite set of images, drawn without replacement: after all of them it is
exact.

By betting (I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random variables by betting", J. R. Statist.
Soc. B 86 (2024) 1, sections 4 and 5). A bettor against "the difference is m" multiplies the capital by 1 + λ (d − m_t)
with each image, where d is −1, 0 or 1 (only A, neither or only B wrong) and m_t the mean of the images that are left if
m is true. If it is, the bets are fair, and the capital ever reaches 40 with a probability of at most 1/40 (Ville). So
an m against which a bettor gets that rich is excluded: on two sides, with an error of 5 % in total.
"""

import math

import numpy as np

from ..arrays import BoolArray, Float64Array, Int64Array
from .statistics import CONFIDENCE, DECIMALS

# The capital is divided among several bettors, who stake different shares, because the best one depends on the unknown
# difference: it is difference / discordant share. The largest part bets on 1 to 2 points where a tenth of the images
# are answered differently. Stakes grow as the images that are left grow few, and reveal more.
_STAKES = np.array([0.02, 0.05, 0.1, 0.2, 0.4])
_PARTS = np.array([0.15, 0.2, 0.4, 0.2, 0.05])
_LARGEST_STAKE = 0.49  # of the capital, so that no image can ruin a bettor
_DIVISION = 1.3  # what the division costs, about: the logarithm of the part of the best
_STEP = 1e-6  # of a bound; it is rounded to 4 decimals of a point
_ROUNDING = 1e-6  # images
EXCLUDED = math.log(2 / (1 - CONFIDENCE))  # logarithm of the capital, on each side


def bounds_of_all(differences: Int64Array, unknown: BoolArray, images: int) -> tuple[float, float]:
    """Return the bounds of the difference over a whole set of images, (low, high), in points.

    They hold with 95 % probability at all times at once.
    differences: int64 (t,), of the images so far in random order: 1 for those that only B gets wrong, −1 for those that
    only A does, else 0; unknown: bool (t,), those whose difference may be anything; images: of the whole set.
    """
    low = _lower_bound(np.where(unknown, -1, differences), images)
    high = -_lower_bound(np.where(unknown, -1, -differences), images)
    return round(100 * low, DECIMALS) + 0.0, round(100 * high, DECIMALS) + 0.0  # without negative zeros


def capital(differences: Int64Array, images: int, mean: float) -> Float64Array:
    """Return the logarithm of the largest capital so far of a bettor who bets that the mean is above `mean`, (t,).

    differences: int64 (t,), −1, 0 or 1; images: of the whole set; mean: over all of them, −1 to 1. Infinite from where
    the images that are left cannot bring the mean down to it. At EXCLUDED, it is excluded that the mean is no larger.
    """
    before, left = np.cumsum(differences) - differences, images - np.arange(len(differences))
    expected = (images * mean - before) / left  # of the next image; beyond 1 the mean cannot be reached from below
    stakes = np.minimum(_STAKES[:, None] * images / left, _LARGEST_STAKE)
    gains = np.log1p(stakes * (differences - np.clip(expected, -1, 1)))
    found = np.logaddexp.reduce(np.cumsum(gains, axis=1) + np.log(_PARTS)[:, None])
    found[np.cumsum(differences) - (left - 1) > images * mean + _ROUNDING] = np.inf
    return np.maximum.accumulate(found)


def _lower_bound(differences: Int64Array, images: int) -> float:
    """Return the largest mean over all images that is excluded from below, −1 to 1."""
    left = images - len(differences)
    low, high = (int(differences.sum()) - left) / images, (int(differences.sum()) + left) / images
    while high - low > _STEP:
        middle = (low + high) / 2
        low, high = (middle, high) if capital(differences, images, middle)[-1] >= EXCLUDED else (low, middle)
    return low


def expected_images(difference: float, discordant: float, images: int) -> int:
    """Return about how many images it takes to exclude a difference that is `difference` points from the true one.

    discordant: share of the images that only one of the two gets wrong, 0 to 1; images: of the whole set.
    """
    needed = 2 * discordant * (EXCLUDED + _DIVISION) / (images * (difference / 100) ** 2)
    return math.ceil(images * needed / (1 + needed))
