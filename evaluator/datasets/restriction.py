"""The classes among which predictions are made: ImageNet-A and -R are published over their own 200 classes."""

from collections.abc import Sequence
from dataclasses import replace

from ..contract import ClassEntry
from ..errors import DatasetError
from .dataset import UNLABELLED, Dataset
from .selection import PUBLISHED, parse_class_selection, published_wnids
from .sources.base import format_names

_OPTION = "--restrict-classes"
_OF_DATASET = "dataset"


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
            f"{chosen:.80}: {format_names([part.classes[label] for label in others])}. Use {_OPTION} {_OF_DATASET}, or "
            "leave these images out with --classes"
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
