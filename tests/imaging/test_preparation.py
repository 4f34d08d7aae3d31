"""Preparations of nets of other origin, against torch, Pillow and the formulas of torchvision."""

import io
import re
import tracemalloc
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from prelunet.evaluator.arrays import Float32Array, UInt8Array
from prelunet.evaluator.errors import ImageError
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.imaging.resize import panel_picture, placed, resize_to_scales
from prelunet.evaluator.imaging.views import crop_origin
from prelunet.evaluator.preparation import Antialias, Interpolation, Preparation, preparation_from_json

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
    preparation = Preparation(resize="squash", antialias="none")
    ours, capped = resize_to_scales(image, (scale,), 4, interpolation, preparation)[scale]
    np.testing.assert_allclose(ours, of_torch(image, (scale, scale), interpolation), rtol=0, atol=HALF_A_LEVEL)
    assert not capped


@pytest.mark.parametrize("interpolation", FILTERS)
def test_a_long_image_without_antialiasing_is_the_middle_of_what_torch_makes_of_it(
    interpolation: Interpolation,
) -> None:
    image = noise(37, 400)
    ours, capped = resize_to_scales(image, (53,), 4, interpolation, Preparation(antialias="none"))[53]
    whole = of_torch(image, (53, 573), interpolation)
    assert ours.shape == (53, 212, 3)
    np.testing.assert_allclose(ours, whole[:, (573 - 212) // 2 :][:, :212], rtol=0, atol=HALF_A_LEVEL)
    assert capped


def of_torchs_bytes(image: UInt8Array, size: tuple[int, int], interpolation: Interpolation) -> UInt8Array:
    planes = torch.from_numpy(image.transpose(2, 0, 1)[None])
    found = torch.nn.functional.interpolate(planes, size, mode=interpolation, align_corners=False, antialias=True)
    pixels: UInt8Array = found.numpy()[0].transpose(1, 2, 0)
    return pixels


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 70), st.booleans())
def test_antialiased_as_torch_pixels_equal_those_of_its_uint8_tensors(
    interpolation: Interpolation, height: int, width: int, scale: int, clipped: bool
) -> None:
    image = noise(height, width)
    if clipped:  # bicubic sums beyond 0 and 255, between the passes too
        image = np.where(image < 128, np.uint8(0), np.uint8(255))
    preparation = Preparation(resize="squash", antialias="torch")
    ours, capped = resize_to_scales(image, (scale,), 4, interpolation, preparation)[scale]
    np.testing.assert_array_equal(ours, of_torchs_bytes(image, (scale, scale), interpolation))
    assert not capped


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_long_image_antialiased_as_torch_is_the_middle_of_what_torch_makes_of_it(
    interpolation: Interpolation,
) -> None:
    image = noise(137, 1400)
    ours, capped = resize_to_scales(image, (53,), 4, interpolation, Preparation(antialias="torch"))[53]
    whole = of_torchs_bytes(image, (53, 542), interpolation).astype(np.float32)
    # Integers for the weights have places for the largest, which of the middle may be smaller than of the whole.
    np.testing.assert_allclose(ours, whole[:, (542 - 212) // 2 :][:, :212], rtol=0, atol=1)
    assert capped


def test_kinds_of_antialiasing_differ_where_images_shrink() -> None:
    image = noise(90, 90)
    pillow, as_torch, without = (
        resize_to_scales(image, (30,), 4, "bicubic", Preparation(antialias=antialias))[30][0].astype(np.float32)
        for antialias in get_args(Antialias)
    )
    assert np.abs(pillow - without).mean() > 20
    assert 0 < np.abs(pillow - as_torch).mean() < 1


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


@pytest.mark.parametrize("antialias", get_args(Antialias))
def test_gray_views_have_three_equal_channels(antialias: Antialias) -> None:
    gray = Image.fromarray(noise(31, 43)).convert("L")
    views = [
        resize_to_scales(image, (20,), 4, "bicubic", Preparation(antialias=antialias))[20][0]
        for image in (gray, gray.convert("RGB"))
    ]
    np.testing.assert_array_equal(*views)
    np.testing.assert_array_equal(panel_picture(gray), panel_picture(gray.convert("RGB")))


@pytest.mark.parametrize(
    ("antialias", "height", "width"),
    [
        *(("none", 1, 2**21), ("none", 2**21, 1), ("none", 1500, 1400)),
        *(("torch", 1, 2**16 - 1), ("torch", 2**16 - 1, 1), ("torch", 1500, 1400)),
    ],
)
def test_resizing_as_torch_copies_little_of_an_image(antialias: Antialias, height: int, width: int) -> None:
    image = Image.new("RGB", (width, height), (1, 2, 3))
    for resize in ("shorter", "squash"):
        tracemalloc.start()
        resize_to_scales(image, (32, 224), 4, "bicubic", Preparation(resize=resize, antialias=antialias))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # Blocks of 64 x 16384 pixels, in up to three copies, and the float32 sums of a view of up to 224 x 896.
        assert peak < 25e6


def test_an_image_that_would_take_long_to_resize_as_torch_is_refused() -> None:
    file = io.BytesIO()
    Image.new("L", (1, 2**16)).save(file, "PNG")
    assert decode_image(file.getvalue(), preparation=Preparation(antialias="none")).size == (1, 2**16)
    with pytest.raises(ImageError, match="1x65536 pixels: this model's images have at most 65535 on a side"):
        decode_image(file.getvalue(), preparation=Preparation(antialias="torch"))


def test_a_preparation_survives_json_and_other_data_is_refused_with_the_reason() -> None:
    unusual = Preparation("pad", antialias="none", rounding="torchvision", pad_color=(1, 2, 255), gray=True)
    assert preparation_from_json(unusual.to_json()) == unusual
    plain = unusual.to_json()
    for data, message in (
        ({**plain, "resize": "stretch"}, "Invalid enum value 'stretch' - at `$.resize`"),
        ({**plain, "rounding": "up"}, "Invalid enum value 'up' - at `$.rounding`"),
        ({**plain, "transparency": 1}, "Expected `str`, got `int` - at `$.transparency`"),
        ({**plain, "pad_color": [0, 0, 256]}, "Expected `int` <= 255 - at `$.pad_color[2]`"),
        ({**plain, "pad_color": [0, 0]}, "Expected `array` of length 3, got 2 - at `$.pad_color`"),
        ({**plain, "antialias": "yes"}, "Invalid enum value 'yes' - at `$.antialias`"),
        ({**plain, "color": "gray"}, "unknown key 'color'"),
        ({key: value for key, value in plain.items() if key != "gray"}, "no key 'gray'"),
        ([], "Expected `object`, got `array`"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            preparation_from_json(data)
