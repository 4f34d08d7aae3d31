"""Decoding: what is accepted gives the pixels that docs promise, all else is an ImageError.

The hostile files are made by tools/make_hostile_images.py; every one has a row in ACCEPTED or REFUSED.
"""

import io
import json
import pickle
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from prelunet.evaluator.arrays import UInt8Array
from prelunet.evaluator.errors import EnvironmentFault, ImageError
from prelunet.evaluator.imaging import decode
from prelunet.evaluator.imaging.decode import decode_image, decode_rgb, image_size
from prelunet.evaluator.imaging.limits import DecodeLimits

DATA = Path(__file__).parents[1] / "data" / "hostile"
HOSTILE = sorted(DATA.iterdir())
assert HOSTILE, f"{DATA} is empty"

# Only programs silence Pillow's warnings, with `silence_decoders`.
pytestmark = pytest.mark.filterwarnings(r"ignore::Warning:PIL\.")

HEIGHT, WIDTH = 24, 37
ROW, COLUMN = np.mgrid[:HEIGHT, :WIDTH]
PICTURE = np.stack([ROW * 10, COLUMN * 6, 255 - ROW * 4 - COLUMN * 3], axis=2).astype(np.uint8)
ALPHA = PICTURE[:, ::-1, 1]
LONG = np.repeat((np.arange(20000) % 251).astype(np.uint8)[None, :, None], 3, axis=2)


def gray(values: npt.NDArray[np.integer]) -> UInt8Array:
    return np.repeat(values.astype(np.uint8)[:, :, None], 3, axis=2)


