"""Images of different sizes on one padded array, as the model file takes them (docs/contract.md)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

UInt8Array = npt.NDArray[np.uint8]


def pack(
    images: Sequence[UInt8Array], height: int, width: int, fill: int = 0
) -> tuple[UInt8Array, npt.NDArray[np.int64]]:
    """Lay N images, uint8 (h, w, 3), on canvases of height x width pixels, each in the upper left corner.

    Returns the canvases, uint8 (N, height, width, 3), and the images' sizes, int64 (N, 2): height and width.
    What lies outside an image is `fill`; the graph ignores it, but the same images should always make the same bytes.
    """
    canvas = np.full((len(images), height, width, 3), fill, dtype=np.uint8)
    sizes = np.array([image.shape[:2] for image in images], dtype=np.int64).reshape(len(images), 2)
    assert (sizes <= (height, width)).all(), f"images of {sizes.max(axis=0)} do not fit a canvas of {height}x{width}"
    for place, image in zip(canvas, images, strict=True):
        place[: image.shape[0], : image.shape[1]] = image
    return canvas, sizes
