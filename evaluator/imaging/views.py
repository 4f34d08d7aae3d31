"""The views of one image: what a protocol shows to the model, and how the views of several share an input array."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ..arrays import UInt8Array
from ..errors import UsageError
from ..preparation import Rounding
from ..protocols import EvaluationProtocol, View, ViewPart
from .resize import DecodedImage, resize_to_scales


class ViewImage(Struct, frozen=True):
    """The pixels of one view. image: uint8 (h, w, 3); capped: part of a long image was cut off.

    A mirrored image is a reversed view of the plain one's memory and takes no more.
    """

    view: View
    image: UInt8Array
    capped: bool


def make_views(image: DecodedImage, protocol: EvaluationProtocol) -> list[ViewImage]:
    """Create the views of an image, uint8 (H, W, 3) or a Pillow RGB image, in the order of `protocol.views`.

    Each scale is resized once. Raises UsageError when a crop does not fit into its scale.
    """
    return cut_views(resized_of(image, protocol), protocol)


def resized_of(image: DecodedImage, protocol: EvaluationProtocol) -> dict[int, tuple[UInt8Array, bool]]:
    """Resize an image to each scale of a protocol, as `resize_to_scales` does."""
    return resize_to_scales(
        image, protocol.scales, protocol.long_side_cap, protocol.interpolation, protocol.preparation
    )


def cut_views(resized: Mapping[int, tuple[UInt8Array, bool]], protocol: EvaluationProtocol) -> list[ViewImage]:
    """Do the same with the results of `resize_to_scales`.

    A mirrored view is the plain one, or its crop, with the columns reversed.
    """
    views = []
    for view in protocol.views:
        pixels, capped = resized[view.scale]
        if protocol.crop is not None:
            pixels = crop_at(pixels, view.part, protocol.crop, protocol.preparation.rounding)
        views.append(ViewImage(view, pixels[:, ::-1] if view.mirrored else pixels, capped))
    return views


def crop_at(image: UInt8Array, part: ViewPart, crop: int, rounding: Rounding = "half-up") -> UInt8Array:
    """Cut crop x crop pixels out of uint8 (h, w, 3) at a corner or the center; UsageError if they do not fit."""
    height, width = image.shape[:2]
    if min(height, width) < crop:
        raise UsageError(f"a crop of {crop} pixels does not fit an image of {height}x{width}; use a larger scale")
    top, left = crop_origin(height, width, part, crop, rounding)
    return np.ascontiguousarray(image[top : top + crop, left : left + crop])


def crop_origin(height: int, width: int, part: ViewPart, crop: int, rounding: Rounding = "half-up") -> tuple[int, int]:
    """Return the row and column where a crop begins: at a corner, or centered, at (side − crop)/2, rounded."""
    if part == "center":
        if rounding == "torchvision":  # halves to the even number
            return round((height - crop) / 2), round((width - crop) / 2)
        return (height - crop) // 2, (width - crop) // 2
    return (0 if part.startswith("top") else height - crop), (0 if part.endswith("left") else width - crop)


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
    own = [image.shape[:2] for image in images]
    fits = all(own_height <= height and own_width <= width for own_height, own_width in own)
    assert fits, f"one of {own} does not fit a canvas of {height}x{width}"
    canvas = np.empty((rows, height, width, 3), dtype=np.uint8)
    if own != rows * [(height, width)]:  # otherwise each pixel is written below
        canvas.fill(fill)
    sizes = np.array(own + (rows - len(own)) * [(height, width)], dtype=np.int64).reshape(rows, 2)
    for place, image in zip(canvas, images, strict=False):  # the blank ones remain
        corner = place[: image.shape[0], : image.shape[1]]
        if image.strides[1] < 0:  # mirrored: numpy would copy single pixels, four times slower
            for channel in range(3):
                corner[..., channel] = image[..., channel]
        else:
            corner[...] = image
    return canvas, sizes
