"""Images of different sizes on one padded array, as the model file takes them (docs/contract.md)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.arrays import UInt8Array


def pack(
    images: Sequence[UInt8Array], height: int, width: int, fill: int = 0, *, rows: int | None = None
) -> tuple[UInt8Array, npt.NDArray[np.int64]]:
    """Lay N images, uint8 (h, w, 3), on canvases of height x width pixels, each in the upper left corner.

    rows: how many canvases there should be, N unless more are asked for; those behind the images are blank.
    Returns the canvases, uint8 (rows, height, width, 3), and the images' sizes, int64 (rows, 2): height and width; of
    a blank one those of the canvas, so that the graph averages over some windows there too.
    What lies outside an image is `fill`; the graph ignores it, but the same images should always make the same bytes.
    """
    rows = len(images) if rows is None else rows
    assert rows >= len(images), f"{len(images)} images do not fit {rows} canvases"
    canvas = np.full((rows, height, width, 3), fill, dtype=np.uint8)
    sizes = np.tile(np.array([height, width], dtype=np.int64), (rows, 1))
    for place, size, image in zip(canvas, sizes, images, strict=False):  # the blank ones are left over
        size[:] = image.shape[:2]
        assert (size <= (height, width)).all(), f"an image of {size} does not fit a canvas of {height}x{width}"
        _copy(image, place[: image.shape[0], : image.shape[1]])
    return canvas, sizes


def _copy(image: UInt8Array, place: UInt8Array) -> None:
    """Copy an image; a mirrored one channel by channel, because numpy would take single pixels, four times slower."""
    if image.strides[1] < 0:
        for channel in range(3):
            place[..., channel] = image[..., channel]
    else:
        place[...] = image
