"""What a training must know of its images beforehand: which cannot be used, their mean, and how their colours vary.

One pass over a split finds it. All sums are whole numbers, so that neither the order of the images nor an interruption
rounds anything. The pass may be kept in a folder and goes on there where it was stopped.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from prelunet.evaluator.arrays import Float32Array, Int64Array, UInt8Array
from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.errors import DatasetError, ImageError, PreluNetError
from prelunet.evaluator.files import open_atomically
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.json_checks import parse_json, require_int, require_object
from prelunet.evaluator.terminal import progress
from prelunet.training.data.augmentation import color_axes
from prelunet.training.data.image_cache import DEFAULT_WORKERS, central_view, map_in_threads

MAX_REFUSED = 0.1  # part of a split; beyond it the dataset, not a few files, is broken
VERSION = 1  # of what is kept; to be raised whenever the same images would give other sums
PROBES = 20  # images that are decoded once more before a training begins
SAVE_EVERY = 10.0  # seconds of work that an interruption costs at most


@dataclass(frozen=True)
class DatasetStatistics:
    """What one pass over a split found.

    refused: file → reason; mean_image: float32 (crop, crop, 3), mean_channels: float32 (3,), both RGB, 0-255, of the
    views of the `center` protocol (PReLU-nets, section 4: "the per-pixel mean"); axes: float32 (3, 3), see
    `training.data.augmentation.color_axes`.
    """

    refused: Mapping[str, str]
    mean_image: Float32Array
    mean_channels: Float32Array
    axes: Float32Array


@dataclass
class PixelSums:
    """The sums of a pass so far.

    seen: images, from the first of the split on; refused: those of them that cannot be used, file → reason; pixels:
    int64 (crop, crop, 3), sum of the central views of the rest; products: int64 (3, 3), sum over all their pixels of
    the products of two channels. Crops of 224 overflow after 2,800 million images.
    """

    pixels: Int64Array
    products: Int64Array
    seen: int = 0
    refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, crop: int) -> "PixelSums":
        """Return the sums of no image."""
        return cls(np.zeros((crop, crop, 3), np.int64), np.zeros((3, 3), np.int64))

    @property
    def used(self) -> int:
        """Return how many images are in the sums."""
        return self.seen - len(self.refused)

    def compute_statistics(self) -> DatasetStatistics:
        """Return what the sums say; there must be an image in them."""
        count = self.used * self.pixels.shape[0] * self.pixels.shape[1]
        sums = [int(total) for total in self.pixels.sum(axis=(0, 1))]
        return DatasetStatistics(
            self.refused,
            (self.pixels / self.used).astype(np.float32),
            np.array([total / count for total in sums], dtype=np.float32),
            color_axes(count, sums, self.products.tolist()),
        )


def compute_statistics(
    dataset: Dataset,
    what: str,
    *,
    scale: int,
    crop: int,
    cache: Path | None = None,
    fresh: bool = False,
    report: Callable[[str], None] = lambda _text: None,
    workers: int = DEFAULT_WORKERS,
) -> DatasetStatistics:
    """Return the survey of a split that is kept in a folder, or make it, from where it was left, and keep it.

    scale, crop: of the central views, in pixels; what: `train/` or `val/`, for messages. cache: see `cache_folder`;
    None keeps nothing. The same names, byte lengths and labels (the fingerprint), scale and crop are the same survey.
    fresh: look at all images, whatever is kept. report: receives when a kept file is damaged, so that everything is
    measured anew, and when nothing can be kept; neither stops the work. Raises DatasetError when more than MAX_REFUSED
    cannot be decoded.
    """
    statistics_file = _StatisticsFile(cache, dataset, scale, crop, report)
    sums = (None if fresh else statistics_file.read()) or PixelSums.empty(crop)
    if sums.seen < len(dataset.samples):
        _add_remaining(sums, dataset, what, scale, workers, lambda: statistics_file.write(sums))
    try:
        check_refused(dataset, what, sums.refused)
    except DatasetError:
        statistics_file.forget()  # or images that are mended, with the length they had, would stay refused
        raise
    return sums.compute_statistics()


def is_still_valid(found: DatasetStatistics, dataset: Dataset) -> bool:
    """Say whether some of the images that a survey has used can still be decoded.

    Rubbish of the same length keeps the fingerprint, and with it a kept survey.
    """
    used = [sample for sample in dataset.samples if sample.file not in found.refused]
    try:
        for sample in used[:: max(1, len(used) // PROBES)]:
            decode_image(dataset.read(sample))
    except ImageError:
        return False
    return True


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return where surveys are kept: $PRELUNET_CACHE, else `prelunet` in $XDG_CACHE_HOME or ~/.cache; else None.

    environment: of the process; None where it names no home. A relative $XDG_CACHE_HOME does not count (XDG Base
    Directory Specification).
    """
    if chosen := environment.get("PRELUNET_CACHE"):
        return Path(chosen)
    caches = environment.get("XDG_CACHE_HOME", "")
    if Path(caches).is_absolute():
        return Path(caches) / "prelunet"
    home = environment.get("HOME")
    return Path(home) / ".cache" / "prelunet" if home else None


