"""The confidence sequence of a difference: beside the products of its definition, and in simulations."""

import math
from itertools import pairwise

import numpy as np
import pytest

from prelunet.evaluator.reporting.sequence import EXCLUDED, bounds_of_all, capital, expected_images

IMAGES = 400


def order(seed: int, only_b: int, only_a: int) -> np.ndarray:
    """Return differences of IMAGES images in random order."""
    differences = np.array([1] * only_b + [-1] * only_a + [0] * (IMAGES - only_a - only_b))
    return np.random.default_rng(seed).permutation(differences)


def bounds(differences: np.ndarray, unknown: tuple[int, ...] = ()) -> tuple[float, float]:
    return bounds_of_all(differences, np.isin(np.arange(len(differences)), unknown), IMAGES)


@pytest.mark.parametrize("mean", [-0.1, 0.0, 0.07])
def test_the_capital_is_that_of_bettors_who_stake_parts_of_it_on_each_image(mean: float) -> None:
    differences = order(3, 90, 40)[:250]
    wealth = {0.02: 0.15, 0.05: 0.2, 0.1: 0.4, 0.2: 0.2, 0.4: 0.05}  # stake at first → part of the capital
    largest, found, seen = 0.0, [], 0
    for number, difference in enumerate(differences.tolist()):
        left = IMAGES - number
        expected = (IMAGES * mean - seen) / left
        for stake in wealth:
            wealth[stake] *= 1 + min(stake * IMAGES / left, 0.49) * (difference - expected)
        seen += difference
        largest = max(largest, sum(wealth.values()))
        found.append(math.log(largest))
    np.testing.assert_allclose(capital(differences, IMAGES, mean), found, rtol=1e-9)


def test_the_interval_holds_the_difference_over_all_images_at_all_times() -> None:
    """With 95 % probability: of 200 orders at most 17 may fail, which has a probability of 1 % if 5 % do."""
    truth, failed = 100 * (48 - 32) / IMAGES, 0
    for seed in range(200):
        differences = order(seed, 48, 32)
        looks = [bounds(differences[:end]) for end in range(50, IMAGES, 50)]
        failed += not all(low <= truth <= high for low, high in looks)
        for (low, high), (next_low, next_high) in pairwise(looks):  # to 4 decimals, which round
            assert low - 2e-4 <= next_low <= next_high <= high + 2e-4, "what was excluded stays excluded"
    assert failed <= 17


def test_all_images_give_the_difference_exactly() -> None:
    assert bounds(order(1, 21, 25)) == (-1.0, -1.0)


def test_each_bound_fails_with_a_probability_of_at_most_a_fortieth() -> None:
    """Ville's inequality: a bettor at fair odds reaches 40 times the capital with a probability of 1/40."""
    assert math.exp(EXCLUDED) == pytest.approx(40)


def test_images_that_only_one_evaluated_may_have_any_difference() -> None:
    differences = order(5, 12, 8)
    differences[:6] = 0
    total = int(differences.sum())
    unknown = (0, 1, 2, 3, 4, 5)
    assert bounds(differences, unknown) == (100 * (total - 6) / IMAGES, 100 * (total + 6) / IMAGES)


def test_the_images_expected_to_be_needed_are_about_those_needed() -> None:
    """Within a factor of 2 of the median of 40 orders."""
    for only_b, only_a in ((60, 20), (30, 10)):
        needed = []
        for seed in range(40):
            paths = capital(order(seed, only_b, only_a), IMAGES, 0.0)
            needed.append(int(np.argmax(paths >= EXCLUDED)))
        discordant, points = (only_b + only_a) / IMAGES, 100 * (only_b - only_a) / IMAGES
        assert 0.5 < expected_images(points, discordant, IMAGES) / np.median(needed) < 2
