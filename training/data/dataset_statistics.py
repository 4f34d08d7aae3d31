"""Statistics of a split, needed before training: its unusable images, mean and color axes.

They are computed in one pass. All sums are integers, so neither the order of the images nor an interruption affects the
result. The sums can be cached in a folder, from which an interrupted pass resumes.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...evaluator.arrays import Float32Array, Int64Array, UInt8Array
from ...evaluator.datasets.dataset import Dataset, Sample
from ...evaluator.errors import DatasetError, ImageError, PreluNetError
from ...evaluator.files import open_atomically
from ...evaluator.imaging.decode import decode_image
from ...evaluator.json_checks import parse_json, require_int, require_object
from ...evaluator.terminal import progress
from .augmentation import color_axes
from .image_cache import central_view, default_workers, map_in_threads

MAX_REFUSED = 0.1  # fraction of a split; above it the whole dataset is considered broken
VERSION = 1  # of the cache; increment it whenever the same images would give other sums
FOLDER = "surveys"  # in the cache
PROBES = 20  # images decoded again before training to validate cached statistics
SAVE_EVERY = 10.0  # seconds; the most work an interruption can lose


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


@dataclass
class PixelSums:
    """The running sums of a pass.

    seen: number of images processed, from the first of the split; refused: the unusable ones, file → reason; pixels:
    int64 (crop, crop, 3), sum of the central views of the others; products: int64 (3, 3), sum of the products of two
    channels over all their pixels. With crops of 224 the sums overflow after 2,800 million images.
    """

    pixels: Int64Array
    products: Int64Array
    seen: int = 0
    refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, crop: int) -> "PixelSums":
        return cls(np.zeros((crop, crop, 3), np.int64), np.zeros((3, 3), np.int64))

    def statistics(self) -> DatasetStatistics:
        """Return the statistics; the sums must contain an image."""
        images = self.seen - len(self.refused)
        count = images * self.pixels.shape[0] * self.pixels.shape[1]
        sums = [int(total) for total in self.pixels.sum(axis=(0, 1))]
        return DatasetStatistics(
            self.refused,
            (self.pixels / images).astype(np.float32),
            np.array([total / count for total in sums], dtype=np.float32),
            color_axes(count, sums, self.products.tolist()),
        )


def compute_statistics(
    dataset: Dataset,
    split: str,
    *,
    scale: int,
    crop: int,
    cache: Path | None = None,
    fresh: bool = False,
    report: Callable[[str], None] = lambda _text: None,
    workers: int | None = None,
) -> DatasetStatistics:
    """Return the statistics of a split from the cache, or compute them, resuming an interrupted pass, and cache them.

    split: `train/` or `val/`, for messages; scale, crop: of the central views, in pixels; cache: see `cache_folder`,
    None for no cache; fresh: ignore cached statistics; report: receives a message if a cache file is damaged (the
    statistics are then recomputed) or cannot be written. The cache key is the fingerprint (names, sizes and
    labels), scale and crop. Raises DatasetError if more than MAX_REFUSED of the images cannot be decoded.
    """
    statistics_file = _StatisticsFile(cache, dataset, scale, crop, report)
    sums = (None if fresh else statistics_file.read()) or PixelSums.empty(crop)
    remaining = dataset.samples[sums.seen :]

    def measure(sample: Sample) -> tuple[UInt8Array, Int64Array] | str:
        try:
            image = decode_image(dataset.read(sample))
        except ImageError as error:
            return str(error)
        view = central_view(image, scale, crop)
        flat = view.reshape(-1, 3).astype(np.float64)  # exact for integers up to 2⁵³, with fast products
        return view, (flat.T @ flat).astype(np.int64)

    if remaining:
        saved = time.monotonic()
        with progress(f"reading {split}", len(dataset.samples), "images", done=sums.seen) as advance:
            measured = map_in_threads(measure, remaining, workers or default_workers())
            for sample, result in zip(remaining, measured, strict=True):
                if isinstance(result, str):
                    sums.refused[sample.file] = result
                else:
                    sums.pixels += result[0]
                    sums.products += result[1]
                sums.seen += 1
                advance()
                if time.monotonic() - saved > SAVE_EVERY:
                    statistics_file.write(sums)
                    saved = time.monotonic()
        statistics_file.write(sums)
    if len(sums.refused) > MAX_REFUSED * sums.seen:
        statistics_file.remove()  # otherwise images repaired without a change of length would stay refused
        some = "; ".join(f"{file}: {reason}" for file, reason in list(sums.refused.items())[:3])
        raise DatasetError(
            f"{dataset.location}: {len(sums.refused)} of {sums.seen} images in {split} cannot be decoded, more than "
            f"{100 * MAX_REFUSED:.0f} %. Replace or remove them. The first: {some}"
        )
    return sums.statistics()


def is_still_valid(statistics: DatasetStatistics, dataset: Dataset) -> bool:
    """Return whether a sample of the images behind the statistics can still be decoded.

    Files corrupted without a change of length keep the fingerprint, and so the cached statistics.
    """
    used = [sample for sample in dataset.samples if sample.file not in statistics.refused]
    try:
        for sample in used[:: max(1, len(used) // PROBES)]:
            decode_image(dataset.read(sample))
    except ImageError:
        return False
    return True


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the cache folder: $PRELUNET_CACHE, or else `prelunet` in $XDG_CACHE_HOME or ~/.cache.

    Returns None if the environment defines no home. A relative $XDG_CACHE_HOME is ignored (XDG Base Directory
    Specification).
    """
    if folder := environment.get("PRELUNET_CACHE"):
        return Path(folder)
    caches = environment.get("XDG_CACHE_HOME", "")
    if Path(caches).is_absolute():
        return Path(caches) / "prelunet"
    home = environment.get("HOME")
    return Path(home) / ".cache" / "prelunet" if home else None


