"""Resizing against plain float64 triangle and cubic filters; capping against cropping the whole resized image."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from prelunet.evaluator.arrays import Float64Array, UInt8Array
from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.imaging.resize import resize_part, resize_shorter_side, resize_to_scales, resized_size
from prelunet.evaluator.preparation import Interpolation

# Pillow rounds after the columns and again after the rows, half a gray level each.
TOLERANCE = 1.0 + 1e-3


def noise(height: int, width: int) -> UInt8Array:
    return np.random.default_rng(height * 100_003 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def triangle(distance: float) -> float:
    return max(0.0, 1 - distance)


def cubic(distance: float) -> float:
    """Keys's kernel with a = -1/2, which Pillow's BICUBIC uses."""
    if distance < 1:
        return 1.5 * distance**3 - 2.5 * distance**2 + 1
    return -0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2 if distance < 2 else 0.0


KERNELS = {"bilinear": (triangle, 1), "bicubic": (cubic, 2)}
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def kernel_weights(
    side: int, full: int, first: int, count: int, interpolation: Interpolation = "bilinear"
) -> Float64Array:
    """Weights (count, side) that make pixels first, first + 1, … of `full` resized ones out of `side` pixels."""
    kernel, support = KERNELS[interpolation]
    step = Fraction(side, full)
    unit = max(step, Fraction(1))  # antialiasing: when shrinking the kernel is as wide as the target's pixels
    reach = support * unit
    weights = np.zeros((count, side))
    for row in range(count):
        center = (first + row + Fraction(1, 2)) * step
        for source in range(max(0, math.floor(center - reach)), min(side, math.ceil(center + reach))):
            weights[row, source] = kernel(float(abs(source + Fraction(1, 2) - center) / unit))
    return weights / weights.sum(axis=1, keepdims=True)


def plain_resize(image: UInt8Array, scale: int, cap: int, interpolation: Interpolation = "bilinear") -> Float64Array:
    """Resize as the design says, without rounding: float64 (h, w, 3)."""
    short = min(image.shape[:2])
    matrices = []
    for side in image.shape[:2]:
        full = math.floor(Fraction(side * scale, short) + Fraction(1, 2))
        kept = min(full, cap * scale)
        matrices.append(kernel_weights(side, full, (full - kept) // 2, kept, interpolation))
    return np.einsum("yh,hwc,xw->yxc", matrices[0], image.astype(np.float64), matrices[1], optimize=True)


@pytest.mark.parametrize(
    ("height", "width", "scale"),
    [
        (37, 53, 28),  # smaller
        (53, 37, 64),  # larger
        (20, 71, 20),  # one side as it is
        (33, 33, 17),  # square
        (101, 30, 11),
        (90, 250, 7),  # much smaller
        (3, 2, 40),  # much larger
        (1, 4, 9),
    ],
)
def test_resized_image_equals_a_plain_triangle_filter(height: int, width: int, scale: int) -> None:
    image = noise(height, width)
    resized, capped = resize_shorter_side(image, scale)
    expected = plain_resize(image, scale, cap=4)
    assert not capped
    assert resized.dtype == np.uint8
    assert resized.flags.c_contiguous
    assert resized.shape == expected.shape
    assert np.abs(resized - expected).max() <= TOLERANCE


@pytest.mark.parametrize(("height", "width", "scale"), [(37, 53, 28), (53, 37, 64), (90, 250, 7), (3, 2, 40)])
def test_bicubic_equals_a_plain_cubic_filter(height: int, width: int, scale: int) -> None:
    image = 80 + noise(height, width) // 3  # so that it shoots over neither end, where Pillow cuts
    resized, _ = resize_to_scales(image, (scale,), interpolation="bicubic")[scale]
    expected = plain_resize(image, scale, 4, "bicubic")
    # Half a gray level from the rows; half from the columns, which the rows' weights (some < 0) make at most 0.7.
    assert np.abs(resized - expected).max() <= 1.2
    assert np.abs(resize_shorter_side(image, scale)[0] - expected).max() > 1.2


@pytest.mark.parametrize("value", [(0, 0, 0), (255, 254, 1), (77, 200, 13)])
def test_one_pixel_becomes_an_even_square(value: tuple[int, int, int]) -> None:
    resized, capped = resize_shorter_side(np.array([[value]], dtype=np.uint8), 28)
    assert not capped
    np.testing.assert_array_equal(resized, np.full((28, 28, 3), value, dtype=np.uint8))


def test_image_at_its_own_scale_is_unchanged() -> None:
    image = noise(31, 47)
    resized, _ = resize_shorter_side(image, 31)
    np.testing.assert_array_equal(resized, image)
    assert not np.shares_memory(resized, image)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width"), [(40, 61), (61, 40), (33, 33)])
def test_every_scale_is_resized_from_the_original_image(height: int, width: int, interpolation: Interpolation) -> None:
    image = noise(height, width)
    image.flags.writeable = False
    scales = (12, 48, 29, 33)  # smaller, larger, in no order
    resized = resize_to_scales(image, scales, interpolation=interpolation)
    assert tuple(resized) == scales
    for scale, (pixels, capped) in resized.items():
        rows, columns = resized_size(height, width, scale)
        expected = Image.fromarray(image).resize((columns, rows), FILTERS[interpolation])
        np.testing.assert_array_equal(pixels, np.asarray(expected))  # to the bit: it is the same filter
        assert not capped


def test_a_scale_is_the_same_alone_and_beside_others_where_some_are_capped() -> None:
    image = noise(21, 5)  # at 28 pixels 117.6 rows become 112; at 1 pixel 4.2 become 4 and nothing is cut away
    resized = resize_to_scales(image, (28, 1, 9))
    assert {scale: capped for scale, (_, capped) in resized.items()} == {28: True, 1: False, 9: True}
    for scale, (pixels, capped) in resized.items():
        alone, capped_alone = resize_shorter_side(image, scale)
        np.testing.assert_array_equal(pixels, alone)
        assert capped == capped_alone


@pytest.mark.parametrize(
    ("height", "width", "scale", "cap"),
    [
        (20, 90, 16, 4),
        (150, 611, 42, 4),
        (91, 20, 16, 4),
        (7, 300, 28, 4),
        (300, 7, 28, 4),
        (40, 401, 11, 3),
        (5, 21, 28, 4),  # just over 1:4
        (1, 600, 9, 4),
        (600, 1, 9, 2),
        (13, 40, 30, 1),  # a cap of 1 keeps a square
    ],
)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_capped_image_is_the_center_of_the_whole_resized_image(
    height: int, width: int, scale: int, cap: int, interpolation: Interpolation
) -> None:
    image = noise(height, width)
    resized, capped = resize_to_scales(image, (scale,), cap, interpolation)[scale]
    short = min(height, width)
    sides = [math.floor(Fraction(side * scale, short) + Fraction(1, 2)) for side in (height, width)]
    whole = np.asarray(Image.fromarray(image).resize((sides[1], sides[0]), FILTERS[interpolation]))
    top, left = ((side - min(side, cap * scale)) // 2 for side in sides)
    expected = whole[top : top + cap * scale, left : left + cap * scale]
    assert capped
    assert resized.shape == expected.shape
    # Pillow takes the box in float32, so a sum at a half may round the other way: docs/protocols.md states both bounds.
    off = np.abs(resized.astype(np.int64) - expected)
    assert off.max() <= 1
    assert np.count_nonzero(off) <= 0.03 * off.size
    if interpolation == "bilinear":
        assert np.abs(resized - plain_resize(image, scale, cap)).max() <= TOLERANCE


def test_a_capped_image_includes_all_that_bicubic_reaches_beyond_the_cut() -> None:
    image = np.full((300, 6000, 3), 128, np.uint8)  # 30 pixels become one; kept are columns 2400 to 3600
    image[:, 2355:2370] = 255  # 1.5 to 2 pixels from the center of the first one kept: the end of the kernel, below 0
    resized, _ = resize_to_scales(image, (10,), 4, "bicubic")[10]
    expected = plain_resize(image, 10, 4, "bicubic")
    assert expected[0, 0, 0] < 126.5
    assert np.abs(resized - expected).max() <= 1.2


def within(resized: tuple[int, ...], seed: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where a part begins and its size: any that fit."""
    random = np.random.default_rng(seed)
    size = [int(random.integers(1, side, endpoint=True)) for side in resized]
    origin = [int(random.integers(0, side - count, endpoint=True)) for side, count in zip(resized, size, strict=True)]
    return (origin[0], origin[1]), (size[0], size[1])


