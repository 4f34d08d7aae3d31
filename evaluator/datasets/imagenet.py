"""ImageNet's devkit: its ground truth counts classes by ILSVRC2012_ID, 1 to 1000, which is not the order of wnids.

The devkit's readme: line i of `ILSVRC2012_validation_ground_truth.txt` is the ILSVRC2012_ID of the i-th image in the
order of the names; `synsets` in `meta.mat` has a row for each id, 1000 classes (num_children is 0) and their ancestors.
"""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluator.datasets.classes import ClassList
from evaluator.datasets.folders import label_file
from evaluator.datasets.lists import check_number
from evaluator.datasets.source import LabelFile, some
from evaluator.errors import DatasetError, UsageError

GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
MATLAB = "meta.mat"
MAPPINGS = ("synsets.txt", "map_clsloc.txt", "wnids.txt")  # texts that may tell the wnid of each devkit id
_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})(?:_n\d{8})?\.\w+", re.ASCII)
_WNID = re.compile(r"n\d{8}", re.ASCII)


def labels_of_devkit(file: LabelFile, images: Sequence[str], classes: ClassList) -> tuple[list[int], list[str]]:
    """Return the label of each image by the devkit's ground truth, and what a person should know of it.

    file: the ground truth, with `meta.mat` or a text mapping beside it; images: names in sorted order.
    Raises DatasetError where the two are not of the same number, an id has no wnid, or a wnid is no class of the model.
    """
    ids = _read_ids(file)
    check_number(len(ids), images, file.path)
    _check_counted(images, file.path)
    mapping = _mapping_beside(file)
    wnid_of = _read_mapping(mapping)
    index_of: dict[int, int] = {}
    for line, devkit_id in enumerate(ids, start=1):
        if devkit_id in index_of:
            continue
        if (wnid := wnid_of.get(devkit_id)) is None:
            raise DatasetError(
                f"{file.path}: line {line} has the id {devkit_id}, which {mapping.path} does not have. Take both files "
                "from the same devkit"
            )
        if wnid not in classes.by_wnid:
            raise DatasetError(
                f"{file.path}: line {line} has the id {devkit_id}, which is {wnid}, none of the model's "
                f"{len(classes.wnids)} classes ({some(classes.wnids)}). Give a dataset of the model's classes"
            )
        index_of[devkit_id] = classes.by_wnid[wnid]
    return [index_of[devkit_id] for devkit_id in ids], [f"labels from {file.path}, its ids as in {mapping.path}"]


def _read_ids(file: LabelFile) -> list[int]:
    ids = []
    for line, text in enumerate(file.text.splitlines(), start=1):
        if not re.fullmatch(r"\s*[1-9]\d{0,8}\s*", text, re.ASCII):
            raise DatasetError(
                f"{file.path}: line {line} should be a devkit id, a number from 1 on, not {text!a:.80}. "
                "Take the file from the devkit anew"
            )
        ids.append(int(text))
    return ids


def _check_counted(images: Sequence[str], path: Path) -> None:
    """Where names carry ILSVRC's numbers, make sure that the i-th has the number i: the lines go by it."""
    for number, name in enumerate(images, start=1):
        found = _VAL_NAME.fullmatch(name.rpartition("/")[2])
        if found and int(found[1]) != number:
            raise DatasetError(
                f"{path}: {name} is image {number} in the order of the names, so the lines would give it another's "
                "label. Restore the images that are missing, or give a list of names and labels"
            )


def read_devkit_ids(path: Path) -> dict[str, int]:
    """Return the devkit id of each wnid. path: the devkit's folder, its meta.mat, or a text mapping.

    Raises UsageError when nothing is there, DatasetError when it tells no ids.
    """
    if path.is_dir():
        folder = path / "data" if (path / "data").is_dir() else path
        file = _mapping_beside(label_file(folder / GROUND_TRUTH))
    elif path.is_file():
        file = label_file(path)
    else:
        raise UsageError(f"{path}: no such file or folder. Give the devkit's folder, its {MATLAB}, or a text mapping")
    return {wnid: devkit_id for devkit_id, wnid in _read_mapping(file).items()}


