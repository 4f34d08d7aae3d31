"""Files that are dear for their bytes are refused before they are decoded; what cameras and encoders write is not."""

import io
import struct
import time
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.errors import ImageError
from prelunet.evaluator.imaging.decode import decode_rgb, image_size
from prelunet.evaluator.imaging.limits import DecodeLimits

PICTURE = np.random.default_rng(0).integers(0, 256, (24, 37, 3), dtype=np.uint8)


def encoded(kind: str, image: Image.Image | None = None, **options: object) -> bytes:
    buffer = io.BytesIO()
    (image or Image.fromarray(PICTURE)).save(buffer, kind, **options)
    return buffer.getvalue()


JPEG, PROGRESSIVE, PNG, GIF = encoded("JPEG"), encoded("JPEG", progressive=True), encoded("PNG"), encoded("GIF")
GIF_HEADER = 13 + (3 << (GIF[10] & 7) + 1)  # bytes, with its palette
LAST_SCAN = PROGRESSIVE[PROGRESSIVE.rindex(b"\xff\xda") : -2]


def put(pieces: bytes, data: bytes, place: int) -> bytes:
    return data[:place] + pieces + data[place:]


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def profiles(number: int) -> bytes:
    """Return a PNG with color profiles that each take half a millisecond."""
    return put(
        number * chunk(b"iCCP", b"icc\0\0" + zlib.compress(bytes(2**20 - 9))),
        put(chunk(b"teXt", bytes(2**17)), PNG, 33),
        33,
    )


def tiff(strips: int, *, big: bool = False) -> bytes:
    """Return a gray TIFF of one column, in strips of a row each."""
    entries = {256: 1, 257: strips, 258: 8, 259: 1, 262: 1, 273: 0, 277: 1, 278: 1, 279: 0}
    many = {273: struct.pack(f"<{strips}I", *[8] * strips), 279: struct.pack(f"<{strips}I", *[1] * strips)}
    header, form = (16, "<HHQQ") if big else (8, "<HHII")
    pieces, places = b"", {}
    for tag, values in many.items():
        places[tag] = header + len(pieces)
        pieces += values
    start = (
        struct.pack("<2sHHHQ", b"II", 43, 8, 0, header + len(pieces))
        if big
        else struct.pack("<2sHI", b"II", 42, 8 + len(pieces))
    )
    directory = b"".join(
        struct.pack(form, tag, 4, strips if tag in many else 1, places.get(tag, value))
        for tag, value in entries.items()
    )
    return start + pieces + struct.pack("<Q" if big else "<H", len(entries)) + directory + bytes(8)


def bmp(side: int, rows: bytes) -> bytes:
    """Return a BMP with run-length encoding. rows: its data."""
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(rows), 0, 0, 256, 256)
    return b"BM" + struct.pack("<IHHI", 1078 + len(rows), 0, 0, 1078) + header + bytes(range(256)) * 4 + rows


def retagged(tags: dict[int, tuple[int, int, int]], values: bytes) -> bytes:
    """Return a TIFF of PICTURE with tags (type, number of values) instead of resolutions, and their values at its end.

    tags: by the tag that each replaces.
    """
    data = encoded("TIFF", dpi=(72, 72))
    for old, new in tags.items():
        entry = data.index(struct.pack("<HHI", old, 3 if old == 296 else 5, 1))
        data = data[:entry] + struct.pack("<HHII", *new, len(data)) + data[entry + 12 :]
    return data + values


def resolutions(number: int) -> bytes:
    return retagged({282: (282, 5, number)}, number * struct.pack("<II", 72, 1))


def exif(size: int) -> bytes:
    """Return Exif of so many bytes: a mirrored orientation, as rational numbers."""
    number = (size - 26) // 8
    start = b"MM\0\x2a" + struct.pack(">IHHHII4x", 8, 1, 274, 5, number, 26)
    return (start + number * struct.pack(">II", 2, 1)).ljust(size, b"\0")


