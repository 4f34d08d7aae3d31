"""What dropout does to a row depends on seed, step and row, and on nothing else."""

import numpy as np

from prelunet.training.data.augmentation import dropout_factors


def test_a_row_loses_the_same_units_whichever_process_asks() -> None:
    whole = dropout_factors(3, 7, range(9), 50, 0.5)
    for rows in (range(3), range(2, 6), range(8, 9), range(4, 4)):
        part = dropout_factors(3, 7, rows, 50, 0.5)
        for some, all_rows in zip(part, whole, strict=True):
            np.testing.assert_array_equal(some, all_rows[rows.start : rows.stop])
            assert some.shape == (len(rows), 50)
            assert some.dtype == np.float32


def test_steps_seeds_rows_and_layers_differ() -> None:
    fc1, fc2 = dropout_factors(3, 7, range(2), 200, 0.5)
    others = (*dropout_factors(3, 8, range(2), 200, 0.5), *dropout_factors(4, 7, range(2), 200, 0.5), fc2)
    for other in (*(rows[0] for rows in others), fc1[1]):
        assert 0.3 < (fc1[0] != other).mean() < 0.7  # independent halves differ in half of the places, σ 0.035


def test_as_many_are_dropped_as_stated_and_the_expectation_stays() -> None:
    for rate in (0.2, 0.5):
        for factors in dropout_factors(0, 1, range(200), 500, rate):
            assert set(np.unique(factors)) == {np.float32(0), np.float32(1 / (1 - rate))}
            # 100,000 draws: σ of the share is 0.0016 at most
            assert abs((factors == 0).mean() - rate) < 0.008


def test_without_dropout_every_factor_is_one() -> None:
    for factors in dropout_factors(0, 1, range(4), 50, 0.0):
        np.testing.assert_array_equal(factors, 1)
