"""Which answers fit a net: paired differences between candidates on the same images, with their uncertainty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ...evaluator.arrays import Float64Array, Int64Array
from ...evaluator.reporting.paired import NO_IMAGES, PairedErrors
from .measure import TEMPERATURES

# Differences to a reference output, as parts of its largest number: of pipelines that are equal up to the rounding of
# kernels, and of one that is equal in any case. What differs thrice as much as the best is another.
EXACT, _EQUAL, _ANOTHER = 1e-3, 1e-5, 3
_SAME = 1e-5  # difference of losses between candidates that give the net the same input
# Nets trained on random crops fit test images that show objects larger than their own preprocessing does (Touvron et
# al. 2019). So a geometry or filter is only excluded if its loss is larger by more than this part, or this many nats.
TOLERATED, _NATS = 0.1, 0.02
_MIN_GAIN_FROM_REORDERING = 0.2  # of the images


@dataclass(frozen=True)
class Standing:
    """How a candidate compares with the best one on the images that both have seen.

    kept: whether it cannot be told apart from the best; loss: mean log loss, or the largest difference to a reference;
    errors: with labels, those of the best and of this one.
    """

    kept: bool
    loss: float
    errors: PairedErrors = NO_IMAGES


def by_labels(values: Float64Array, error: float, tolerated: float = 0.0) -> list[Standing]:
    """Compare candidates by the log loss of the true class, each at the temperature that suits it best.

    values: (candidates, images, values) of `Labels`; error: probability that the true answer is not kept, shared among
    the comparisons (Bonferroni); tolerated: part by which its loss may be larger than that of the best.
    """
    losses = values[:, :, : len(TEMPERATURES)]
    losses = np.stack([own[:, place] for own, place in zip(losses, losses.mean(1).argmin(1), strict=True)])
    wrong = values[:, :, -1] > 0
    best = int(losses.mean(1).argmin())
    level = 1 - error / max(1, len(values) - 1)
    standings = []
    for own, failed in zip(losses, wrong, strict=True):
        difference = own - (1 + tolerated) * losses[best] - (_NATS if tolerated else _SAME)
        kept = bool(difference.mean() <= _quantile(level, len(own)) * _standard_error(difference))
        counts = np.bincount(2 * wrong[best] + failed, minlength=4)
        neither, only_own, only_best, both = map(int, counts)
        standings.append(Standing(kept, float(own.mean()), PairedErrors(both, only_best, only_own, neither)))
    return standings


def by_references(values: Float64Array) -> list[Standing]:
    """Compare candidates by their largest difference to the reference outputs. values: (candidates, images, 1)."""
    largest = values[:, :, 0].max(1)
    limit = max(_EQUAL, _ANOTHER * float(largest.min()) if largest.min() <= EXACT else float(largest.min()))
    return [Standing(bool(each <= limit), float(each)) for each in largest]


def better_than_chance(values: Float64Array, error: float) -> bool:
    """Return whether a candidate knows the labels: its loss is smaller than expected with those of other images.

    values: (images, values) of `Labels`.
    """
    count = len(TEMPERATURES)
    place = int(values[:, :count].mean(0).argmin())
    difference = values[:, count + place] - values[:, place]
    return bool(difference.mean() > _quantile(1 - error, len(values)) * _standard_error(difference))


def fits_another_order(answers: Int64Array, labels: Int64Array, known: float) -> bool:
    """Return whether a net would know far more labels if its outputs meant other classes.

    answers: index of each image's best output; labels: of its class; known: share of labels that it knows, perhaps
    given its images in another way. What counts is beyond what shuffled labels give: with as many classes as images,
    every output has a class that suits it.
    """
    rng = np.random.default_rng(0)

    def suited(labels: Int64Array) -> float:
        table = np.zeros((answers.max() + 1, labels.max() + 1))
        np.add.at(table, (answers, labels), 1)
        return float(table.max(1).sum() / len(labels))

    by_chance = float(np.mean([suited(rng.permutation(labels)) for _ in range(20)]))
    return (suited(labels) - by_chance) / max(1 - by_chance, 0.1) > known + _MIN_GAIN_FROM_REORDERING


def ranked(standings: Sequence[Standing]) -> list[int]:
    """Return the places of candidates, best first."""
    return sorted(range(len(standings)), key=lambda place: (not standings[place].kept, standings[place].loss))


def _standard_error(numbers: Float64Array) -> float:
    return float(numbers.std(ddof=1)) / math.sqrt(len(numbers))


def _quantile(level: float, images: int) -> float:
    """Return a quantile of Student's t, by the first two terms of its expansion (Cornish and Fisher 1938)."""
    z, freedom = NormalDist().inv_cdf(level), images - 1
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
