"""What callers give as an image: the pixels that a decoder sees are theirs."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.errors import ImageError, UsageError
from prelunet.evaluator.image_input import encoded_image, is_image
from prelunet.evaluator.imaging.decode import decode_rgb

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 37, 3), dtype=np.uint8)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return an image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_a_file_is_passed_on_byte_for_byte(tmp_path: Path) -> None:
    file = tmp_path / "ä photo.jpg"
    file.write_bytes(b"any bytes")
    assert encoded_image(file) == encoded_image(str(file)) == encoded_image(b"any bytes") == b"any bytes"


@pytest.mark.parametrize(
    "pixels",
    [PIXELS, PIXELS[:, :, 0], PIXELS[::2, ::-1], PIXELS[:, :, ::-1], np.asfortranarray(PIXELS), PIXELS[:1, :1]],
    ids=["RGB", "gray", "strides", "BGR view", "Fortran order", "one pixel"],
)
def test_the_pixels_of_an_array_arrive_unchanged(pixels: np.ndarray) -> None:
    expected = pixels if pixels.ndim == 3 else np.repeat(pixels[:, :, None], 3, axis=2)
    np.testing.assert_array_equal(decode_rgb(encoded_image(pixels)), expected)


@pytest.mark.parametrize(
    "file",
    [
        file_of(Image.fromarray(PIXELS), "JPEG"),
        file_of(Image.fromarray(PIXELS[:, :, 0]), "JPEG"),
        file_of(Image.fromarray(PIXELS).quantize(20), "PNG", transparency=3),
        file_of(Image.fromarray(PIXELS[:, :, 0] > 100), "TIFF"),
        file_of(Image.fromarray(np.dstack([PIXELS, PIXELS[::-1, :, 1]])), "WEBP", lossless=True),
        file_of(Image.fromarray(np.dstack([PIXELS[:, :, 0], PIXELS[::-1, :, 1]])), "PNG"),
        file_of(Image.fromarray(PIXELS[:, :, 0].astype(np.uint16) * 257 - 100), "PNG"),
        file_of(Image.fromarray(PIXELS), "TIFF", tiffinfo={274: 6}),
    ],
    ids=["JPEG", "gray", "palette", "1 bit", "RGBA", "LA", "16 bits", "rotated TIFF"],
)
def test_an_opened_pillow_image_gives_the_pixels_of_its_file(file: bytes) -> None:
    np.testing.assert_array_equal(decode_rgb(encoded_image(Image.open(io.BytesIO(file)))), decode_rgb(file))


@pytest.mark.parametrize("apply_exif", [False, True])
def test_a_pillow_image_keeps_its_exif_orientation(apply_exif: bool) -> None:
    exif = Image.Exif()
    exif[274] = 6
    file = file_of(Image.fromarray(PIXELS), "JPEG", exif=exif)
    encoded = encoded_image(Image.open(io.BytesIO(file)))
    expected = decode_rgb(file, apply_exif=apply_exif)
    assert expected.shape[0] == (37 if apply_exif else 24)
    np.testing.assert_array_equal(decode_rgb(encoded, apply_exif=apply_exif), expected)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (PIXELS / 255, r"type is float64, but it must be uint8.*\(array \* 255\)"),
        (PIXELS.astype(np.int32), "type is int32"),
        (np.dstack([PIXELS, PIXELS[:, :, 0]]), r"shape is \(24, 37, 4\).*array\[\.\.\., :3\]"),
        (PIXELS.transpose(2, 0, 1), r"shape is \(3, 24, 37\).*array\.transpose\(1, 2, 0\)"),
        (PIXELS[None], r"shape is \(1, 24, 37, 3\), but it must be \(height, width, 3\).*list\(array\)"),
        (PIXELS[0, :, 0], r"shape is \(37,\)"),
        (PIXELS[:0], r"shape is \(0, 37, 3\)"),
    ],
)
def test_an_array_of_another_kind_is_refused_with_what_to_change(array: np.ndarray, text: str) -> None:
    with pytest.raises(ImageError, match=text):
        encoded_image(array)


@pytest.mark.parametrize("mode", ["F", "CMYK", "LAB", "YCbCr", "I"])
def test_a_pillow_image_that_a_png_cannot_hold_is_refused(mode: str) -> None:
    with pytest.raises(ImageError, match=rf"mode is {mode}, which .*image\.convert\('RGB'\)"):
        encoded_image(Image.new(mode, (3, 2)))


def test_a_damaged_or_closed_pillow_image_is_refused() -> None:
    truncated = Image.open(io.BytesIO(file_of(Image.fromarray(PIXELS), "JPEG")[:-300]))
    closed = Image.open(io.BytesIO(file_of(Image.fromarray(PIXELS), "PNG")))
    closed.close()
    for image in (truncated, closed):
        with pytest.raises(ImageError, match="the Pillow image cannot be read"):
            encoded_image(image)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (lambda folder: folder, "cannot be read .Is a directory."),
        (
            lambda folder: str(folder / "gone.jpg"),
            "gone.jpg: cannot be read .No such file or directory.. Give the path",
        ),
        (lambda folder: "nul\0", "cannot be read .*embedded null"),
        (lambda folder: "x" * 10**6, "^x{100}…x{99}: cannot be read .File name too long"),
    ],
    ids=["folder", "missing", "NUL", "long"],
)
def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path, path: Callable[[Path], Any], text: str) -> None:
    with pytest.raises(ImageError, match=text):
        encoded_image(path(tmp_path))


def test_a_huge_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("prelunet.evaluator.image_input._MAX_BYTES", 10)
    (tmp_path / "huge.jpg").write_bytes(bytes(11))
    with pytest.raises(ImageError, match="more than 10 bytes"):
        encoded_image(tmp_path / "huge.jpg")


@pytest.mark.parametrize("other", [None, 7, [b"cat"], io.BytesIO(b"cat")])
def test_an_object_of_another_type_is_refused(other: object) -> None:
    assert not is_image(other)
    with pytest.raises(UsageError, match=f"an image cannot be of type {type(other).__name__}; give a path, the bytes"):
        encoded_image(other)


def test_encoding_bytes_and_paths_loads_neither_pillow_nor_numpy() -> None:
    program = f"""if True:
        import sys
        from prelunet.evaluator.image_input import encoded_image
        encoded_image(b"cat"), encoded_image({sys.executable!r})
        assert not sys.modules.keys() & {{"numpy", "PIL"}}
    """
    subprocess.run([sys.executable, "-c", program], check=True)
