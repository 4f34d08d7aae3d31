"""Estimate from the header of an image file what decoding it costs, before anything is decoded.

The bytes are untrusted, and this runs on a server's event loop: without Pillow, and in time that the file's structure
cannot raise. Reading 100 kB takes about 0.04 ms, nearly all of it the search for the scans of a JPEG.
"""

import re
from itertools import islice

from msgspec import Struct

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
JPEG_2000_SIGNATURE = b"\0\0\0\x0cjP  \r\n\x87\n"  # of the file format; a bare stream begins with the next
JPEG_2000_STREAM = b"\xff\x4f\xff\x51"
# Everything within these limits is decoded in about 50 ms or less, whatever its bytes.
_EASY_PIXELS = 2**21
EASY_DECODE_BYTES = 22 * _EASY_PIXELS  # the most that decoding and resizing one takes; see `decode.decode_bytes`
_EASY_SCANS = 16  # encoders write about ten
_EASY_BYTES_PER_PIXEL, _EASY_METADATA = 4, 2**18  # more bytes can only be metadata, in any number of small pieces
_EASY_BYTES = _EASY_BYTES_PER_PIXEL * _EASY_PIXELS + _EASY_METADATA
_EASY_SEGMENTS = 256  # of a JPEG before its pixels, or chunks of a PNG; Pillow takes microseconds for each

_MANY_SCANS = 100  # no more are accepted (`evaluator.imaging.cost_limits`)

_START_OF_SCAN = 0xDA  # ITU-T T.81, B.1.1, as are the next three
_SCAN = re.compile(rb"\xff\xda")  # never part of compressed pixels
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # the markers of a frame header
_BASELINE = {0xC0, 0xC1}  # sequential Huffman: decoded in one pass


class ImageHeader(Struct, frozen=True):
    """The work of decoding a file.

    pixels: height x width, None if the header states none; passes: how often decoding goes over the pixels, in units
    of a baseline JPEG; easy: decoding takes little time and memory, whatever the rest of the file contains.
    """

    pixels: int | None
    passes: float
    easy: bool


def read_header(data: bytes) -> ImageHeader:
    """Read the header of an image file of any format; bytes that are not an image give some header too."""
    if data.startswith(b"\xff\xd8"):
        return _jpeg_header(data)
    passes = 6  # measured: a PNG with transparency takes five times as long as a baseline JPEG, a lossless WebP seven
    if data.startswith(PNG_SIGNATURE):
        pixels = _number(data, 16, 4) * _number(data, 20, 4)
        position, chunks = len(PNG_SIGNATURE), 0
        while position < len(data) and chunks <= _EASY_SEGMENTS:
            position += 12 + _number(data, position, 4)
            chunks += 1
        return ImageHeader(pixels, passes, _few_bytes(data, pixels) and chunks <= _EASY_SEGMENTS)
    if data.startswith((JPEG_2000_SIGNATURE, JPEG_2000_STREAM)):
        passes = 50  # measured, too
    return ImageHeader(_other_pixels(data), passes, easy=False)


def _jpeg_header(data: bytes) -> ImageHeader:
    """Walk over the segments up to the first scan, as Pillow does."""
    # Larger files are not easy, their bytes cost as much as some scans, and 30 MB of fill bytes would take 50 ms.
    searched = data if len(data) <= _EASY_BYTES else b""
    scans = sum(1 for _ in islice(_SCAN.finditer(searched), _MANY_SCANS))
    pixels, passes, position = None, 1 + 0.5 * scans, 2  # each scan goes over all coefficients, even if it changes none
    for _ in range(_EASY_SEGMENTS):
        marker, length = _number(data, position, 2) - 0xFF00, _number(data, position + 2, 2)
        if marker == _START_OF_SCAN:
            easy = pixels is not None and scans <= _EASY_SCANS and _few_bytes(data, pixels)
            return ImageHeader(pixels, passes, easy)
        if marker in _FRAMES:
            pixels = _number(data, position + 5, 2) * _number(data, position + 7, 2)
            passes = 1 if marker in _BASELINE and scans <= 4 else passes
        position += 1 if marker == 0xFF else 2 + length  # 0xff may be repeated before a marker
    return ImageHeader(pixels, passes, easy=False)


def _few_bytes(data: bytes, pixels: int) -> bool:
    """Return whether a file has few pixels, and no more bytes than these can need."""
    return pixels <= _EASY_PIXELS and len(data) <= _EASY_BYTES_PER_PIXEL * pixels + _EASY_METADATA


def _other_pixels(data: bytes) -> int | None:
    """Return the pixels of a WebP, GIF or BMP file, None for others, whose size is not at a fixed place."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":  # RFC 9649, sections 2.5 to 2.7
        if data[12:16] == b"VP8X":
            return (_little(data, 24, 3) + 1) * (_little(data, 27, 3) + 1)
        if data[12:16] == b"VP8L":
            bits = _little(data, 21, 4)
            return ((bits & 0x3FFF) + 1) * ((bits >> 14 & 0x3FFF) + 1)
        return (_little(data, 26, 2) & 0x3FFF) * (_little(data, 28, 2) & 0x3FFF)
    if data[:3] == b"GIF":
        return _little(data, 6, 2) * _little(data, 8, 2)
    if data[:2] == b"BM":
        height = _little(data, 22, 4)
        return _little(data, 18, 4) * min(height, 2**32 - height)  # a negative height: rows from top to bottom
    return None


def _number(data: bytes, start: int, length: int) -> int:
    return int.from_bytes(data[start : start + length], "big")


def _little(data: bytes, start: int, length: int) -> int:
    return int.from_bytes(data[start : start + length], "little")
