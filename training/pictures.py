"""Decoded images of a split: surveyed once, kept in memory while they fit, else decoded again each time.

What is kept changes no result, only the time.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from evaluator.datasets.sample import Dataset, Sample
from evaluator.errors import DatasetError, ImageError
from evaluator.imaging.decode import decode_image
from evaluator.imaging.resize import Picture, resize_shorter_side
from evaluator.imaging.views import center_crop
from evaluator.machine import cores
from evaluator.progress import progress

UInt8Array = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]
Item = TypeVar("Item")
Answer = TypeVar("Answer")

MEMORY = 2**30  # bytes of decoded images that are kept: 5,000 of 256x256; all of ImageNet would be 250 GB
MAX_REFUSED = 0.1  # part of a split; beyond it the dataset, not a few files, is broken
WORKERS = max(1, min(8, cores() - 1))  # threads beside the one that trains

# Evaluation cuts a long side at 4 shorter ones, because whole images cost memory. A training view is one crop, so all
# of the image may take part; this bound only keeps an image of 1x20000 from filling the memory.
TRAINING_CAP = 64


class Pictures:
    """The usable images of one split, in dataset order. Safe to read from several threads."""

    def __init__(self, dataset: Dataset, refused: Mapping[str, str], memory: int = MEMORY) -> None:
        self.dataset = dataset
        self.refused = dict(refused)  # file → reason
        self.samples: list[Sample] = [sample for sample in dataset.samples if sample.file not in self.refused]
        self._kept: dict[int, UInt8Array] = {}
        self._room = memory

    def __len__(self) -> int:
        return len(self.samples)

    def picture(self, index: int) -> Picture:
        """Return image `index`, to be resized: uint8 (H, W, 3) where it is kept, else as Pillow has decoded it.

        Raises DatasetError when it has become unreadable since the survey.
        """
        kept = self._kept.get(index)
        if kept is not None:
            return kept
        sample = self.samples[index]
        try:
            image = decode_image(self.dataset.read(sample))
        except ImageError as error:
            raise DatasetError(f"{sample.file}: could be read when the training began, but now: {error}") from error
        size = 3 * image.width * image.height
        if size > self._room:
            return image
        self._room -= size  # two threads may both pass here: the bound is soft by a few images
        self._kept[index] = kept = np.array(image)
        return kept

    def central_view(self, index: int, scale: int, crop: int) -> UInt8Array:
        """Return the view of the `center` protocol, uint8 (crop, crop, 3): resized to a scale, central crop."""
        return _central_view(self.picture(index), scale, crop)


@dataclass(frozen=True)
class Survey:
    """What one pass over a split found. refused: file → reason; mean: float32 (crop, crop, 3), RGB, 0-255."""

    refused: Mapping[str, str]
    mean: FloatArray


def survey(dataset: Dataset, what: str, *, scale: int, crop: int, workers: int = WORKERS) -> Survey:
    """Decode every image of a split once: find those that cannot be used, and average the central views of the rest.

    The mean is per pixel, of the views of the `center` protocol (PReLU-nets, section 4: "the per-pixel mean").
    what: `train/` or `val/`, for messages. Raises DatasetError when more than MAX_REFUSED cannot be decoded.
    """
    samples = dataset.samples
    total = np.zeros((crop, crop, 3))  # float64 holds sums of whole numbers exactly, in any order
    refused: dict[str, str] = {}

    def look(sample: Sample) -> UInt8Array | str:
        try:
            image = decode_image(dataset.read(sample))
        except ImageError as error:
            return str(error)
        return _central_view(image, scale, crop)

    with progress(f"reading {what}", len(samples), "images") as advance:
        for sample, found in zip(samples, map_ahead(look, samples, workers), strict=True):
            if isinstance(found, str):
                refused[sample.file] = found
            else:
                total += found
            advance()
    _check_refused(dataset, what, refused)
    return Survey(refused, (total / (len(samples) - len(refused))).astype(np.float32))


def _central_view(image: Picture, scale: int, crop: int) -> UInt8Array:
    return center_crop(resize_shorter_side(image, scale)[0], crop)


def _check_refused(dataset: Dataset, what: str, refused: Mapping[str, str]) -> None:
    images = len(dataset.samples)
    if len(refused) > MAX_REFUSED * images:
        some = "; ".join(f"{file}: {reason}" for file, reason in list(refused.items())[:3])
        raise DatasetError(
            f"{dataset.location}: {len(refused)} of {images} images in {what} cannot be decoded, more than "
            f"{100 * MAX_REFUSED:.0f} %. Get them again or remove them. The first: {some}"
        )


def map_ahead(function: Callable[[Item], Answer], items: Iterable[Item], workers: int) -> Iterator[Answer]:
    """Yield function(item) in the order of the items, computed by threads that stay a few items ahead of the reader."""
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[Answer]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
