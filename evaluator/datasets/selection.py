"""Select part of a dataset, some of its classes or a number of images spread evenly over it, and restrict predictions.

ImageNet-A and -R are published over their own 200 classes.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..contract import MAX_NAME_LENGTH, ClassEntry
from ..errors import DatasetError, UsageError
from .dataset import UNLABELLED, Dataset
from .labels.class_names import ClassList
from .sources.base import format_names
from .sources.folder import label_file

_OPTION = "--restrict-classes"
_OF_DATASET = "dataset"
IN_RANDOM_ORDER = "in random order"  # in the selection of a run that was stopped when it was decided
PUBLISHED = {"imagenet-a": "ImageNet-A", "imagenet-r": "ImageNet-R"}  # built-in sets of 200 wnids each
_NAMED = 8  # a selection names up to this many classes, more are described by their number and a digest
_LONGEST = MAX_NAME_LENGTH // 2  # characters of these names; the whole selection must fit into run.json


def parse_class_selection(text: str, classes: Sequence[ClassEntry], option: str = "--classes") -> tuple[str, ...]:
    """Return the wnids selected by an option, in the order of the model's classes.

    text: wnids, class indices or unique names, separated by commas or, as names may have commas, by line feeds; a file
    with one per line; or a published set (`PUBLISHED`). If a whole line of a file is not a class, its first word is
    used. Raises UsageError or DatasetError for words that are not classes.
    """
    class_list = ClassList(tuple(entry.wnid for entry in classes), tuple(entry.name for entry in classes))
    path, separator = Path(text), "\n" if "\n" in text or class_list.contains(text.strip()) else ","
    if text in PUBLISHED:
        words = dict.fromkeys(published_wnids(text), option)
        if missing := [wnid for wnid in words if not class_list.contains(wnid)]:
            raise DatasetError(
                f"{option} {text}: the model lacks {len(missing)} of {PUBLISHED[text]}'s {len(words)} classes: "
                f"{format_names(missing)}. Use a model of ImageNet's classes, or list classes that it has"
            )
    elif os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises for a list too long for a file name
        try:
            lines = label_file(path).data().decode("utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise UsageError(f"{option} {path}: not UTF-8 text. Use a file with one wnid per line") from error
        words = {
            word if class_list.contains(word) else word.split()[0]: f"{path}: line {number}"
            for number, line in enumerate(lines, 1)
            if (word := line.strip())
        }
    elif (path.suffix or len(path.parts) > 1) and separator == "," and "," not in text:
        raise UsageError(f"{option} {text}: no such file, and not a class. Use wnids separated by commas, or a file")
    else:
        words = {word.strip(): option for word in text.split(separator) if word.strip()}
    if not words:
        raise UsageError(f"{option} {text}: names no class. Use wnids separated by commas, or a file of wnids")
    index, _ = class_list.resolve_labels(words, chosen=True)
    return tuple(class_list.wnids[number] for number in sorted(set(index.values())))


def published_wnids(name: str) -> list[str]:
    return (Path(__file__).parent / "labels" / f"{name}.txt").read_text(encoding="ascii").split()


def select(dataset: Dataset, *, limit: int | None, classes: Sequence[str]) -> Dataset:
    """Return the dataset with only the images of some classes, and of these only `limit` images, spread evenly.

    classes: wnids of the dataset's classes, () for all; limit: of N images, keep those at floor(i·N/limit).
    Labels do not change. Raises DatasetError when the classes have no images.
    """
    samples, remarks = dataset.samples, list(dataset.remarks)
    words = [] if dataset.selection is None else [dataset.selection]
    if classes:
        index = {wnid: label for label, wnid in enumerate(dataset.classes)}
        selected = {index.get(wnid): wnid for wnid in classes}
        samples = [sample for sample in dataset.samples if not selected.keys().isdisjoint(sample.labels)]
        if None in selected or not samples:
            raise DatasetError(
                f"{dataset.location}: no images of the selected classes ({format_names(classes)}). "
                "Select classes that the dataset contains"
            )
        filled = {label for sample in samples for label in sample.labels}
        if missing := [wnid for label, wnid in selected.items() if label not in filled]:
            remarks.append(
                f"no images of {len(missing):,} of the {len(classes):,} selected classes: {format_names(missing)}"
            )
        text = f"classes {', '.join(sorted(classes))}"
        if len(text) > _LONGEST or len(classes) > _NAMED or any("," in wnid for wnid in classes):
            digest = hashlib.sha256("\n".join(sorted(classes)).encode()).hexdigest()
            text = f"{len(classes)} classes, sha256 {digest}"  # no other set has this text
        words.append(text)
    total = len(samples)
    if limit is not None and limit < total:
        samples = [samples[number * total // limit] for number in range(limit)]
        words.append(f"{limit} images spread evenly")
    elif limit is not None:
        remarks.append(f"--limit {limit}: there are only {total:,} images; all of them are used")
    if not words:
        return replace(dataset, remarks=tuple(remarks))
    spec = dataset.spec and replace(dataset.spec, limit=limit, classes=tuple(classes))
    return replace(dataset, samples=samples, remarks=tuple(remarks), selection=", of these ".join(words), spec=spec)


def random_order(dataset: Dataset, seed: int) -> list[int]:
    """Return the numbers of all images in random order."""
    order: list[int] = np.random.default_rng(seed).permutation(len(dataset.samples)).tolist()
    return order


def first_images(dataset: Dataset, count: int, seed: int) -> Dataset:
    """Return the first images in random order, sorted by name; all of them are the dataset itself."""
    total = len(dataset.samples)
    if count >= total:
        return dataset
    words = f"the first {count:,} of {total:,} images {IN_RANDOM_ORDER}"
    part = part_of(dataset, random_order(dataset, seed)[:count], words)
    return replace(part, spec=dataset.spec and replace(dataset.spec, first_random=(count, seed)))


def part_of(dataset: Dataset, chosen: Sequence[int], words: str) -> Dataset:
    """Return some images of a dataset, by their numbers, in order of name. words: what they are."""
    samples = [dataset.samples[index] for index in sorted(chosen)]
    selection = words if dataset.selection is None else f"{dataset.selection}, of these {words}"
    return replace(dataset, samples=samples, selection=selection)


def restrict(part: Dataset, whole: Dataset, chosen: str | None, classes: Sequence[ClassEntry]) -> Dataset:
    """Return a part of a dataset with the classes among which predictions are made.

    whole: the dataset without a selection; chosen: value of `--restrict-classes`, None for all classes, which gives a
    remark where the dataset has images of some only.
    Raises DatasetError for fewer than two classes, for classes that the model lacks, and for images of others.
    """
    present = {label for sample in whole.samples for label in sample.labels}
    if chosen is None:
        return replace(part, remarks=(*part.remarks, *_remark_if_partial(whole, present)))
    if chosen == _OF_DATASET:
        indices = sorted(present)
    else:
        try:
            wnids = set(parse_class_selection(chosen, classes, option=_OPTION))
        except DatasetError as error:
            sets = "" if chosen in PUBLISHED else f". Or use a set: {', '.join(PUBLISHED)}, {_OF_DATASET}"
            raise DatasetError(f"{error}{sets}") from error
        indices = [index for index, entry in enumerate(classes) if entry.wnid in wnids]
    if len(indices) < 2:
        raise DatasetError(f"{_OPTION} {chosen}: {len(indices)} class, but a prediction needs at least 2. Use more")
    allowed = set(indices)
    if outside := [sample.labels for sample in part.samples if not allowed.issuperset(sample.labels)]:
        others = sorted({label for labels in outside for label in labels} - allowed)
        raise DatasetError(
            f"{part.location}: {len(outside):,} of {len(part.samples):,} images are of classes outside {_OPTION} "
            f"{chosen:.80}: {format_names([part.classes[label] for label in others])}. Use {_OPTION} {_OF_DATASET}"
            f"{'' if part.spec and part.spec.classes else ', or leave these images out'}"
        )
    name = chosen if chosen in {*PUBLISHED, _OF_DATASET} else "list"
    return replace(part, restriction={"name": name, "classes": indices})


def _remark_if_partial(dataset: Dataset, present: set[int]) -> list[str]:
    """Return a remark if a labeled dataset has images of only some of the model's classes: those present."""
    if not 0 < len(present) < len(dataset.classes) or UNLABELLED in present:
        return []
    wnids = {dataset.classes[index] for index in present}
    advice = f"to predict among these alone: {_OPTION} {_OF_DATASET}"
    for name, title in PUBLISHED.items():
        if wnids == set(published_wnids(name)):
            advice = f"these are the classes of {title}, which is published over them: {_OPTION} {name}"
    return [
        f"{dataset.location}: scored over all {len(dataset.classes):,} classes although the dataset has images of "
        f"{len(present):,} only; {advice}"
    ]
