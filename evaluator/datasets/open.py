"""Open a dataset: open the folder or archive, find the folder of the split in it, and label every image."""

import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets.dataset import Dataset, DatasetSpec
from prelunet.evaluator.datasets.labels.class_names import ClassList
from prelunet.evaluator.datasets.layouts import has_label_file, label_images, label_training_images, list_images
from prelunet.evaluator.datasets.parquet import find_parquet, label_parquet
from prelunet.evaluator.datasets.selection import select
from prelunet.evaluator.datasets.sources.archive import ArchiveSource, open_archive
from prelunet.evaluator.datasets.sources.base import PARQUET, TAR, Source, describe_place, join
from prelunet.evaluator.datasets.sources.folder import FolderSource, reading_error
from prelunet.evaluator.errors import DatasetError, UsageError

SPLITS = ("train", "val")
_SETS = (*SPLITS, "test")  # of ImageNet; the test set has no labels


def open_from_spec(spec: DatasetSpec, classes: Sequence[ClassEntry]) -> Dataset:
    """Open the dataset of a spec, labeled with a model's classes. Raises as `open_dataset` and `select` do."""
    if spec.no_labels and spec.classes:
        raise UsageError("--classes with --no-labels: without labels no image has a class. Remove one of them")
    dataset = open_dataset(
        spec.path,
        split="val",
        wnids=[entry.wnid for entry in classes],
        names=[entry.name for entry in classes],
        labels=spec.labels,
        no_labels=spec.no_labels,
    )
    return select(dataset, limit=spec.limit, classes=spec.classes)


def open_images(path: Path, classes: Sequence[ClassEntry]) -> Dataset:
    """Open images without labels. Where there are several sets, open `val`. Raises as `open_dataset` does."""
    wnids, names = [entry.wnid for entry in classes], [entry.name for entry in classes]
    return open_dataset(path, split="val", wnids=wnids, names=names, no_labels=True, any_split=False)


def open_dataset(
    path: Path,
    *,
    split: str,
    wnids: Sequence[str] | None = None,
    names: Sequence[str] = (),
    labels: Path | None = None,
    no_labels: bool = False,
    any_split: bool = True,
) -> Dataset:
    """Open a folder, .tar, .tar.gz, .zip or .parquet of images in any layout of docs/datasets.md.

    split: `train` or `val`; a folder of that name at the top, or inside a single top folder, is entered.
    wnids: of the model's classes, in label order; None (a training set) accepts only class folders, in sorted order,
    webdataset shards and parquet files. names: of these classes, in the same order. labels: a label list or devkit;
    None searches in and next to the dataset where labels are needed. no_labels: ignore labels, as for a test set;
    any_split: with no_labels, require that only one set exists, instead of choosing `split`.
    The samples are all files with an image suffix, at any depth, sorted by name. Hidden files, `__MACOSX` and other
    files are skipped.
    Raises UsageError when `path` or `labels` does not exist. Raises DatasetError when something cannot be read, the
    layout is ambiguous, labels and images do not match one to one, or a label is not a class of the model.
    """
    if labels is not None and no_labels:
        raise UsageError("--labels and --no-labels cannot be combined. Remove one of them")
    source = _open_source(path)
    classes = None if wnids is None else ClassList(tuple(wnids), tuple(names))
    if classes is None:
        subfolder = _find_class_folders(source, path, split)
    else:
        subfolder = _find_image_folder(source, path, split, classes, any_split=no_labels and any_split)
    images = list_images(source, path, subfolder)
    if parquet := find_parquet(images, split):
        if labels is not None:
            raise DatasetError(f"{images.place}: parquet files contain their own labels. Remove --labels")
        dataset = label_parquet(images, parquet, split, classes, no_labels=no_labels)
    elif classes is None:
        dataset = label_training_images(images, split)
    else:
        dataset = label_images(images, split, classes, labels, no_labels=no_labels)
    remarks = dataset.remarks
    if isinstance(source, ArchiveSource) and source.path != path:
        unpacked = (
            f"{path}: compressed, so it was unpacked to {source.path} ({source.path.stat().st_size:,} bytes). Images "
            "are read from that file; delete it when the run and its reports are done"
        )
        remarks = (unpacked, *remarks)
    return replace(dataset, remarks=remarks, spec=dataset.spec and replace(dataset.spec, no_labels=no_labels))


