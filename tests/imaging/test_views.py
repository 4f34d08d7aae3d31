"""The views of an image follow its protocol, in order, and crops are where the design places them."""

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.imaging.resize import resize_shorter_side
from prelunet.evaluator.imaging.views import crop_at, make_views
from prelunet.evaluator.protocols import EvaluationProtocol, View

IMAGE = np.random.default_rng(3).integers(0, 256, (41, 67, 3), dtype=np.uint8)


def test_views_come_scale_by_scale_plain_before_mirrored() -> None:
    views = make_views(IMAGE, EvaluationProtocol("three", "dense", (32, 48, 30), mirror=True))
    assert [view.view for view in views] == [
        View(scale, mirrored) for scale in (32, 48, 30) for mirrored in (False, True)
    ]
    for view in views:
        expected, _ = resize_shorter_side(IMAGE, view.view.scale)
        np.testing.assert_array_equal(view.image, expected[:, ::-1] if view.view.mirrored else expected)
        assert not view.capped
    for plain, mirrored in zip(views[::2], views[1::2], strict=True):
        assert np.shares_memory(plain.image, mirrored.image)


@pytest.mark.parametrize("shape", [(41, 67), (30, 200)])  # the second is capped
def test_views_of_a_pillow_image_are_those_of_its_pixels(shape: tuple[int, int]) -> None:
    image = np.random.default_rng(8).integers(0, 256, (*shape, 3), dtype=np.uint8)
    picture = Image.fromarray(image)
    protocol = EvaluationProtocol("three", "dense", (32, 48, min(shape)), mirror=True)
    for expected, view in zip(make_views(image, protocol), make_views(picture, protocol), strict=True):
        np.testing.assert_array_equal(view.image, expected.image)
        assert (view.view, view.capped) == (expected.view, expected.capped)
    np.testing.assert_array_equal(np.asarray(picture), image)


def test_mirrored_view_swaps_columns_and_not_rows_or_channels() -> None:
    image = np.zeros((28, 30, 3), dtype=np.uint8)
    image[2, 4, 1] = 255
    plain, mirrored = make_views(image, EvaluationProtocol("one", "dense", (28,), mirror=True))
    assert plain.image[2, 4, 1] == 255
    assert mirrored.image[2, 25, 1] == 255
    assert mirrored.image.sum() == 255


def test_protocol_without_mirroring_has_one_view_a_scale() -> None:
    views = make_views(IMAGE, EvaluationProtocol("plain", "dense", (32, 48), mirror=False))
    assert [view.view for view in views] == [View(32, False), View(48, False)]


@pytest.mark.parametrize(("shape", "top", "left"), [((33, 54), 2, 13), ((32, 53), 2, 12), ((28, 28), 0, 0)])
def test_center_shows_the_crop_at_the_rounded_down_middle(shape: tuple[int, int], top: int, left: int) -> None:
    image = np.random.default_rng(4).integers(0, 256, (*shape, 3), dtype=np.uint8)
    (view,) = make_views(image, EvaluationProtocol("center", "center", (min(shape),), mirror=False, crop=28))
    np.testing.assert_array_equal(view.image, image[top : top + 28, left : left + 28])
    assert view.view == View(min(shape), False, "center")


@pytest.mark.parametrize(("height", "width"), [(33, 54), (71, 28), (30, 31)])
def test_ten_crop_shows_the_corners_of_the_whole_image_and_the_center_each_mirrored_too(
    height: int, width: int
) -> None:
    image = np.random.default_rng(6).integers(0, 256, (height, width, 3), dtype=np.uint8)
    views = make_views(image, EvaluationProtocol("ten", "ten-crop", (min(height, width),), mirror=True, crop=28))
    top, left = (height - 28) // 2, (width - 28) // 2
    expected = {
        "top-left": image[:28, :28],
        "top-right": image[:28, width - 28 :],
        "bottom-left": image[height - 28 :, :28],
        "bottom-right": image[height - 28 :, width - 28 :],
        "center": image[top : top + 28, left : left + 28],
    }
    assert [(view.view.part, view.view.mirrored) for view in views] == [
        (part, mirrored) for part in expected for mirrored in (False, True)
    ]
    for view in views:
        plain = expected[view.view.part]
        np.testing.assert_array_equal(view.image, plain[:, ::-1] if view.view.mirrored else plain)


def test_corners_of_a_capped_image_are_those_of_the_part_that_is_kept() -> None:
    image = np.random.default_rng(7).integers(0, 256, (30, 200, 3), dtype=np.uint8)  # of 200 columns 40 to 160
    views = make_views(image, EvaluationProtocol("ten", "ten-crop", (30,), mirror=False, crop=28))
    np.testing.assert_array_equal(views[0].image, image[:28, 40:68])
    np.testing.assert_array_equal(views[3].image, image[2:, 132:160])
    assert all(view.capped for view in views)


def test_crop_larger_than_the_image_is_refused() -> None:
    with pytest.raises(UsageError, match="a crop of 28 pixels does not fit an image of 27x40"):
        crop_at(np.zeros((27, 40, 3), dtype=np.uint8), "center", 28)


def test_cap_of_the_protocol_holds_and_is_recorded() -> None:
    image = np.random.default_rng(5).integers(0, 256, (9, 100, 3), dtype=np.uint8)
    views = make_views(image, EvaluationProtocol("narrow", "dense", (30, 12), mirror=True, long_side_cap=3))
    assert [view.image.shape for view in views] == [(30, 90, 3), (30, 90, 3), (12, 36, 3), (12, 36, 3)]
    assert all(view.capped for view in views)
