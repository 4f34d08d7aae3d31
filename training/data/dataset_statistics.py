"""Statistics of a split, needed before training: its unusable images, mean and color axes.

They are computed in one pass. All sums are integers, so the order of the images does not affect the result.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...evaluator.arrays import Float32Array, Int64Array, UInt8Array
from ...evaluator.datasets.dataset import Dataset, Sample
from ...evaluator.errors import DatasetError, ImageError
from ...evaluator.imaging.decode import decode_image
from ...evaluator.terminal import progress
from .augmentation import color_axes
from .image_cache import central_view, default_workers, map_in_threads

MAX_REFUSED = 0.1  # fraction of a split; above it the whole dataset is considered broken


@dataclass(frozen=True)
class DatasetStatistics:
    """The statistics of a split.

    refused: unusable file → reason; mean_image: float32 (crop, crop, 3), mean_channels: float32 (3,), both RGB, 0-255,
    over the views of the `center` protocol (PReLU-nets, section 4: "the per-pixel mean"); axes: float32 (3, 3), see
    `training.data.augmentation.color_axes`.
    """

    refused: Mapping[str, str]
    mean_image: Float32Array
    mean_channels: Float32Array
    axes: Float32Array


def compute_statistics(
    dataset: Dataset, split: str, *, scale: int, crop: int, workers: int | None = None
) -> DatasetStatistics:
    """Read all images of a split and return its statistics.

    split: `train/` or `val/`, for messages; scale, crop: of the central views, in pixels. Raises DatasetError if more
    than MAX_REFUSED of the images cannot be decoded.
    """
    samples, refused = dataset.samples, dict[str, str]()
    # With crops of 224 the sums overflow after 2,800 million images.
    pixels, products = np.zeros((crop, crop, 3), np.int64), np.zeros((3, 3), np.int64)

    def measure(sample: Sample) -> tuple[UInt8Array, Int64Array] | str:
        """Return the central view and the sums of the products of two channels, or why there is none."""
        try:
            image = decode_image(dataset.read(sample))
        except ImageError as error:
            return str(error)
        view = central_view(image, scale, crop)
        flat = view.reshape(-1, 3).astype(np.float64)  # exact for integers up to 2⁵³, with fast products
        return view, (flat.T @ flat).astype(np.int64)

    with progress(f"reading {split}", len(samples), "images") as advance:
        measured = map_in_threads(measure, samples, workers or default_workers())
        for sample, result in zip(samples, measured, strict=True):
            if isinstance(result, str):
                refused[sample.file] = result
            else:
                pixels += result[0]
                products += result[1]
            advance()
    if len(refused) > MAX_REFUSED * len(samples):
        some = "; ".join(f"{file}: {reason}" for file, reason in list(refused.items())[:3])
        raise DatasetError(
            f"{dataset.location}: {len(refused)} of {len(samples)} images in {split} cannot be decoded, more than "
            f"{100 * MAX_REFUSED:.0f} %. Replace or remove them. The first: {some}"
        )
    images = len(samples) - len(refused)
    count, sums = images * crop * crop, [int(total) for total in pixels.sum(axis=(0, 1))]
    return DatasetStatistics(
        refused,
        (pixels / images).astype(np.float32),
        np.array([total / count for total in sums], dtype=np.float32),
        color_axes(count, sums, products.tolist()),
    )