@given(st.integers(1, 150), st.integers(1, 150), st.integers(1, 60), st.integers(1, 5), st.integers(0, 2**32))
def test_a_part_is_as_near_to_the_exact_filter_as_the_whole_image_and_like_its_crop(
    height: int, width: int, scale: int, cap: int, seed: int
) -> None:
    image = noise(height, width)
    (top, left), (rows, columns) = within(resized_size(height, width, scale, cap), seed)
    part = resize_part(image, scale, (top, left), (rows, columns), cap)
    place = slice(top, top + rows), slice(left, left + columns)
    assert part.shape == (rows, columns, 3)
    assert np.abs(part - plain_resize(image, scale, cap)[place]).max() <= TOLERANCE
    whole = resize_shorter_side(image, scale, cap)[0][place]
    assert np.abs(part.astype(np.int64) - whole).max() <= 2  # both within 1 of the exact filter


@pytest.mark.parametrize("size", [(375, 500), (500, 375), (333, 500), (1024, 768), (230, 301)])
@pytest.mark.parametrize("scale", [256, 301, 512])
def test_a_training_crop_of_a_photo_equals_the_crop_of_the_whole_resized_photo(
    size: tuple[int, int], scale: int
) -> None:
    image = golden_image(*size)  # smooth, as photos are
    resized, _ = resize_shorter_side(image, scale)
    for origin in ((0, 0), (17, 5), (resized.shape[0] - 224, resized.shape[1] - 224)):
        crop = resized[origin[0] :, origin[1] :][:224, :224].astype(np.int64)
        off = np.abs(resize_part(image, scale, origin, (224, 224)) - crop)
        assert off.max() <= 1  # 2 takes two roundings the same way at one place: noise has them, photos hardly


