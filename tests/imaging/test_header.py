"""The header tells what decoding costs, for files of all kinds and for hostile ones."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from prelunet.evaluator.errors import ImageError
from prelunet.evaluator.imaging.decode import image_size
from prelunet.evaluator.imaging.header import read_header

HOSTILE = sorted((Path(__file__).parents[1] / "data" / "hostile").iterdir())
PICTURE = np.random.default_rng(2).integers(0, 256, (60, 97, 3), np.uint8)


def encoded(kind: str, picture: np.ndarray = PICTURE, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, kind, **options)
    return file.getvalue()


def with_segments(jpeg: bytes, count: int) -> bytes:
    """Add comments behind the start marker."""
    return jpeg[:2] + count * b"\xff\xfe\x00\x04ab" + jpeg[2:]


def with_chunks(png: bytes, count: int) -> bytes:
    """Add empty chunks behind the header chunk, with wrong checksums: nobody reads them here."""
    return png[:33] + count * b"\0\0\0\0teXt\0\0\0\0" + png[33:]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "WEBP"])
@pytest.mark.parametrize("lossless", [False, True])
def test_the_header_tells_the_number_of_pixels(kind: str, lossless: bool) -> None:
    assert read_header(encoded(kind, lossless=lossless)).pixels == 60 * 97


@pytest.mark.parametrize("path", HOSTILE, ids=lambda path: path.name)
@pytest.mark.filterwarnings(r"ignore::Warning:PIL\.")
def test_the_header_agrees_with_the_decoder_wherever_it_tells_a_size(path: Path) -> None:
    data = path.read_bytes()
    header = read_header(data)
    try:
        height, width = image_size(data)
    except ImageError:
        return
    assert header.pixels in {height * width, None}
    assert header.pixels is not None or data[:2] in {b"II", b"MM", b"P5", b"P6"}, "TIFF and PPM have no fixed place"


@given(st.sampled_from([encoded(kind) for kind in ("JPEG", "PNG", "GIF", "BMP", "WEBP")]), st.data())
def test_damaged_bytes_give_some_header(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data[: draw.draw(st.integers(0, len(data)))])
    for place in draw.draw(st.lists(st.integers(0, 60), max_size=9)):
        if place < len(damaged):
            damaged[place] = draw.draw(st.integers(0, 255))
    header = read_header(bytes(damaged))
    assert header.pixels is None or header.pixels >= 0


def test_ordinary_photos_and_screenshots_are_easy() -> None:
    picture = np.random.default_rng(1).integers(0, 256, (1200, 1600, 3), np.uint8)
    for kind, options in [("JPEG", {}), ("JPEG", {"progressive": True, "quality": 95}), ("PNG", {})]:
        assert read_header(encoded(kind, picture, **options)).easy, (kind, options)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("more than two megapixels", encoded("JPEG", np.zeros((1500, 1500, 3), np.uint8))),
        ("the same as PNG", encoded("PNG", np.zeros((1500, 1500, 3), np.uint8))),
        ("scans without end", (HOSTILE[0].parent / "bomb-scans.jpg").read_bytes()),
        ("hundreds of segments", with_segments(encoded("JPEG"), 300)),
        ("hundreds of chunks", with_chunks(encoded("PNG"), 300)),
        ("metadata far larger than the pixels", encoded("PNG") + bytes(300_000)),
        ("another format", encoded("WEBP")),
        ("no image", b"no image"),
    ],
)
def test_what_may_take_long_is_not_easy(name: str, data: bytes) -> None:
    assert not read_header(data).easy, name


def test_a_few_segments_and_chunks_are_easy() -> None:
    """The controls of the two cases above."""
    assert read_header(with_segments(encoded("JPEG"), 100)).easy
    assert read_header(with_chunks(encoded("PNG"), 100)).easy


def test_each_scan_of_a_jpeg_is_a_pass_over_its_pixels() -> None:
    baseline, progressive = read_header(encoded("JPEG")), read_header(encoded("JPEG", progressive=True))
    hostile = read_header((HOSTILE[0].parent / "bomb-scans.jpg").read_bytes())
    assert 1 == baseline.passes < progressive.passes < hostile.passes
