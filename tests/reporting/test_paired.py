import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from statsmodels.stats import contingency_tables, multitest

from prelunet.evaluator.reporting.paired import NO_IMAGES, PairedErrors, adjusted_p, difference_interval, mcnemar

Z = 1.959963984540054  # 97.5 % point of the normal distribution
REASON = 5e-6  # p-values are kept to 6 significant digits


def mcnemar_by_fractions(only_a: int, only_b: int) -> Fraction:
    """Return the share of all coin tosses that are at least as uneven."""
    coins = only_a + only_b
    uneven = [heads for heads in range(coins + 1) if abs(2 * heads - coins) >= abs(only_a - only_b)]
    return Fraction(sum(math.comb(coins, heads) for heads in uneven), 2**coins)


def interval_from_images(both: int, only_a: int, only_b: int, neither: int) -> tuple[float, float]:
    """Newcombe's method 10 from one row per image: bounds as roots of Wilson's equation, phi as a correlation."""
    a = np.array([1] * both + [1] * only_a + [0] * only_b + [0] * neither)
    b = np.array([1] * both + [0] * only_a + [1] * only_b + [0] * neither)
    n = len(a)
    bounds = []
    for p in (a.mean(), b.mean()):  # (p - x)² = z² x (1 - x) / n, solved for x
        bounds.append(sorted(np.roots([1 + Z * Z / n, -2 * p - Z * Z / n, p * p]).real))
    (low_a, high_a), (low_b, high_b) = bounds
    phi = 0.0
    if a.std() and b.std():
        phi = float(np.corrcoef(a, b)[0, 1])
        if phi > 0:
            phi = max(0.0, phi - 1 / (2 * n * a.std() * b.std()))  # half an image off the product of the counts
    below = (b.mean() - low_b, high_a - a.mean())
    above = (high_b - b.mean(), a.mean() - low_a)
    sides = [math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y)) for x, y in (below, above)]
    difference = b.mean() - a.mean()
    return 100 * (difference - sides[0]), 100 * (difference + sides[1])


def tables(images: int) -> list[tuple[int, int, int, int]]:
    return [counts for counts in itertools.product(range(images + 1), repeat=4) if sum(counts) == images]


def test_mcnemar_equals_a_plain_sum_of_binomial_terms_for_all_small_counts() -> None:
    for only_a, only_b in itertools.product(range(16), repeat=2):
        assert mcnemar(only_a, only_b) == pytest.approx(float(mcnemar_by_fractions(only_a, only_b)), rel=REASON)


def test_mcnemar_equals_statsmodels_on_random_tables() -> None:
    draw = random.Random(0)
    for _ in range(150):
        both, only_a, only_b, neither = (draw.choice([0, draw.randint(0, 9), draw.randint(0, 400)]) for _ in range(4))
        expected = contingency_tables.mcnemar([[both, only_a], [only_b, neither]], exact=True).pvalue
        assert mcnemar(only_a, only_b) == pytest.approx(min(1.0, expected), rel=REASON)


@pytest.mark.parametrize("count", [0, 1, 7, 400])
def test_as_many_wrong_in_each_alone_is_no_evidence_at_all(count: int) -> None:
    assert mcnemar(count, count) == 1.0
    assert float(mcnemar_by_fractions(count, count)) == 1.0


def test_mcnemar_does_not_care_which_run_is_called_a() -> None:
    assert mcnemar(3, 17) == mcnemar(17, 3) < 0.05 < mcnemar(6, 14)


def test_mcnemar_of_a_whole_imagenet_neither_overflows_nor_fails() -> None:
    assert mcnemar(1100, 900) == pytest.approx(float(mcnemar_by_fractions(1100, 900)), rel=REASON)
    assert 0.0 <= mcnemar(0, 50_000) < 1e-300


def test_interval_of_a_published_example() -> None:
    # Complete response before and after a therapy (Cavo et al. 2012), as the R package `contingencytables` gives it.
    interval = difference_interval(both=59, only_a=16, only_b=6, neither=80)
    assert tuple(round(bound / 100, 4) for bound in interval) == (-0.1186, -0.0046)


def test_interval_equals_one_computed_from_single_images() -> None:
    draw = random.Random(1)
    cases = [*tables(5), *(tuple(draw.choice([0, draw.randint(0, 60)]) for _ in range(4)) for _ in range(200))]
    for counts in cases:
        if sum(counts):
            # abs 1e-4: rounding to 4 decimals, and numpy finds a double root at 0 only to 1e-8
            assert difference_interval(*counts) == pytest.approx(interval_from_images(*counts), abs=1e-4), counts


def test_interval_turns_around_when_the_runs_are_exchanged() -> None:
    for both, only_a, only_b, neither in tables(7):
        low, high = difference_interval(both, only_a, only_b, neither)
        assert difference_interval(both, only_b, only_a, neither) == (-high, -low)


def test_interval_holds_the_difference_has_a_width_and_stays_within_100_points() -> None:
    for counts in (*tables(1), *tables(2), *tables(9)):
        pair = PairedErrors(*counts)
        low, high = pair.interval
        assert pair.difference is not None
        assert -100 <= low <= pair.difference <= high <= 100
        assert low < high


def test_interval_has_about_its_nominal_coverage() -> None:
    """The exact coverage over all tables of 16 images, for true errors from equal to very different."""
    images = 16
    found = {counts: difference_interval(*counts) for counts in tables(images)}
    coverages = []
    for rates in [(0.1, 0.1, 0.1, 0.7), (0.2, 0.1, 0.3, 0.4), (0.05, 0.05, 0.2, 0.7), (0.3, 0.2, 0.05, 0.45)]:
        truth = 100 * (rates[2] - rates[1])
        covered = 0.0
        for counts, (low, high) in found.items():
            if low <= truth <= high:
                ways = math.factorial(images) / math.prod(map(math.factorial, counts))
                covered += ways * math.prod(rate**count for rate, count in zip(rates, counts, strict=True))
        coverages.append(covered)
    assert min(coverages) > 0.93  # Newcombe's own tables: between 0.93 and 0.99 for so few images
    assert max(coverages) < 0.99


def test_without_images_nothing_is_known_of_a_difference() -> None:
    assert NO_IMAGES.interval is None
    assert NO_IMAGES.difference is None
    assert NO_IMAGES.p == 1.0


def test_a_difference_is_below_zero_where_b_makes_fewer_errors() -> None:
    pair = PairedErrors(both=3, only_a=5, only_b=1, neither=31)
    assert (pair.images, pair.wrong_a, pair.wrong_b) == (40, 8, 4)
    assert pair.difference == -10.0
    assert pair + PairedErrors(1, 2, 4, 8) == PairedErrors(4, 7, 5, 39)


def test_adjusted_p_equals_the_definition_and_statsmodels() -> None:
    draw = random.Random(2)
    for count in (1, 2, 7, 40):
        p_values = [draw.choice([1.0, draw.random(), draw.random() ** 4]) for _ in range(count)]
        adjusted = adjusted_p(p_values)
        for place, value in enumerate(p_values):
            larger = [other for other in p_values if other >= value]
            expected = min(1.0, *(count * other / sum(p <= other for p in p_values) for other in [*larger, 1.0]))
            assert adjusted[place] == pytest.approx(expected, rel=REASON)
        assert adjusted == pytest.approx(list(multitest.multipletests(p_values, method="fdr_bh")[1]), rel=REASON)
    assert adjusted_p([]) == []