def raw_profile(data: bytes) -> bytes:
    """Return a PNG with Exif as some programs write it."""
    return put(chunk(b"tEXt", b"Raw profile type exif\0\nexif\n%d\n" % len(data) + data.hex().encode()), PNG, 33)


PIECES = 2**17 + 1
DEAR: dict[str, tuple[Callable[[], bytes], str]] = {
    "JPEG, fill bytes": (lambda: put(PIECES * b"\xff", JPEG, 2), "131072 fill bytes"),
    "JPEG, bytes between segments": (lambda: put(b"\xff" + PIECES * b"\0", JPEG, 2), "131072 fill bytes"),
    "JPEG, what only Pillow passes over": (lambda: put(PIECES * b"\xff\xf0", JPEG, 2), "131072 fill bytes"),
    "JPEG, fill bytes after an early end": (lambda: put(b"\xff\xd9" + PIECES * b"\xff", JPEG, 2), "131072 fill bytes"),
    "JPEG, comments": (lambda: put(PIECES * segment(0xFE, b""), JPEG, 2), "32768 segments"),
    "JPEG, comments among scans": (
        lambda: put(85 * LAST_SCAN + PIECES * segment(0xFE, b"") + 20 * LAST_SCAN, PROGRESSIVE, -2), "32768 segments"
    ),
    "JPEG, scans": (lambda: put(100 * LAST_SCAN, PROGRESSIVE, -2), "more than 100 scans"),
    "JPEG, tables": (lambda: put(3000 * segment(0xDB, b"\0" + 64 * b"\1"), JPEG, 2), "segments of kind 0xdb"),
    "JPEG, Exif": (lambda: put(5 * segment(0xE1, b"Exif\0\0" + bytes(60_000)), JPEG, 2), "segments of kind 0xe1"),
    "JPEG, Photoshop": (lambda: put(70 * segment(0xED, b"Photoshop 3.0\0" + bytes(60_000)), JPEG, 2), "kind 0xed"),
    "PNG, chunks": (lambda: put(2**15 * chunk(b"prVt"), PNG, 33), "32768 chunks"),
    "PNG, chunks after the pixels": (lambda: put(2**15 * chunk(b"prVt"), PNG, -12), "32768 chunks"),
    "PNG, empty pieces of pixels": (lambda: put(2**15 * chunk(b"IDAT"), PNG, 33), "32768 chunks"),
    "PNG, profiles": (lambda: profiles(17), "16 color profiles"),
    "PNG, Exif": (lambda: put(chunk(b"eXIf", exif(2**18 + 1)), PNG, 33), "262144 bytes of Exif"),
    "PNG, Exif after the pixels": (lambda: put(chunk(b"eXIf", exif(2**18 + 1)), PNG, -12), "262144 bytes of Exif"),
    "PNG, Exif as text": (lambda: raw_profile(exif(2**17)), "262144 bytes of Exif"),
    "WebP, Exif": (lambda: encoded("WEBP", exif=exif(2**18 + 1)), "262144 bytes of Exif"),
    "GIF, extensions": (lambda: put(PIECES * b"!\xf9\0\0", GIF, GIF_HEADER), "small pieces"),
    "GIF, one comment": (lambda: put(b"!\xfe" + PIECES * b"\1a" + b"\0", GIF, GIF_HEADER), "small pieces"),
    "GIF, unknown bytes": (lambda: put(PIECES * b"\0", GIF, GIF_HEADER), "small pieces"),
    "PPM, comments": (lambda: b"P6 2 2\n#" + PIECES * b"x" + b"\n255\n" + bytes(12), "comments"),
    "PPM, white space": (lambda: b"P6" + PIECES * b" " + b"2 2 255\n" + bytes(12), "comments"),
    "PPM, plain text": (lambda: b"P3 512 513 255\n", "512x513 pixels are more than the limit of 262144 for plain"),
    "PPM, comments in plain text": (lambda: b"P3 2 2 255\n" + 257 * b"#\n" + 12 * b"1 ", "256 comments"),
    "BMP, runs": (lambda: bmp(513, b"\0\1"), "513x513 pixels are more than the limit of 262144 for BMP with run"),
    "BMP, runs of nothing": (lambda: bmp(9, PIECES * b"\0\2\0\0" + b"\0\1"), "small pieces"),
    "TIFF, strips": (lambda: tiff(2**15 + 1), "32768 strips"),
    "TIFF, strips of a BigTIFF": (lambda: tiff(2**15 + 1, big=True), "32768 strips"),
    "TIFF, resolutions": (lambda: resolutions(2**16), "65536 numbers"),
    "TIFF, what only we might take for a BigTIFF": (
        lambda: b"MM\0\x2b" + struct.pack(">IHHHII", 8, 1, 282, 5, 2**16 + 1, 26) + bytes(2**19 + 8), "65536 numbers"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEAR)
def test_a_file_that_is_dear_for_its_bytes_is_refused(name: str) -> None:
    make, reason = DEAR[name]
    with pytest.raises(ImageError, match=reason) as refusal:
        decode_rgb(make(), apply_exif=True)
    assert str(refusal.value).endswith((". Save the image again", ". Save the image as PNG"))


USUAL: dict[str, Callable[[], bytes]] = {
    "profile, Exif, XMP, comments and fill bytes": lambda: put(
        b"".join(3 * b"\xff" + segment(0xE2, b"ICC_PROFILE\0" + bytes([n, 16]) + bytes(65_000)) for n in range(16))
        + segment(0xE1, b"Exif\0\0MM\0\x2a\0\0\0\x08" + bytes(6) + 65_000 * b"\xff")  # notes of a camera's maker
        + 160 * segment(0xE1, b"http://ns.adobe.com/xmp/extension/\0" + bytes(65_000))  # with a second picture
        + 20 * segment(0xED, b"Photoshop 3.0\0" + bytes(65_000))
        + 300 * segment(0xFE, b"comment"),
        JPEG, 2,
    ),
    "a video and unused flash memory at the end": lambda: JPEG + 99 * (JPEG + LAST_SCAN) + 2**18 * b"\xff",
}  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_what_cameras_write_around_a_jpeg_changes_no_pixel(name: str) -> None:
    np.testing.assert_array_equal(decode_rgb(USUAL[name]()), decode_rgb(JPEG))


def test_a_png_in_far_smaller_pieces_than_usual_or_with_zeros_at_its_end_is_decoded() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (1000, 700, 3), dtype=np.uint8)
    data = encoded("PNG", Image.fromarray(noise), compress_level=0)
    start = data.index(b"IDAT") - 4
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in noise), 0)
    small = b"".join(chunk(b"IDAT", pixels[place : place + 100]) for place in range(0, len(pixels), 100))
    np.testing.assert_array_equal(decode_rgb(data[:start] + small + data[-12:]), noise)
    np.testing.assert_array_equal(decode_rgb(profiles(16)), PICTURE)
    np.testing.assert_array_equal(decode_rgb(PNG + bytes(2**19)), PICTURE)


