"""Read labels from ImageNet's devkit. Its ground truth uses ILSVRC2012_ID, 1 to 1000, which is not the order of wnids.

From the devkit's readme: line i of `ILSVRC2012_validation_ground_truth.txt` is the ILSVRC2012_ID of the i-th image by
name. `synsets` in `meta.mat` has a row for each id: 1000 classes (num_children is 0) and their ancestors.
"""

import io
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from ...errors import DatasetError, UsageError, import_from_extra
from ..sources.base import LabelFile, format_names
from ..sources.folder import label_file
from .class_file import WNID
from .class_names import ClassList
from .label_lists import check_positions

GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
META_MAT = "meta.mat"
MAPPING_FILES = ("synsets.txt", "map_clsloc.txt", "wnids.txt")  # text files that may map devkit ids to wnids
VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})(?:_n\d{8})?\.\w+", re.ASCII)


def labels_of_devkit(file: LabelFile, images: Sequence[str], classes: ClassList) -> tuple[list[int], list[str]]:
    """Return the label of each image from the devkit's ground truth, and remarks for the user.

    file: the ground truth, with `meta.mat` or a text mapping in the same folder; images: names in sorted order.
    Raises DatasetError when the numbers of labels and images differ, an id has no wnid, or a wnid is not a class of
    the model.
    """
    ids = []
    for line, text in enumerate(file.text.splitlines(), start=1):
        if not re.fullmatch(r"\s*[1-9]\d{0,8}\s*", text, re.ASCII):
            raise DatasetError(
                f"{file.path}: line {line} should be a devkit id, a positive integer, not {text!a:.80}. "
                "Copy the file from the devkit again"
            )
        ids.append(int(text))
    for number, name in enumerate(images, start=1):  # labels are assigned by position
        found = VAL_NAME.fullmatch(name.rpartition("/")[2])
        if found and int(found[1]) != number:
            raise DatasetError(
                f"{file.path}: {name} is image {number} in sorted order, so it would get another image's label. "
                "Restore the missing images, or pass a list of names and labels"
            )
    check_positions(len(ids), images, file.path)
    mapping = _mapping_beside(file)
    wnid_of = _read_mapping(mapping, classes.by_wnid)
    places: dict[str, str] = {}  # wnid → where its id first occurs
    for line, devkit_id in enumerate(ids, start=1):
        if (wnid := wnid_of.get(devkit_id)) is None:
            raise DatasetError(
                f"{file.path}: line {line} has the id {devkit_id}, which is not in {mapping.path}. Use both files from "
                "the same devkit"
            )
        if wnid not in places and not classes.contains(wnid):
            raise DatasetError(
                f"{file.path}: line {line} has the id {devkit_id}, which is {wnid}, not one of the model's "
                f"{len(classes.wnids)} classes ({format_names(classes.wnids)}). Use a dataset with the model's classes"
            )
        places.setdefault(wnid, f"{file.path}: line {line}")
    index, kind = classes.resolve_labels(places)
    remark = f"labels from {file.path}, ids mapped by {mapping.path}, read as {kind}"
    return [index[wnid_of[devkit_id]] for devkit_id in ids], [remark]


def read_devkit_ids(path: Path, wnids: Collection[str] = ()) -> dict[str, int]:
    """Return the devkit id of each wnid. path: the devkit's folder, its meta.mat, or a text mapping.

    wnids: of the model; a text mapping may contain them besides ImageNet's.
    Raises UsageError when the path does not exist, DatasetError when it contains no ids.
    """
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        folder = path / "data" if (path / "data").is_dir() else path
        file = _mapping_beside(label_file(folder / GROUND_TRUTH))
    elif os.path.isfile(path):  # noqa: PTH113
        file = label_file(path)
    else:
        raise UsageError(f"{path}: no such file or folder. Pass the devkit's folder, its {META_MAT}, or a text mapping")
    return {wnid: devkit_id for devkit_id, wnid in _read_mapping(file, wnids).items()}