def luma(picture: UInt8Array) -> npt.NDArray[np.integer]:
    """ITU-R 601 in whole numbers, as JPEG and Pillow have it."""
    red, green, blue = np.moveaxis(picture.astype(np.int64), 2, 0)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def on_white(values: npt.NDArray[np.integer], alpha: npt.NDArray[np.integer]) -> UInt8Array:
    """round(alpha·value + (1 − alpha)·255) in whole numbers; 255 is odd, so there are no halves."""
    alpha = alpha.astype(np.int64)
    alpha = alpha if alpha.ndim == values.ndim else alpha[:, :, None]
    return ((values.astype(np.int64) * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


def from_cmyk() -> UInt8Array:
    black = PICTURE[::-1, :, :1].astype(np.float64)
    return np.round((255 - PICTURE) * (255 - black) / 255).astype(np.uint8)


def three_colors(*colors: tuple[int, int, int]) -> UInt8Array:
    return np.array(colors, dtype=np.uint8)[(ROW + COLUMN) % 3]


def bits() -> UInt8Array:
    rows = np.array([[0xA5, 0x0F, 0xF0, row, 0x80] for row in range(HEIGHT)], dtype=np.uint8)
    return gray(np.unpackbits(rows, axis=1)[:, :WIDTH] * 255)


GRAY_16 = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) * 73 % 65536 >> 8
RED, GREEN, BLUE = (200, 20, 20), (20, 200, 20), (20, 20, 200)

# file: (what it should show, largest difference). Lossless files: none. JPEG at quality 95 keeps these smooth slopes to
# within 12 (chroma at half size); a GIF holds 256 colors here of which each is within 16 of the true one.
ACCEPTED: dict[str, tuple[UInt8Array, int]] = {
    "one-pixel.png": (np.array([[[200, 100, 50]]], dtype=np.uint8), 0),
    "one-row-20000-columns.png": (LONG, 0),
    "one-column-20000-rows.png": (LONG.transpose(1, 0, 2), 0),
    "png-named.jpg": (PICTURE, 0),
    "animated.gif": (PICTURE, 16),
    "animated.png": (PICTURE, 0),
    "animated.webp": (PICTURE, 0),
    "exif-rotated.jpg": (PICTURE, 12),
    "exif-rotated.png": (PICTURE, 0),
    "exif-damaged.jpg": (PICTURE, 12),
    "two-pictures.mpo.jpg": (PICTURE, 12),
    "progressive.jpg": (PICTURE, 12),
    "lzw.tif": (PICTURE, 0),
    "grey.jpg": (gray(luma(PICTURE)), 12),
    "cmyk-adobe.jpg": (from_cmyk(), 12),
    "cmyk.tif": (from_cmyk(), 0),
    "palette.png": (three_colors(RED, GREEN, BLUE), 0),
    "palette-alpha.png": (three_colors((255, 255, 255), (137, 227, 137), BLUE), 0),  # alpha 0, 128, 255
    "rgba.png": (on_white(PICTURE, ALPHA), 0),
    "rgba.webp": (on_white(PICTURE, ALPHA), 0),
    "grey-alpha.png": (on_white(gray(luma(PICTURE)), ALPHA), 0),
    "grey-16-bit.png": (gray(GRAY_16), 0),
    "grey-16-bit.tif": (gray(GRAY_16), 0),
    "grey-16-bit.ppm": (gray(GRAY_16), 0),
    "one-bit.png": (bits(), 0),
}

REFUSED = {
    "empty.jpg": "the file is empty",
    "text.jpg": "not a readable image",
    "page.png": "not a readable image",
    "zeros.jpg": "not a readable image",
    "drawing.svg.png": "not a readable image",
    "program.eps.jpg": "not a readable image",
    "float.tif": "floating-point",
    "grey-32-bit.tif": "beyond 16 bits",
    "cut-in-first-marker.jpg": "header is damaged",
    "cut-in-tables.jpg": "truncated",
    "cut-before-scan.jpg": "truncated",
    "cut-in-scan.jpg": "truncated",
    "cut-before-end-marker.jpg": "truncated",
    "cut-in-header.png": "truncated",
    "cut-in-data.png": "truncated",
    "cut-in-data.gif": "truncated",
    "cut-in-data.webp": "truncated",
    "cut-in-data.tif": "truncated",
    "bomb-header.png": "more pixels than the limit of 64000000",
    "bomb-just-over-the-limit.png": "8001x8000 pixels are more than the limit of 64000000",
    "bomb-screen.gif": "more pixels than the limit",
    "bomb-canvas.webp": "9073x9073 pixels are more than the limit",
    "bomb-size.bmp": "more pixels than the limit",
    "bomb-size.ppm": "more pixels than the limit",
    "bomb-text.png": "data too large",
    "bomb-profile.png": "data too large",
    "bomb-scans.jpg": "more than 100 scans",
    "bomb-tile.tif": "40000x40000 pixels are more than the limit",
}

TESTED_ALONE = {"palette-transparent.gif"}


def test_every_hostile_file_has_an_expected_outcome() -> None:
    assert {path.name for path in HOSTILE} == {*ACCEPTED, *REFUSED, *TESTED_ALONE}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_file_gives_the_promised_pixels(name: str) -> None:
    expected, tolerance = ACCEPTED[name]
    pixels = decode_rgb((DATA / name).read_bytes())
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(np.int64) - expected).max() <= tolerance


@pytest.mark.parametrize("name", REFUSED)
def test_refused_file_gives_a_reason_and_names_no_path(name: str) -> None:
    with pytest.raises(ImageError, match=re.escape(REFUSED[name])) as refusal:
        decode_rgb((DATA / name).read_bytes())
    assert not re.search(r"/|object at|\n", str(refusal.value))
    assert re.search(r"\. (Get|Send|Convert|Save)|; convert", str(refusal.value)), "says how to fix it"


def test_transparent_color_of_a_gif_becomes_white_and_the_others_stay() -> None:
    data = (DATA / "palette-transparent.gif").read_bytes()
    image = Image.open(io.BytesIO(data))
    indices, palette = np.asarray(image), np.array(image.getpalette(), dtype=np.uint8).reshape(-1, 3)
    assert (indices == 3).any()
    palette[3] = 255
    np.testing.assert_array_equal(decode_rgb(data), palette[indices])


