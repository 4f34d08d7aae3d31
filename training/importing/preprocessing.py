"""Pixel preprocessing of third-party nets, with a numpy implementation to which adopted graphs are compared."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ...evaluator.errors import UsageError
from ...evaluator.preparation import ANTIALIASED, Interpolation, Preparation

Channels = Literal["rgb", "bgr", "gray"]
Layout = Literal["NCHW", "NHWC"]
ChannelValues = tuple[float, float, float]
Preset = Literal["torchvision", "timm", "timm-inception", "keras-tf", "keras-caffe", "ultralytics", "clip", "hf-vit"]

PIXEL_RANGES = (1, 255)
LUMA, LUMA_UNIT = (19595, 38470, 7471), 2**16  # of red, green and blue, as in Pillow: ITU-R 601-2
# Nets of other origin see what Pillow and torchvision, and what is written after them, make of an image file.
USUAL_ELSEWHERE = Preparation(rounding="torchvision", transparency="dropped")


@dataclass(frozen=True)
class Preprocessing:
    """How pixels 0-255 become the net's input: (pixel · pixel_range / 255 − mean) / std, in float32.

    mean, std: one number per channel in the net's channel order (`channels`), or None if the net takes bytes;
    pixel_range: 1 or 255, the largest pixel value when the mean is subtracted; channels: `gray` is Pillow's luma, in
    all of the net's channels; interpolation, preparation: of the images before it; tight: a central crop has all of the
    shorter side, as in CLIP.
    Raises UsageError for inconsistent numbers.
    """

    mean: ChannelValues | None
    std: ChannelValues | None
    pixel_range: int = 1
    channels: Channels = "rgb"
    interpolation: Interpolation = "bilinear"
    preparation: Preparation = USUAL_ELSEWHERE
    tight: bool = False

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise UsageError(
                "--mean and --std require each other: give both, for example --mean 0,0,0 --std 1,1,1 for no change"
            )
        if self.pixel_range not in PIXEL_RANGES:
            raise UsageError(f"--range {self.pixel_range}: should be 1 or 255")
        if self.mean is None or self.std is None:
            return
        self._check_numbers(self.mean, self.std)

    def _check_numbers(self, mean: ChannelValues, std: ChannelValues) -> None:
        """Raise UsageError for a mean or std impossible for pixels from 0 to `pixel_range`."""
        if not all(math.isfinite(number) for number in (*mean, *std)):
            raise UsageError(f"--mean {_format_numbers(mean)} --std {_format_numbers(std)}: should be finite numbers")
        if min(std) <= 0:
            raise UsageError(f"--std {_format_numbers(std)}: should be above 0")
        if min(mean) < 0:
            raise UsageError(f"--mean {_format_numbers(mean)}: below 0, but pixels range from 0 to {self.pixel_range}")
        for option, numbers in (("--mean", mean), ("--std", std)):
            if self.pixel_range == 1 and max(numbers) > 1:
                raise UsageError(
                    f"{option} {_format_numbers(numbers)}: above 1, but pixels range from 0 to 1. If these numbers "
                    "are for pixels from 0 to 255, add --range 255"
                )
        if max(mean) > self.pixel_range:
            raise UsageError(f"--mean {_format_numbers(mean)}: above 255, but pixels range from 0 to 255")
        if self.pixel_range == 255 and 0 < max(mean) <= 1:
            raise UsageError(
                f"--mean {_format_numbers(mean)} --range 255: almost 0 for pixels from 0 to 255. If these numbers are "
                "for pixels from 0 to 1, omit --range 255"
            )

    def apply(self, image: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Preprocess an image, uint8 (H, W, 3) RGB, to (H, W, 3) in the net's channel order.

        Returns float32, or uint8 with unchanged values if the net takes bytes.
        """
        pixels = image[:, :, ::-1] if self.channels == "bgr" else image
        if self.channels == "gray":  # in whole numbers, as Pillow computes it
            luma = (image @ np.array(LUMA, np.int64) + LUMA_UNIT // 2) // LUMA_UNIT
            pixels = np.repeat(luma.astype(np.uint8)[:, :, None], 3, axis=2)
        if self.mean is None or self.std is None:
            return pixels
        values = pixels.astype(np.float32)
        if self.pixel_range == 1:
            values = values / np.float32(255)
        return np.asarray((values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32))

    @property
    def identity(self) -> tuple[object, ...]:
        """Return all that decides what the net sees of an image resized to a scale, alike for equal settings."""
        numbers = [None if each is None else tuple(map(float, each)) for each in (self.mean, self.std)]
        return (*numbers, int(self.pixel_range), self.channels, self.interpolation, self.preparation)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the model file."""
        return {
            "mean": None if self.mean is None else list(self.mean),
            "std": None if self.std is None else list(self.std),
            "range": self.pixel_range,
            "channels": self.channels,
        }

    def __str__(self) -> str:
        how = {"shorter": "resized", "squash": "squashed", "pad": "padded"}[self.preparation.resize]
        resized = f"{how} with the {self.interpolation} filter"
        resized += ANTIALIASED[self.preparation.antialias]
        if self.mean is None or self.std is None:
            return f"unchanged {self.channels if self.channels == 'gray' else self.channels.upper()} bytes, {resized}"
        names = ["gray"] * 3 if self.channels == "gray" else list(self.channels.upper())
        numbers = zip(names, self.mean, self.std, strict=True)
        parts = dict.fromkeys(f"{name} (x - {mean:g}) / {std:g}" for name, mean, std in numbers)  # gray may be one
        return f"{', '.join(parts)}, x from 0 to {self.pixel_range}; {resized}"


_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels
_HALF = (0.5, 0.5, 0.5)

# timm calls these constants IMAGENET_DEFAULT_* and IMAGENET_INCEPTION_*; Keras has its own as modes of
# `imagenet_utils.preprocess_input`, whose mode "torch" is `torchvision` here. Ultralytics: `classify_transforms`; CLIP:
# `_transform` of its clip.py; hf-vit: the defaults of transformers' ViTImageProcessor.
PRESETS: dict[Preset, Preprocessing] = {
    "torchvision": Preprocessing(_MEAN, _STD),
    "timm": Preprocessing(_MEAN, _STD, interpolation="bicubic"),
    "timm-inception": Preprocessing(_HALF, _HALF, interpolation="bicubic"),
    "keras-tf": Preprocessing(_HALF, _HALF),
    "keras-caffe": Preprocessing((103.939, 116.779, 123.68), (1, 1, 1), pixel_range=255, channels="bgr"),
    "ultralytics": Preprocessing((0, 0, 0), (1, 1, 1), tight=True),
    "clip": Preprocessing(
        (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), interpolation="bicubic", tight=True
    ),
    "hf-vit": Preprocessing(_HALF, _HALF, preparation=replace(USUAL_ELSEWHERE, resize="squash", antialias="torch")),
}


def _format_numbers(numbers: ChannelValues) -> str:
    return ",".join(f"{number:g}" for number in numbers)


def parse_channel_values(text: str, option: str) -> ChannelValues:
    """Parse `0.485,0.456,0.406`, or one number for all channels; raises UsageError for anything else."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text}: should be three comma-separated numbers, or one") from error
    if len(numbers) == 1:
        return numbers * 3
    if len(numbers) != 3:
        raise UsageError(f"{option} {text}: should be three comma-separated numbers, or one, not {len(numbers)}")
    return (numbers[0], numbers[1], numbers[2])
