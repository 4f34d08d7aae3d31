"""Confidence intervals and standard errors of the benchmarks."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95


def interval_of_mean(values: npt.ArrayLike) -> tuple[float, float]:
    """Return the Student's t interval of the mean of at least two independent values."""
    from scipy import stats  # here: slow to import

    found = np.asarray(values, dtype=float)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(found) - 1) * found.std(ddof=1) / len(found) ** 0.5
    return float(found.mean() - half), float(found.mean() + half)


def median_ratio(values: Sequence[float], others: Sequence[float]) -> tuple[float, float | None]:
    """Return the median of the ratios of pairs, and its standard error, assuming normal ratios; None for one pair."""
    ratios = [one / other for one, other in zip(values, others, strict=True)]
    error = math.sqrt(math.pi / 2 / len(ratios)) * statistics.stdev(ratios) if len(ratios) > 1 else None
    return statistics.median(ratios), error


def differs(value: float, limit: float, error: float | None) -> bool:
    """Return whether a value is more than two standard errors from a limit."""
    return error is not None and abs(value - limit) > 2 * error
