"""Confidence intervals over trainings with several seeds."""

import numpy as np
import numpy.typing as npt
from scipy import stats

CONFIDENCE = 0.95


def interval_of_mean(values: npt.ArrayLike) -> tuple[float, float]:
    """Return the Student's t interval of the mean of at least two independent values."""
    found = np.asarray(values, dtype=float)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(found) - 1) * found.std(ddof=1) / len(found) ** 0.5
    return float(found.mean() - half), float(found.mean() + half)
