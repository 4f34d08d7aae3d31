"""What a labelled dataset is to everybody above: an ordered list of samples whose bytes can be read."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from prelunet.evaluator.errors import DatasetError, ImageError
from prelunet.evaluator.imaging.limits import DecodeLimits

UNLABELLED = -1  # the label of an image whose class nobody has told, as those of ImageNet's test set


@dataclass(frozen=True, slots=True)
class Sample:
    """One image of a dataset. file: relative name with '/'; label: class index or UNLABELLED; size: bytes."""

    file: str
    label: int
    size: int


class Reader(Protocol):
    """Gives the bytes of a sample; safe to call from several threads."""

    def read(self, file: str) -> bytes:
        """Return the bytes of the file of that name."""
        ...


@dataclass(frozen=True)
class DatasetSpec:
    """All that it takes to open the same dataset again.

    path: folder or archive; labels: file or folder that gives the labels, None where the dataset itself does;
    no_labels: whether the images are taken without labels; limit: how many images, spread evenly, None for all;
    classes: wnids of the classes whose images are taken, () for all.
    """

    path: Path
    labels: Path | None = None
    no_labels: bool = False
    limit: int | None = None
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dataset:
    """An ordered, labelled list of images.

    location: the folder or archive; classes: the wnids (class folder names) in label order;
    samples: sorted by file name, which is the order of every run.
    layout: how images and labels were found, in words; remarks: what a person should know of it, a sentence each;
    selection: which part of the dataset was asked for, in words; None for all of it;
    place: from which it can be opened again, None for images that lie nowhere.
    """

    location: Path
    classes: tuple[str, ...]
    samples: Sequence[Sample]
    reader: Reader
    layout: str = "class folders"
    remarks: tuple[str, ...] = ()
    selection: str | None = None
    spec: DatasetSpec | None = None

    def read(self, sample: Sample) -> bytes:
        """Return the encoded bytes of one sample.

        Raises ImageError, before it is read, when no image may be so large; DatasetError when it has another length
        than when the dataset was opened: the run's fingerprint would tell of images that it has not seen.
        """
        if sample.size > DecodeLimits.max_bytes:
            raise ImageError(f"{sample.size} bytes are more than the limit of {DecodeLimits.max_bytes}")
        data = self.reader.read(sample.file)
        if len(data) != sample.size:
            raise DatasetError(
                f"{self.location}: {sample.file} has {len(data):,} bytes, but had {sample.size:,} when the dataset was "
                "opened. Leave the images alone while they are in use, and run the command again"
            )
        return data

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of the sorted relative names, byte lengths and labels."""
        digest = hashlib.sha256()
        for sample in sorted(self.samples, key=lambda s: s.file):
            digest.update(f"{sample.file}\0{sample.size}\0{sample.label}\n".encode())
        return digest.hexdigest()
