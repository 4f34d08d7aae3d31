"""Resize to a scale: the shorter side gets that many pixels, the longer side keeps the aspect ratio, up to a cap.

Nets of other origin may have been trained on images that are squashed to a square: both sides get the scale.

Training, export and serving all use Pillow's bilinear filter, which widens when it shrinks (antialiasing). Its bicubic
filter is for adopted classifiers that were trained with it.
"""

from collections.abc import Iterable

import numpy as np
from PIL import Image

from ..arrays import UInt8Array
from ..contract import Interpolation, Resize
from ..protocols import LONG_SIDE_CAP

DecodedImage = UInt8Array | Image.Image  # (H, W, 3), or the result of `decode_image`

# Pillow's filter, and its support: pixels of the coarser grid on either side.
_FILTERS = {"bilinear": (Image.Resampling.BILINEAR, 1), "bicubic": (Image.Resampling.BICUBIC, 2)}

PANEL_LONG_SIDE = 320  # pixels of a heat map's panel; tiny images are enlarged and huge ones shrunk to it
PANEL_SHORT_SIDE = 40  # pixels at least, so that even a 1x20000 image gets a visible panel


def resized_size(
    height: int, width: int, scale: int, cap: int = LONG_SIDE_CAP, resize: Resize = "shorter"
) -> tuple[int, int]:
    """Return height and width of a height x width image resized to a scale by `resize_to_scales`.

    The shorter side is `scale`, the longer one floor(long·scale/short + 1/2), but at most cap·scale; both are `scale`
    in an image that is squashed.
    """
    full_height, full_width = _uncapped_size(height, width, scale, resize)
    return min(full_height, cap * scale), min(full_width, cap * scale)


def _uncapped_size(height: int, width: int, scale: int, resize: Resize = "shorter") -> tuple[int, int]:
    """Return the size without a cap, in integers: with floats some sizes would lose a row."""
    if resize == "squash":
        return scale, scale
    short = min(height, width)
    return (2 * height * scale + short) // (2 * short), (2 * width * scale + short) // (2 * short)


def resize_shorter_side(
    image: DecodedImage, scale: int, cap: int = LONG_SIDE_CAP, interpolation: Interpolation = "bilinear"
) -> tuple[UInt8Array, bool]:
    """Resize an image so that its shorter side has `scale` pixels.

    image: uint8 (H, W, 3) or a Pillow RGB image, any sides from 1 on. Returns uint8 (h, w, 3) and whether it was
    capped. A long side beyond cap·scale keeps only the cap·scale pixels of its center, from floor((long − cap·scale)/2)
    on, and only these are computed (a 1x20000 image at scale 256 would otherwise become 256x5120000). They differ from
    those of the whole by at most one level, in few places: Pillow takes the part's position as float32.
    """
    return resize_to_scales(image, (scale,), cap, interpolation)[scale]


def resize_to_scales(
    image: DecodedImage,
    scales: Iterable[int],
    cap: int = LONG_SIDE_CAP,
    interpolation: Interpolation = "bilinear",
    resize: Resize = "shorter",
) -> dict[int, tuple[UInt8Array, bool]]:
    """Resize an image to each scale, always from the original; return the result of `resize_shorter_side` for each.

    image: uint8 (H, W, 3), which Pillow copies once, or a Pillow RGB image; resize: of its shorter side, or squash it.
    """
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    resized = {}
    for scale in scales:
        full = _uncapped_size(picture.height, picture.width, scale, resize)
        kept = resized_size(picture.height, picture.width, scale, cap, resize)
        first = (full[0] - kept[0]) // 2, (full[1] - kept[1]) // 2
        resized[scale] = _resize_region(picture, full, first, kept, interpolation), kept != full
    return resized


def resize_part(
    image: DecodedImage, scale: int, origin: tuple[int, int], size: tuple[int, int], cap: int = LONG_SIDE_CAP
) -> UInt8Array:
    """Compute only one part of the bilinear result of `resize_shorter_side`.

    image: uint8 (H, W, 3) or a Pillow RGB image; origin: row and column in the resized (and capped) image where the
    part begins; size: its height and width, which must fit. Returns uint8 (height, width, 3).

    Part and whole are each within 1 level of the exact filter, because Pillow rounds between its two passes and at the
    end, so they differ by at most 2. Most differences are 1. They occur where Pillow, depending on the sizes, processes
    rows before columns in only one of them, or where a sum lies at one half. (Bicubic parts would differ by more:
    values beyond 0 or 255 are clipped between the passes.)
    """
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    full = _uncapped_size(picture.height, picture.width, scale)
    capped = resized_size(picture.height, picture.width, scale, cap)
    assert all(0 <= place <= side - count for place, side, count in zip(origin, capped, size, strict=True))
    first = (full[0] - capped[0]) // 2 + origin[0], (full[1] - capped[1]) // 2 + origin[1]
    return _resize_region(picture, full, first, size, "bilinear")


def panel_picture(image: DecodedImage) -> UInt8Array:
    """Return an image at the size of a heat map's panel, uint8 (h, w, 3)."""
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    factor = PANEL_LONG_SIDE / max(picture.size)
    width, height = (max(PANEL_SHORT_SIDE, round(side * factor)) for side in picture.size)
    return np.array(picture.resize((width, height), Image.Resampling.BICUBIC))


def _resize_region(
    picture: Image.Image,
    full: tuple[int, int],
    first: tuple[int, int],
    count: tuple[int, int],
    interpolation: Interpolation,
) -> UInt8Array:
    """Return `count` rows and columns, from `first` on, of the picture resized to `full`."""
    width, height = picture.size
    resampling, support = _FILTERS[interpolation]
    top, bottom, box_top, box_bottom = _source_span(height, full[0], first[0], count[0], support)
    left, right, box_left, box_right = _source_span(width, full[1], first[1], count[1], support)
    if (top, left, bottom, right) != (0, 0, height, width):
        picture = picture.crop((left, top, right, bottom))
    return np.array(picture.resize((count[1], count[0]), resampling, box=(box_left, box_top, box_right, box_bottom)))


def _source_span(side: int, full: int, offset: int, count: int, support: int) -> tuple[int, int, float, float]:
    """Return which source pixels of one side produce `count` of `full` resized pixels, from `offset` on.

    support: pixels of the coarser grid that the filter reaches on either side.
    Returns first and last + 1 of the source pixels that the filter touches, then the begin and end of the part among
    them, counted from the first. The caller cuts out these pixels first, because Pillow's box is float32, which cannot
    distinguish neighboring pixels far along a very long side.
    """
    if count == full:
        return 0, side, 0.0, float(side)
    reach = support * -(-side // full) + 1  # plus one for rounding
    first = max(offset * side // full - reach, 0)
    last = min(-(-(offset + count) * side // full) + reach, side)
    return first, last, (offset * side - first * full) / full, ((offset + count) * side - first * full) / full
