"""Resize as torch's `interpolate` does, in numpy: without antialiasing, or as it resizes uint8 tensors with it.

The latter is what torchvision and the image processors of transformers do with tensors. It differs from Pillow by a few
levels: weights have 16 bits, and rows are computed first. (Without AVX2, except on ARM, torchvision computes bilinear
images in float32, up to one level off.)
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from ..arrays import UInt8Array
from ..preparation import Interpolation

_Real = TypeVar("_Real", np.float32, np.float64)

_CUBIC = -0.75  # parameter of torch, OpenCV and TensorFlow without antialiasing
_WIDE_CUBIC = -0.5  # of torch and Pillow with antialiasing
_BLOCK = 64, 2**14  # source rows and columns of a block that is resized at once: 10 MB of copies
_OVERLAP = 4  # times as many with antialiasing, where blocks overlap
_WEIGHT_BITS, _MOST_BITS = 15, 22  # of the integers for the weights, without the sign; of their binary places


class _Taps(NamedTuple):
    """For each of n resized pixels along one side, its t source pixels (n, t), and their weights (n, t).

    bits: binary places of the weights if they are integers, int16; otherwise 0, and they are float32.
    """

    places: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32] | npt.NDArray[np.int16]
    bits: int = 0


def as_torch(
    picture: Image.Image,
    full: tuple[int, int],
    first: tuple[int, int],
    count: tuple[int, int],
    interpolation: Interpolation,
    *,
    antialias: bool,
) -> UInt8Array:
    """Return `count` rows and columns, from `first` on, of a picture that is resized to `full` rows and columns.

    interpolation: one that torch has, with antialiasing bilinear or bicubic. Returns uint8 (rows, columns, 3), with
    antialiasing equal to torch's, and otherwise to its float32, rounded.
    """
    blocks_of, resized = (_wide_blocks, _antialiased) if antialias else (_blocks, _interpolated)
    above, beside = (
        list(blocks_of(side, full[axis], first[axis], count[axis], interpolation, _BLOCK[axis]))
        for axis, side in enumerate(reversed(picture.size))
    )
    blocks = [[resized(picture, rows, columns) for columns in beside] for rows in above]
    return np.concatenate([np.concatenate(row, axis=1) for row in blocks])


def _wide_blocks(side: int, full: int, first: int, count: int, interpolation: Interpolation, most: int) -> list[_Taps]:
    """Return what `_blocks` yields, for a filter with antialiasing: integers, rounded as torch does.

    They have as many binary places as the largest of the weights allows. Of a part of a side, that may be more than
    torch's have for the whole, which can move a pixel by one level.
    """
    together = max(1, _OVERLAP * most * full // side)
    blocks = [
        _wide_weights(side, full, first + start, min(together, count - start), interpolation)
        for start in range(0, count, together)
    ]
    largest = max(weights.max() for _, weights in blocks)
    enough = (bits for bits in range(_MOST_BITS) if int(0.5 + largest * 2 ** (bits + 1)) >= 2**_WEIGHT_BITS)
    bits = next(enough, _MOST_BITS)
    return [
        _Taps(places, np.trunc(weights * 2**bits + np.copysign(0.5, weights)).astype(np.int16), bits)
        for places, weights in blocks
    ]


def _wide_weights(
    side: int, full: int, first: int, count: int, interpolation: Interpolation
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Return the places and weights of `count` of `full` pixels, from `first` on.

    In torch's order of float64 operations (`upsample_avx_bilinear_bicubic_uint8`).
    """
    step = side / full
    wide = max(step, 1.0)
    support = (1 if interpolation == "bilinear" else 2) * wide
    center = step * (np.arange(first, first + count) + 0.5)
    begin = np.maximum((center - support + 0.5).astype(np.int32), 0)
    end = np.minimum((center + support + 0.5).astype(np.int32), side)
    places = begin[:, None] + np.arange((end - begin).max(), dtype=np.int32)
    distance = np.abs((places - center[:, None] + 0.5) * (1 / wide))
    if interpolation == "bilinear":
        weights = np.maximum(1 - distance, 0)
    else:
        outer = np.where(distance < 2, _outer(distance, np.float64(_WIDE_CUBIC)), 0)
        weights = np.where(distance < 1, _inner(distance, np.float64(_WIDE_CUBIC)), outer)
    weights[places >= end[:, None]] = 0
    weights /= sum(weights.T)[:, None]
    return np.minimum(places, side - 1), weights


