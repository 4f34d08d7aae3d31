"""Paired comparison of two runs on the same images: errors, intervals and significance of their difference.

Differences are in percentage points, B - A; negative where B is better. Interval of a difference: R. G. Newcombe,
Statistics in Medicine 17 (1998) 2635. Test: Q. McNemar, Psychometrika 12 (1947) 153, exact. Many tests at once:
Y. Benjamini and Y. Hochberg, J. R. Statist. Soc. B 57 (1995) 289.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..errors import import_from_extra
from .statistics import DECIMALS, error_percent, wilson_bounds

SIGNIFICANCE = 0.05  # level at which a difference is significant
P_DIGITS = 6  # significant digits of a p-value in a file


@dataclass(frozen=True)
class PairedErrors:
    """Numbers of images that are wrong in both runs, only in A, only in B, and in neither."""

    both: int
    only_a: int
    only_b: int
    neither: int

    @property
    def images(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def wrong_a(self) -> int:
        return self.both + self.only_a

    @property
    def wrong_b(self) -> int:
        return self.both + self.only_b

    @property
    def difference(self) -> float | None:
        """Return the difference of the errors, B - A, in points to 4 decimals; None without images."""
        return error_percent(self.only_b - self.only_a, self.images)

    @property
    def interval(self) -> list[float] | None:
        """Return the 95 % interval of the difference, [low, high] in points; None without images."""
        return list(difference_interval(self.both, self.only_a, self.only_b, self.neither)) if self.images else None

    @property
    def p(self) -> float:
        """Return the p-value of McNemar's exact test, two-sided."""
        return mcnemar(self.only_a, self.only_b)

    def __add__(self, other: "PairedErrors") -> "PairedErrors":
        """Return the sums of the counts."""
        return PairedErrors(
            self.both + other.both, self.only_a + other.only_a, self.only_b + other.only_b, self.neither + other.neither
        )


NO_IMAGES = PairedErrors(0, 0, 0, 0)


@lru_cache(maxsize=4096)  # classes of equal size share a few pairs; one test takes 0.2 ms
def mcnemar(only_a: int, only_b: int) -> float:
    """Return the two-sided p-value of McNemar's exact test, 0 to 1, to 6 significant digits.

    only_a, only_b: images that are wrong only in A and only in B. If neither run is better, each of these is a toss of
    a fair coin; all other images carry no information on the difference. p is 1 if the two counts are equal.
    """
    if only_a == only_b:
        return 1.0
    stats = import_from_extra("scipy.stats")
    return float(f"{stats.binomtest(only_a, only_a + only_b).pvalue:.{P_DIGITS}g}")


def adjusted_p(p_values: Sequence[float]) -> list[float]:
    """Return the Benjamini-Hochberg adjusted p-values of many tests, in the same order.

    Of the tests whose adjusted value is at most 0.05, no more than 5 % are expected to be false discoveries.
    """
    if not p_values:
        return []
    stats = import_from_extra("scipy.stats")
    return [float(f"{value:.{P_DIGITS}g}") for value in stats.false_discovery_control(p_values, method="bh")]


@lru_cache(maxsize=4096)
def difference_interval(both: int, only_a: int, only_b: int, neither: int) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two errors on the same images: (low, high) in points, 4 decimals.

    Newcombe's method 10: the distances from each error to its Wilson bounds, added like the sides of a triangle whose
    angle follows from the correlation of the two. The interval has a width even if no image changed, and stays within
    -100..100. At least one image is needed.
    """
    images = both + only_a + only_b + neither
    a, b = (both + only_a) / images, (both + only_b) / images
    (low_a, high_a), (low_b, high_b) = wilson_bounds(both + only_a, images), wilson_bounds(both + only_b, images)
    below_a, above_a, below_b, above_b = a - low_a, high_a - a, b - low_b, high_b - b
    phi = _correlation(both, only_a, only_b, neither)
    low = b - a - math.sqrt(below_b**2 - 2 * phi * below_b * above_a + above_a**2)
    high = b - a + math.sqrt(above_b**2 - 2 * phi * above_b * below_a + below_a**2)
    return (round(100 * low, DECIMALS), round(100 * high, DECIMALS))


def _correlation(both: int, only_a: int, only_b: int, neither: int) -> float:
    """Return the correlation of the two results, with Newcombe's continuity correction if it is positive.

    0 if one of the runs is right on all images or wrong on all images.
    """
    images = both + only_a + only_b + neither
    product = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    if product == 0:
        return 0.0
    together = both * neither - only_a * only_b
    if together > 0:
        return max(together - images / 2, 0.0) / math.sqrt(product)
    return together / math.sqrt(product)