def test_alpha_is_rounded_exactly_for_every_value_and_alpha() -> None:
    values, alphas = np.meshgrid(np.arange(256), np.arange(256))
    pixels = np.stack([values, values[::-1], 255 - values, alphas], axis=2).astype(np.uint8)
    np.testing.assert_array_equal(
        decode_rgb(encoded(Image.fromarray(pixels), "PNG")), on_white(pixels[:, :, :3], alphas)
    )


def test_16_bit_gray_with_a_transparent_value_has_white_there() -> None:
    values = np.array([[0, 300, 65535], [300, 12800, 301]], dtype=np.uint16)
    data = encoded(Image.fromarray(values), "PNG", transparency=300)
    np.testing.assert_array_equal(decode_rgb(data), gray(np.array([[0, 255, 255], [255, 50, 1]])))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_only_on_request(orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    data = encoded(Image.fromarray(PICTURE), "PNG", exif=exif)
    # Exif 2.32, table 6: where row 0 and column 0 of the file lie in the upright picture.
    upright = {
        1: PICTURE,
        2: PICTURE[:, ::-1],
        3: PICTURE[::-1, ::-1],
        4: PICTURE[::-1],
        5: PICTURE.transpose(1, 0, 2),
        6: PICTURE.transpose(1, 0, 2)[:, ::-1],
        7: PICTURE.transpose(1, 0, 2)[::-1, ::-1],
        8: PICTURE.transpose(1, 0, 2)[::-1],
    }[orientation]
    np.testing.assert_array_equal(decode_rgb(data), PICTURE)
    np.testing.assert_array_equal(decode_rgb(data, apply_exif=True), upright)


@pytest.mark.parametrize("path", HOSTILE, ids=lambda path: path.name)
@pytest.mark.parametrize("apply_exif", [False, True])
def test_pillow_image_and_array_show_the_same_or_are_refused_for_the_same_reason(path: Path, apply_exif: bool) -> None:
    data = path.read_bytes()
    try:
        expected = decode_rgb(data, apply_exif=apply_exif)
    except ImageError as refused:
        with pytest.raises(ImageError, match=re.escape(str(refused))):
            decode_image(data, apply_exif=apply_exif)
    else:
        image = decode_image(data, apply_exif=apply_exif)
        assert image.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(image), expected)


def test_limits_hold_to_the_byte_and_the_pixel() -> None:
    data = encoded(Image.fromarray(PICTURE), "PNG")
    assert decode_rgb(data, DecodeLimits(len(data), HEIGHT * WIDTH)).shape == PICTURE.shape
    with pytest.raises(ImageError, match=f"{len(data)} bytes are more than the limit of {len(data) - 1}"):
        decode_rgb(data, DecodeLimits(max_bytes=len(data) - 1))
    with pytest.raises(ImageError, match=f"37x24 pixels are more than the limit of {HEIGHT * WIDTH - 1}"):
        decode_rgb(data, DecodeLimits(max_pixels=HEIGHT * WIDTH - 1))


@pytest.mark.parametrize("name", ACCEPTED)
def test_size_of_the_header_is_the_size_of_the_decoded_image(name: str) -> None:
    data = (DATA / name).read_bytes()
    assert image_size(data) == decode_rgb(data).shape[:2]


def test_size_is_read_without_the_pixels_and_refused_over_the_limit() -> None:
    assert image_size((DATA / "cut-in-scan.jpg").read_bytes()) == (HEIGHT, WIDTH)
    for name in ("bomb-header.png", "bomb-canvas.webp", "empty.jpg", "text.jpg"):
        with pytest.raises(ImageError, match=re.escape(REFUSED[name])):
            image_size((DATA / name).read_bytes())


def test_video_appended_to_a_jpeg_does_not_count_as_scans() -> None:
    data = (DATA / "progressive.jpg").read_bytes()
    np.testing.assert_array_equal(decode_rgb(data + b"\xff\xda\x00\x02" * 500), decode_rgb(data))


