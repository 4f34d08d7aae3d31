"""The test images: pictures like photos, made from a seed, at sizes and in modes that pipelines treat differently.

Every size is odd or shares no factor with the nets' sizes, so that long sides and crops have to be rounded.
"""

from pathlib import Path

import numpy as np
from PIL import Image

SEED = 20261127
# name: width, height, mode. In the order of the scores.
IMAGES = {
    "landscape.jpg": (641, 427, "RGB"),
    "portrait.jpg": (333, 499, "RGB"),
    "square.png": (301, 301, "RGB"),
    "small.png": (187, 243, "RGB"),
    "wide.png": (699, 181, "RGB"),
    "tall.png": (257, 683, "RGB"),
    "large.png": (697, 593, "RGB"),
    "gray.jpg": (523, 391, "L"),
    "transparent.png": (401, 297, "RGBA"),
    "palette.png": (355, 463, "P"),
    "cmyk.jpg": (449, 337, "CMYK"),
}


def write_images(folder: Path) -> None:
    """Write all test images; the same bytes for the same versions of numpy and Pillow."""
    folder.mkdir(parents=True)
    for number, (name, (width, height, mode)) in enumerate(IMAGES.items()):
        image = Image.fromarray(picture(np.random.default_rng([SEED, number]), width, height))
        if mode == "RGBA":
            image.putalpha(Image.fromarray(picture(np.random.default_rng([SEED, 100]), width, height)[:, :, 0]))
        elif mode == "P":
            image = image.quantize(64)
        elif mode != "RGB":
            image = image.convert(mode)
        image.save(folder / name, quality=93)


def picture(random: np.random.Generator, width: int, height: int) -> np.ndarray:
    """Return uint8 (height, width, 3): random fields of several grains, an edge, and a little noise.

    The coarse fields give each picture colors of its own; the fine ones make filters differ.
    """
    values = np.zeros((height, width, 3))
    for cells, weight in ((2, 1.0), (5, 0.8), (12, 0.6), (40, 0.45), (110, 0.35)):
        grid = random.normal(size=(cells, cells, 3)).astype(np.float32)
        layers = [
            Image.fromarray(grid[:, :, channel]).resize((width, height), Image.Resampling.BICUBIC)
            for channel in range(3)
        ]
        values += weight * np.stack([np.asarray(layer) for layer in layers], 2)
    rows, columns = np.mgrid[:height, :width]
    slope = random.normal(size=2)
    values += np.where((rows - height / 2) * slope[0] + (columns - width / 2) * slope[1] > 0, 0.5, -0.5)[:, :, None]
    values = 128 + 55 * values + 4 * random.normal(size=values.shape)
    return np.asarray(np.clip(np.round(values), 0, 255), np.uint8)