def _antialiased(picture: Image.Image, rows: _Taps, columns: _Taps) -> UInt8Array:
    """Return the weighted sums of the source pixels, in each row and then in each column, uint8 (rows, columns, 3)."""
    (top, bottom), (left, right) = _span(rows), _span(columns)
    strips = []
    for start in range(top, bottom, _BLOCK[0]):
        strip = picture.crop((left, start, right, min(start + _BLOCK[0], bottom))).convert("RGB")
        strips.append(_sums(np.asarray(strip).swapaxes(0, 1), columns, left))
    return _sums(np.concatenate(strips, axis=1).swapaxes(0, 1), rows, top)


def _sums(pixels: UInt8Array, taps: _Taps, first: int) -> UInt8Array:
    """Return the weighted sums along the first axis of pixels, which begin with that source pixel, rounded, uint8."""
    pixels = np.ascontiguousarray(pixels)
    total = np.full((len(taps.places), *pixels.shape[1:]), 1 << taps.bits >> 1, np.int32)
    for places, weights in zip(taps.places.T, taps.weights.T.astype(np.int32), strict=True):
        total += weights[:, None, None] * pixels[places - first]
    result: UInt8Array = np.clip(total >> taps.bits, 0, 255).astype(np.uint8)
    return result


def _taps(side: int, full: int, first: int, count: int, interpolation: Interpolation) -> _Taps:
    """Return what `count` of `full` pixels, from `first` on, take from a side without antialiasing.

    In torch's order of float32 operations, so that both round alike (`torch.nn.functional.interpolate` with
    align_corners=False).
    """
    step, pixel = np.float32(side / full), np.arange(first, first + count, dtype=np.float32)
    if interpolation == "nearest":
        return _Taps(np.minimum((pixel * step).astype(np.int32), side - 1)[:, None], np.ones((count, 1), np.float32))
    place = step * (pixel + np.float32(0.5)) - np.float32(0.5)
    if interpolation == "bilinear":
        place = np.maximum(place, np.float32(0))
    before = np.floor(place)
    t = place - before
    one, a = np.float32(1), np.float32(_CUBIC)
    if interpolation == "bilinear":
        offsets, weights = [0, 1], [one - t, t]
    else:
        offsets = [-1, 0, 1, 2]
        weights = [_outer(t + one, a), _inner(t, a), _inner(one - t, a), _outer(one - t + one, a)]
    places = np.clip(before.astype(np.int32)[:, None] + offsets, 0, side - 1)
    return _Taps(places, np.stack(weights, axis=1))


def _blocks(side: int, full: int, first: int, count: int, interpolation: Interpolation, most: int) -> Iterator[_Taps]:
    """Yield the taps of consecutive pixels along one side. most: source pixels that those of one block reach, about."""
    together = max(1, most * full // side)
    for start in range(0, count, together):
        yield _taps(side, full, first + start, min(together, count - start), interpolation)


def _inner(x: npt.NDArray[_Real], a: _Real) -> npt.NDArray[_Real]:
    """Return the cubic kernel with parameter a at distances from 0 to 1 (Keys 1981)."""
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _outer(x: npt.NDArray[_Real], a: _Real) -> npt.NDArray[_Real]:
    """Return the cubic kernel at distances from 1 to 2."""
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def _span(taps: _Taps) -> tuple[int, int]:
    """Return the first of the source pixels, and the last + 1."""
    return int(taps.places.min()), int(taps.places.max()) + 1


def _interpolated(picture: Image.Image, rows: _Taps, columns: _Taps) -> UInt8Array:
    """Return the weighted sums of the source pixels, rounded, uint8 (rows, columns, 3)."""
    (top, bottom), (left, right) = _span(rows), _span(columns)
    source = np.asarray(picture.crop((left, top, right, bottom)).convert("RGB"))
    total = np.zeros((len(rows.places), len(columns.places), 3), np.float32)
    for row, row_weight in zip((rows.places - top).T, rows.weights.T, strict=True):
        pairs = zip((columns.places - left).T, columns.weights.T, strict=True)
        of_row = sum(weight[:, None] * source[row[:, None], column] for column, weight in pairs)
        total += row_weight[:, None, None] * of_row
    result: UInt8Array = np.clip(np.rint(total), 0, 255).astype(np.uint8)
    return result
