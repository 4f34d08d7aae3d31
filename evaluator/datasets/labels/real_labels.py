"""ReaL: for each image of ImageNet's validation set, all classes that it shows (Beyer et al. 2020, arXiv:2006.07159).

real.json is a list of lists: the n-th has the class indices of ILSVRC2012_val_n. An empty list is an image that shows
none of the classes; it is left out. An answer is right if it is any of the true classes.
"""

import gzip
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from msgspec import Meta, convert

from ...errors import DatasetError
from ...json_checks import parse_json
from ..sources.base import format_names
from ..sources.folder import label_file
from .class_file import IMAGENET_1K, read_class_list
from .class_names import ClassList
from .imagenet_devkit import VAL_NAME

IMAGENET_REAL = Path("imagenet-real")  # the name of the built-in labels
_LISTS = re.compile(rb"\s*\[\s*\[")
_FIX = "Pass real.json as published, or the built-in labels: --labels imagenet-real"


def is_real(labels: Path) -> bool:
    """Return whether labels are ReaL's: built in, or a JSON file that begins like a list of lists."""
    if labels == IMAGENET_REAL or labels.suffix.lower() != ".json":
        return labels == IMAGENET_REAL
    with suppress(OSError), labels.open("rb") as file:
        return _LISTS.match(file.read(64)) is not None
    return False


def labels_of_real(path: Path, images: Sequence[str], classes: ClassList) -> tuple[list[tuple[int, ...]], list[str]]:
    """Return the true classes of each image, () for an image to leave out, and remarks for the user.

    path: `imagenet-real` or a file. The indices are those of ImageNet's 1000 classes if all wnids of the model are
    among them, or names of a model without wnids; otherwise the model's own. Raises DatasetError when the file is
    malformed or too short, a name has no number of ILSVRC or that of another name, or the model lacks a class shown.
    """
    lists = _read(path)
    imagenet = [entry.wnid for entry in read_class_list(Path(IMAGENET_1K))]
    published = path == IMAGENET_REAL or bool(classes.by_imagenet_wnid) or classes.by_wnid.keys() <= set(imagenet)
    wnids = imagenet if published else classes.wnids
    truths = [lists[number - 1] for number in _numbers(path, images, len(lists))]
    shown = {index for truth in truths for index in truth}
    if beyond := shown - set(range(len(wnids))):
        raise DatasetError(f"{path}: the label {max(beyond)} is not a class index from 0 to {len(wnids) - 1}. {_FIX}")
    if missing := [wnids[index] for index in sorted(shown) if not classes.contains(wnids[index])]:
        raise DatasetError(
            f"{path}: the images show {len(missing):,} classes that the model lacks: {format_names(missing)}. "
            "Use a model of ImageNet's 1000 classes"
        )
    index_of, _ = classes.resolve_labels({wnids[index]: str(path) for index in shown}, chosen=True)
    found = [tuple(index_of[wnids[index]] for index in truth) for truth in truths]
    left_out, several = sum(not truth for truth in found), sum(len(truth) > 1 for truth in found)
    if left_out == len(found):
        raise DatasetError(f"{path}: none of the {len(found):,} images has a label, so there is nothing to evaluate")
    return found, [
        f"labels from {path}, read as class indices of {'ImageNet' if published else 'the model'}: {several:,} images "
        f"have several true classes; {left_out:,} without a class are left out"
    ]


def _read(path: Path) -> list[tuple[int, ...]]:
    if path == IMAGENET_REAL:
        data = gzip.decompress(Path(__file__).with_name(f"{IMAGENET_REAL}.txt.gz").read_bytes())
        return [tuple(map(int, line.split())) for line in data.decode("ascii").splitlines()]
    try:
        lists = convert(parse_json(label_file(path).text), list[tuple[Annotated[int, Meta(ge=0)], ...]])
        if twice := [number for number, truth in enumerate(lists, start=1) if len(set(truth)) < len(truth)]:
            raise ValueError(f"list {twice[0]} has a class twice")
    except ValueError as error:
        raise DatasetError(f"{path}: not a list of lists of class indices ({error}). {_FIX}") from error
    return lists


def _numbers(path: Path, images: Sequence[str], lists: int) -> list[int]:
    """Return ILSVRC's number of each image, from 1. lists: how many there are."""
    image_of: dict[int, str] = {}
    for name in images:
        if (found := VAL_NAME.fullmatch(name.rpartition("/")[2])) is None:
            raise DatasetError(
                f"{path}: {format_names([name])} is not named like ILSVRC2012_val_00000293.JPEG. The number in that "
                "name selects the labels. Use ImageNet's validation images with their names"
            )
        number = int(found[1])
        if not 1 <= number <= lists:
            raise DatasetError(
                f"{path}: has labels of {lists:,} images, but {format_names([name])} is image {number:,}. {_FIX}"
            )
        if number in image_of:
            raise DatasetError(
                f"{path}: {format_names([image_of[number], name])} are the same image. Remove one of them"
            )
        image_of[number] = name
    return list(image_of)
