"""Color augmentation, compared with numpy's covariance and with the definition in the paper."""

from dataclasses import replace

import numpy as np
import pytest

from prelunet.training.data.augmentation import COLOR, VIEW, color_axes, color_shift, random_stream, training_view
from tests.training.training_folders import RECIPE

COLORFUL = replace(RECIPE, color=0.1)
AXES = np.array([[50, 8, 1], [48, 0, -3], [46, -9, 2]], np.float32)  # as for photos: brightness, then blue versus red


def axes_of(pixels: np.ndarray) -> np.ndarray:
    """Return the axes of integer pixels (count, 3)."""
    whole = pixels.astype(object)  # Python integers
    return color_axes(len(pixels), list(whole.sum(axis=0)), (whole.T @ whole).tolist())


def correlated_pixels(count: int) -> np.ndarray:
    random = np.random.default_rng(0)
    values = random.standard_normal((count, 3)) @ AXES.T + [123, 117, 104]
    return np.clip(values, 0, 255).astype(np.uint8)


def test_the_axes_are_those_of_numpys_covariance() -> None:
    pixels = correlated_pixels(5000)
    axes = axes_of(pixels)
    assert axes.dtype == np.float32
    covariance = np.cov(pixels.T.astype(np.float64), bias=True)
    # float32 has 7 digits of entries up to 50, and the covariance has products of them
    np.testing.assert_allclose(axes.astype(np.float64) @ axes.T, covariance, rtol=1e-6, atol=1e-3)
    lengths = np.linalg.norm(axes, axis=0)
    assert lengths[0] > lengths[1] > lengths[2] > 0
    directions = axes / lengths
    np.testing.assert_allclose(directions.T @ directions, np.eye(3), atol=1e-5)  # orthogonal


def test_each_axis_points_to_the_side_of_its_largest_component() -> None:
    axes = axes_of(correlated_pixels(1000))
    assert all(column[np.abs(column).argmax()] > 0 for column in axes.T)


@pytest.mark.parametrize(("pixel", "count"), [((7, 200, 31), 3), ((255, 255, 255), 10**15)])
def test_pixels_that_are_all_alike_have_no_axes(pixel: tuple[int, int, int], count: int) -> None:
    """In floats, the differences of large sums would give 10^15 white pixels axes of noise."""
    axes = color_axes(count, [count * value for value in pixel], [[count * a * b for b in pixel] for a in pixel])
    np.testing.assert_array_equal(axes, np.zeros((3, 3)))


def test_gray_pixels_vary_along_one_axis_only() -> None:
    axes = axes_of(np.repeat(np.arange(256)[:, None], 3, axis=1))
    deviation = np.std(np.arange(256))
    np.testing.assert_allclose(axes[:, 0], [deviation] * 3, rtol=1e-6)  # along (1, 1, 1): three channels' variances
    assert np.abs(axes[:, 1:]).max() < 1e-4  # the square root of the rounding error of 16,000


def test_the_shift_is_the_papers_sum_over_the_components() -> None:
    for epoch, index in ((0, 0), (3, 17)):
        drawn = random_stream(COLORFUL.seed, COLOR, epoch, index).standard_normal(3)
        expected = sum(0.1 * drawn[k] * AXES[:, k].astype(np.float64) for k in range(3))
        shift = color_shift(COLORFUL, AXES, epoch, index)
        assert shift.dtype == np.float32
        np.testing.assert_allclose(shift, expected, rtol=1e-6)  # float32


def test_shifts_have_mean_zero_and_the_pixels_covariance_times_the_variance() -> None:
    shifts = np.stack([color_shift(COLORFUL, AXES, epoch, index) for epoch in range(10) for index in range(400)])
    # 4000 draws: the mean has a deviation of 0.1·50/63 = 0.08 levels, a variance one of 2.2 %
    assert np.abs(shifts.mean(axis=0)).max() < 0.4
    expected = 0.1**2 * AXES.astype(np.float64) @ AXES.T
    np.testing.assert_allclose(np.cov(shifts.T), expected, rtol=0.12)


def test_the_shift_depends_only_on_seed_epoch_and_image() -> None:
    shift = color_shift(COLORFUL, AXES, 2, 5)
    np.testing.assert_array_equal(shift, color_shift(replace(COLORFUL, batch=7), AXES, 2, 5))
    for recipe, epoch, index in ((COLORFUL, 3, 5), (COLORFUL, 2, 6), (replace(COLORFUL, seed=4), 2, 5)):
        assert not np.array_equal(shift, color_shift(recipe, AXES, epoch, index))


def test_color_augmentation_does_not_change_the_view() -> None:
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    np.testing.assert_array_equal(training_view(image, RECIPE, 2, 5), training_view(image, COLORFUL, 2, 5))
    assert random_stream(0, VIEW, 2, 5).random() != random_stream(0, COLOR, 2, 5).random()