def _open_source(path: Path) -> Source:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"{path}: no such file or folder. Pass a folder of images, or a .tar, .tar.gz, .zip or .parquet"
        ) from error
    except OSError as error:
        raise reading_error(error, path) from error
    if stat.S_ISDIR(mode):
        return FolderSource(path)
    if stat.S_ISREG(mode):
        return ArchiveSource(path) if path.suffix == PARQUET else open_archive(path)
    raise DatasetError(
        f"{path}: neither a folder nor a regular file. Pass a folder of images, or a .tar, .tar.gz, .zip or .parquet"
    )


def _find_image_folder(source: Source, path: Path, split: str, classes: ClassList, *, any_split: bool) -> str:
    """Return the folder with the images of the split, which will be labeled with a model's classes.

    any_split: return the only set, whatever its name.
    """
    subfolder = _single_root(source, path, classes)
    subfolders = source.folders(subfolder)
    # CIFAR-100 has a class "train".
    sets = [name for name in subfolders if name in _SETS and not classes.contains(name)]
    if any_split and len(sets) > 1:
        is_folder = isinstance(source, FolderSource)
        raise DatasetError(
            f"{describe_place(path, subfolder)}: contains the sets {' and '.join(sets)}; it is not clear which one "
            f"to use without labels. {'Pass' if is_folder else 'Unpack it, and pass'} the folder of one set: "
            f"--data {(path if is_folder else path.parent) / subfolder / sets[-1]}"
        )
    chosen = sets[0] if any_split and sets else split
    if chosen in sets:
        return join(subfolder, chosen)
    if sets:
        raise _missing_split_error(describe_place(path, subfolder), sets[0], split)
    return subfolder


def _single_root(source: Source, path: Path, classes: ClassList) -> str:
    """Return the single top folder that most archives have, or the folder next to a label file; '' if none."""
    subfolders = source.folders("")
    if any(name in _SETS or classes.contains(name) for name in subfolders):
        return ""
    if _has_shards(source, "", TAR):
        return ""
    if len(subfolders) != 1 and not has_label_file(source, path, ""):
        return ""
    filled = {name.partition("/")[0] if "/" in name else "" for name, _ in source.images("")}
    if not filled and len(subfolders) == 1:
        return "" if _has_shards(source, "", PARQUET) else subfolders[0]  # may contain shards
    return filled.pop() if len(filled) == 1 else ""


def _find_class_folders(source: Source, path: Path, split: str) -> str:
    """Return the folder with the class folders of the split, when the classes are not known in advance."""
    subfolder = ""
    top = source.folders("")
    if split not in top and len(top) == 1 and top[0] not in SPLITS:
        subfolder = top[0] if source.folders(top[0]) or _has_shards(source, top[0]) else ""
    subfolders = source.folders(subfolder)
    # A folder named `train` or `val` without folders or shards inside is a class.
    splits = [
        name
        for name in {*SPLITS, split}
        if name in subfolders and (source.folders(join(subfolder, name)) or _has_shards(source, join(subfolder, name)))
    ]
    if split in splits:
        return join(subfolder, split)
    if splits:
        raise _missing_split_error(describe_place(path, subfolder), splits[0], split)
    return subfolder


def _has_shards(source: Source, subfolder: str, *suffixes: str) -> bool:
    return any(name.endswith(suffixes or (TAR, PARQUET)) for name in source.other_files(subfolder))


def _missing_split_error(place: str, other: str, split: str) -> DatasetError:
    return DatasetError(
        f"{place}: class folders in '{other}' but none in '{split}'. "
        f"Put the {split} images into class folders in '{split}', next to '{other}'"
    )
