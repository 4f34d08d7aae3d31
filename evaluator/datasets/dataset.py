"""A labeled dataset: an ordered list of samples whose bytes can be read."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ..cli_option import option
from ..errors import DatasetError, ImageError, UsageError
from ..imaging.limits import DecodeLimits

CLASS_FOLDERS = "class folders"  # the name of the layout
UNLABELLED = -1  # the label of an image of unknown class, as in ImageNet's test set


@dataclass(frozen=True, slots=True)
class Sample:
    """One image of a dataset.

    file: relative name with '/'; label: class index or UNLABELLED; size: in bytes, see `Dataset.exact_sizes`; also: its
    other true classes, if it has several. It is counted under `label`.
    """

    file: str
    label: int
    size: int
    also: tuple[int, ...] = ()

    @property
    def labels(self) -> tuple[int, ...]:
        """Return the indices of all its true classes, `label` first."""
        return (self.label, *self.also)


class Reader(Protocol):
    """Reads samples. Thread-safe."""

    def read(self, file: str) -> bytes: ...


@dataclass(frozen=True)
class DatasetSpec:
    """Everything needed to open the same dataset again.

    labels: None if the dataset itself contains them; limit: None for all images; classes: wnids of the selected
    classes, () for all; restrict_classes: name of a set of classes, or a list of them; None for all of the model's;
    first_random: only so many of these images, the first in a random order, and the seed of it.
    """

    path: Path = option(
        MISSING,
        "Folder, .tar, .tar.gz, .zip or .parquet of images: in class folders, flat with labels, or shards "
        "(docs/datasets.md). A `val` (`valid`, `validation`, or else `test`) folder in it is used.",
        flag="data",
    )
    labels: Path | None = option(
        None,
        "Labels of flat images: a list of `name,label` or `name wnid`, or the ILSVRC devkit; or ReaL's labels of "
        "ImageNet's validation images: imagenet-real (built in) or its real.json.",
    )
    no_labels: bool = option(False, "Evaluate without labels (a test set), for `prelunet submission`.")
    limit: int | None = option(None, "Evaluate only this many images, evenly spaced.", min=1)
    classes: tuple[str, ...] = ()
    restrict_classes: str | None = option(
        None,
        "Predict among these classes only, as ImageNet-A and -R are published: imagenet-a, imagenet-r, dataset "
        "(those with images), or wnids separated by commas, or a file of them.",
        metavar="SET",
    )
    listed_only: bool = option(
        False, "With a list of labels, leave out images that it does not list, and lines without an image."
    )

    first_random: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--limit {self.limit}: give the number of images, at least 1")


@dataclass(frozen=True)
class Dataset:
    """An ordered, labeled list of images.

    location: the folder or archive; classes: the wnids (class folder names) in label order;
    samples: sorted by file name, which is the order of every run;
    layout: how images and labels were found, as text; remarks: notes for the user, one sentence each;
    selection: the selected part of the dataset, as text, None for all of it;
    spec: how to open the dataset again, None for images that exist only in memory;
    restriction: for run.json, the `name` and ascending indices of the `classes` among which predictions are made, None
    for all;
    exact_sizes: whether the sizes of samples are exact, not means of several images.
    """

    location: Path
    classes: tuple[str, ...]
    samples: Sequence[Sample]
    reader: Reader
    layout: str = CLASS_FOLDERS
    remarks: tuple[str, ...] = ()
    selection: str | None = None
    spec: DatasetSpec | None = None
    restriction: Mapping[str, Any] | None = None
    exact_sizes: bool = True

    def read(self, sample: Sample) -> bytes:
        """Return the encoded bytes of one sample.

        Raises ImageError when the file exceeds the size limit, before reading if its size is known. Raises DatasetError
        when its length has changed since the dataset was opened: the run's fingerprint would describe other images.
        """
        if self.exact_sizes:
            _check_limit(sample.size)
        data = self.reader.read(sample.file)
        if not self.exact_sizes:
            _check_limit(len(data))
        elif len(data) != sample.size:
            raise DatasetError(
                f"{self.location}: {sample.file} has {len(data):,} bytes, but had {sample.size:,} when the dataset was "
                "opened. Do not change the images while they are in use, and run the command again"
            )
        return data

    @property
    def candidates(self) -> tuple[int, ...] | None:
        """Return the class indices among which predictions are made, None for all."""
        return None if self.restriction is None else tuple(self.restriction["classes"])

    @property
    def largest_image(self) -> int:
        """Return an upper bound of the bytes of an image that `read` returns."""
        limit = DecodeLimits.max_bytes
        return min(limit, max((s.size for s in self.samples), default=0)) if self.exact_sizes else limit

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of the sorted relative names, sizes and labels."""
        digest = hashlib.sha256()
        for sample in sorted(self.samples, key=lambda s: s.file):
            digest.update(f"{sample.file}\0{sample.size}\0{','.join(map(str, sample.labels))}\n".encode())
        return digest.hexdigest()


def _check_limit(size: int) -> None:
    if size > DecodeLimits.max_bytes:
        raise ImageError(f"{size} bytes are more than the limit of {DecodeLimits.max_bytes}")
