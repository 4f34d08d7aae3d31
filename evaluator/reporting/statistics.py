"""Error rates with intervals, calibration, ranks. Errors are in percent, as in papers (docs/statistics.md).

Pure functions of counts and arrays; the results are deterministic.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

TOPS = (1, 5)  # an image is a top-k error when the rank of its class exceeds k
CONFIDENCE = 0.95
DECIMALS = 4  # of every percentage in a report
RESAMPLES = 10_000
SEED = 1502_01852  # of every bootstrap, so that the same run has the same interval; the paper's arXiv number
BINS = 15  # of the reliability diagram, as in Guo et al. 2017
HISTOGRAM_BINS = 20  # of the scores of right and wrong answers: 0.05 wide
NO_MACRO_INTERVAL = "no interval: a class has only one image"  # where `macro_interval` is None
RANK_STEPS = (1, 2, 3, 6, 11, 21, 51, 101)  # first rank of each step; the last step ends at the number of classes


def error_percent(errors: int, total: int) -> float | None:
    """Return the error in percent, rounded to 4 decimals; None if total is 0."""
    return round(100.0 * errors / total, DECIMALS) if total else None


def wilson_bounds(errors: int, total: int) -> tuple[float, float]:
    """Return the Wilson 95 % interval of an error rate: (low, high), 0 to 1, not rounded. total: above 0.

    The interval stays within 0..1 and has a width even at 0 errors, where the usual ± interval has none.
    E. B. Wilson, JASA 22 (1927).
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    center = (errors + z**2 / 2) / (total + z**2)
    half = z * math.sqrt(errors * (total - errors) / total + z**2 / 4) / (total + z**2)
    return (center - half if errors else 0.0, center + half if errors < total else 1.0)


def wilson_interval(errors: int, total: int) -> list[float] | None:
    """Return the Wilson 95 % interval of an error rate, [low, high], percent to 4 decimals; None if total is 0."""
    return [round(100.0 * bound, DECIMALS) for bound in wilson_bounds(errors, total)] if total else None


def macro_error(wrong: Sequence[int], totals: Sequence[int]) -> float | None:
    """Return the mean over classes of their error, in percent; every class has the same weight.

    wrong, totals: per class, the number of wrong images and of all images; for the difference of two runs, `wrong` is
    the difference of their counts. Classes without images do not count; None if no class has images.
    """
    errors = [errors / total for errors, total in zip(wrong, totals, strict=True) if total]
    return round(100.0 * float(np.mean(errors)), DECIMALS) if errors else None


def macro_interval(plus: Sequence[int], minus: Sequence[int], totals: Sequence[int]) -> list[float] | None:
    """Return the 95 % percentile bootstrap interval of the mean over classes of (plus - minus) / total, in percent.

    plus, minus, totals: per class, the number of images that count +1, that count -1, and of all images. For the macro
    error of one run, `plus` counts the wrong images and `minus` is 0; for the difference of two, `plus` counts the
    images that only one run gets wrong and `minus` those that only the other does. Images are resampled within each
    class; the classes are fixed. Classes without images do not count. None if no class has images, or if one has a
    single image: every resample would be the same, as if its error were known exactly.
    Deterministic, rounded to 4 decimals. Efron and Tibshirani 1993, chapter 13.
    """
    if 1 in totals or not any(totals):
        return None
    # Resampling the n images of a class gives multinomial counts of plus, minus and rest. k classes with the same
    # n, plus and minus share the probabilities, so the sum of their draws is one multinomial draw of k * n. With
    # 50 images per class about 50 draws replace 1000, and only RESAMPLES numbers are in memory at a time.
    alike = Counter(group for group in zip(plus, minus, totals, strict=True) if group[2])
    generator = np.random.Generator(np.random.Philox(SEED))
    sums = np.zeros(RESAMPLES)
    for (up, down, total), classes in sorted(alike.items()):
        drawn = generator.multinomial(
            classes * total, [up / total, down / total, (total - up - down) / total], RESAMPLES
        )
        sums += (drawn[:, 0] - drawn[:, 1]) / total
    tail = (1 - CONFIDENCE) / 2
    bounds = np.quantile(100.0 * sums / alike.total(), [tail, 1 - tail])
    return [round(float(bound), DECIMALS) for bound in bounds]


@dataclass(frozen=True)
class CalibrationBin:
    """The images whose answer has a score in (low, high]; confidence and accuracy in percent."""

    low: float  # scores, 0..1
    high: float
    images: int
    confidence: float | None  # mean score of the answers; None without images
    accuracy: float | None  # share of right answers; None without images


@dataclass(frozen=True)
class HistogramBin:
    """The number of right and of wrong answers whose score is in (low, high]."""

    low: float  # scores, 0..1
    high: float
    right: int
    wrong: int


@dataclass(frozen=True)
class Calibration:
    """How well scores match accuracy. confidence, expected_error: percent."""

    confidence: float  # mean score of the answer
    expected_error: float  # expected calibration error
    bins: list[CalibrationBin]
    histogram: list[HistogramBin]


