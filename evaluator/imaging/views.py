"""The views of one image: what a protocol shows to the model."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evaluator.errors import UsageError
from evaluator.imaging.resize import resize_shorter_side
from evaluator.protocols import Protocol, View

UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ViewImage:
    """The pixels of one view. image: uint8 (h, w, 3), contiguous; capped: part of a long image was cut away."""

    view: View
    image: UInt8Array
    capped: bool


def make_views(image: UInt8Array, protocol: Protocol) -> list[ViewImage]:
    """Make the views of an image, uint8 (H, W, 3), in the order of `protocol.views`.

    Each scale is resized once; the mirrored view is the plain one with its columns reversed.
    """
    plain = {scale: _plain_view(image, scale, protocol) for scale in protocol.scales}
    views = []
    for view in protocol.views:
        pixels, capped = plain[view.scale]
        views.append(ViewImage(view, np.ascontiguousarray(pixels[:, ::-1]) if view.mirrored else pixels, capped))
    return views


def _plain_view(image: UInt8Array, scale: int, protocol: Protocol) -> tuple[UInt8Array, bool]:
    resized, capped = resize_shorter_side(image, scale, protocol.long_side_cap)
    if protocol.crop is not None:
        resized = center_crop(resized, protocol.crop)
    return resized, capped


def center_crop(image: UInt8Array, crop: int) -> UInt8Array:
    """Cut the central crop x crop pixels out of uint8 (h, w, 3), from floor((side − crop)/2) on in both directions."""
    height, width = image.shape[:2]
    if min(height, width) < crop:
        raise UsageError(f"a crop of {crop} pixels does not fit an image of {height}x{width}; use a larger scale")
    top, left = (height - crop) // 2, (width - crop) // 2
    return np.ascontiguousarray(image[top : top + crop, left : left + crop])
