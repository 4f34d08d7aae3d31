"""The dropout factors of a row depend on seed, step and row only."""

import numpy as np

from prelunet.training.data.augmentation import dropout_factors


def test_a_row_drops_the_same_units_in_any_process() -> None:
    whole = dropout_factors(3, 7, range(9), (50, 50), 0.5)
    for rows in (range(3), range(2, 6), range(8, 9), range(4, 4)):
        part = dropout_factors(3, 7, rows, (50, 50), 0.5)
        for some, all_rows in zip(part, whole, strict=True):
            np.testing.assert_array_equal(some, all_rows[rows.start : rows.stop])
            assert some.shape == (len(rows), 50)
            assert some.dtype == np.float32


def test_steps_seeds_rows_and_layers_differ() -> None:
    fc1, fc2 = dropout_factors(3, 7, range(2), (200, 200), 0.5)
    others = (*dropout_factors(3, 8, range(2), (200, 200), 0.5), *dropout_factors(4, 7, range(2), (200, 200), 0.5), fc2)
    for other in (*(rows[0] for rows in others), fc1[1]):
        assert 0.3 < (fc1[0] != other).mean() < 0.7  # independent draws differ in half of the units, σ 0.035


def test_the_stated_fraction_is_dropped_and_the_expectation_is_preserved() -> None:
    for rate in (0.2, 0.5):
        for factors in dropout_factors(0, 1, range(200), (500, 500), rate):
            assert set(np.unique(factors)) == {np.float32(0), np.float32(1 / (1 - rate))}
            # 100,000 draws: σ of the share is 0.0016 at most
            assert abs((factors == 0).mean() - rate) < 0.008


def test_without_dropout_every_factor_is_one() -> None:
    for factors in dropout_factors(0, 1, range(4), (50, 50), 0.0):
        np.testing.assert_array_equal(factors, 1)
