"""Two answers to the same images: is the difference of their errors more than chance?

Differences are in percentage points, B - A: below 0 where B is better. Interval of a difference: R. G. Newcombe,
Statistics in Medicine 17 (1998) 2635. Test: Q. McNemar, Psychometrika 12 (1947) 153, exact. Many tests at once:
Y. Benjamini and Y. Hochberg, J. R. Statist. Soc. B 57 (1995) 289.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from prelunet.evaluator.reporting.statistics import CONFIDENCE, DECIMALS, error_percent

SIGNIFICANCE = 0.05  # a difference stands when chance alone would give one as large less often than this
P_DIGITS = 6  # significant digits of a p-value in a file


@dataclass(frozen=True)
class PairedErrors:
    """The same images judged twice: how many are wrong in both, only in A, only in B, in neither."""

    both: int
    only_a: int
    only_b: int
    neither: int

    @property
    def images(self) -> int:
        """Return how many images were judged."""
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def wrong_a(self) -> int:
        """Return how many images are wrong in A, in B too or not."""
        return self.both + self.only_a

    @property
    def wrong_b(self) -> int:
        """Return how many images are wrong in B, in A too or not."""
        return self.both + self.only_b

    @property
    def difference(self) -> float | None:
        """Return the difference of the errors, B - A, in points rounded to 4 decimals; None without images."""
        return error_percent(self.only_b - self.only_a, self.images)

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the difference, (low, high) in points."""
        return difference_interval(self.both, self.only_a, self.only_b, self.neither)

    @property
    def p(self) -> float:
        """Return how likely so large a difference, either way, is by chance: McNemar's exact test."""
        return mcnemar(self.only_a, self.only_b)

    def __add__(self, other: "PairedErrors") -> "PairedErrors":
        """Return the counts over the images of both."""
        return PairedErrors(
            self.both + other.both,
            self.only_a + other.only_a,
            self.only_b + other.only_b,
            self.neither + other.neither,
        )


NO_IMAGES = PairedErrors(0, 0, 0, 0)


@lru_cache(maxsize=4096)  # classes of the same size share a few pairs; one test takes 0.2 ms
def mcnemar(only_a: int, only_b: int) -> float:
    """Return the two-sided p-value of McNemar's exact test, 0 to 1, to 6 significant digits.

    only_a, only_b: images that are wrong in A alone and in B alone. If neither is better, each of these is a throw of
    a fair coin; all other images say nothing of the difference. p is 1 where there are as many of each, or none.
    """
    if only_a == only_b:
        return 1.0
    from scipy import stats  # here: it takes 0.4 s to import

    return float(f"{stats.binomtest(only_a, only_a + only_b).pvalue:.{P_DIGITS}g}")


def adjusted_p(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of many tests adjusted after Benjamini and Hochberg, in the same order.

    Of the tests whose adjusted value is at most 0.05, no more than 5 % are expected to be chance.
    """
    if not p_values:
        return []
    from scipy import stats

    return [float(f"{value:.{P_DIGITS}g}") for value in stats.false_discovery_control(p_values, method="bh")]


@lru_cache(maxsize=4096)
def difference_interval(both: int, only_a: int, only_b: int, neither: int) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two errors on the same images: (low, high) in points, 4 decimals.

    Newcombe's method 10: the distances from each error to its Wilson bounds, added like the sides of a triangle whose
    angle follows from the correlation of the two. It keeps a width where no image changed, and stays within -100..100.
    Without images it is (-100, 100): nothing is known.
    """
    images = both + only_a + only_b + neither
    if images == 0:
        return (-100.0, 100.0)
    a, below_a, above_a = _wilson_distances(both + only_a, images)
    b, below_b, above_b = _wilson_distances(both + only_b, images)
    phi = _correlation(both, only_a, only_b, neither)
    low = b - a - math.sqrt(below_b**2 - 2 * phi * below_b * above_a + above_a**2)
    high = b - a + math.sqrt(above_b**2 - 2 * phi * above_b * below_a + below_a**2)
    return (round(100 * low, DECIMALS), round(100 * high, DECIMALS))


def _correlation(both: int, only_a: int, only_b: int, neither: int) -> float:
    """Return the correlation of the two judgements, a positive one made smaller by Newcombe's half image.

    0 where one of them is the same for all images.
    """
    images = both + only_a + only_b + neither
    product = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    if product == 0:
        return 0.0
    together = both * neither - only_a * only_b
    if together > 0:
        return max(together - images / 2, 0.0) / math.sqrt(product)
    return together / math.sqrt(product)


@lru_cache(maxsize=4096)
def _wilson_distances(errors: int, total: int) -> tuple[float, float, float]:
    """Return the error (0 to 1) and how far below and above it its Wilson bounds lie, not rounded."""
    from scipy import stats

    interval = stats.binomtest(errors, total).proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    rate = errors / total
    return rate, rate - float(interval.low), float(interval.high) - rate