@pytest.mark.parametrize(("scans", "refused"), [(100, False), (101, True)])
def test_a_jpeg_of_100_scans_is_the_last_one_accepted(scans: int, refused: bool) -> None:
    data = (DATA / "progressive.jpg").read_bytes()
    last = data[data.rindex(b"\xff\xda") : -2]  # shown again, it changes nothing
    data = data[:-2] + last * (scans - data.count(b"\xff\xda")) + data[-2:]
    assert data.count(b"\xff\xda") == scans
    if refused:
        with pytest.raises(ImageError, match="more than 100 scans"):
            decode_rgb(data)
    else:
        assert decode_rgb(data).shape == (HEIGHT, WIDTH, 3)


def test_threads_decode_as_one_thread_does() -> None:
    def outcome(path: Path) -> bytes:
        try:
            return pickle.dumps(decode_rgb(path.read_bytes()))
        except ImageError as error:
            return str(error).encode()

    alone = [outcome(path) for path in HOSTILE]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(outcome, HOSTILE * 4)) == alone * 4


def test_hostile_files_need_little_memory_and_leave_nothing_on_stderr() -> None:
    program = f"""
import json, pathlib, resource
from prelunet.evaluator.errors import ImageError
from prelunet.evaluator.imaging.decode import decode_rgb, silence_decoders
silence_decoders()
# 8 MB of text or profile in two files, and the decoders' own tables; the bombs claim 200 MB to 30 GB.
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000,) * 2)
refusals = {{}}
for file in sorted(pathlib.Path({str(DATA)!r}).iterdir()):
    for apply_exif in (True, False):
        try:
            decode_rgb(file.read_bytes(), apply_exif=apply_exif)
        except ImageError as error:
            refusals[file.name] = str(error)
print(json.dumps(refusals))
"""
    done = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    refusals = json.loads(done.stdout)
    assert refusals.keys() == REFUSED.keys()
    for name, message in refusals.items():
        assert REFUSED[name] in message, name


@pytest.mark.parametrize(
    ("kind", "options", "tolerance"), [("JPEG2000", {}, 0), ("AVIF", {"quality": 100, "subsampling": "4:4:4"}, 6)]
)
def test_avif_and_jpeg_2000_give_the_saved_pixels(kind: str, options: dict[str, Any], tolerance: int) -> None:
    """Tolerance: AVIF's conversion to another color space rounds, and the fastest encoder is used."""
    pixels = decode_rgb(encoded(Image.fromarray(PICTURE), kind, **options))
    assert np.abs(pixels.astype(np.int64) - PICTURE).max() <= tolerance
    alpha = np.random.default_rng(2).integers(0, 256, PICTURE.shape[:2], dtype=np.uint8)
    with_alpha = Image.fromarray(np.dstack([PICTURE, alpha]))
    blended = decode_rgb(encoded(with_alpha, kind, **options))
    assert np.abs(blended.astype(np.int64) - on_white(PICTURE, alpha)).max() <= tolerance
    with pytest.raises(ImageError, match=r"damaged|truncated"):
        decode_rgb(encoded(Image.fromarray(PICTURE), kind, **options)[:-40])


def test_formats_outside_the_list_never_reach_their_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    Image.init()

    def reached(*_: object) -> None:
        raise AssertionError("a decoder outside the list was started")

    others = {name: (reached, accept) for name, (_, accept) in Image.OPEN.items() if name not in decode.FORMATS}
    assert "EPS" in others
    for name, opener in others.items():
        monkeypatch.setitem(Image.OPEN, name, opener)
    for kind in ("ICO", "TGA", "PCX", "SGI", "QOI"):
        with pytest.raises(ImageError, match="Accepted formats: JPEG, PNG, GIF, WEBP, BMP, TIFF, PPM, AVIF, JPEG2000"):
            decode_rgb(encoded(Image.fromarray(PICTURE), kind))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def seeds(image: Image.Image) -> list[bytes]:
    exif = Image.Exif()
    exif[274] = 6
    kinds: list[tuple[str, dict[str, object]]] = [
        ("JPEG", {"exif": exif}),
        ("JPEG", {"progressive": True}),
        ("PNG", {"exif": exif}),
        ("GIF", {}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True, "exif": exif}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "jpeg"}),
        ("PPM", {}),
    ]
    return [encoded(image, kind, **options) for kind, options in kinds]


