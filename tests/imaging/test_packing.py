"""Images of different sizes are copied unchanged to the upper left corners of their canvases."""

import numpy as np
import pytest

from prelunet.evaluator.imaging.views import pack


def test_every_image_lies_in_the_upper_left_corner_of_its_canvas() -> None:
    random = np.random.default_rng(0)
    images = [random.integers(1, 256, (height, width, 3), dtype=np.uint8) for height, width in ((5, 9), (7, 2), (1, 1))]
    canvas, sizes = pack(images, 8, 11)
    assert canvas.dtype == np.uint8
    assert canvas.shape == (3, 8, 11, 3)
    assert sizes.dtype == np.int64
    assert sizes.tolist() == [[5, 9], [7, 2], [1, 1]]
    for place, image in zip(canvas, images, strict=True):
        np.testing.assert_array_equal(place[: image.shape[0], : image.shape[1]], image)
        assert place.sum(dtype=np.int64) == image.sum(dtype=np.int64), "everything outside is 0"


def test_mirrored_image_is_packed_though_its_memory_runs_backwards() -> None:
    image = np.random.default_rng(1).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    canvas, _ = pack([image[:, ::-1]], 4, 6)
    np.testing.assert_array_equal(canvas[0], image[:, ::-1])
    assert canvas.flags.c_contiguous


def test_no_images_make_an_empty_batch() -> None:
    canvas, sizes = pack([], 8, 11)
    assert canvas.shape == (0, 8, 11, 3)
    assert sizes.shape == (0, 2)


def test_image_larger_than_the_canvas_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="does not fit a canvas of 8x11"):
        pack([np.zeros((8, 12, 3), dtype=np.uint8)], 8, 11)


def test_canvases_behind_the_images_are_blank_and_of_full_size() -> None:
    image = np.random.default_rng(2).integers(1, 256, (5, 9, 3), dtype=np.uint8)
    canvas, sizes = pack([image], 8, 11, rows=3)
    alone, size = pack([image], 8, 11)
    np.testing.assert_array_equal(canvas[:1], alone)
    assert canvas.shape == (3, 8, 11, 3)
    assert not canvas[1:].any()
    assert sizes.dtype == np.int64
    assert sizes.tolist() == [*size.tolist(), [8, 11], [8, 11]]


def test_fewer_canvases_than_images_are_our_own_mistake() -> None:
    image = np.zeros((5, 9, 3), dtype=np.uint8)
    with pytest.raises(AssertionError, match="2 images do not fit 1 canvases"):
        pack([image, image], 8, 11, rows=1)
