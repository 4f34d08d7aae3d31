"""The misclassified images that the page shows: the most confident mistakes large, and some of every class small.

Which images, and in which order, follows from the run alone; their pixels come from the dataset where it is reachable.
All pictures together keep to a budget of bytes, which the classes share by taking turns.
"""

import base64
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

from PIL import Image

from prelunet.evaluator.datasets import DatasetSpec, open_from_spec
from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.errors import DatasetError, PreluNetError, RunFolderError
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.machine import cores
from prelunet.evaluator.validation.predictions import Prediction
from prelunet.evaluator.validation.run import Run
from prelunet.evaluator.validation.run_log import find_dataset

GALLERY_SIZE = 48  # images in the gallery
MAX_PER_CLASS = 3  # so that one hopeless class does not fill the gallery
THUMBNAIL = 192  # pixels, longer side, in the gallery; smaller images are kept as they are and enlarged by the browser
TILE = 112  # pixels, longer side, of the mistakes that stand with their class
MAX_UNSCALED_SIDE = 64  # pixels; images up to this size keep every pixel
PICTURE_BYTES = 2_500_000  # budget for all pictures on the page: about 800 photographs, or most of ImageNet's classes
WEBP_QUALITY = 75  # 3 kB a tile, a third less than JPEG
BATCH_SIZE = 64  # pictures encoded between two checks of the budget


@dataclass(frozen=True)
class Mistake:
    """A misclassified image. thumbnail: a `data:` address; None when the image could not be read."""

    prediction: Prediction
    thumbnail: str | None = None

    @property
    def tiny(self) -> bool:
        """Return whether the image is so small that its pixels should be seen when it is enlarged."""
        return self.thumbnail is not None and self.thumbnail.startswith("data:image/png")


@dataclass(frozen=True)
class Gallery:
    """What the page shows of the mistakes.

    mistakes: those of the gallery; total: how many images were misclassified; tiles: `data:` addresses of further
    mistakes by file; missing: why there are no pictures, for people; None when there are.
    """

    mistakes: tuple[Mistake, ...]
    total: int
    tiles: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None


def build_gallery(run: Run, data: Path | None) -> Gallery:
    """Choose the mistakes and fetch their images.

    data: folder or archive of the images; None to look where the run found them, and then it is no error when they
    are gone. Raises DatasetError when `data` is not the dataset of this run, RunFolderError when the run names an image
    that its dataset does not have.
    """
    (gallery,) = build_galleries([run], data)
    return gallery


def build_galleries(runs: Sequence[Run], data: Path | None) -> list[Gallery]:
    """Make the galleries of runs on the same images, which are opened, listed and fingerprinted once."""
    galleries = [_without_pictures(run) for run in runs]
    if not any(gallery.mistakes for gallery in galleries):
        return galleries
    dataset = _find_images(runs, data)
    if isinstance(dataset, str):
        return [replace(gallery, missing=dataset) if gallery.mistakes else gallery for gallery in galleries]
    return [
        _with_pictures(gallery, dataset, run) if gallery.mistakes else gallery
        for gallery, run in zip(galleries, runs, strict=True)
    ]


def _without_pictures(run: Run) -> Gallery:
    mistakes = tuple(map(Mistake, choose_mistakes(run.predictions)))
    return Gallery(mistakes, sum(p.refused is None and p.rank > 1 for p in run.predictions))


def _find_images(runs: Sequence[Run], data: Path | None) -> Dataset | str:
    """Open the images in `data`, or where one of the runs found them; a text says why there are none."""
    places = [(run, find_dataset(run.folder)) for run in runs if run.folder]
    known = [(run, spec) for run, spec in places if spec is not None]
    if data is not None:
        run, spec = known[0] if known else (runs[0], None)
        return _open(run, _relocated(spec, data))
    for run, spec in known:
        try:
            return _open(run, spec)
        except (PreluNetError, OSError):  # no path of this machine on a page that is sent around
            continue
    if not known:
        return "The run does not say where its images are."
    return "The images of this run are no longer where it found them, or have changed."


