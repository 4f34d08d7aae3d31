"""Resize to a scale: the shorter side gets that many pixels, the longer one follows, up to a cap.

Pillow's bilinear filter, which widens when it shrinks (antialiasing): the same in training, export and serving. Its
bicubic one is for adopted classifiers that were trained with it.
"""

from collections.abc import Iterable

import numpy as np
from PIL import Image

from prelunet.evaluator.arrays import UInt8Array
from prelunet.evaluator.contract import Interpolation
from prelunet.evaluator.protocols import LONG_SIDE_CAP

DecodedImage = UInt8Array | Image.Image  # (H, W, 3), or what `decode_image` gives

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
    image: DecodedImage, scale: int, cap: int = LONG_SIDE_CAP, interpolation: Interpolation = "bilinear"
) -> tuple[UInt8Array, bool]:
    """Resize an image so that its shorter side has `scale` pixels.

    image: uint8 (H, W, 3) or an RGB image of Pillow, any sides from 1 on. Returns uint8 (h, w, 3) and whether it was
    capped: of a long side beyond cap·scale only the centre of cap·scale pixels is kept, from
    floor((long − cap·scale)/2) on, and only that part is ever computed (a 1x20000 image at scale 256 would otherwise
    become 256x5120000).
    """
    return resize_to_scales(image, (scale,), cap, interpolation)[scale]


def resize_to_scales(
    image: DecodedImage, scales: Iterable[int], cap: int = LONG_SIDE_CAP, interpolation: Interpolation = "bilinear"
) -> dict[int, tuple[UInt8Array, bool]]:
    """Resize an image to each scale, always from all its pixels; for each what `resize_shorter_side` returns.

    image: uint8 (H, W, 3), which Pillow copies once, or an RGB image of Pillow.
    """
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    return {scale: _resize(picture, scale, cap, interpolation) for scale in scales}


def resize_part(
    image: DecodedImage, scale: int, origin: tuple[int, int], size: tuple[int, int], cap: int = LONG_SIDE_CAP
) -> UInt8Array:
    """Compute one part of what `resize_shorter_side` gives, bilinear, and nothing beside it.

    image: uint8 (H, W, 3) or an RGB image of Pillow; origin: row and column in the resized (and capped) image where the
    part begins; size: its height and width, which must fit. Returns uint8 (height, width, 3).

    Like the whole image it is within 1 level of the exact filter, since Pillow rounds between its two passes and at the
    end; so part and whole differ by 2 at most. They do differ, mostly by 1, where Pillow, which looks at the sizes,
    takes rows before columns in one of them only, or where a sum lies at a half. (Bicubic parts would differ by more:
    what shoots over 0 or 255 is cut off between the passes.)
    """
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    full = _uncapped_size(picture.height, picture.width, scale)
    capped = resized_size(picture.height, picture.width, scale, cap)
    assert all(0 <= place <= side - count for place, side, count in zip(origin, capped, size, strict=True))
    first = (full[0] - capped[0]) // 2 + origin[0], (full[1] - capped[1]) // 2 + origin[1]
    return _resize_region(picture, full, first, size, "bilinear")


def _resize(picture: Image.Image, scale: int, cap: int, interpolation: Interpolation) -> tuple[UInt8Array, bool]:
    width, height = picture.size
    full = _uncapped_size(height, width, scale)
    kept = resized_size(height, width, scale, cap)
    first = (full[0] - kept[0]) // 2, (full[1] - kept[1]) // 2
    return _resize_region(picture, full, first, kept, interpolation), kept != full


def _resize_region(
    picture: Image.Image,
    full: tuple[int, int],
    first: tuple[int, int],
    count: tuple[int, int],
    interpolation: Interpolation,
) -> UInt8Array:
    """Return rows and columns from `first` on, `count` of them, of the picture resized to `full`."""
    width, height = picture.size
    resampling, support = _FILTERS[interpolation]
    top, bottom, box_top, box_bottom = _source_span(height, full[0], first[0], count[0], support)
    left, right, box_left, box_right = _source_span(width, full[1], first[1], count[1], support)
    if (top, left, bottom, right) != (0, 0, height, width):
        picture = picture.crop((left, top, right, bottom))
    return np.array(picture.resize((count[1], count[0]), resampling, box=(box_left, box_top, box_right, box_bottom)))


def _source_span(side: int, full: int, offset: int, count: int, support: int) -> tuple[int, int, float, float]:
    """Return from which source pixels `count` of `full` resized pixels of one side are made, from `offset` on.

    support: pixels of the coarser grid that the filter reaches on either side.
    First and last + 1 of the source pixels that the filter touches; then, counted from the first, where the part
    begins and ends among them. The part is cut out first because Pillow takes its box in float32, which far
    along a very long side cannot tell neighbouring pixels apart.
    """
    if count == full:
        return 0, side, 0.0, float(side)
    reach = support * -(-side // full) + 1  # and one for rounding
    first = max(offset * side // full - reach, 0)
    last = min(-(-(offset + count) * side // full) + reach, side)
    return first, last, (offset * side - first * full) / full, ((offset + count) * side - first * full) / full
