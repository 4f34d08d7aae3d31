"""Refuse files that take long to decode for their bytes, before anything is decoded.

Pillow reads the structure of a file in Python, piece by piece, and a file of 32 MB has room for millions of pieces: it
would take seconds to minutes, and a client can send it in 30 kB of gzip. The limits below are far above what cameras
and encoders write, and keep such a file to about half a second.
"""

import io
import re
import struct
from collections import Counter
from contextlib import suppress
from itertools import islice

from PIL import ImageFile, TiffImagePlugin

from ..errors import ImageError
from .header import PNG_SIGNATURE

_SMALL = 2**17  # bytes: no room for many pieces
_MAX_READS = 2**17  # of fill bytes, comments, extensions, runs and other small pieces; one in 256 bytes is allowed
_MAX_SEGMENTS = 2**15  # of a JPEG
_MAX_CHUNKS = 2**15  # of a PNG; one in 1 kB is allowed, and 8 kB are usual
# Of segments that Pillow parses: quantization tables, Exif (joined, one by one) and Photoshop's resources.
_APP1 = 0xE1
_MAX_EXIF_BYTES = 2**18  # of any format; a JPEG's segment, where cameras put it, has room for 2^16
_MAX_SEGMENT_BYTES = {0xDB: 2**16, _APP1: _MAX_EXIF_BYTES, 0xED: 2**22}
_MAX_SCANS = 100  # of 64 Mpixel takes 0.03 s each, in as little as 8 bytes; encoders write about ten
_MAX_PROFILES = 16  # of a PNG, where 1 MB of profile takes 1 kB
_MAX_STRIPS = 2**15  # or tiles, of a TIFF
_MAX_NUMBERS = 2**16  # in the other tags of a TIFF; a rational number takes 3 us
_MAX_PLAIN_PIXELS = 2**18  # of these codecs, which Pillow has in Python
_PLAIN = {"ppm_plain": "plain-text PPM", "bmp_rle": "BMP with run-length encoding"}
_MAX_PLAIN_COMMENTS = 256  # each moves up to 1 MB

# The markers that Pillow takes for the begin of a segment; it skips all else. ITU-T T.81, B.1.1.
_SEGMENT = re.compile(rb"\xff([\xc0-\xc7\xc9-\xcf\xd9-\xef\xfe])")
_SCAN = re.compile(rb"\xff\xda")
_END_OF_IMAGE, _START_OF_SCAN = 0xD9, 0xDA
_STRIPS = {273, 279, 324, 325}  # where strips and tiles begin, and their lengths: TIFF 6.0, sections 8 and 15
_WHOLE_TYPES = {1, 2, 7}  # bytes, text and undefined, which Pillow takes as they are: TIFF 6.0, section 2
_DIRECTORIES = (34665, 34853, 40965)  # of a TIFF, with the camera's settings, the place and more


class BoundedFile(io.BytesIO):
    """An image file that Pillow may read from a limited number of times, after which reads raise ImageError."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads_left = self._limit = max(_MAX_READS, len(data) // 256)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as `io.BytesIO` does."""
        self.reads_left -= 1
        if self.reads_left < 0:
            raise _too_many("fill bytes, comments, extensions or other small pieces", self._limit)
        return super().read(size)


def open_bounded(data: bytes) -> io.BytesIO:
    """Return a file for Pillow to read. Raises ImageError if its structure takes too long to read."""
    small = len(data) <= _SMALL
    if data.startswith(b"\xff\xd8"):
        # Nearly all files have few of these bytes, and their scans need no walk. For 92 kB bytes.count takes 0.065 ms
        # instead of 0.027 ms, during which other threads wait.
        few_scans = next(islice(_SCAN.finditer(data), _MAX_SCANS, None), None) is None
        if not (small and few_scans):
            _check_jpeg(data, header_only=few_scans)
    elif not small and data.startswith(PNG_SIGNATURE):
        _check_png(data)
    elif not small and data[:2] in {b"II", b"MM"}:
        _check_tiff(data)
    return io.BytesIO(data) if small else BoundedFile(data)


def check_plain(image: ImageFile.ImageFile, data: bytes) -> None:
    """Refuse a large image of a kind that Pillow decodes in Python. Call it before the pixels are decoded."""
    codec = image.tile[0].codec_name if image.tile else ""
    if codec not in _PLAIN:
        return
    if (pixels := image.width * image.height) > _MAX_PLAIN_PIXELS:
        raise ImageError(
            f"{image.width}x{image.height} pixels are more than the limit of {_MAX_PLAIN_PIXELS} for {_PLAIN[codec]}. "
            "Save the image as PNG"
        )
    if isinstance(image.fp, BoundedFile):
        image.fp.reads_left += 2 * pixels
    if codec == "ppm_plain" and data.count(b"#") > _MAX_PLAIN_COMMENTS:
        raise _too_many("comments", _MAX_PLAIN_COMMENTS)


