"""Resize to a scale: the shorter side gets that many pixels, the longer side keeps the aspect ratio, up to a cap.

Training, export and serving all use Pillow's bilinear filter, which widens when it shrinks (antialiasing). Nets of
other origin may have been trained on other images, such as whole ones, squashed or padded to a square
(`evaluator.preparation`).
"""

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from PIL import Image

from ..arrays import UInt8Array
from ..preparation import USUAL, Antialias, Interpolation, Preparation
from ..protocols import LONG_SIDE_CAP
from .as_torch import as_torch

DecodedImage = UInt8Array | Image.Image  # (H, W, 3), or the result of `decode_image`, RGB or gray

# Pillow's filter, and its support: pixels of the coarser grid on either side.
_FILTERS = {
    "nearest": (Image.Resampling.NEAREST, 0),
    "bilinear": (Image.Resampling.BILINEAR, 1),
    "bicubic": (Image.Resampling.BICUBIC, 2),
    "lanczos": (Image.Resampling.LANCZOS, 3),
}

PANEL_LONG_SIDE = 320  # pixels of a heat map's panel; tiny images are enlarged and huge ones shrunk to it
PANEL_SHORT_SIDE = 40  # pixels at least, so that even a 1x20000 image gets a visible panel


class Placement(NamedTuple):
    """Where a view lies in its resized image: height and width of the whole image, and of the view; in pixels.

    first: row and column of the view's first pixel in the whole image; negative where the view has a border.
    """

    full: tuple[int, int]
    first: tuple[int, int]
    size: tuple[int, int]


def placed(
    height: int, width: int, scale: int, cap: int = LONG_SIDE_CAP, preparation: Preparation = USUAL
) -> Placement:
    """Return the placement of a height x width image that is resized to a scale by `resize_to_scales`.

    The shorter side is `scale`, the longer one long·scale/short, rounded, but at most cap·scale. Both are `scale` in an
    image that is squashed or padded; the sides of a padded image itself are rounded to the nearest.
    """
    full = _full_size(height, width, scale, preparation)
    if preparation.resize == "pad":
        border = (scale - full[0]) // 2, (scale - full[1]) // 2
        return Placement(full, (-border[0], -border[1]), (scale, scale))
    size = min(full[0], cap * scale), min(full[1], cap * scale)
    return Placement(full, ((full[0] - size[0]) // 2, (full[1] - size[1]) // 2), size)


def resized_size(
    height: int, width: int, scale: int, cap: int = LONG_SIDE_CAP, preparation: Preparation = USUAL
) -> tuple[int, int]:
    """Return height and width of the result of `resize_to_scales` for a height x width image."""
    return placed(height, width, scale, cap, preparation).size


def _full_size(height: int, width: int, scale: int, preparation: Preparation) -> tuple[int, int]:
    """Return the size without a cap and a border, in integers: with floats some sizes would lose a row."""
    if preparation.resize == "squash":
        return scale, scale
    short, long = sorted((height, width))
    if preparation.resize == "pad":
        rows, columns = (max(1, round(Fraction(side * scale, long))) for side in (height, width))
        return rows, columns
    if preparation.rounding != "half-up":
        return height * scale // short, width * scale // short
    return (2 * height * scale + short) // (2 * short), (2 * width * scale + short) // (2 * short)


def resize_shorter_side(image: DecodedImage, scale: int, cap: int = LONG_SIDE_CAP) -> tuple[UInt8Array, bool]:
    """Resize an image as training does, so that its shorter side has `scale` pixels.

    image: uint8 (H, W, 3) or a Pillow RGB image, any sides from 1 on. Returns uint8 (h, w, 3) and whether it was
    capped. A long side beyond cap·scale keeps only the cap·scale pixels of its center, from floor((long − cap·scale)/2)
    on, and only these are computed (a 1x20000 image at scale 256 would otherwise become 256x5120000). They differ from
    those of the whole by at most one level, in few places: Pillow takes the part's position as float32.
    """
    return resize_to_scales(image, (scale,), cap)[scale]


def resize_to_scales(
    image: DecodedImage,
    scales: Iterable[int],
    cap: int = LONG_SIDE_CAP,
    interpolation: Interpolation = "bilinear",
    preparation: Preparation = USUAL,
) -> dict[int, tuple[UInt8Array, bool]]:
    """Resize an image to each scale, always from the original; return a result of `resize_shorter_side` for each.

    image: uint8 (H, W, 3), which Pillow copies once, or a Pillow RGB image.
    """
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    resized = {}
    for scale in scales:
        full, first, size = placed(picture.height, picture.width, scale, cap, preparation)
        if preparation.resize == "pad":
            canvas = np.full((*size, 3), preparation.pad_color, np.uint8)
            inner = canvas[-first[0] : full[0] - first[0], -first[1] : full[1] - first[1]]
            inner[...] = _resize_region(picture, full, (0, 0), full, interpolation, antialias=preparation.antialias)
            resized[scale] = canvas, False
        else:
            part = _resize_region(picture, full, first, size, interpolation, antialias=preparation.antialias)
            resized[scale] = part, size != full
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
    full, first, capped = placed(picture.height, picture.width, scale, cap)
    assert all(0 <= place <= side - count for place, side, count in zip(origin, capped, size, strict=True))
    return _resize_region(picture, full, (first[0] + origin[0], first[1] + origin[1]), size, "bilinear")


def panel_picture(image: DecodedImage) -> UInt8Array:
    """Return an image at the size of a heat map's panel, uint8 (h, w, 3)."""
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    factor = PANEL_LONG_SIDE / max(picture.size)
    width, height = (max(PANEL_SHORT_SIDE, round(side * factor)) for side in picture.size)
    return np.array(picture.resize((width, height), Image.Resampling.BICUBIC).convert("RGB"))


def _resize_region(
    picture: Image.Image,
    full: tuple[int, int],
    first: tuple[int, int],
    count: tuple[int, int],
    interpolation: Interpolation,
    *,
    antialias: Antialias = "pillow",
) -> UInt8Array:
    """Return `count` rows and columns, from `first` on, of the picture resized to `full`."""
    width, height = picture.size
    if antialias != "pillow":
        return as_torch(picture, full, first, count, interpolation, antialias=antialias == "torch")
    resampling, support = _FILTERS[interpolation]
    top, bottom, box_top, box_bottom = _source_span(height, full[0], first[0], count[0], support)
    left, right, box_left, box_right = _source_span(width, full[1], first[1], count[1], support)
    if (top, left, bottom, right) != (0, 0, height, width):
        picture = picture.crop((left, top, right, bottom))
    resized = picture.resize((count[1], count[0]), resampling, box=(box_left, box_top, box_right, box_bottom))
    return np.asarray(resized if resized.mode == "RGB" else resized.convert("RGB"))  # convert would copy an RGB image


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
