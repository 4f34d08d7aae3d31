"""The pictures of the benchmarks: reproducible synthetic pixels in photo sizes, or the photos of a folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.errors import ImageError
from prelunet.evaluator.imaging.decode import decode_rgb

# Height and width of photos like ImageNet's: half of them 4:3 at 500 pixels, others with odd sides.
SIZES = ((375, 500), (500, 375), (333, 500), (500, 334), (427, 640), (371, 487), (500, 500), (768, 1024), (281, 500))
MAX_PHOTOS = 12  # limit for a folder: enough for mixed sizes


@dataclass(frozen=True)
class Photo:
    """One decoded picture. pixels: uint8 (H, W, 3)."""

    name: str
    pixels: npt.NDArray[np.uint8]

    def to_json(self) -> dict[str, object]:
        """Return name and size as plain data."""
        return {"name": self.name, "height": self.pixels.shape[0], "width": self.pixels.shape[1]}


@dataclass(frozen=True)
class _InMemoryReader:
    """Reads files by number; numbers beyond the last start again."""

    files: Sequence[bytes]

    def read(self, file: str) -> bytes:
        """Return the bytes of a file."""
        return self.files[int(file) % len(self.files)]


def dataset_in_memory(files: Sequence[bytes], count: int) -> Dataset:
    """Return a dataset of `count` images whose contents cycle through these files."""
    samples = [Sample(f"{number:06}", 0, len(files[number % len(files)])) for number in range(count)]
    return Dataset(Path("memory"), ("n00000000",), samples, _InMemoryReader(files))


def load_photos(folder: Path | None) -> list[Photo]:
    """Return the synthetic pictures, or up to twelve photos of a folder, evenly spaced over its sorted files."""
    if folder is None:
        return [Photo(f"made {height}x{width}", golden_image(height, width)) for height, width in SIZES]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    photos: list[Photo] = []
    count = min(MAX_PHOTOS, len(files))
    for path in (files[index * len(files) // count] for index in range(count)):
        try:
            photos.append(Photo(path.name, decode_rgb(path.read_bytes())))
        except ImageError as error:
            print(f"{path.name}: skipped: {error}")
    if not photos:
        raise SystemExit(f"--data {folder}: no readable picture found")
    return photos
