"""Limits on the images that are decoded."""

from dataclasses import dataclass

from ..cli_option import option

PILLOW_MAX_PIXELS = 2 * (1024**3 // 4 // 3)  # Pillow itself refuses more: 178,956,970


@dataclass(frozen=True)
class DecodeLimits:
    """The largest accepted image.

    baseline_factor: a baseline JPEG may have this many times max_pixels.
    """

    max_bytes: int = option(
        32 * 1024 * 1024, "Maximum size of an encoded image, in bytes.", flag="max-image-bytes", min=1, max=2**29
    )
    max_pixels: int = option(
        64_000_000,
        "Maximum size of a decoded image, in pixels (height x width).",
        flag="max-image-pixels",
        min=1,
        max=PILLOW_MAX_PIXELS,
    )
    baseline_factor: int = 1
