"""Preparations of nets of other origin, against torch, Pillow and the formulas of torchvision."""

import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from prelunet.evaluator.arrays import Float32Array, UInt8Array
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.imaging.resize import panel_picture, placed, resize_to_scales
from prelunet.evaluator.imaging.views import crop_origin
from prelunet.evaluator.preparation import Interpolation, Preparation, preparation_from_json

FILTERS: tuple[Interpolation, ...] = ("nearest", "bilinear", "bicubic")
TORCHVISION = Preparation(rounding="torchvision")


def noise(height: int, width: int, channels: int = 3) -> UInt8Array:
    return np.random.default_rng(height * 100_003 + width).integers(0, 256, (height, width, channels), dtype=np.uint8)


# Our whole numbers against torch's fractions: rounded; and a position among 90 pixels is off by up to 8e-6 in float32,
# between neighbors that differ by up to 255 levels.
HALF_A_LEVEL = 0.5 + 255 * 8e-6


def of_torch(image: UInt8Array, size: tuple[int, int], interpolation: Interpolation) -> Float32Array:
    planes = torch.from_numpy(image.transpose(2, 0, 1)[None].astype(np.float32))
    corners = None if interpolation == "nearest" else False
    found = torch.nn.functional.interpolate(planes, size, mode=interpolation, align_corners=corners, antialias=False)
    pixels: Float32Array = found.clamp(0, 255).numpy()[0].transpose(1, 2, 0)
    return pixels


@pytest.mark.parametrize("interpolation", FILTERS)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 70))
def test_without_antialiasing_pixels_are_those_of_torch(
    interpolation: Interpolation, height: int, width: int, scale: int
) -> None:
    image = noise(height, width)
    preparation = Preparation(resize="squash", antialias=False)
    ours, capped = resize_to_scales(image, (scale,), 4, interpolation, preparation)[scale]
    np.testing.assert_allclose(ours, of_torch(image, (scale, scale), interpolation), rtol=0, atol=HALF_A_LEVEL)
    assert not capped


