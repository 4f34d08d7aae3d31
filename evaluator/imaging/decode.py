"""Decode image files to RGB pixels. The bytes are untrusted.

Rules of this module: only the formats below are accepted (some of Pillow's decoders start programs); limits are checked
before memory is allocated; any fault in the bytes raises an ImageError that names no path; no global state changes, so
any number of threads may decode. Only `silence_decoders` changes the process; programs call it, importing does not.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, get_args

import numpy as np
import PIL._imaging
from PIL import (  # plugins by name: otherwise Pillow would load them at the first image, in several threads at once
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from ..arrays import UInt8Array
from ..errors import ImageError, ImageTooLarge, OutOfMemory, PreluNetError
from ..preparation import USUAL, Preparation, Transparency
from .cost_limits import check_exif, check_plain, open_bounded, skip_directories
from .header import JPEG_2000_SIGNATURE, JPEG_2000_STREAM, PNG_SIGNATURE, read_header
from .limits import DecodeLimits

_PLUGINS = (
    JpegImagePlugin.JpegImageFile,
    MpoImagePlugin.MpoImageFile,  # a JPEG of several pictures, from some cameras; opened through JPEG only
    PngImagePlugin.PngImageFile,
    GifImagePlugin.GifImageFile,
    WebPImagePlugin.WebPImageFile,
    BmpImagePlugin.BmpImageFile,
    TiffImagePlugin.TiffImageFile,
    PpmImagePlugin.PpmImageFile,
    # These two need libraries that some builds of Pillow lack. A forged AVIF may decode a larger image than it states;
    # a server decodes it in a process of limited memory.
    AvifImagePlugin.AvifImageFile,
    Jpeg2KImagePlugin.Jpeg2KImageFile,
)
FORMATS = tuple(plugin.format for plugin in _PLUGINS if plugin.format != "MPO")
SUFFIXES = (  # in any case
    *(".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".j2k", ".jpx"),
)
# How files of these formats begin: JPEG, PNG, GIF, BMP, TIFF, BigTIFF, JPEG 2000; WebP begins with RIFF and a size, and
# AVIF with a size.
_BEGINNINGS = (
    *(b"\xff\xd8\xff", PNG_SIGNATURE, b"GIF8", b"BM", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    *(JPEG_2000_SIGNATURE, JPEG_2000_STREAM),
)
BEGINNING = 12  # bytes that `begins_like_an_image` looks at

_TILE_WIDTH, _TILE_LENGTH, _BITS_PER_SAMPLE = 322, 323, 258  # TIFF 6.0, sections 15 and 3
_LONGEST_AS_TORCH = 2**16 - 1  # pixels, as of a JPEG: numpy sums up to 4 for each of a side, one by one
_ORIENTATION = 274  # Exif 2.32, section 4.6.4
_EXIF_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# What files may have that nets see in one way or another: transparency, more than 8 bits, four inks, and an EXIF
# orientation other than upright.
Trait = Literal["alpha", "16-bit", "cmyk", "rotated"]
TRAITS: tuple[Trait, ...] = get_args(Trait)

# See `decode_bytes`: of WebP with transparency and of a CMYK JPEG, each with a rotated copy.
_MAX_BYTES_PER_PIXEL, _BASELINE_BYTES_PER_PIXEL = 28 + 4, 9 + 4


def begins_like_an_image(data: bytes) -> bool:
    """Return whether a file that begins with these bytes may be an image; PPM is not recognized, as `P6` is a word."""
    webp, avif = data[:4] == b"RIFF" and data[8:12] == b"WEBP", data[4:12] in {b"ftypavif", b"ftypavis"}
    return data.startswith(_BEGINNINGS) or webp or avif


def silence_decoders() -> None:
    """Keep Pillow's warnings and libtiff's messages from stderr, where they would come between log lines.

    Pillow warns of odd metadata, which users cannot fix; libtiff repeats what our own error states. Changes the whole
    process and those forked from it: each program calls it once, before it decodes.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")  # not catch_warnings, which is not thread-safe
    library = ctypes.CDLL(PIL._imaging.__file__)
    for name in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
        if (setter := getattr(library, name, None)) is not None:  # missing in a Pillow without libtiff
            setter.argtypes, setter.restype = [ctypes.c_void_p], ctypes.c_void_p
            setter(None)


def decode_rgb(data: bytes, limits: DecodeLimits = DecodeLimits(), *, apply_exif: bool = False) -> UInt8Array:
    """Decode an image file to uint8 (H, W, 3), RGB, 0-255.

    Gray is repeated in the three channels. 16-bit images keep the upper 8 bits. CMYK becomes (255-C)(255-K)/255 and so
    on, without its color profile. Transparency is blended with white, round(alpha·value + (1-alpha)·255). Of an
    animation the first frame is used. EXIF orientation is ignored unless `apply_exif` (TIFF's own orientation is part
    of that format and always applied).
    Raises ImageError for bytes that are not an image of `FORMATS`, are truncated or damaged, or exceed the limits.
    """
    with _image_errors(limits):
        return np.array(decode_image(data, limits, apply_exif=apply_exif))


