import math

import pytest

from evaluator.reporting.statistics import error_percent, wilson_interval


def wilson_by_formula(errors: int, total: int) -> tuple[float, float]:
    """The textbook form: (p + z²/2n ± z·sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), percent."""
    z = 1.959963984540054  # 97.5 % point of the normal distribution
    p = errors / total
    middle = p + z * z / (2 * total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return tuple(100 * (middle + sign * half) / (1 + z * z / total) for sign in (-1, 1))


@pytest.mark.parametrize(
    ("errors", "total"), [(0, 1), (1, 1), (0, 50), (5, 50), (25, 50), (50, 50), (13, 97), (2855, 50_000)]
)
def test_wilson_interval_equals_the_closed_form(errors: int, total: int) -> None:
    # abs 5.1e-5: the interval is rounded to 4 decimals
    assert wilson_interval(errors, total) == pytest.approx(wilson_by_formula(errors, total), abs=5.1e-5)


@pytest.mark.parametrize(
    ("errors", "total", "low", "high"),
    [  # the paper's numbers and a class of 50 images
        (2_855, 50_000, 5.51, 5.92),
        (10_795, 50_000, 21.23, 21.95),
        (4_940, 100_000, 4.81, 5.08),
        (5, 50, 4.3, 21.4),
        (0, 50, 0.0, 7.1),
        (25, 50, 36.6, 63.4),
    ],
)
def test_wilson_interval_of_known_error_rates(errors: int, total: int, low: float, high: float) -> None:
    decimals = 2 if total > 50 else 1
    assert tuple(round(bound, decimals) for bound in wilson_interval(errors, total)) == (low, high)


def test_without_images_nothing_is_known() -> None:
    assert wilson_interval(0, 0) == (0.0, 100.0)
    assert error_percent(0, 0) is None


def test_an_error_is_percent_with_four_decimals() -> None:
    assert error_percent(1, 3) == 33.3333
    assert error_percent(0, 7) == 0.0