@pytest.mark.parametrize("interpolation", FILTERS)
def test_a_long_image_without_antialiasing_is_the_middle_of_what_torch_makes_of_it(
    interpolation: Interpolation,
) -> None:
    image = noise(37, 400)
    ours, capped = resize_to_scales(image, (53,), 4, interpolation, Preparation(antialias=False))[53]
    whole = of_torch(image, (53, 573), interpolation)
    assert ours.shape == (53, 212, 3)
    np.testing.assert_allclose(ours, whole[:, (573 - 212) // 2 :][:, :212], rtol=0, atol=HALF_A_LEVEL)
    assert capped


def test_without_antialiasing_differs_from_pillow_where_images_shrink() -> None:
    image = noise(90, 90)
    with_, without = (
        resize_to_scales(image, (30,), 4, "bilinear", Preparation(antialias=antialias))[30][0]
        for antialias in (True, False)
    )
    assert np.abs(with_.astype(np.float32) - without).mean() > 20


def test_nearest_is_pillows_unless_it_should_be_torchs() -> None:
    image = noise(50, 70)
    ours, _ = resize_to_scales(image, (31,), 4, "nearest", Preparation(resize="squash"))[31]
    wanted = np.asarray(Image.fromarray(image).resize((31, 31), Image.Resampling.NEAREST))
    np.testing.assert_array_equal(ours, wanted)
    assert (of_torch(image, (31, 31), "nearest") != wanted).any(), "the two differ"


@pytest.mark.parametrize(("height", "width"), [(61, 83), (90, 31), (7, 200), (40, 40), (3, 500)])
def test_a_padded_image_lies_in_the_middle_of_a_square_of_the_color(height: int, width: int) -> None:
    image, color = noise(height, width), (124, 7, 200)
    preparation = Preparation(resize="pad", pad_color=color)
    ours, capped = resize_to_scales(image, (48,), 4, "bilinear", preparation)[48]
    long = max(height, width)
    rows, columns = (max(1, round(side * 48 / long)) for side in (height, width))
    wanted = Image.new("RGB", (48, 48), color)
    small = Image.fromarray(image).resize((columns, rows), Image.Resampling.BILINEAR)
    wanted.paste(small, ((48 - columns) // 2, (48 - rows) // 2))
    np.testing.assert_array_equal(ours, np.asarray(wanted))
    assert not capped, "nothing is cut off"


def test_transformers_rounds_the_place_of_a_crop_down() -> None:
    for side in range(224, 300):
        assert crop_origin(256, side, "center", 224, "transformers") == (16, (side - 224) // 2)
    assert placed(100, 199, 256, preparation=Preparation(rounding="transformers")).size == (256, 509)


def test_sides_and_crops_are_rounded_as_torchvision_does() -> None:
    crop = 224
    differ = 0
    for height in range(180, 700, 7):
        for width in range(180, 700):
            # torchvision/transforms/functional.py: _compute_resized_output_size, center_crop
            short, long = sorted((height, width))
            other = int(256 * long / short)
            size = (256, other) if height <= width else (other, 256)
            origin = tuple(int(round((side - crop) / 2.0)) for side in size)  # noqa: RUF046 as it stands there
            assert placed(height, width, 256, preparation=TORCHVISION).size == size
            assert crop_origin(*size, "center", crop, "torchvision") == origin
            usual = placed(height, width, 256).size
            differ += (usual, crop_origin(*usual, "center", crop)) != (size, origin)
    assert differ > 10_000, "of 39,000: the usual rounding is another one"


def picture(mode: str, format_: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.frombytes(mode, (43, 31), noise(31, 43, len(mode)).tobytes()).save(buffer, format_, **options)
    return buffer.getvalue()


def palette() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(noise(31, 43)).quantize(16).save(buffer, "PNG", transparency=bytes(range(0, 256, 16)))
    return buffer.getvalue()


FILES = {
    "RGBA": picture("RGBA", "PNG"),
    "gray with alpha": picture("LA", "PNG"),
    "palette with alpha": palette(),
    "a transparent color": picture("RGB", "PNG", transparency=(1, 2, 3)),
    "WebP": picture("RGBA", "WEBP", lossless=True, exact=True),
    "CMYK": picture("CMYK", "JPEG"),
    "gray": picture("L", "JPEG"),
}


@pytest.mark.parametrize("name", FILES)
def test_transparency_is_dropped_as_by_pillow(name: str) -> None:
    wanted = np.asarray(Image.open(io.BytesIO(FILES[name])).convert("RGB"))
    found = np.asarray(decode_image(FILES[name], preparation=Preparation(transparency="dropped")))
    np.testing.assert_array_equal(found, wanted)


def test_16_bit_gray_keeps_its_upper_bits_where_transparency_is_dropped() -> None:
    values = np.arange(31 * 43, dtype=np.uint16).reshape(31, 43) * 47
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG", transparency=470)
    found = np.asarray(decode_image(buffer.getvalue(), preparation=Preparation(transparency="dropped")))
    np.testing.assert_array_equal(found, np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2))


@pytest.mark.parametrize("name", FILES)
def test_gray_is_pillows_luma_in_all_channels(name: str) -> None:
    opened = Image.open(io.BytesIO(FILES[name]))
    wanted = np.asarray((opened.convert("RGB") if opened.mode == "CMYK" else opened).convert("L"))
    found = np.asarray(decode_image(FILES[name], preparation=Preparation(transparency="dropped", gray=True)))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("antialias", [True, False])
def test_gray_views_have_three_equal_channels(antialias: bool) -> None:
    gray = Image.fromarray(noise(31, 43)).convert("L")
    views = [
        resize_to_scales(image, (20,), 4, "bicubic", Preparation(antialias=antialias))[20][0]
        for image in (gray, gray.convert("RGB"))
    ]
    np.testing.assert_array_equal(*views)
    np.testing.assert_array_equal(panel_picture(gray), panel_picture(gray.convert("RGB")))


@pytest.mark.parametrize(("height", "width"), [(1, 2**21), (2**21, 1), (1500, 1400)])
def test_resizing_without_antialiasing_copies_little_of_an_image(height: int, width: int) -> None:
    image = Image.new("RGB", (width, height), (1, 2, 3))
    for resize in ("shorter", "squash"):
        tracemalloc.start()
        resize_to_scales(image, (32, 224), 4, "bicubic", Preparation(resize=resize, antialias=False))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # Blocks of 64 x 16384 pixels, in up to three copies, and the float32 sums of a view of up to 224 x 896.
        assert peak < 25e6


def test_a_preparation_survives_json_and_other_data_is_refused_with_the_reason() -> None:
    unusual = Preparation("pad", antialias=False, rounding="torchvision", pad_color=(1, 2, 255), gray=True)
    assert preparation_from_json(unusual.to_json()) == unusual
    plain = unusual.to_json()
    for data, message in (
        ({**plain, "resize": "stretch"}, "resize should be one of shorter, squash, pad"),
        ({**plain, "rounding": "up"}, "rounding should be one of half-up, torchvision, transformers"),
        ({**plain, "transparency": 1}, "transparency should be text"),
        ({**plain, "pad_color": [0, 0, 256]}, "pad_color should be a whole number from 0 to 255"),
        ({**plain, "pad_color": [0, 0]}, "pad_color should have three levels, not 2"),
        ({**plain, "antialias": 1}, "antialias should be true or false"),
        ({**plain, "color": "gray"}, "unknown key 'color'"),
        ([], "preparation should be an object"),
    ):
        with pytest.raises(ValueError, match=message):
            preparation_from_json(data)