def calibration(scores: npt.ArrayLike, right: npt.ArrayLike) -> Calibration | None:
    """Compare the scores of the answers with their accuracy; None without images.

    scores: (images,), score of each answer, 0..1; right: bool (images,). The expected calibration error is the
    mean over images of |accuracy - confidence| of their bin; 15 bins of equal width, closed on the right.
    Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern Neural Networks", ICML 2017, Eq. 3.
    The histogram has 20 bins, closed on the right as well.
    """
    score = np.minimum(np.asarray(scores, dtype=np.float64), 1.0)  # half precision may exceed 1 slightly
    hit = np.asarray(right, dtype=bool)
    if not len(score):
        return None
    edges, of_bin = _equal_bins(score, BINS)
    images = np.bincount(of_bin, minlength=BINS)
    summed = np.bincount(of_bin, weights=score, minlength=BINS)
    hits = np.bincount(of_bin, weights=hit, minlength=BINS)
    bins = [
        CalibrationBin(
            low=float(edges[place]),
            high=float(edges[place + 1]),
            images=int(count),
            confidence=round(100.0 * float(summed[place]) / int(count), DECIMALS) if count else None,
            accuracy=round(100.0 * float(hits[place]) / int(count), DECIMALS) if count else None,
        )
        for place, count in enumerate(images)
    ]
    edges, of_bin = _equal_bins(score, HISTOGRAM_BINS)
    right_count, wrong_count = (np.bincount(of_bin[which], minlength=HISTOGRAM_BINS).tolist() for which in (hit, ~hit))
    return Calibration(
        confidence=round(100.0 * float(summed.sum()) / len(score), DECIMALS),
        expected_error=round(100.0 * float(np.abs(hits - summed).sum()) / len(score), DECIMALS),
        bins=bins,
        histogram=list(map(HistogramBin, edges[:-1].tolist(), edges[1:].tolist(), right_count, wrong_count)),
    )


def _equal_bins(score: npt.NDArray[np.float64], bins: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.intp]]:
    """Return the edges of bins of equal width from 0 to 1, and the bin of each score; an edge ends its lower bin."""
    edges = np.arange(bins + 1) / bins
    return edges, np.searchsorted(edges[1:], score, side="left")


@dataclass(frozen=True)
class RiskPoint:
    """The images whose answer has a score of at least `threshold`. coverage: their share of all images, percent."""

    threshold: float  # 0..1, not rounded
    images: int
    coverage: float
    top1_wrong: int
    top1_error: float  # percent of these images
    top1_interval: list[float] | None  # Wilson, percent; never None: a point has images


@dataclass(frozen=True)
class RiskCoverage:
    """The error of a model that answers only where its score is high enough."""

    area: float  # under the curve, percent: mean over images of the error at the image's own score as threshold
    points: list[RiskPoint]  # by ascending coverage


def risk_coverage(scores: npt.ArrayLike, right: npt.ArrayLike) -> RiskCoverage | None:
    """Return the error of the answers that stay above a threshold of the score; None without images.

    scores: (images,), score of each answer, 0..1; right: bool (images,). For each whole percent of coverage there is
    the point with the highest threshold that keeps at least as many images; images of equal scores stay together, so
    that some percents share a point, listed once. Thresholds depend on the scores alone, never on what is right, so
    that each point's Wilson interval holds. Area: AURC of Geifman, Uziel, El-Yaniv, ICLR 2019.
    """
    score = np.minimum(np.asarray(scores, dtype=np.float64), 1.0)
    total = len(score)
    if not total:
        return None
    order = np.argsort(-score)
    thresholds = score[order]
    kept = np.searchsorted(-thresholds, -thresholds, side="right")  # per image: those with at least its score
    wrong = np.cumsum(~np.asarray(right, dtype=bool)[order])[kept - 1]
    needed = -(-np.arange(1, 101) * total // 100)  # rounded up
    points = [
        RiskPoint(
            threshold=float(thresholds[images - 1]),
            images=images,
            coverage=round(100.0 * images / total, DECIMALS),
            top1_wrong=errors,
            top1_error=round(100.0 * errors / images, DECIMALS),
            top1_interval=wilson_interval(errors, images),
        )
        for images, errors in dict(zip(kept[needed - 1].tolist(), wrong[needed - 1].tolist(), strict=True)).items()
    ]
    return RiskCoverage(area=round(100.0 * float((wrong / kept).mean()), DECIMALS), points=points)


@dataclass(frozen=True)
class RankStep:
    """The number of images whose true class has a rank from `first` to `last`."""

    first: int
    last: int
    images: int


@dataclass(frozen=True)
class Ranks:
    """Ranks of the true class among all classes; rank 1 is the answer. None without images."""

    median: float | None
    mean: float | None
    mean_reciprocal: float | None  # 0..1
    counts: list[RankStep]


def rank_summary(ranks: npt.ArrayLike, classes: int) -> Ranks:
    """Summarize the ranks of the true class. ranks: integers (images,) from 1 to classes.

    The mean reciprocal rank is the mean of 1 / rank.
    """
    rank = np.asarray(ranks, dtype=np.int64)
    firsts = [first for first in RANK_STEPS if first <= classes]
    lasts = [following - 1 for following in firsts[1:]] + [classes]
    counts = [
        RankStep(first, last, int(np.count_nonzero((rank >= first) & (rank <= last))))
        for first, last in zip(firsts, lasts, strict=True)
    ]
    if not len(rank):
        return Ranks(None, None, None, counts)
    return Ranks(
        median=float(np.median(rank)),
        mean=round(float(rank.mean()), DECIMALS),
        mean_reciprocal=round(float((1 / rank).mean()), DECIMALS),
        counts=counts,
    )
