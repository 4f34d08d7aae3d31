"""Resize to a scale: the shorter side gets that many pixels, the longer one follows, up to a cap.

Pillow's bilinear filter, which widens when it shrinks (antialiasing): the same in training, export and serving. Its
bicubic one is for adopted classifiers that were trained with it.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from PIL import Image

from evaluator.contract import Interpolation
from evaluator.protocols import LONG_SIDE_CAP

UInt8Array = npt.NDArray[np.uint8]
Picture = UInt8Array | Image.Image  # (H, W, 3), or what `decode_image` gives

# Pillow's filter, and how far it reaches: pixels of the coarser grid on either side.
_FILTERS = {"bilinear": (Image.Resampling.BILINEAR, 1), "bicubic": (Image.Resampling.BICUBIC, 2)}


def resized_size(height: int, width: int, scale: int, cap: int = LONG_SIDE_CAP) -> tuple[int, int]:
    """Return height and width of a height x width image at a scale, as `resize_shorter_side` gives them.

    The shorter side is `scale`, the longer one floor(long·scale/short + 1/2), but at most cap·scale.
    """
    full_height, full_width = _uncapped_size(height, width, scale)
    return min(full_height, cap * scale), min(full_width, cap * scale)


def _uncapped_size(height: int, width: int, scale: int) -> tuple[int, int]:
    """Return the size without a cap, in whole numbers: a float would miss a row at some sizes."""
    short = min(height, width)
    return (2 * height * scale + short) // (2 * short), (2 * width * scale + short) // (2 * short)


def resize_shorter_side(
    image: Picture, scale: int, cap: int = LONG_SIDE_CAP, interpolation: Interpolation = "bilinear"
) -> tuple[UInt8Array, bool]:
    """Resize an image so that its shorter side has `scale` pixels.

    image: uint8 (H, W, 3) or an RGB image of Pillow, any sides from 1 on. Returns uint8 (h, w, 3) and whether it was
    capped: of a long side beyond cap·scale only the centre of cap·scale pixels is kept, from
    floor((long − cap·scale)/2) on, and only that part is ever computed (a 1x20000 image at scale 256 would otherwise
    become 256x5120000).
    """
    return resize_to_scales(image, (scale,), cap, interpolation)[scale]


def resize_to_scales(
    image: Picture, scales: Iterable[int], cap: int = LONG_SIDE_CAP, interpolation: Interpolation = "bilinear"
) -> dict[int, tuple[UInt8Array, bool]]:
    """Resize an image to each scale, always from all its pixels; for each what `resize_shorter_side` returns.

    image: uint8 (H, W, 3), which Pillow copies once, or an RGB image of Pillow.
    """
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    return {scale: _resize(picture, scale, cap, interpolation) for scale in scales}


def _resize(picture: Image.Image, scale: int, cap: int, interpolation: Interpolation) -> tuple[UInt8Array, bool]:
    width, height = picture.size
    full = _uncapped_size(height, width, scale)
    kept = resized_size(height, width, scale, cap)
    resampling, support = _FILTERS[interpolation]
    top, bottom, box_top, box_bottom = _source_span(height, full[0], kept[0], support)
    left, right, box_left, box_right = _source_span(width, full[1], kept[1], support)
    if kept != full:
        picture = picture.crop((left, top, right, bottom))
    resized = picture.resize((kept[1], kept[0]), resampling, box=(box_left, box_top, box_right, box_bottom))
    return np.array(resized), kept != full


def _source_span(side: int, full: int, kept: int, support: int) -> tuple[int, int, float, float]:
    """Return from which source pixels the central `kept` of `full` resized pixels of one side are made.

    support: pixels of the coarser grid that the filter reaches on either side.
    First and last + 1 of the source pixels that the filter touches; then, counted from the first, where the kept
    part begins and ends among them. The part is cut out first because Pillow takes its box in float32, which far
    along a very long side cannot tell neighbouring pixels apart.
    """
    if kept == full:
        return 0, side, 0.0, float(side)
    offset = (full - kept) // 2
    reach = support * -(-side // full) + 1  # and one for rounding
    first = max(offset * side // full - reach, 0)
    last = min(-(-(offset + kept) * side // full) + reach, side)
    return first, last, (offset * side - first * full) / full, ((offset + kept) * side - first * full) / full
