"""Decoded images of a split, kept in memory while they fit and decoded again otherwise.

The cache affects speed only, never results.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from PIL import Image

from ...evaluator.arrays import UInt8Array
from ...evaluator.datasets.dataset import Dataset, Sample
from ...evaluator.errors import DatasetError, ImageError
from ...evaluator.imaging.decode import decode_image
from ...evaluator.imaging.resize import DecodedImage, resize_shorter_side
from ...evaluator.imaging.views import crop_at
from ...evaluator.machine import cores

Item = TypeVar("Item")
Answer = TypeVar("Answer")

CACHE_BYTES = 2**30  # bytes of decoded images: 5,000 of 256x256; all of ImageNet would be 250 GB
DECODED_SIZE_RATIO = 8  # size in memory relative to the file: 5 to 10 for JPEG photos
MAX_WORKERS = 16
UNREADABLE = (ImageError, DatasetError)  # DatasetError: the file is missing or its length has changed

# Evaluation caps the longer side at 4 times the shorter one, because whole images cost memory. A training view is a
# single crop, which may come from anywhere in the image; this cap only keeps an image of 1x20000 from filling memory.
TRAINING_LONG_SIDE_CAP = 64


def default_workers(processes: int = 1) -> int:
    """Return how many threads or processes decode images for each training process of a machine."""
    return max(1, min(MAX_WORKERS, (cores() - 1) // processes))  # leaves a core for training


class ImageCache:
    """The usable images of one split, in dataset order. Safe to read from several threads."""

    def __init__(self, dataset: Dataset, refused: Mapping[str, str], memory: int = CACHE_BYTES) -> None:
        self.dataset = dataset
        self.refused = dict(refused)  # file → reason
        self.samples: list[Sample] = [sample for sample in dataset.samples if sample.file not in self.refused]
        self._kept: dict[int, UInt8Array] = {}
        self._memory = self._free_bytes = memory

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def fits_in_memory(self) -> bool:
        """Return whether all decoded images are expected to fit, estimated from the file sizes."""
        return DECODED_SIZE_RATIO * sum(sample.size for sample in self.samples) <= self._memory

    def image(self, index: int) -> DecodedImage:
        """Return image `index`: uint8 (H, W, 3) if it is cached, else the decoded Pillow image.

        Raises ImageError or DatasetError if it has become unreadable since the statistics were computed.
        """
        kept = self._kept.get(index)
        if kept is not None:
            return kept
        image = self.decode(self.samples[index])
        size = 3 * image.width * image.height
        if size > self._free_bytes:
            return image
        self._free_bytes -= size  # threads may race here and exceed the limit by a few images
        self._kept[index] = kept = np.array(image)
        return kept

    def decode(self, sample: Sample) -> Image.Image:
        return decode_image(self.dataset.read(sample))

    def central_view(self, index: int, scale: int, crop: int) -> UInt8Array:
        """Return the view of the `center` protocol, uint8 (crop, crop, 3); raises as `image` does."""
        return central_view(self.image(index), scale, crop)


def central_view(image: DecodedImage, scale: int, crop: int) -> UInt8Array:
    """Return the view of the `center` protocol: the central crop of the resized image, uint8 (crop, crop, 3)."""
    return crop_at(resize_shorter_side(image, scale)[0], "center", crop)


def map_in_threads(function: Callable[[Item], Answer], items: Iterable[Item], workers: int) -> Iterator[Answer]:
    """Yield function(item) in the order of the items, computed by threads a few items ahead of the consumer."""
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
