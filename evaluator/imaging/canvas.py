"""Pack images of different sizes into one padded array, the input of a model file (docs/formats.md)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..arrays import UInt8Array


def pack(
    images: Sequence[UInt8Array], height: int, width: int, fill: int = 0, *, rows: int | None = None
) -> tuple[UInt8Array, npt.NDArray[np.int64]]:
    """Copy N images, uint8 (h, w, 3), onto canvases of height x width pixels, each in the upper left corner.

    rows: number of canvases, by default N; those after the images are blank.
    Returns the canvases, uint8 (rows, height, width, 3), and the images' sizes, int64 (rows, 2): height and width. The
    size of a blank canvas is its own, so that the graph averages over some windows there too.
    Pixels outside an image are `fill`. The graph ignores them, but equal images should always give equal bytes.
    """
    rows = len(images) if rows is None else rows
    assert rows >= len(images), f"{len(images)} images do not fit {rows} canvases"
    canvas = np.full((rows, height, width, 3), fill, dtype=np.uint8)
    sizes = np.tile(np.array([height, width], dtype=np.int64), (rows, 1))
    for place, size, image in zip(canvas, sizes, images, strict=False):  # the blank ones remain
        size[:] = image.shape[:2]
        assert (size <= (height, width)).all(), f"an image of {size} does not fit a canvas of {height}x{width}"
        corner = place[: image.shape[0], : image.shape[1]]
        if image.strides[1] < 0:  # mirrored: numpy would copy single pixels, four times slower
            for channel in range(3):
                corner[..., channel] = image[..., channel]
        else:
            corner[...] = image
    return canvas, sizes
