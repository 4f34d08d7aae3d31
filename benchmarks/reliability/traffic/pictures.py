"""Encoded pictures: good ones of many shapes, small ones in every format, and the hostile ones of the tests."""

import io
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.common.results import ROOT

HOSTILE = ROOT / "tests" / "data" / "hostile"
# Shapes of good pictures; the demo net sees crops of 28 pixels. 40x57 is frequent: equal shapes share batches.
SHAPES = ((40, 57), (40, 57), (57, 40), (33, 61), (96, 64), (64, 150), (128, 128), (31, 33), (200, 90))


@dataclass(frozen=True)
class Picture:
    """An encoded picture and what it is."""

    what: str
    data: bytes


def pixels(height: int, width: int, seed: int) -> np.ndarray:
    """Return smooth noise, as in photos: uint8 (height, width, 3)."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    large = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy: np.ndarray = np.clip(large + rng.integers(-12, 13, large.shape), 0, 255).astype(np.uint8)
    return noisy


def encoded(image: Image.Image | np.ndarray, form: str, **options: Any) -> bytes:
    """Encode a picture in one of Pillow's formats."""
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, form, **options)
    return buffer.getvalue()


def good_pictures(seed: int) -> list[Picture]:
    """Return good pictures of all shapes as JPEG, PNG and WebP."""
    found = []
    for number, (height, width) in enumerate(SHAPES):
        form = ("JPEG", "PNG", "JPEG", "WEBP")[number % 4]
        found.append(Picture(f"{form} {height}x{width}", encoded(pixels(height, width, seed + number), form)))
    return found


def marked_picture(value: int) -> bytes:
    """Return a picture whose values are all `value`."""
    return encoded(np.full((40, 57, 3), value, np.uint8), "PNG")


@cache
def hostile_pictures() -> tuple[Picture, ...]:
    """Return the hostile pictures of the tests of at most 64 kB; larger ones only repeat their contents."""
    files = sorted(HOSTILE.iterdir())
    assert files, f"{HOSTILE} is empty"
    return tuple(Picture(file.name, file.read_bytes()) for file in files if file.stat().st_size <= 2**16)


def dear_pictures() -> Iterator[bytes]:
    """Yield pictures of up to 32 MB that would take seconds to decode, and that compress to next to nothing."""
    picture = pixels(24, 37, 1)
    jpeg, png, gif, tiff = (encoded(picture, form, dpi=(72, 72)) for form in ("JPEG", "PNG", "GIF", "TIFF"))
    size, scan, palette = 30 * 2**20, jpeg.index(b"\xff\xda") + 40, 13 + (3 << (gif[10] & 7) + 1)
    for pieces, data, place in (
        (size * b"\xff", jpeg, 2),  # fill bytes
        (size * b"\xff" + b"\0", jpeg, scan),
        (size * b"\xff", jpeg, -2),
        (400_000 * b"\xff\xfe\0\2", jpeg, 2),  # comments
        (2_000_000 * b"!\xf9\0\0", gif, palette),  # extensions
        (size // 12 * (b"\0\0\0\0prVt" + zlib.crc32(b"prVt").to_bytes(4)), png, 33),  # chunks
        (9_000_000 * b"#", b"P6\n\n1 1 255\n\0\0\0", 3),  # a comment
    ):
        yield data[:place] + pieces + data[place:]
    yield b"P3 2000 2000 255\n" + 12_000_000 * b"1 "
    yield b"P3 512 512 255\n" + 3 * 512 * 512 * b"1 "  # as large as is accepted
    numbers = size // 8 * struct.pack("<II", 72, 1)
    resolution = tiff.index(struct.pack("<HHI", 282, 5, 1))
    many = struct.pack("<HHII", 282, 5, size // 8, len(tiff))
    yield tiff[:resolution] + many + tiff[resolution + len(many) :] + numbers
    exif = b"MM\0\x2a" + struct.pack(">IHHHII4x", 8, 1, 274, 5, size // 8, 26) + numbers
    yield png[:33] + struct.pack(">I4s", len(exif), b"eXIf") + exif + zlib.crc32(b"eXIf" + exif).to_bytes(4) + png[33:]


@cache
def made_pictures() -> tuple[Picture, ...]:
    """Return a small picture for each format and encoding that Pillow writes."""
    return tuple(Picture(name, data) for name, data in _made().items())


def _made() -> Mapping[str, bytes]:
    color = Image.fromarray(pixels(34, 45, 3))
    alpha = color.convert("RGBA")
    deep = Image.fromarray(pixels(34, 45, 4)[..., 0].astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = 6

    def animated(form: str, **options: Any) -> bytes:
        first, *others = (Image.fromarray(pixels(34, 45, number)) for number in range(3))
        return encoded(first, form, save_all=True, append_images=others, **options)

    return {
        "jpeg": encoded(color, "JPEG"),
        "jpeg progressive": encoded(color, "JPEG", progressive=True, quality=95, subsampling=0),
        "jpeg restart markers, exif": encoded(color, "JPEG", restart_marker_blocks=1, exif=exif),
        "jpeg gray": encoded(color.convert("L"), "JPEG"),
        "jpeg cmyk": encoded(color.convert("CMYK"), "JPEG"),
        "mpo": animated("MPO"),
        "png": encoded(color, "PNG"),
        "png exif": encoded(alpha, "PNG", exif=exif),
        "png palette": encoded(color.quantize(31), "PNG"),
        "png one bit": encoded(color.convert("1"), "PNG"),
        "png deep": encoded(deep, "PNG"),
        "apng": animated("PNG"),
        "gif": encoded(color, "GIF"),
        "gif interlaced, animated": animated("GIF", interlace=1),
        "webp": encoded(color, "WEBP", quality=70),
        "webp lossless": encoded(alpha, "WEBP", lossless=True, exif=exif),
        "webp animated": animated("WEBP"),
        "tiff": encoded(color, "TIFF"),
        **{f"tiff {name}": encoded(color, "TIFF", compression=name)
           for name in ("tiff_lzw", "tiff_deflate", "packbits", "jpeg", "tiff_adobe_deflate")},
        "tiff group4": encoded(color.convert("1"), "TIFF", compression="group4"),
        "tiff deep": encoded(deep, "TIFF"),
        "tiff pages": animated("TIFF"),
        "bmp": encoded(color, "BMP"),
        "bmp palette": encoded(color.quantize(15), "BMP"),
        "ppm": encoded(color, "PPM"),
        "ico": encoded(alpha, "ICO", sizes=[(32, 32)]),
        "tga": encoded(color, "TGA", compression="tga_rle"),
        "jpeg 2000": encoded(color, "JPEG2000"),
    }  # fmt: skip
