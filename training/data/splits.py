"""The splits of a training dataset: `train/` and `val/`."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from ...evaluator.contract import ClassEntry
from ...evaluator.datasets.dataset import Dataset
from ...evaluator.datasets.open import open_dataset
from ...evaluator.errors import DatasetError, ImageError
from ...evaluator.imaging.decode import image_size


@dataclass(frozen=True)
class Splits:
    """Training and validation images; the labels of both index the training set's classes."""

    train: Dataset
    val: Dataset

    @property
    def classes(self) -> tuple[ClassEntry, ...]:
        """Return the classes: the wnid is the folder's name, and the name is the same with spaces for '-' and '_'.

        For shards, the label takes the place of the folder's name.
        """
        return tuple(ClassEntry(wnid, wnid.replace("-", " ").replace("_", " ")) for wnid in self.train.classes)

    def to_json(self) -> dict[str, Any]:
        """Return what determines the results of a run, without the location of the images."""
        return {
            "fingerprint": self.train.fingerprint,
            "images": len(self.train.samples),
            "val_fingerprint": self.val.fingerprint,
            "val_images": len(self.val.samples),
        }


def open_splits(path: Path) -> Splits:
    """Open a folder or archive with class folders in `train/` and `val/`, or a folder with shards.

    Shards are in `train/` and `val/`, or side by side with these words in their names. `val/` may be named `valid/` or
    `validation/`, or be Tiny-ImageNet's. A training class may be missing from it, but not the other way round.
    Raises DatasetError if a split is missing, a class folder is empty, there is only one class, a class name is empty
    or occurs twice, or `val/` has a class that `train/` does not have.
    """
    train = open_dataset(path, split="train")
    val = open_dataset(path, split="val")
    if train.reader == val.reader:  # neither folder exists, so both opened the top
        raise DatasetError(
            f"{path}: no folders 'train' and 'val' here. Put the class folders (or webdataset shards) for training "
            f"into {path / 'train'} and those for validation into {path / 'val'}"
        )
    if len(train.classes) < 2:
        raise DatasetError(
            f"{path}: train/ has only one class ({train.classes[0]}), but a classifier needs at least two. "
            "Add a folder for a second class"
        )
    if odd := [name for name, count in Counter(train.classes).items() if count > 1 or not name]:
        raise DatasetError(f"{path}: the class name {odd[0]!a} is empty or occurs twice. Give each class its own name")
    unknown = sorted(set(val.classes) - set(train.classes))
    if unknown:
        raise DatasetError(
            f"{path}: val/ has {len(unknown)} classes that train/ does not have: {', '.join(unknown[:5])}. "
            "Add training images for them, or remove their folders from val/"
        )
    labels = {wnid: label for label, wnid in enumerate(train.classes)}
    samples = [replace(sample, label=labels[val.classes[sample.label]]) for sample in val.samples]
    return Splits(train, replace(val, classes=train.classes, samples=samples))


def median_shorter_side(dataset: Dataset) -> float:
    """Return the median shorter side in pixels of up to 1,000 images, evenly spaced; unreadable ones are skipped.

    Raises DatasetError if no image has a readable header.
    """
    sides, count = [], len(dataset.samples)
    for sample in (dataset.samples[index * count // min(count, 1000)] for index in range(min(count, 1000))):
        with suppress(ImageError):  # `compute_statistics` reports it
            sides.append(min(image_size(dataset.read(sample))))
    if not sides:
        raise DatasetError(
            f"{dataset.location}: none of {len(dataset.samples)} training images can be read. Restore the images"
        )
    return float(median(sides))


# The embedded dataset: part of Fashion-MNIST, created by tools/build_fashion_mnist.py


def embedded_dataset_path() -> Path:
    """Return the path of the embedded archive: 10 classes, 6,000 images in train/ and 2,000 in val/, 5 to 28 pixels."""
    return Path(str(resources.files("prelunet.training") / "data" / "fashion_mnist.zip"))
