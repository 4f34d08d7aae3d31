"""Error rates and how sure they are. Errors are percent, as papers print them."""

from functools import lru_cache

CONFIDENCE = 0.95
DECIMALS = 4  # of every percentage in a report


def error_percent(errors: int, total: int) -> float | None:
    """Return errors per hundred, rounded to 4 decimals; None where there is nothing to count."""
    return round(100.0 * errors / total, DECIMALS) if total else None


@lru_cache(maxsize=4096)  # classes of the same size share a few hundred pairs; one interval takes 0.2 ms
def wilson_interval(errors: int, total: int) -> tuple[float, float]:
    """Return the Wilson 95 % interval of an error rate: (low, high) in percent, rounded to 4 decimals.

    total 0 gives (0, 100): nothing is known. E. B. Wilson, JASA 22 (1927); it stays inside 0..100 and is honest at
    0 errors, where the usual ± interval would have no width.
    """
    if total == 0:
        return (0.0, 100.0)
    from scipy import stats  # here: it takes 0.4 s, and a server or a validation starts without an interval

    interval = stats.binomtest(errors, total).proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return (round(100.0 * float(interval.low), DECIMALS), round(100.0 * float(interval.high), DECIMALS))