def _read_mapping(file: LabelFile, wnids: Collection[str]) -> dict[int, str]:
    """Return the wnid of each devkit id. wnids: accepted in a text mapping besides ImageNet's."""
    found = _read_matlab(file) if file.name.endswith(".mat") else _read_text(file, wnids)
    wnid_of = dict(found)
    if not 0 < len(wnid_of) == len(set(wnid_of.values())) == len(found):
        raise DatasetError(
            f"{file.path}: {'contains an id or a wnid twice' if found else 'empty'}. "
            "Copy the file from the devkit again"
        )
    return wnid_of


def _mapping_beside(ground_truth: LabelFile) -> LabelFile:
    """Return the file next to the ground truth that maps devkit ids to wnids."""
    if (matlab := ground_truth.beside(META_MAT)) is not None:
        return matlab
    texts = [file for name in MAPPING_FILES if (file := ground_truth.beside(name)) is not None]
    folder = ground_truth.path.parent
    if len(texts) > 1:
        raise DatasetError(
            f"{folder}: {' and '.join(file.name for file in texts)} could both map devkit ids to wnids. "
            f"Keep only the right one, or add the devkit's {META_MAT}"
        )
    if not texts:
        raise DatasetError(
            f"{folder}: no {META_MAT} to map devkit ids to wnids, and no text file ({', '.join(MAPPING_FILES)}) with "
            f"lines `id wnid`. Add the devkit's {META_MAT}: the ids are not in the order of the model's classes"
        )
    return texts[0]


def _read_matlab(file: LabelFile) -> list[tuple[int, str]]:
    """Read `synsets` of meta.mat: rows with ILSVRC2012_ID, WNID, …, num_children. Raises MissingExtra."""
    matlab, data = import_from_extra("scipy.io"), io.BytesIO(file.data())
    try:
        synsets = np.atleast_1d(matlab.loadmat(data, squeeze_me=True, variable_names=["synsets"])["synsets"])
        return [(int(row["ILSVRC2012_ID"]), str(row["WNID"])) for row in synsets if row["num_children"] == 0]
    except Exception as error:  # scipy raises many kinds for a damaged file
        raise DatasetError(
            f"{file.path}: cannot read ILSVRC's `synsets` ({error!s:.200}). Copy the file from the devkit again"
        ) from error


def _read_text(file: LabelFile, wnids: Collection[str]) -> list[tuple[int, str]]:
    """Read lines `id wnid` or `wnid id`. More words may follow."""
    found: list[tuple[int, str]] = []
    for line, text in enumerate(file.text.splitlines(), start=1):
        words = [word for word in re.split(r"[\s,]+", text.strip(), maxsplit=2) if word]
        if not words:
            continue
        named = [word for word in words[:2] if WNID.fullmatch(word) or word in wnids]
        numbers = [
            int(word) for word in words[:2] if word not in named and re.fullmatch(r"[1-9]\d{0,8}", word, re.ASCII)
        ]
        if len(named) != 1 or len(numbers) != 1:
            raise DatasetError(
                f"{file.path}: line {line} should be `id wnid`, as `1 n02119789`, not {text!a:.80}. Fix the file"
            )
        found.append((numbers[0], named[0]))
    return found


def wnids_in_names(images: Sequence[str], classes: ClassList) -> tuple[list[int], list[str]] | None:
    """Return labels and remarks if every name ends in a wnid (`ILSVRC2012_val_00000293_n01440764.JPEG`), else None."""
    wnids = [name.rpartition("/")[2].partition(".")[0].rpartition("_")[2] for name in images]
    words = dict(zip(reversed(wnids), reversed(images), strict=True))  # wnid → the first image that names it
    if not all(WNID.fullmatch(wnid) and classes.contains(wnid) for wnid in words):
        return None
    index, kind = classes.resolve_labels(words)
    return [index[wnid] for wnid in wnids], [] if kind == "wnids" else [f"the images' names end in {kind}"]