def check_refused(dataset: Dataset, what: str, refused: Mapping[str, str]) -> None:
    """Raise DatasetError when more than MAX_REFUSED of a split's images are refused."""
    images = len(dataset.samples)
    if len(refused) > MAX_REFUSED * images:
        some = "; ".join(f"{file}: {reason}" for file, reason in list(refused.items())[:3])
        raise DatasetError(
            f"{dataset.location}: {len(refused)} of {images} images in {what} cannot be decoded, more than "
            f"{100 * MAX_REFUSED:.0f} %. Get them again or remove them. The first: {some}"
        )


def _add_remaining(
    sums: PixelSums, dataset: Dataset, what: str, scale: int, workers: int, save: Callable[[], None]
) -> None:
    """Bring a tally to the end of the split; `save` is called now and then, between two images, and at the end."""
    crop, samples = sums.pixels.shape[0], dataset.samples[sums.seen :]

    def look(sample: Sample) -> tuple[UInt8Array, Int64Array] | str:
        try:
            image = decode_image(dataset.read(sample))
        except ImageError as error:
            return str(error)
        view = central_view(image, scale, crop)
        flat = view.reshape(-1, 3).astype(np.float64)  # which holds 2⁵³ whole numbers, and has fast products
        return view, (flat.T @ flat).astype(np.int64)

    saved = time.monotonic()
    with progress(f"reading {what}", len(dataset.samples), "images", done=sums.seen) as advance:
        for sample, found in zip(samples, map_in_threads(look, samples, workers), strict=True):
            if isinstance(found, str):
                sums.refused[sample.file] = found
            else:
                sums.pixels += found[0]
                sums.products += found[1]
            sums.seen += 1
            advance()
            if time.monotonic() - saved > SAVE_EVERY:
                save()
                saved = time.monotonic()
    save()


class _StatisticsFile:
    """The file of one survey: a tally as safetensors, with a digest of all that it says."""

    def __init__(
        self, cache: Path | None, dataset: Dataset, scale: int, crop: int, report: Callable[[str], None]
    ) -> None:
        name = f"{dataset.fingerprint}-{scale}-{crop}-v{VERSION}.safetensors"
        self._path = None if cache is None else cache / "surveys" / name
        self._crop, self._images, self._report = crop, len(dataset.samples), report

    def read(self) -> PixelSums | None:
        """Return the tally that is kept, None where there is none, or none that can be used."""
        from safetensors import SafetensorError, safe_open

        if self._path is None or not self._path.exists():
            return None
        try:
            with safe_open(self._path, framework="numpy") as file:
                said = file.metadata() or {}
                sums = PixelSums(
                    file.get_tensor("pixels"),
                    file.get_tensor("products"),
                    require_int(parse_json(said["seen"]), "seen", 0),
                    require_object(parse_json(said["refused"]), "refused"),
                )
            self._check(sums, said["digest"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            reason = " ".join(str(error).split())[:120]
            self._report(f"{self._path}: damaged ({reason}), so the images are looked at anew")
            return None
        return sums

    def write(self, sums: PixelSums) -> None:
        """Keep a tally, whole or not at all; where that fails, say so once and keep nothing from then on."""
        from safetensors.numpy import save

        if self._path is None:
            return
        said = {"seen": str(sums.seen), "refused": json.dumps(sums.refused), "digest": _digest(sums)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open_atomically(self._path) as file:
                file.write(save({"pixels": sums.pixels, "products": sums.products}, said))
        except (OSError, PreluNetError) as error:
            self._report(
                f"{self._path.parent}: the mean and the axes of colour cannot be kept ({error}), so the next training "
                "measures them anew. Choose another folder with the environment's PRELUNET_CACHE"
            )
            self._path = None

    def forget(self) -> None:
        """Remove the file, where there is one."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _check(self, sums: PixelSums, digest: str) -> None:
        """Raise ValueError for what cannot be the tally of these images."""
        shapes = {"pixels": (sums.pixels, (self._crop, self._crop, 3)), "products": (sums.products, (3, 3))}
        for name, (array, shape) in shapes.items():
            if array.dtype != np.int64 or array.shape != shape:
                raise ValueError(f"{name} are {array.dtype} {array.shape}")
        if sums.seen > self._images or digest != _digest(sums):
            raise ValueError("it is not what was written")


def _digest(sums: PixelSums) -> str:
    """Return the sha256 of all that a tally says."""
    digest = hashlib.sha256(json.dumps([sums.seen, sums.refused]).encode())
    digest.update(sums.pixels.tobytes())
    digest.update(sums.products.tobytes())
    return digest.hexdigest()