def _read_mapping(file: LabelFile) -> dict[int, str]:
    """Return the wnid of each devkit id."""
    found = _read_matlab(file) if file.name.endswith(".mat") else _read_text(file)
    wnid_of = dict(found)
    if not 0 < len(wnid_of) == len(set(wnid_of.values())) == len(found):
        raise DatasetError(
            f"{file.path}: {'an id or a wnid is there twice' if found else 'empty'}. Take the file from the devkit anew"
        )
    return wnid_of


def _mapping_beside(ground_truth: LabelFile) -> LabelFile:
    """Return the file beside the ground truth that tells the wnid of each devkit id."""
    if (matlab := ground_truth.beside(MATLAB)) is not None:
        return matlab
    texts = [file for name in MAPPINGS if (file := ground_truth.beside(name)) is not None]
    folder = ground_truth.path.parent
    if len(texts) > 1:
        raise DatasetError(
            f"{folder}: {' and '.join(file.name for file in texts)} may both tell the wnids of devkit ids. "
            f"Keep the right one there, or the devkit's {MATLAB}"
        )
    if not texts:
        raise DatasetError(
            f"{folder}: no {MATLAB} here to tell the wnids of devkit ids, nor a text ({', '.join(MAPPINGS)}) with "
            f"lines `id wnid`. Put the devkit's {MATLAB} there: the ids are not in the order of the model's classes"
        )
    return texts[0]


def _read_matlab(file: LabelFile) -> list[tuple[int, str]]:
    """Read `synsets` of meta.mat: rows with ILSVRC2012_ID, WNID, …, num_children."""
    from scipy.io import loadmat  # here, since most datasets need none of it

    opened: Any = io.BytesIO(file.data)  # Any: the stubs leave out that an open file is taken too
    try:
        rows = loadmat(opened, squeeze_me=True, variable_names=["synsets"])["synsets"]
        return [(int(row["ILSVRC2012_ID"]), str(row["WNID"])) for row in rows if int(row["num_children"]) == 0]
    except Exception as error:  # on damaged bytes scipy raises whatever comes
        raise DatasetError(
            f"{file.path}: no `synsets` of ILSVRC can be read here ({str(error) or type(error).__name__:.200}). "
            "Take the file from the devkit anew"
        ) from error


def _read_text(file: LabelFile) -> list[tuple[int, str]]:
    """Read lines `id wnid`, `wnid id`, or wnids alone, of which the i-th has the id i; more words may follow."""
    found: list[tuple[int, str]] = []
    explicit = None
    for line, text in enumerate(file.text.splitlines(), start=1):
        words = [word for word in re.split(r"[\s,]+", text.strip(), maxsplit=2) if word]
        if not words:
            continue
        numbers = [int(word) for word in words[:2] if re.fullmatch(r"[1-9]\d{0,8}", word, re.ASCII)]
        wnids = [word for word in words[:2] if _WNID.fullmatch(word)]
        if len(wnids) != 1 or (explicit is not None and bool(numbers) != explicit):
            raise DatasetError(
                f"{file.path}: line {line} should be `id wnid`, as `1 n02119789`, not {text!a:.80}. Mend the file"
            )
        explicit = bool(numbers)
        found.append((numbers[0] if numbers else len(found) + 1, wnids[0]))
    in_order = [wnid for _, wnid in found]
    if explicit is False and in_order == sorted(in_order):
        raise DatasetError(
            f"{file.path}: lists wnids in sorted order, which is the order of class indices, not of devkit ids. "
            f"Put the devkit's {MATLAB} beside the ground truth, or write lines `id wnid`"
        )
    return found


def wnids_in_names(images: Sequence[str], classes: ClassList) -> list[int] | None:
    """Return the labels where every name ends in a wnid of the model (`ILSVRC2012_val_00000293_n01440764.JPEG`)."""
    labels = []
    for name in images:
        stem = name.rpartition("/")[2].partition(".")[0]
        label = classes.by_wnid.get(stem.rpartition("_")[2]) if _WNID.fullmatch(stem[-9:]) else None
        if label is None:
            return None
        labels.append(label)
    return labels
