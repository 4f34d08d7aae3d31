"""How answers are told apart, beside scipy and in simulations."""

import numpy as np
import pytest
from scipy import stats

from prelunet.export.finding.decide import better_than_chance, by_labels, by_references
from prelunet.export.finding.measure import TEMPERATURES

COUNT = len(TEMPERATURES)


def values_of(losses: np.ndarray, wrong: np.ndarray | None = None) -> np.ndarray:
    """Return what is measured of candidates whose loss, (candidates, images), is the same at each temperature."""
    wrong = np.zeros_like(losses) if wrong is None else wrong
    control = np.full((*losses.shape, COUNT), 5.0)
    return np.concatenate([np.repeat(losses[..., None], COUNT, 2), control, wrong[..., None]], 2)


@pytest.mark.parametrize("images", [24, 96, 400])
def test_an_answer_is_excluded_where_students_t_of_the_paired_losses_excludes_it(images: int) -> None:
    random = np.random.default_rng(images)
    decisions = []
    for _ in range(200):
        common = random.exponential(size=images)
        losses = np.stack([common, *(common + random.normal(0.9 / images**0.5, 0.4, (3, images)))])
        best = losses.mean(1).argmin()
        for own, standing in zip(losses, by_labels(values_of(losses), 0.04), strict=True):
            difference = own - losses[best]
            error = difference.std(ddof=1) / images**0.5
            limit = stats.t.ppf(1 - 0.04 / 3, images - 1) * error
            # Where the two are as near as the last digits of the quantile, either decision is right.
            if abs(difference.mean() - limit) > 1e-3 * (limit + 1e-3) + 1e-5:
                decisions.append((standing.kept, bool(difference.mean() <= limit)))
    assert len({kept for kept, _ in decisions}) == 2, "some are kept and some are not"
    assert all(kept == expected for kept, expected in decisions)


def test_the_true_answer_is_kept_with_its_confidence_among_others_as_good() -> None:
    random = np.random.default_rng(3)
    kept = 0
    for _ in range(1000):
        common = random.exponential(size=100)
        losses = common + random.exponential(0.3, (8, 100))  # all have the same mean
        kept += by_labels(values_of(losses), 0.05)[0].kept
    assert kept >= 950


def test_each_answer_is_judged_at_its_own_temperature() -> None:
    losses = np.stack([np.full((40, COUNT), 2.0), np.full((40, COUNT), 3.0)])
    losses[1, :, 4] = 1.0 + np.linspace(0, 0.1, 40)
    values = np.concatenate([losses, np.zeros((2, 40, COUNT + 1))], 2)
    assert [each.kept for each in by_labels(values, 0.05)] == [False, True]


def test_a_tolerated_part_keeps_answers_that_are_a_little_worse() -> None:
    random = np.random.default_rng(0)
    best = random.exponential(size=400)
    values = values_of(np.stack([best, 1.05 * best + 0.001, 1.4 * best]))
    assert [each.kept for each in by_labels(values, 0.05)] == [True, False, False]
    assert [each.kept for each in by_labels(values, 0.05, 0.1)] == [True, True, False]
    perfect = values_of(np.stack([best / 1e6, best / 1e6 + 0.01, best / 1e6 + 0.05]))
    assert [each.kept for each in by_labels(perfect, 0.05, 0.1)] == [True, True, False]


def test_errors_are_counted_in_pairs() -> None:
    losses = np.stack([np.full(6, 1.0), np.arange(6) + 2.0])
    wrong = np.array([[1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 0, 1]])
    errors = by_labels(values_of(losses, wrong), 0.05)[1].errors
    assert (errors.both, errors.only_a, errors.only_b, errors.neither) == (1, 1, 3, 1)


def test_chance_is_what_the_labels_of_other_images_give() -> None:
    random = np.random.default_rng(1)
    losses = random.exponential(size=(1, 200))
    values = values_of(losses)
    values[..., COUNT : 2 * COUNT] = losses[..., None] + random.normal(0.0, 0.5, (1, 200, 1))
    assert not better_than_chance(values[0], 0.005)
    values[..., COUNT : 2 * COUNT] += 0.3
    assert better_than_chance(values[0], 0.005)


def test_only_what_is_as_near_to_the_outputs_as_the_nearest_is_kept() -> None:
    exact = np.array([[2e-7, 1e-7], [3e-6, 1e-6], [1e-7, 5e-4]])[..., None]
    assert [each.kept for each in by_references(exact)] == [True, True, False]
    none = np.array([[0.2, 0.1], [0.1, 0.3]])[..., None]
    assert [each.kept for each in by_references(none)] == [True, False]