def decode_image(
    data: bytes,
    limits: DecodeLimits = DecodeLimits(),
    *,
    apply_exif: bool = False,
    preparation: Preparation = USUAL,
    reserve: Callable[[int], None] = lambda _bytes: None,
    notice: Callable[[Trait], None] | None = None,
) -> Image.Image:
    """Decode as `decode_rgb` does, but to a Pillow RGB image, or a gray one if the net's images are gray.

    preparation: of the net's images; reserve: called after the header and before any pixel with the most bytes that
    decoding and resizing will take; it may block (`evaluator.imaging.decode_memory`); notice: called with each trait.

    Use this before resizing: conversion to an array copies all pixels twice, which takes two fifths of the time of a
    12-Mpixel photo at one scale (benchmarks/results/decoding.md) and half of its memory.
    """
    with _image_errors(limits):
        image = _open(data, limits)
        if preparation.antialias == "torch" and max(image.size) > _LONGEST_AS_TORCH:
            size = f"{image.width}x{image.height}"
            raise ImageError(f"{size} pixels: this model's images have at most {_LONGEST_AS_TORCH} on a side. Crop it")
        reserve(decode_bytes(image, apply_exif=apply_exif))
        deep = bool(image.tile) and ";16" in str(image.tile[0].args)
        pixels = _pixels_of(image, data)
        turn = _transpose_of(image) if apply_exif else None
        if notice:
            for trait in _traits_of(image, pixels, deep=deep):
                notice(trait)
        rgb = _to_rgb(pixels, preparation.transparency)
        if preparation.gray:
            rgb = rgb.convert("L")
        return rgb.transpose(turn) if apply_exif and turn is not None else rgb


def _traits_of(image: ImageFile.ImageFile, pixels: Image.Image, *, deep: bool) -> Iterator[Trait]:
    """Yield the traits of a file, whose decoded pixels are given. deep: whether its decoder reads 16 bits."""
    if pixels.has_transparency_data:
        yield "alpha"
    if deep or pixels.mode.startswith("I"):
        yield "16-bit"
    if pixels.mode == "CMYK":
        yield "cmyk"
    with suppress(Exception):  # damaged, or too large to be read: it turns nothing
        if _transpose_of(image) is not None:
            yield "rotated"


def _transpose_of(image: ImageFile.ImageFile) -> Image.Transpose | None:
    """Return what turns an image upright as its EXIF says; None if it is, or says nothing. Call it after the pixels."""
    check_exif(image)
    return _EXIF_TRANSPOSE.get(image.getexif().get(_ORIENTATION, 1))


def decode_bytes(image: Image.Image, *, apply_exif: bool = False) -> int:
    """Return the most bytes that decoding an image to RGB and resizing it take; its pixels are not decoded yet.

    Measured with Pillow 13.0 on 12 Mpixel of each kind: the decoder's own buffers, and the copies of the conversion to
    RGB.
    """
    plain = image.mode in {"RGB", "L"}
    if image.format in {"JPEG", "MPO"}:
        each = 12 if image.info.get("progressive") else 5 if plain else 9  # 12: the coefficients of all scans
    elif image.format == "WEBP":
        each = 19 if plain else 28
    elif image.format == "JPEG2000":
        each = {"L": 9, "I;16": 12, "RGB": 21}.get(image.mode, 28)
    elif image.format == "AVIF":
        each = 14 if plain else 22
    elif plain:
        each = 5 if image.format in {"PNG", "BMP"} else 11  # TIFF: a strip may be the whole image
    else:
        each = 18
    return (each + 4 * apply_exif) * image.width * image.height


def max_decode_bytes(limits: DecodeLimits = DecodeLimits()) -> int:
    """Return the most bytes that decoding and resizing any image within the limits takes."""
    return limits.max_pixels * max(_MAX_BYTES_PER_PIXEL, limits.baseline_factor * _BASELINE_BYTES_PER_PIXEL)


def image_size(data: bytes, limits: DecodeLimits = DecodeLimits()) -> tuple[int, int]:
    """Return height and width of an image file from its header, as `decode_rgb` without `apply_exif` gives them.

    Raises ImageError for bytes that are not an image of `FORMATS` or exceed the limits; a truncated image passes.
    """
    with _image_errors(limits):
        image = _open(data, limits)
        return image.height, image.width


@contextmanager
def _image_errors(limits: DecodeLimits) -> Iterator[None]:
    """Convert any error of Pillow about bad bytes to an ImageError."""
    try:
        yield
    except PreluNetError:
        raise
    except UnidentifiedImageError as error:  # its text contains the address of our buffer
        raise ImageError(
            f"not a readable image, or its header is damaged. Accepted formats: {', '.join(FORMATS)}; "
            "convert the file to one of these"
        ) from error
    except Image.DecompressionBombError as error:
        raise ImageError(
            f"the header states far more pixels than the limit of {limits.max_pixels}. Send a smaller image"
        ) from error
    except MemoryError as error:
        raise OutOfMemory("decoding an image needs more memory than this machine has left") from error
    except Exception as error:  # the decoders have no common base class
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise ImageError(
            f"the image is truncated or damaged: {reason}. Get the file again from its source, or save it again"
        ) from error


