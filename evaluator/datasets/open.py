"""The one door to datasets: open a folder or an archive, find the right folder in it, label every image."""

import stat
from collections.abc import Sequence
from pathlib import Path

from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets.dataset import Dataset, DatasetSpec, Sample
from prelunet.evaluator.datasets.labels.class_names import ClassList
from prelunet.evaluator.datasets.layouts import has_label_file, label_images, label_training_images, list_images
from prelunet.evaluator.datasets.selection import select
from prelunet.evaluator.datasets.sources.archive import ArchiveSource, open_archive
from prelunet.evaluator.datasets.sources.base import Source, describe_place, join
from prelunet.evaluator.datasets.sources.folder import FolderSource, reading_error
from prelunet.evaluator.errors import DatasetError, UsageError

SPLITS = ("train", "val")
_SETS = (*SPLITS, "test")  # of ImageNet; the last one without labels


def open_from_spec(place: DatasetSpec, classes: Sequence[ClassEntry]) -> Dataset:
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
    return open_dataset(path, split="val", class_names=wnids, names=names, no_labels=True, any_split=False)


def open_dataset(
    path: Path,
    *,
    split: str,
    class_names: Sequence[str] | None = None,
    names: Sequence[str] = (),
    labels: Path | None = None,
    no_labels: bool = False,
    any_split: bool = True,
) -> Dataset:
    """Open a folder, a .tar, .tar.gz or .zip of images, in any of the layouts of docs/datasets.md.

    split: `train` or `val`; where the top, or a single folder at the top, has a folder of that name, it is entered.
    class_names: the model's wnids, whose places are the labels; None (for a training set) takes class folders in
    sorted order, or webdataset shards, and no other layout. names: of the model's classes, for people, in that order.
    labels: list of labels or devkit, None to look in and beside the dataset where they are needed; no_labels: take the
    images without labels, as a test set; any_split: which set those are has to be clear, else it is the split.
    Samples are all files with an image's suffix, at any depth, sorted by name. Hidden files, `__MACOSX` and other
    files are left out.
    Raises UsageError when there is nothing at `path` or `labels`; DatasetError when something cannot be read, the
    layout is not clear, labels and images do not fit one to one, or a label is no class of the model.
    """
    if labels is not None and no_labels:
        raise UsageError("--labels and --no-labels contradict each other. Give one of them")
    source = _open_source(path)
    if class_names is None:
        found, classes = label_training_images(
            list_images(source, path, _find_class_folders(source, path, split)), split
        )
    else:
        classes = tuple(class_names)
        model = ClassList(classes, tuple(names))
        subfolder = _find_image_folder(source, path, split, model, any_split=no_labels and any_split)
        found = label_images(list_images(source, path, subfolder), split, model, labels, no_labels=no_labels)
    return Dataset(
        path,
        classes,
        [Sample(*each) for each in zip(found.names, found.labels, found.sizes, strict=True)],
        found.reader,
        found.layout,
        (*_unpacked_remark(source, path), *found.remarks),
        spec=DatasetSpec(path, found.labels_from, no_labels),
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


def _unpacked_remark(source: Source, path: Path) -> list[str]:
    """Return the remark on an archive that was unpacked."""
    if not isinstance(source, ArchiveSource) or source.path == path:
        return []
    return [
        f"{path}: compressed, so it was unpacked to {source.path} ({source.path.stat().st_size:,} bytes), from which "
        "images are read; delete that file when the run and its reports are done"
    ]


def _find_image_folder(source: Source, path: Path, split: str, classes: ClassList, *, any_split: bool) -> str:
    """Return the folder that holds the images of the split, to be labelled as the classes of a model.

    any_split: of whichever set there is, if it is the only one.
    """
    subfolder = _single_root(source, path, classes)
    subfolders = source.folders(subfolder)
    sets = [
        name for name in subfolders if name in _SETS and not classes.contains(name)
    ]  # CIFAR-100 has a class of trains
    if any_split and len(sets) > 1:
        first = "" if isinstance(source, FolderSource) else "Unpack it, and give"
        raise DatasetError(
            f"{describe_place(path, subfolder)}: which images should be taken without labels, those in {' or '.join(sets)}? "
            f"{first or 'Give'} the folder itself, as --data {(path if not first else path.parent) / subfolder / sets[-1]}"
        )
    asked = sets[0] if any_split and sets else split
    if asked in sets:
        return join(subfolder, asked)
    if sets:
        raise _missing_split_error(describe_place(path, subfolder), sets[0], split)
    return subfolder


def _single_root(source: Source, path: Path, classes: ClassList) -> str:
    """Return the one folder that most archives begin with, or that lies beside its labels; '' where there is none."""
    subfolders = source.folders("")
    if any(name in _SETS or classes.contains(name) for name in subfolders):
        return ""
    if any(name.endswith(".tar") for name in source.other_files("")):  # shards
        return ""
    if len(subfolders) != 1 and not has_label_file(source, path, ""):
        return ""
    filled = {name.partition("/")[0] if "/" in name else "" for name, _ in source.images("")}
    if not filled and len(subfolders) == 1:
        return subfolders[0]  # it may hold shards
    return filled.pop() if len(filled) == 1 else ""


def _find_class_folders(source: Source, path: Path, split: str) -> str:
    """Return the folder that holds the class folders of the split, where the classes are not known beforehand."""
    subfolder = ""
    top = source.folders("")
    if split not in top and len(top) == 1 and top[0] not in SPLITS and source.folders(top[0]):
        subfolder = top[0]
    subfolders = source.folders(subfolder)
    splits = [name for name in {*SPLITS, split} if name in subfolders and _is_set(source, join(subfolder, name))]
    # A folder of that name without folders or shards inside is a class.
    if split in splits:
        return join(subfolder, split)
    if splits:
        raise _missing_split_error(describe_place(path, subfolder), splits[0], split)
    return subfolder


def _is_set(source: Source, subfolder: str) -> bool:
    """Say whether there are class folders or shards in a folder."""
    return bool(source.folders(subfolder)) or any(name.endswith(".tar") for name in source.other_files(subfolder))


def _missing_split_error(place: str, other: str, split: str) -> DatasetError:
    return DatasetError(
        f"{place}: class folders in '{other}' but none in '{split}'. "
        f"Put the {split} images into a folder '{split}' of class folders beside '{other}'"
    )