def test_metadata_of_a_gif_and_a_ppm_change_no_pixel() -> None:
    xmp = b"!\xff\x0bXMP DataXMP" + 2**17 * b"<xmp> " + b"\1" + bytes(range(255, -1, -1)) + b"\0"
    comment = b"!\xfe" + 999 * (b"\xff" + 255 * b"c") + b"\0"
    np.testing.assert_array_equal(decode_rgb(put(xmp + comment, GIF, GIF_HEADER)), decode_rgb(GIF))
    plain = b"P6\n# a scanner's name\n37 24\n# and its settings\n255\n" + PICTURE.tobytes()
    np.testing.assert_array_equal(decode_rgb(plain), PICTURE)


@pytest.mark.parametrize("big", [False, True])
def test_a_tiff_with_a_strip_for_each_row_is_decoded(big: bool) -> None:
    data = tiff(2**15, big=big)
    assert image_size(data) == (2**15, 1)
    assert decode_rgb(data).shape == (2**15, 1, 3)


@pytest.mark.filterwarnings("ignore:Metadata Warning")
def test_metadata_of_a_tiff_changes_no_pixel() -> None:
    np.testing.assert_array_equal(decode_rgb(resolutions(2**16 - 99)), PICTURE)
    for kind in (1, 2, 7):  # bytes, text or undefined, such as the settings of a microscope
        settings = retagged({282: (50839, kind, 2**20)}, bytes(2**20))
        np.testing.assert_array_equal(decode_rgb(settings), PICTURE)