def check_exif(image: ImageFile.ImageFile) -> None:
    """Refuse much Exif. Call it once the pixels are decoded, which a PNG's Exif may follow, and before it is read."""
    if any(len(image.info.get(key, b"")) > _MAX_EXIF_BYTES for key in ("exif", "Raw profile type exif")):
        raise _too_many("bytes of Exif", _MAX_EXIF_BYTES)


def skip_directories(image: TiffImagePlugin.TiffImageFile) -> None:
    """Keep Pillow from reading all of a TIFF's further directories, of any size, after it has decoded the pixels."""
    tags = image.getexif()  # which Pillow keeps
    for directory in _DIRECTORIES:
        if directory in tags:
            del tags[directory]


def _check_jpeg(data: bytes, *, header_only: bool) -> None:
    """Walk over the segments as Pillow does up to the first scan, and libjpeg up to the end marker.

    What follows that marker, such as a phone's video, does not count.
    """
    counts, sizes, position = Counter[int](), Counter[int](), 2
    for _ in range(_MAX_SEGMENTS):
        end = len(data) if counts[_START_OF_SCAN] else min(position + _MAX_READS, len(data))
        segment = _SEGMENT.search(data, position, end)
        if segment is None and end < len(data):
            raise _too_many("fill bytes", _MAX_READS)
        if segment is None:
            return
        kind, start = segment[1][0], segment.end()
        if kind == _START_OF_SCAN and header_only:
            return
        if kind == _END_OF_IMAGE:
            if counts[_START_OF_SCAN]:
                return
            position = start  # Pillow goes on
            continue
        length = max(2, int.from_bytes(data[start : start + 2]))
        counts[kind] += 1
        if kind != _APP1 or data.startswith(b"Exif\0\0", start + 2):  # the others hold XMP, of any size
            sizes[kind] += length
        if counts[_START_OF_SCAN] > _MAX_SCANS:
            raise ImageError(f"a JPEG of more than {_MAX_SCANS} scans takes too long to decode. Save the image again")
        if sizes[kind] > _MAX_SEGMENT_BYTES.get(kind, len(data)):
            raise ImageError(
                f"a JPEG with more than {_MAX_SEGMENT_BYTES[kind]} bytes in segments of kind {kind:#x} takes too long "
                "to decode. Save the image again"
            )
        position = start + length
    raise _too_many("segments", _MAX_SEGMENTS)


def _check_png(data: bytes) -> None:
    position, profiles, limit = len(PNG_SIGNATURE), 0, max(_MAX_CHUNKS, len(data) // 1024)
    for _ in range(limit):
        kind = data[position + 4 : position + 8]
        if kind in {b"", b"IEND"}:
            return
        profiles += kind == b"iCCP"
        if profiles > _MAX_PROFILES:
            raise _too_many("color profiles", _MAX_PROFILES)
        position += 12 + int.from_bytes(data[position : position + 4])
    raise _too_many("chunks", limit)


def _check_tiff(data: bytes) -> None:
    """Count the strips and numbers of the first directory. TIFF 6.0, section 2; BigTIFF has wider numbers."""
    order, big = "<" if data[0] == ord("I") else ">", data[2] == 43  # as Pillow reads these
    number, entry, entry_bytes = ("Q", "HHQ", 20) if big else ("H", "HHI", 12)
    numbers = 0
    with suppress(struct.error):  # truncated, as Pillow will say
        (start,) = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
        (entries,) = struct.unpack_from(order + number, data, start)
        start += struct.calcsize(order + number)
        for place in range(start, start + entry_bytes * min(entries, _MAX_NUMBERS + 1), entry_bytes):
            tag, kind, count = struct.unpack_from(order + entry, data, place)
            if tag in _STRIPS and count > _MAX_STRIPS:
                raise _too_many("strips or tiles", _MAX_STRIPS)
            numbers += 1 if tag in _STRIPS or kind in _WHOLE_TYPES else max(1, count)
            if numbers > _MAX_NUMBERS:
                raise _too_many("numbers in the tags of a TIFF", _MAX_NUMBERS)


def _too_many(pieces: str, limit: int) -> ImageError:
    return ImageError(f"more than {limit} {pieces} take too long to decode. Save the image again")