def choose_mistakes(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the mistakes of the gallery, most confident first, at most 3 of a class and 48 in all."""
    of_class: Counter[int] = Counter()
    chosen: list[Prediction] = []
    for prediction in _most_confident_mistakes(predictions):
        if of_class[prediction.label] < MAX_PER_CLASS:
            of_class[prediction.label] += 1
            chosen.append(prediction)
        if len(chosen) == GALLERY_SIZE:
            break
    return chosen


def mistakes_round_robin(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return all mistakes: the most confident one of every class, then the second of every class, and so on."""
    turn: Counter[int] = Counter()
    placed = []
    for prediction in _most_confident_mistakes(predictions):
        placed.append((turn[prediction.label], prediction))
        turn[prediction.label] += 1
    return [prediction for _, prediction in sorted(placed, key=itemgetter(0))]  # stable: confident ones stay in front


def _most_confident_mistakes(predictions: Sequence[Prediction]) -> Iterator[Prediction]:
    """Yield the mistakes by their scores, equal ones by their names, which rise in a run."""
    wrong = [(-p.top[0][1], number) for number, p in enumerate(predictions) if p.refused is None and p.rank > 1]
    return (predictions[number] for _, number in sorted(wrong))


def _relocated(spec: DatasetSpec | None, data: Path) -> DatasetSpec:
    """Return where the images lie now; their labels and the part of them that was asked for are as they were."""
    if spec is None:
        return DatasetSpec(data)
    gone = spec.labels is None or not spec.labels.exists()
    return replace(spec, path=data, labels=None if gone else spec.labels)


def _open(run: Run, spec: DatasetSpec) -> Dataset:
    """Open a dataset and make sure that it is the one of the run."""
    dataset = open_from_spec(spec, run.info.classes)
    if dataset.fingerprint != run.info.dataset["fingerprint"]:
        raise DatasetError(
            f"{spec.path}: not the images of this run: {len(dataset.samples)} images with fingerprint "
            f"{dataset.fingerprint[:12]}…, but the run has {run.info.dataset['images']} with "
            f"{run.info.dataset['fingerprint'][:12]}…. Give the dataset that was validated: --data DIR|ARCHIVE"
        )
    return dataset


def _with_pictures(gallery: Gallery, dataset: Dataset, run: Run) -> Gallery:
    """Add the images; RunFolderError for one that the dataset does not have: no other file may get onto the page."""
    samples = {sample.file: sample for sample in dataset.samples}
    shown = dict.fromkeys(mistake.prediction.file for mistake in gallery.mistakes)
    wanted = [prediction.file for prediction in mistakes_round_robin(run.predictions)]
    for file in wanted:
        if file not in samples:
            raise RunFolderError(
                f"{run.folder or 'run'}: {file[:100]!r} is no image of its dataset, so the run is "
                "damaged. Restore predictions.jsonl, or start the run anew with --fresh"
            )
    rest = [file for file in wanted if file not in shown]
    exif = run.info.protocol.apply_exif
    with ThreadPoolExecutor(cores()) as pool:
        pictures = _pictures(pool, dataset, [samples[file] for file in shown], THUMBNAIL, apply_exif=exif)
        mistakes = tuple(replace(m, thumbnail=p) for m, p in zip(gallery.mistakes, pictures, strict=True))
        left = PICTURE_BYTES - sum(len(mistake.thumbnail or "") for mistake in mistakes)
        tiles: dict[str, str] = {}
        small = _pictures(pool, dataset, [samples[file] for file in rest], TILE, apply_exif=exif)
        for file, tile in zip(rest, small, strict=True):
            left -= len(tile or "")
            if left < 0:
                break
            if tile is not None:
                tiles[file] = tile
    return replace(gallery, mistakes=mistakes, tiles=tiles)


def _pictures(
    pool: ThreadPoolExecutor, dataset: Dataset, samples: Sequence[Sample], side: int, *, apply_exif: bool
) -> Iterator[str | None]:
    """Yield the pictures of these samples in their order; only a few more are made than are taken."""
    for start in range(0, len(samples), BATCH_SIZE):
        batch = samples[start : start + BATCH_SIZE]
        yield from pool.map(lambda sample: _picture(dataset, sample, side, apply_exif=apply_exif), batch)


def _picture(dataset: Dataset, sample: Sample, side: int, *, apply_exif: bool) -> str | None:
    """Return an image as a `data:` address, its longer side at most `side`; None when it cannot be read any more."""
    try:
        pixels = decode_rgb(dataset.read(sample), apply_exif=apply_exif)
    except (PreluNetError, OSError):
        return None
    image = Image.fromarray(pixels)
    coded = io.BytesIO()
    if max(image.size) <= MAX_UNSCALED_SIDE:
        image.save(coded, "PNG", optimize=True)
        kind = "png"
    else:
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        image.save(coded, "WEBP", quality=WEBP_QUALITY)
        kind = "webp"
    return f"data:image/{kind};base64,{base64.b64encode(coded.getvalue()).decode('ascii')}"
