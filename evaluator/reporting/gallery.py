"""The misclassified images that the page shows: the most confident mistakes, a few of each class.

Which images, and in which order, follows from the run alone; their pixels come from the dataset where it is reachable.
"""

import base64
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from evaluator.datasets import open_dataset
from evaluator.datasets.sample import Dataset
from evaluator.errors import DatasetError, PreluNetError, RunFolderError
from evaluator.imaging.decode import decode_rgb
from evaluator.validation.run import Prediction, Run, find_dataset

SHOWN = 48  # images on the page
SHOWN_OF_A_CLASS = 3  # so that one hopeless class does not fill the gallery
THUMBNAIL = 192  # pixels, longer side; smaller images are kept as they are and enlarged by the browser
JPEG_QUALITY = 82  # about 8 kB a thumbnail, 0.5 MB a page


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

    total: how many images were misclassified; missing: why there are no pictures, for people; None when there are.
    """

    mistakes: tuple[Mistake, ...]
    total: int
    missing: str | None = None


def make_gallery(run: Run, data: Path | None) -> Gallery:
    """Choose the mistakes and fetch their images.

    data: folder or archive of the images; None to look where the run found them, and then it is no error when they
    are gone. Raises DatasetError when `data` is not the dataset of this run, RunFolderError when the run names an image
    that its dataset does not have.
    """
    mistakes = tuple(Mistake(prediction) for prediction in choose_mistakes(run.predictions))
    total = sum(p.refused is None and p.rank > 1 for p in run.predictions)
    if not mistakes:
        return Gallery((), 0)
    if data is not None:
        return Gallery(_with_thumbnails(mistakes, _open(run, data), run), total)
    location = find_dataset(run.folder) if run.folder else None
    if location is None:
        return Gallery(mistakes, total, "The run does not say where its images are.")
    try:
        dataset = _open(run, location)
    except (PreluNetError, OSError):  # no path of this machine on a page that is sent around
        return Gallery(mistakes, total, "The images of this run are no longer where it found them, or have changed.")
    return Gallery(_with_thumbnails(mistakes, dataset, run), total)


def choose_mistakes(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the mistakes to show, most confident first, at most 3 of a class and 48 in all."""
    wrong = (prediction for prediction in predictions if prediction.refused is None and prediction.rank > 1)
    of_class: Counter[int] = Counter()
    chosen: list[Prediction] = []
    for prediction in sorted(wrong, key=lambda p: (-p.top[0][1], p.file)):
        if of_class[prediction.label] < SHOWN_OF_A_CLASS:
            of_class[prediction.label] += 1
            chosen.append(prediction)
        if len(chosen) == SHOWN:
            break
    return chosen


def _open(run: Run, location: Path) -> Dataset:
    """Open a dataset and make sure that it is the one of the run."""
    dataset = open_dataset(location, split="val", class_names=[entry.wnid for entry in run.info.classes])
    if dataset.fingerprint != run.info.dataset["fingerprint"]:
        raise DatasetError(
            f"{location}: not the images of this run: {len(dataset.samples)} images with fingerprint "
            f"{dataset.fingerprint[:12]}…, but the run has {run.info.dataset['images']} with "
            f"{run.info.dataset['fingerprint'][:12]}…. Give the dataset that was validated: --data DIR|ARCHIVE"
        )
    return dataset


def _with_thumbnails(mistakes: tuple[Mistake, ...], dataset: Dataset, run: Run) -> tuple[Mistake, ...]:
    """Add the images; RunFolderError for one that the dataset does not have: no other file may get onto the page."""
    exif, files = run.info.protocol.apply_exif, {sample.file for sample in dataset.samples}
    for mistake in mistakes:
        if mistake.prediction.file not in files:
            raise RunFolderError(
                f"{run.folder or 'run'}: {mistake.prediction.file[:100]!r} is no image of its dataset, so the run is "
                "damaged. Restore predictions.jsonl, or start the run anew with --fresh"
            )
    return tuple(
        replace(mistake, thumbnail=_thumbnail(dataset, mistake.prediction.file, apply_exif=exif))
        for mistake in mistakes
    )


def _thumbnail(dataset: Dataset, file: str, *, apply_exif: bool) -> str | None:
    """Return an image as a `data:` address, no longer than 192 pixels; None when it cannot be read any more."""
    try:
        pixels = decode_rgb(dataset.reader.read(file), apply_exif=apply_exif)
    except (PreluNetError, OSError):
        return None
    image = Image.fromarray(pixels)
    coded = io.BytesIO()
    if max(image.size) <= THUMBNAIL // 2:  # every pixel counts where there are few
        image.save(coded, "PNG", optimize=True)
        kind = "png"
    else:
        image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
        image.save(coded, "JPEG", quality=JPEG_QUALITY)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(coded.getvalue()).decode('ascii')}"
