"""The misclassified images on the page: the most confident mistakes large, and some of every class small.

The choice and the order of images depend only on the run; the pixels come from the dataset if it is available.
All pictures share a budget of bytes, which is distributed over the classes round-robin.
"""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from PIL import Image

from ..datasets import DatasetSpec, open_from_spec
from ..datasets.dataset import Dataset, Sample
from ..datasets.labels.real_labels import IMAGENET_REAL
from ..errors import DatasetError, PreluNetError, RunFolderError
from ..imaging.decode import decode_image
from ..machine import cores
from ..protocols import EvaluationProtocol
from ..validation.mistakes import choose_mistakes, mistakes_as_shown
from ..validation.predictions import Prediction
from ..validation.run import Run
from ..validation.run_log import find_dataset

THUMBNAIL = 192  # pixels, longer side, in the gallery; the browser enlarges smaller images
TILE = 112  # pixels, longer side, of mistakes shown with their class
MAX_UNSCALED_SIDE = 64  # pixels; images up to this size keep every pixel
PICTURE_BYTES = 2_500_000  # budget for all pictures on the page: about 800 photographs, or most of ImageNet's classes
WEBP_QUALITY = 75  # 3 kB a tile, a third less than JPEG
BATCH_SIZE = 64  # pictures encoded between two checks of the budget


@dataclass(frozen=True)
class Mistake:
    """A misclassified image. thumbnail: a `data:` URL; None if the image could not be read."""

    prediction: Prediction
    thumbnail: str | None = None

    @property
    def tiny(self) -> bool:
        """Return whether the image is so small that it should be enlarged without smoothing."""
        return self.thumbnail is not None and self.thumbnail.startswith("data:image/png")


@dataclass(frozen=True)
class Gallery:
    """The mistakes shown on the page.

    mistakes: those of the gallery; total: number of misclassified images; tiles: file → `data:` URL of further
    mistakes; missing: message that explains why there are no pictures, or None.
    """

    mistakes: tuple[Mistake, ...]
    total: int
    tiles: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None


def build_gallery(run: Run, data: Path | None) -> Gallery:
    """Choose the mistakes and load their images.

    data: folder or archive of the images; None to look where the run found them, in which case missing images are no
    error. Raises DatasetError if `data` is not the dataset of this run, RunFolderError if the run names an image that
    is not in its dataset.
    """
    (gallery,) = build_galleries([run], data)
    return gallery


def build_galleries(runs: Sequence[Run], data: Path | None) -> list[Gallery]:
    """Build the galleries of runs on the same images; the dataset is opened, listed and fingerprinted once."""
    galleries = [
        Gallery(tuple(map(Mistake, choose_mistakes(run.predictions))), sum(p.rank > 1 for p in run.predictions))
        for run in runs
    ]
    if not any(gallery.mistakes for gallery in galleries):
        return galleries
    dataset = _find_images(runs, data)
    if isinstance(dataset, str):
        return [replace(gallery, missing=dataset) if gallery.mistakes else gallery for gallery in galleries]
    return [
        _with_pictures(gallery, dataset, run) if gallery.mistakes else gallery
        for gallery, run in zip(galleries, runs, strict=True)
    ]


def _find_images(runs: Sequence[Run], data: Path | None) -> Dataset | str:
    """Open the images in `data`, or where one of the runs found them; return a message if there are none."""
    specs = [(run, find_dataset(run.folder)) for run in runs if run.folder]
    recorded = [(run, spec) for run, spec in specs if spec is not None]
    if data is not None:
        run, spec = recorded[0] if recorded else (runs[0], None)
        there = spec and spec.labels and (spec.labels == IMAGENET_REAL or spec.labels.exists())
        labels = spec.labels if spec and there else None
        return _open(run, replace(spec or DatasetSpec(data), path=data, labels=labels))  # the selection stays
    for run, spec in recorded:
        try:
            return _open(run, spec)
        except (PreluNetError, OSError):  # not reported: local paths must not appear on a page that may be shared
            continue
    if not recorded:
        return "The run does not record the location of its images."
    return "The images of this run have been moved or changed."


def _open(run: Run, spec: DatasetSpec) -> Dataset:
    """Open a dataset and check that it is the one of the run."""
    dataset = open_from_spec(spec, run.info.classes)
    if dataset.fingerprint != run.info.dataset["fingerprint"]:
        raise DatasetError(
            f"{spec.path}: not the images of this run: {len(dataset.samples)} images with fingerprint "
            f"{dataset.fingerprint[:12]}…, but the run has {run.info.dataset['images']} with "
            f"{run.info.dataset['fingerprint'][:12]}…. Pass the validated dataset with --data DIR|ARCHIVE"
        )
    return dataset


def _with_pictures(gallery: Gallery, dataset: Dataset, run: Run) -> Gallery:
    """Add the pictures. Raises RunFolderError for a file outside the dataset: no other file may get onto the page."""
    samples = {sample.file: sample for sample in dataset.samples}
    wanted = [prediction.file for prediction in mistakes_as_shown(run.predictions)]
    for file in wanted:
        if file not in samples:
            raise RunFolderError(
                f"{run.folder or 'run'}: {file[:100]!r} is not in its dataset, so the run is "
                "damaged. Restore predictions.jsonl, or restart the run with --fresh"
            )
    shown, rest = wanted[: len(gallery.mistakes)], wanted[len(gallery.mistakes) :]
    protocol = run.info.protocol
    with ThreadPoolExecutor(cores()) as pool:
        pictures = _pictures(pool, dataset, [samples[file] for file in shown], THUMBNAIL, protocol=protocol)
        mistakes = tuple(replace(m, thumbnail=p) for m, p in zip(gallery.mistakes, pictures, strict=True))
        left = PICTURE_BYTES - sum(len(mistake.thumbnail or "") for mistake in mistakes)
        tiles: dict[str, str] = {}
        small = _pictures(pool, dataset, [samples[file] for file in rest], TILE, protocol=protocol)
        for file, tile in zip(rest, small, strict=True):
            left -= len(tile or "")
            if left < 0:
                break
            if tile is not None:
                tiles[file] = tile
    return replace(gallery, mistakes=mistakes, tiles=tiles)


def picture_url(image: Image.Image, side: int) -> str:
    """Return an image as a `data:` URL: a PNG if it is tiny, else a WebP with its longer side at most `side`."""
    coded, kind = io.BytesIO(), "png"
    if max(image.size) <= MAX_UNSCALED_SIDE:
        image.save(coded, "PNG", optimize=True)
    else:
        kind = "webp"
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        image.save(coded, "WEBP", quality=WEBP_QUALITY)
    return f"data:image/{kind};base64,{base64.b64encode(coded.getvalue()).decode('ascii')}"


def _pictures(
    pool: ThreadPoolExecutor, dataset: Dataset, samples: Sequence[Sample], side: int, *, protocol: EvaluationProtocol
) -> Iterator[str | None]:
    """Yield samples as `data:` URLs in order, their longer sides at most `side`, encoding at most one batch ahead.

    None for an image that can no longer be read.
    """

    def picture(sample: Sample) -> str | None:
        try:
            image = decode_image(dataset.read(sample), apply_exif=protocol.apply_exif, preparation=protocol.preparation)
        except (PreluNetError, OSError):
            return None
        return picture_url(image, side)

    for start in range(0, len(samples), BATCH_SIZE):
        yield from pool.map(picture, samples[start : start + BATCH_SIZE])