def test_only_the_first_directory_of_a_tiff_is_read() -> None:
    """Three times 65,535 more entries would be too many."""
    directories = {282: (34665, 4, 1), 283: (34853, 4, 1), 296: (40965, 4, 1)}  # Exif, place and interoperability
    np.testing.assert_array_equal(decode_rgb(retagged(directories, b"\xff\xff" + bytes(2**20))), PICTURE)


@pytest.mark.filterwarnings("ignore:Metadata Warning")
def test_a_quarter_of_a_megabyte_of_exif_is_applied() -> None:
    data = exif(250_000)
    parts = (segment(0xE1, b"Exif\0\0" + data[place : place + 62_500]) for place in range(0, 250_000, 62_500))
    mirrored = {
        JPEG: put(b"".join(parts), JPEG, 2),
        PNG: put(chunk(b"eXIf", data), PNG, 33),
        encoded("WEBP"): encoded("WEBP", exif=data),
    }
    for upright, image in mirrored.items():
        np.testing.assert_array_equal(decode_rgb(image), decode_rgb(upright))
        np.testing.assert_array_equal(decode_rgb(image, apply_exif=True), decode_rgb(upright)[:, ::-1])


def test_plain_text_and_runs_of_up_to_512x512_pixels_are_decoded() -> None:
    text = b"P3\n# by hand\n37 24 255\n" + b" ".join(b"%d" % value for value in PICTURE.ravel())
    np.testing.assert_array_equal(decode_rgb(text), PICTURE)
    assert (decode_rgb(b"P3 512 512 255\n" + 3 * 2**18 * b"7 ") == 7).all()
    runs = (512 * b"\1\7" + b"\0\0") * 512 + b"\0\1"
    assert (decode_rgb(bmp(512, runs)) == decode_rgb(bmp(1, b"\1\7\0\1"))).all()


@pytest.mark.parametrize("largest", [1, 31, 100, 254, 256, 1023, 4095, 65_534, 65_535])
@pytest.mark.parametrize("kind", [b"P5", b"P6"])
def test_a_ppm_of_any_range_has_the_values_that_pillow_gives_it(kind: bytes, largest: int) -> None:
    values = np.random.default_rng(2).integers(
        0, 2**16 if largest > 255 else 2**8, 24 * 37 * (3 if kind == b"P6" else 1)
    )
    data = b"%s 37 24 %d\n" % (kind, largest) + values.astype(">u2" if largest > 255 else np.uint8).tobytes()
    expected = np.asarray(Image.open(io.BytesIO(data)))
    if kind == b"P5":
        expected = np.repeat((expected >> (8 if largest > 255 else 0))[:, :, None], 3, axis=2).astype(np.uint8)
    np.testing.assert_array_equal(decode_rgb(data), expected)
    with pytest.raises(ImageError, match="truncated or damaged"):
        decode_rgb(data[:-1])


@pytest.mark.parametrize("place", [-2, JPEG.index(b"\xff\xda") + 40])
def test_thirty_megabytes_of_fill_in_a_scan_take_no_time_to_speak_of(place: int) -> None:
    """libjpeg used to begin anew with each block: 31 s; now 0.1 s, and the limit is far from both."""
    data = put(30 * 2**20 * b"\xff" + (b"" if place == -2 else b"\0"), JPEG, place)
    begun = time.process_time()
    assert decode_rgb(data, DecodeLimits(max_bytes=len(data))).shape == PICTURE.shape
    assert time.process_time() - begun < 3