SEEDS = seeds(Image.fromarray(PICTURE)) + [
    (DATA / name).read_bytes() for name in ("animated.gif", "animated.webp", "animated.png", "palette-alpha.png")
]
NOISE = seeds(Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 61, 3), dtype=np.uint8)))


@st.composite
def damaged_images(draw: st.DrawFn) -> bytes:
    """A valid file with a few bytes changed, cut out or put in, most of them near its beginning, and perhaps cut."""
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.one_of(st.integers(0, min(120, len(data))), st.integers(0, len(data))))
        removed = draw(st.integers(0, 4))
        data[place : place + removed] = draw(st.binary(max_size=4))
    end = draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))
    return bytes(data[:end])


@settings(max_examples=600)
@given(damaged_images(), st.booleans())
def test_damaged_image_decodes_to_pixels_or_is_refused(data: bytes, apply_exif: bool) -> None:
    limits = DecodeLimits(max_pixels=500_000)
    try:
        pixels = decode_rgb(data, limits, apply_exif=apply_exif)
    except ImageError:
        return
    assert pixels.dtype == np.uint8
    assert pixels.shape[2:] == (3,)
    assert 0 < pixels.shape[0] * pixels.shape[1] <= limits.max_pixels
    if not apply_exif:
        assert image_size(data, limits) == pixels.shape[:2]


@pytest.mark.parametrize("seed", range(len(NOISE)))
@pytest.mark.parametrize("tenth", range(1, 10))
def test_image_cut_anywhere_before_its_last_pixel_is_refused(seed: int, tenth: int) -> None:
    data = NOISE[seed]  # so that nearly all of a file is pixels
    with pytest.raises(ImageError):
        decode_rgb(data[: len(data) * tenth // 10])


def test_a_machine_out_of_memory_is_not_the_images_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run would record the image as refused for good, and another machine would give another result."""

    def no_memory(*_arguments: object, **_options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", no_memory)
    with pytest.raises(EnvironmentFault, match="more memory than this machine has left"):
        decode_rgb(b"any")


BROKEN_TIFFS = """if True:
    import io, os, sys, warnings
    import numpy
    from PIL import Image, TiffImagePlugin

    filters = list(warnings.filters)
    import prelunet.evaluator.imaging.decode_memory, prelunet.evaluator.imaging.views, prelunet.evaluator.imaging.views
    from prelunet.evaluator.errors import ImageError
    from prelunet.evaluator.imaging.decode import decode_rgb, silence_decoders
    assert warnings.filters == filters

    def count_refused():
        whole = io.BytesIO()
        Image.effect_noise((60, 40), 80).convert("RGB").save(whole, "TIFF", compression="tiff_lzw")
        good, refused = whole.getvalue(), 0
        for place in range(8, len(good) - 40, 37):
            try:
                decode_rgb(good[:place] + b"\\xff" * 40 + good[place + 40:])
            except ImageError:
                refused += 1
        assert refused > 50
"""


def stderr_of(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", BROKEN_TIFFS + textwrap.indent(textwrap.dedent(program), "    ")],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip


def test_importing_the_package_changes_nothing_in_the_process() -> None:
    noise = stderr_of("count_refused()")
    assert "UserWarning: Tag data larger than file" in noise, "Pillow still warns"
    assert "TIFF directory is missing" in noise, "libtiff still writes its own lines"


def test_broken_tiffs_leave_nothing_on_stderr_of_a_silenced_process_and_of_those_forked_from_it() -> None:
    """Libtiff would write its own lines there, in the middle of a server's log."""
    program = """
        silence_decoders()
        count_refused()
        sys.exit(os.waitpid(pid, 0)[1] if (pid := os.fork()) else count_refused())
    """
    assert stderr_of(program) == ""


def test_every_verb_silences_the_decoders() -> None:
    program = """
        from prelunet.evaluator import cli
        assert cli.run(["report", "nowhere"]) == 2
        count_refused()
    """
    (line,) = stderr_of(program).splitlines()
    assert line.startswith("prelunet: nowhere")
