"""The one door to datasets: open a folder or an archive, find the right folder in it, label every image."""

import stat
from collections.abc import Sequence
from pathlib import Path

from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets.dataset import Dataset, DatasetPlace, Sample
from prelunet.evaluator.datasets.labels.class_names import ClassList
from prelunet.evaluator.datasets.layouts import find_layout, has_list, images_in, training_layout
from prelunet.evaluator.datasets.selection import select
from prelunet.evaluator.datasets.sources.archive import ArchiveSource, open_archive
from prelunet.evaluator.datasets.sources.base import Source, join, place_of
from prelunet.evaluator.datasets.sources.folder import FolderSource, reading_error
from prelunet.evaluator.errors import DatasetError, UsageError

SPLITS = ("train", "val")
_SETS = (*SPLITS, "test")  # of ImageNet; the last one without labels


def open_place(place: DatasetPlace, classes: Sequence[ClassEntry]) -> Dataset:
    """Open what a place names, labelled as the classes of a model; errors as of `open_dataset` and `select`."""
    if place.no_labels and place.classes:
        raise UsageError("--classes with --no-labels: without labels no image has a class. Leave one of them out")
    dataset = open_dataset(
        place.path,
        split="val",
        class_names=[entry.wnid for entry in classes],
        names=[entry.name for entry in classes],
        labels=place.labels,
        no_labels=place.no_labels,
    )
    return select(dataset, limit=place.limit, classes=place.classes)


def open_images(path: Path, classes: Sequence[ClassEntry]) -> Dataset:
    """Open images whose labels do not matter; of several sets `val`, as with labels. Raises as `open_dataset` does."""
    wnids, names = [entry.wnid for entry in classes], [entry.name for entry in classes]
    return open_dataset(path, split="val", class_names=wnids, names=names, no_labels=True, any_set=False)


def open_dataset(
    path: Path,
    *,
    split: str,
    class_names: Sequence[str] | None = None,
    names: Sequence[str] = (),
    labels: Path | None = None,
    no_labels: bool = False,
    any_set: bool = True,
) -> Dataset:
    """Open a folder, a .tar, .tar.gz or .zip of images, in any of the layouts of docs/datasets.md.

    split: `train` or `val`; where the top, or a single folder at the top, has a folder of that name, it is entered.
    class_names: the model's wnids, whose places are the labels; None (for a training set) takes class folders in
    sorted order, or webdataset shards, and no other layout. names: of the model's classes, for people, in that order.
    labels: list of labels or devkit, None to look in and beside the dataset where they are needed; no_labels: take the
    images without labels, as a test set; any_set: which set those are has to be clear, else it is the split.
    Samples are all files with an image's suffix, at any depth, sorted by name. Hidden files, `__MACOSX` and other
    files are left out.
    Raises UsageError when there is nothing at `path` or `labels`; DatasetError when something cannot be read, the
    layout is not clear, labels and images do not fit one to one, or a label is no class of the model.
    """
    if labels is not None and no_labels:
        raise UsageError("--labels and --no-labels contradict each other. Give one of them")
    source = _open_source(path)
    if class_names is None:
        found, classes = training_layout(images_in(source, path, _enter_split(source, path, split)), split)
    else:
        classes = tuple(class_names)
        model = ClassList(classes, tuple(names))
        inside = _enter(source, path, split, model, any_set=no_labels and any_set)
        found = find_layout(images_in(source, path, inside), split, model, labels, no_labels=no_labels)
    return Dataset(
        path,
        classes,
        [Sample(*each) for each in zip(found.names, found.labels, found.sizes, strict=True)],
        found.reader,
        found.layout,
        (*_unpacking(source, path), *found.remarks),
        place=DatasetPlace(path, found.labels_from, no_labels),
    )


def _open_source(path: Path) -> Source:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"{path}: no such file or folder. Give a folder of images, or a .tar, .tar.gz or .zip of one"
        ) from error
    except OSError as error:
        raise reading_error(error, path) from error
    if stat.S_ISDIR(mode):
        return FolderSource(path)
    if stat.S_ISREG(mode):
        return open_archive(path)
    raise DatasetError(
        f"{path}: neither a folder nor a file. Give a folder of images, or a .tar, .tar.gz or .zip of one"
    )


def _unpacking(source: Source, path: Path) -> list[str]:
    """Return the remark on an archive that was unpacked."""
    if not isinstance(source, ArchiveSource) or source.path == path:
        return []
    return [
        f"{path}: compressed, so it was unpacked to {source.path} ({source.path.stat().st_size:,} bytes), from which "
        "images are read; delete that file when the run and its reports are done"
    ]


def _enter(source: Source, path: Path, split: str, classes: ClassList, *, any_set: bool) -> str:
    """Return the folder that holds the images of the split, to be labelled as the classes of a model.

    any_set: of whichever set there is, if it is the only one.
    """
    inside = _lone_folder(source, path, classes)
    below = source.folders(inside)
    sets = [name for name in below if name in _SETS and not classes.knows(name)]  # CIFAR-100 has a class of trains
    if any_set and len(sets) > 1:
        first = "" if isinstance(source, FolderSource) else "Unpack it, and give"
        raise DatasetError(
            f"{place_of(path, inside)}: which images should be taken without labels, those in {' or '.join(sets)}? "
            f"{first or 'Give'} the folder itself, as --data {(path if not first else path.parent) / inside / sets[-1]}"
        )
    asked = sets[0] if any_set and sets else split
    if asked in sets:
        return join(inside, asked)
    if sets:
        raise _no_split(place_of(path, inside), sets[0], split)
    return inside


def _lone_folder(source: Source, path: Path, classes: ClassList) -> str:
    """Return the one folder that most archives begin with, or that lies beside its labels; '' where there is none."""
    below = source.folders("")
    if any(name in _SETS or classes.knows(name) for name in below):
        return ""
    if any(name.endswith(".tar") for name in source.others("")):  # shards
        return ""
    if len(below) != 1 and not has_list(source, path, ""):
        return ""
    filled = {name.partition("/")[0] if "/" in name else "" for name, _ in source.images("")}
    if not filled and len(below) == 1:
        return below[0]  # it may hold shards
    return filled.pop() if len(filled) == 1 else ""


def _enter_split(source: Source, path: Path, split: str) -> str:
    """Return the folder that holds the class folders of the split, where the classes are not known beforehand."""
    inside = ""
    top = source.folders("")
    if split not in top and len(top) == 1 and top[0] not in SPLITS and source.folders(top[0]):
        inside = top[0]
    below = source.folders(inside)
    splits = [name for name in {*SPLITS, split} if name in below and _is_set(source, join(inside, name))]
    # A folder of that name without folders or shards inside is a class.
    if split in splits:
        return join(inside, split)
    if splits:
        raise _no_split(place_of(path, inside), splits[0], split)
    return inside


def _is_set(source: Source, inside: str) -> bool:
    """Say whether there are class folders or shards in a folder."""
    return bool(source.folders(inside)) or any(name.endswith(".tar") for name in source.others(inside))


def _no_split(place: str, other: str, split: str) -> DatasetError:
    return DatasetError(
        f"{place}: class folders in '{other}' but none in '{split}'. "
        f"Put the {split} images into a folder '{split}' of class folders beside '{other}'"
    )