def test_a_part_reads_pixels_beyond_its_edge_as_the_whole_image_does() -> None:
    image = np.zeros((40, 60, 3), np.uint8)
    image[:, 30:] = 255  # 4 source columns to one: the filter of column 7, centered at 30, sees both sides
    part = resize_part(image, 10, (0, 7), (10, 1))
    np.testing.assert_array_equal(part, resize_shorter_side(image, 10)[0][:, 7:8])
    assert 0 < part[0, 0, 0] < 255


def test_a_part_far_along_a_very_long_image_is_in_its_place() -> None:
    image = np.resize(noise(1, 251), (1, 3_000_001, 3))
    part = resize_part(image, 28, (3, 70_000_000), (5, 28), cap=2**24)
    columns = slice(2_500_000 - 2, 2_500_000 + 3)  # 28 columns show source column 2,500,000 and parts of its neighbors
    weights = kernel_weights(5, 5 * 28, 2 * 28, 28)
    expected = weights @ image[0, columns].astype(np.float64)
    assert np.abs(part - expected[None]).max() <= TOLERANCE


@pytest.mark.parametrize(("long", "scale"), [(20_000, 256), (3_000_001, 28), (20_000_001, 12)])
def test_extreme_shapes_stay_small_and_show_their_true_center(long: int, scale: int) -> None:
    image = np.resize(noise(1, 251), (1, long, 3))  # repeated to this length
    kept = 4 * scale
    first = (long * scale - kept) // 2
    around = slice(first // scale - 3, first // scale + 9)  # the source pixels that the center shows, and some more
    weights = kernel_weights(12, 12 * scale, first - (first // scale - 3) * scale, kept)
    expected = weights @ image[0, around].astype(np.float64)
    for turned in (False, True):
        resized, capped = resize_shorter_side(image.transpose(1, 0, 2) if turned else image, scale)
        assert capped
        assert resized.shape == ((kept, scale, 3) if turned else (scale, kept, 3))
        shown = resized.transpose(1, 0, 2) if turned else resized
        assert np.abs(shown - expected[None]).max() <= TOLERANCE


@given(st.integers(1, 30_000), st.integers(1, 30_000), st.integers(1, 2_000), st.integers(1, 6))
def test_sizes_follow_the_rule_exactly(height: int, width: int, scale: int, cap: int) -> None:
    short = min(height, width)
    expected = tuple(
        min(math.floor(Fraction(side * scale, short) + Fraction(1, 2)), cap * scale) for side in (height, width)
    )
    assert resized_size(height, width, scale, cap) == expected
    assert min(expected) == scale


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40), st.integers(1, 5))
def test_planned_size_is_the_size_of_the_resized_image(height: int, width: int, scale: int, cap: int) -> None:
    resized, capped = resize_shorter_side(noise(height, width), scale, cap)
    assert resized.shape[:2] == resized_size(height, width, scale, cap)
    assert capped == (resized_size(height, width, scale, cap) != resized_size(height, width, scale, cap=60))
