"""A part of a dataset: some of its classes, or a number of images spread evenly over it."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.datasets.labels.class_names import ClassList
from prelunet.evaluator.datasets.sources.base import format_names
from prelunet.evaluator.datasets.sources.folder import label_file
from prelunet.evaluator.errors import DatasetError, UsageError

_NAMED = 8  # classes that a selection names; more are told by their number and a digest


def parse_class_selection(text: str, classes: Sequence[ClassEntry]) -> tuple[str, ...]:
    """Return the wnids that `--classes` asks for, in the order of the model's classes.

    text: wnids, class indices or unique names with commas between, or a file with one on each line (what follows the
    first word is left out where the whole line is no class). Raises UsageError or DatasetError for what is no class.
    """
    known = ClassList(tuple(entry.wnid for entry in classes), tuple(entry.name for entry in classes))
    path = Path(text)
    if os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises for a list that is too long for a name
        try:
            lines = label_file(path).data().decode("utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise UsageError(f"--classes {path}: not a text in UTF-8. Give a file with a wnid on each line") from error
        words = {
            word if known.contains(word) else word.split()[0]: f"{path}: line {number}"
            for number, line in enumerate(lines, 1)
            if (word := line.strip())
        }
    else:
        words = {word.strip(): "--classes" for word in text.split(",") if word.strip()}
    if not words:
        raise UsageError(f"--classes {text}: names no class. Give wnids with commas between, or a file of them")
    chosen = set(known.resolve_labels(words, chosen=True).index.values())
    return tuple(wnid for index, wnid in enumerate(known.wnids) if index in chosen)


def select(dataset: Dataset, *, limit: int | None, classes: Sequence[str]) -> Dataset:
    """Return the dataset with the images of these classes only, and of those `limit` images spread evenly.

    classes: wnids of the dataset's classes, () for all; limit: of N images in their order those at floor(i·N/limit).
    Labels stay. Raises DatasetError when the classes have no images.
    """
    samples, words, remarks = dataset.samples, list[str](), list(dataset.remarks)
    if classes:
        samples, missing = _of_classes(dataset, classes)
        if missing:
            remarks.append(
                f"no images of {len(missing):,} of the {len(classes):,} classes asked for: {format_names(missing)}"
            )
        words.append(_describe_classes(classes))
    total = len(samples)
    if limit is not None and limit < total:
        samples = [samples[number * total // limit] for number in range(limit)]
        words.append(f"{limit} images spread evenly")
    elif limit is not None:
        remarks.append(f"--limit {limit}: there are only {total:,} images; all of them are taken")
    if not words:
        return replace(dataset, remarks=tuple(remarks))
    spec = dataset.spec and replace(dataset.spec, limit=limit, classes=tuple(classes))
    return replace(dataset, samples=samples, remarks=tuple(remarks), selection=", of these ".join(words), spec=spec)


def _of_classes(dataset: Dataset, classes: Sequence[str]) -> tuple[list[Sample], list[str]]:
    """Return the samples of some classes, and those classes that have none."""
    index = {wnid: label for label, wnid in enumerate(dataset.classes)}
    asked = {index.get(wnid): wnid for wnid in classes}
    samples = [sample for sample in dataset.samples if sample.label in asked]
    if None in asked or not samples:
        raise DatasetError(
            f"{dataset.location}: no images of the classes asked for ({format_names(classes)}). Ask for classes that it has"
        )
    filled = {sample.label for sample in samples}
    return samples, [wnid for label, wnid in asked.items() if label not in filled]


def _describe_classes(classes: Sequence[str]) -> str:
    """Return words for a set of classes that no other set has."""
    plain = all(wnid.isalnum() for wnid in classes)
    if plain and len(classes) <= _NAMED:
        return f"classes {', '.join(sorted(classes))}"
    digest = hashlib.sha256("\n".join(sorted(classes)).encode()).hexdigest()
    return f"{len(classes)} classes, sha256 {digest}"