def check_bytes(data: bytes, limits: DecodeLimits) -> None:
    """Raise ImageTooLarge for a file with too many bytes."""
    if len(data) > limits.max_bytes:
        raise ImageTooLarge(f"{len(data)} bytes are more than the limit of {limits.max_bytes}. Send a smaller file")


def _open(data: bytes, limits: DecodeLimits) -> ImageFile.ImageFile:
    """Read the header and check the limits, without decoding a pixel."""
    if not data:
        raise ImageError("no image: the file is empty. Get the file again from its source")
    check_bytes(data, limits)
    # Pillow limits the sides of plain WebP files to 16383 pixels, but of an extended one (RFC 9649, section 2.7) it
    # allocates the canvas while it reads the header.
    if data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X":
        width, height = (int.from_bytes(data[start : start + 3], "little") + 1 for start in (24, 27))
        _check_pixels(width, height, limits)
    image = Image.open(open_bounded(data), formats=FORMATS)
    if image.width * image.height > limits.max_pixels:
        baseline = read_header(data).passes == 1
        _check_pixels(image.width, image.height, limits, limits.baseline_factor if baseline else 1)
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        tile = image.tag_v2.get(_TILE_WIDTH, 1), image.tag_v2.get(_TILE_LENGTH, 1)
        _check_pixels(*tile, limits)  # a tile may be far larger than its image
        skip_directories(image)
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        image.decodermaxblock = len(data)  # given less, libjpeg would read a long row of fill bytes again and again
    check_plain(image, data)
    return image


def _check_pixels(width: int, height: int, limits: DecodeLimits, factor: int = 1) -> None:
    if width * height > (limit := limits.max_pixels * factor):
        kind = " for anything but a baseline JPEG" if factor < limits.baseline_factor else ""
        raise ImageError(f"{width}x{height} pixels are more than the limit of {limit}{kind}. Send a smaller image")


def _pixels_of(image: ImageFile.ImageFile, data: bytes) -> Image.Image:
    """Decode the pixels, in the file's own mode."""
    if not (image.tile and image.tile[0].codec_name == "ppm"):
        image.load()
        return image
    # A PPM whose largest value is not 255. Pillow scales it value by value in Python, 0.7 s for 1 MB.
    largest: int = image.tile[0].args[1]  # type: ignore[index, assignment]
    count = len(image.getbands()) * image.width * image.height
    values = np.frombuffer(data, np.dtype(np.uint8 if largest < 256 else ">u2"), count, image.tile[0].offset)
    white, kind = (65535, np.int32) if image.mode == "I" else (255, np.uint8)
    scaled = np.round(np.arange(largest + 1) / largest * white).astype(kind)
    return Image.frombytes(image.mode, image.size, scaled[np.minimum(values, largest)].tobytes())


def _to_rgb(image: Image.Image, transparency: Transparency) -> Image.Image:
    """Convert any Pillow mode to RGB by the rules of `decode_rgb`."""
    if image.mode.startswith("I"):  # keep the upper 8 of 16 bits; Pillow would clip everything above 255 to white
        values = np.asarray(image)
        if isinstance(image, TiffImagePlugin.TiffImageFile) and image.tag_v2.get(_BITS_PER_SAMPLE) == (12,):
            raise ImageError("12-bit grayscale is refused. Convert the image to 8 or 16 bits")
        if values.min() < 0 or values.max() > 65535:
            raise ImageError(
                "grayscale values beyond 16 bits or below 0 are refused. Convert the image to 8 or 16 bits"
            )
        gray = (values >> 8).astype(np.uint8)
        transparent = image.info.get("transparency")
        if isinstance(transparent, int) and transparency == "white":
            gray[values == transparent] = 255
        return Image.fromarray(gray).convert("RGB")
    if image.mode in {"F", "LAB"}:  # floating-point pixels have no standard range, Pillow's LAB no standard white
        raise ImageError("floating-point and CIELAB pixels are refused. Convert the image to 8-bit RGB")
    if image.mode == "La":  # premultiplied gray, which Pillow can convert only to LA
        image = image.convert("LA")
    if image.has_transparency_data and transparency == "white":
        rgba = image.convert("RGBA")
        rgb = Image.new("RGB", image.size, (255, 255, 255))
        rgb.paste(rgba.convert("RGB"), mask=rgba.getchannel("A"))  # rounds exactly, see tests/imaging/test_decode.py
        return rgb
    return image if image.mode == "RGB" else image.convert("RGB")  # convert would copy an RGB image