def forget_statistics(cache: Path, *datasets: Dataset) -> None:
    """Delete the cached statistics of datasets, at every scale and crop."""
    for dataset in datasets:
        for path in (cache / FOLDER).glob(f"{dataset.fingerprint}-*"):
            path.unlink(missing_ok=True)


class _StatisticsFile:
    """A cache file: the sums of a pass as safetensors."""

    def __init__(
        self, cache: Path | None, dataset: Dataset, scale: int, crop: int, report: Callable[[str], None]
    ) -> None:
        name = f"{dataset.fingerprint}-{scale}-{crop}-v{VERSION}.safetensors"
        self._path = None if cache is None else cache / FOLDER / name
        self._images, self._report = len(dataset.samples), report

    def read(self) -> PixelSums | None:
        """Return the cached sums, or None if there are none or they are unusable."""
        from safetensors import SafetensorError, safe_open

        if self._path is None or not self._path.exists():
            return None
        try:
            with safe_open(self._path, framework="numpy") as file:
                metadata = file.metadata() or {}
                sums = PixelSums(
                    file.get_tensor("pixels"),
                    file.get_tensor("products"),
                    require_int(parse_json(metadata["seen"]), "seen", 0, self._images),
                    require_object(parse_json(metadata["refused"]), "refused"),
                )
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            reason = " ".join(str(error).split())[:120]
            self._report(f"{self._path}: damaged ({reason}), so the statistics are recomputed")
            return None
        return sums

    def write(self, sums: PixelSums) -> None:
        """Cache the sums atomically. If that fails, report it and stop caching."""
        from safetensors.numpy import save

        if self._path is None:
            return
        metadata = {"seen": str(sums.seen), "refused": json.dumps(sums.refused)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open_atomically(self._path) as file:
                file.write(save({"pixels": sums.pixels, "products": sums.products}, metadata))
        except (OSError, PreluNetError) as error:
            self._report(
                f"{self._path.parent}: the dataset statistics cannot be cached ({error}), so the next run recomputes "
                "them. Choose another folder with the environment variable PRELUNET_CACHE"
            )
            self._path = None

    def remove(self) -> None:
        """Remove the file if it exists."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
