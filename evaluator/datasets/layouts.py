"""Detect the layout of a folder or an archive and label its images. docs/datasets.md lists the layouts.

Nothing is guessed: where a dataset can be read in two ways, the error names both and the option that decides.
"""

import os.path
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prelunet.evaluator.datasets.dataset import UNLABELLED, Reader
from prelunet.evaluator.datasets.labels.class_names import ClassList
from prelunet.evaluator.datasets.labels.imagenet_devkit import GROUND_TRUTH, labels_of_devkit, wnids_in_names
from prelunet.evaluator.datasets.labels.label_lists import labels_of_list
from prelunet.evaluator.datasets.sources.archive import ArchiveSource
from prelunet.evaluator.datasets.sources.base import LabelFile, Source, describe_place, format_names
from prelunet.evaluator.datasets.sources.folder import FolderSource, label_file
from prelunet.evaluator.datasets.webdataset import (
    is_shard,
    labels_in_shard,
    open_shards,
    open_training_shards,
    shards_of_split,
)
from prelunet.evaluator.errors import DatasetError, UsageError

SHARDS = "webdataset shards"  # the name of the layout


@dataclass(frozen=True)
class ImageListing:
    """The images in one folder of a source. names: sorted, relative to the folder; sizes: in bytes."""

    source: Source
    path: Path
    subfolder: str
    names: Sequence[str]
    sizes: Sequence[int]

    @property
    def place(self) -> str:
        """Return the path of the folder for messages."""
        return describe_place(self.path, self.subfolder)


@dataclass(frozen=True)
class LabelledListing:
    """Images with their labels. layout, remarks: see `Dataset`; labels_from: `DatasetSpec.labels`."""

    names: Sequence[str]
    sizes: Sequence[int]
    labels: Sequence[int]
    reader: Reader
    layout: str
    remarks: Sequence[str] = ()
    labels_from: Path | None = None


def list_images(source: Source, path: Path, subfolder: str) -> ImageListing:
    """List the images in a folder. Raises DatasetError for a name that can be neither printed nor written to a run."""
    found = sorted(source.images(subfolder))
    names = [name for name, _ in found]
    images = ImageListing(source, path, subfolder, names, array("q", (size for _, size in found)))
    _check_names((*source.folders(subfolder), *names), images.place)
    return images


def label_training_images(images: ImageListing, split: str) -> tuple[LabelledListing, tuple[str, ...]]:
    """Label training images by their class folders in sorted order, or from shards; also return the classes.

    Raises DatasetError when there are neither class folders nor shards, when a class folder is empty, or when the
    labels of the shards are inconsistent (`open_training_shards`).
    """
    if tars := _tars(images):
        paths = shards_of_split(tars, split)
        table, labels, reader, classes = open_training_shards(paths, complete=split == "train")
        return LabelledListing(table.names, table.sizes, labels, reader, SHARDS, [_span(images, paths)]), classes
    folders = tuple(images.source.folders(images.subfolder))
    if not folders:
        raise DatasetError(
            f"{images.place}: no class folders found ({len(images.names)} images outside any folder). "
            "Put the images of each class into a folder named after the class, or use webdataset shards"
        )
    return _by_folder(images, folders, {folder: index for index, folder in enumerate(folders)}, []), folders


def label_images(
    images: ImageListing, split: str, classes: ClassList, labels: Path | None, *, no_labels: bool
) -> LabelledListing:
    """Detect how images are labeled, and return their labels as a model's class indices. Raises as `open_dataset`."""
    if (shards := _shards(images, split, classes, labels, no_labels=no_labels)) is not None:
        return shards
    if no_labels:
        return _found(images, [UNLABELLED] * len(images.names), "unlabelled")
    if labels is not None:
        return _by_file(images, resolve_labels_option(labels), classes)
    folders = images.source.folders(images.subfolder)
    loose = sum("/" not in name for name in images.names)
    if not loose and folders:
        return _by_class_folder(images, folders, classes)
    if loose == len(images.names):
        return _flat(images, classes)
    if not any(map(classes.contains, folders)) and classes.folder_numbers(folders, images.place) is None:
        raise DatasetError(
            f"{images.place}: {loose:,} images are outside any folder, and {len(images.names) - loose:,} are in "
            f"folders that are not classes of the model ({format_names(folders)}). Pass labels for all images with "
            "--labels FILE, or pass the intended folder as --data"
        )
    return _by_class_folder(images, folders, classes)


def _found(
    images: ImageListing,
    labels: Sequence[int],
    layout: str,
    remarks: Iterable[str] = (),
    labels_from: Path | None = None,
) -> LabelledListing:
    reader = images.source.reader(images.subfolder)
    return LabelledListing(images.names, images.sizes, labels, reader, layout, tuple(remarks), labels_from)


def _by_class_folder(images: ImageListing, folders: Sequence[str], classes: ClassList) -> LabelledListing:
    index, remarks = labels_of_folders(folders, classes, images.place)
    return _by_folder(images, folders, index, remarks)


def _by_folder(
    images: ImageListing, folders: Sequence[str], index: Mapping[str, int], remarks: Sequence[str]
) -> LabelledListing:
    """Label images by their folders, skipping images outside the folders."""
    check_not_empty(folders, {name.partition("/")[0] for name in images.names if "/" in name}, images.place)
    in_folders = [position for position, name in enumerate(images.names) if "/" in name]
    loose = len(images.names) - len(in_folders)
    if loose:
        remarks = [*remarks, f"{images.place}: skipped {loose:,} images that are outside the class folders"]
        sizes = array("q", (images.sizes[position] for position in in_folders))
        images = replace(images, names=[images.names[position] for position in in_folders], sizes=sizes)
    return _found(images, [index[name.partition("/")[0]] for name in images.names], "class folders", remarks)


def _flat(images: ImageListing, classes: ClassList) -> LabelledListing:
    """Label images outside any folder: by the wnids in their names, or by the only label file found."""
    if not images.names:
        raise DatasetError(f"{images.place}: no images found. Pass a folder or an archive that contains images")
    if (labels := wnids_in_names(images.names, classes)) is not None:
        return _found(images, labels, "flat, wnids in the names")
    file = find_label_file(images.source, images.path, images.subfolder)
    if file is None:
        raise DatasetError(
            f"{images.place}: {len(images.names):,} images without class folders, and no label file in or next to the "
            "dataset. Pass labels with --labels FILE (a list of names and labels) or --labels DIR (the devkit). "
            "For a test set without labels, use --no-labels"
        )
    try:
        return _by_file(images, file, classes)
    except DatasetError as error:
        raise DatasetError(
            f"{error}. This label file was found by its name. Pass another one with --labels. "
            "For a test set without labels, use --no-labels"
        ) from error


def _by_file(images: ImageListing, file: LabelFile, classes: ClassList) -> LabelledListing:
    """Label images from a list or from the devkit."""
    if not images.names:
        raise DatasetError(f"{images.place}: no images found. Pass a folder or an archive that contains images")
    remarks, layout = [], "flat" if not any("/" in name for name in images.names) else "folders"
    if any(map(classes.contains, images.source.folders(images.subfolder))):
        remarks = [f"{images.place}: some folders are named after classes, but the labels come from {file.path}"]
    if file.name == GROUND_TRUTH:
        labels, label_remarks = labels_of_devkit(file, images.names, classes)
        layout += ", devkit labels"
    else:
        labels, label_remarks = labels_of_list(file, images.names, classes, images.subfolder)
        layout += f", labels from {file.path.name}"
    labels_from = file.path if isinstance(file.source, FolderSource) else None
    return _found(images, labels, layout, [*label_remarks, *remarks], labels_from)


def _shards(
    images: ImageListing, split: str, classes: ClassList, labels: Path | None, *, no_labels: bool
) -> LabelledListing | None:
    """Label the images of a webdataset shard or of a folder of shards. Return None for other datasets."""
    source, subfolder = images.source, images.subfolder
    tars = _tars(images)
    in_class_folders = any(map(classes.contains, source.folders(subfolder)))  # then the folders are the labels
    if not tars and (in_class_folders or not isinstance(source, ArchiveSource) or not is_shard(source, subfolder)):
        return None
    if labels is not None:
        raise DatasetError(f"{images.place}: webdataset shards contain their own labels. Remove --labels")
    layout = "unlabelled" if no_labels else SHARDS
    if tars:
        paths = shards_of_split(tars, split)
        table, indices, reader = open_shards(paths, classes, no_labels=no_labels)
        return LabelledListing(table.names, table.sizes, indices, reader, layout, [_span(images, paths)])
    assert isinstance(source, ArchiveSource), "checked above"
    indices = [UNLABELLED] * len(images.names) if no_labels else labels_in_shard(source, subfolder, classes)
    return _found(images, indices, layout)


def _tars(images: ImageListing) -> list[Path]:
    """Return the tars in a folder, unless the folder also contains images."""
    source = images.source
    if not isinstance(source, FolderSource) or images.names:
        return []
    return [
        source.root / images.subfolder / name for name in source.other_files(images.subfolder) if name.endswith(".tar")
    ]


def _span(images: ImageListing, paths: Sequence[Path]) -> str:
    return f"{images.place}: {len(paths):,} shards, {paths[0].name} to {paths[-1].name}"


def _check_names(names: Iterable[str], place: str) -> None:
    """Refuse names that are not valid Unicode: they can be neither printed nor written to a run."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DatasetError(f"{place}: the name {name!a} is not valid UTF-8. Rename it") from error


# Labels from class folders, which are named by wnid, class index or class name.


def labels_of_folders(folders: Sequence[str], classes: ClassList, place: str) -> tuple[dict[str, int], list[str]]:
    """Return the class index of each class folder, and remarks for the user.

    folders: sorted; place: the folder that contains them, for messages. Raises DatasetError when a folder is not a
    class of the model, or could be several.
    """
    index, remarks = _match_folders(folders, classes, place)
    _check_distinct(index, classes, place)
    found = set(index.values())
    missing = [wnid for number, wnid in enumerate(classes.wnids) if number not in found]
    if missing:
        remarks.append(
            f"{place}: no folders for {len(missing):,} of the model's {len(classes.wnids):,} classes "
            f"({format_names(missing)}); class indices are still those of the full model"
        )
    return index, remarks


def _match_folders(folders: Sequence[str], classes: ClassList, place: str) -> tuple[dict[str, int], list[str]]:
    if all(folder in classes.by_wnid for folder in folders):
        return {folder: classes.by_wnid[folder] for folder in folders}, []
    numbers = classes.folder_numbers(folders, place)
    if numbers is not None:
        return numbers, [
            f"{place}: the folders are named 0 to {len(folders) - 1}; the names are read as class indices, "
            "in numeric order (in text order, 10 would come before 2)"
        ]
    unknown = [folder for folder in folders if not classes.contains(folder)]
    if unknown:
        raise DatasetError(
            f"{place}: {len(unknown)} of {len(folders)} class folders are not among the model's {len(classes.wnids)} "
            f"classes: {format_names(unknown)}. The model's classes start with {format_names(classes.wnids)}. "
            "Rename the folders to the model's wnids, remove them, or pass labels with --labels FILE"
        )
    resolved = classes.resolve_labels({folder: f"{place}/{folder}" for folder in folders})
    return dict(resolved.index), [f"{place}: folders matched to the model's classes by {resolved.kind}"]


def _check_distinct(index: Mapping[str, int], classes: ClassList, place: str) -> None:
    """Refuse two folders that stand for the same class: in another class list they may be two classes."""
    first: dict[int, str] = {}
    for folder, number in index.items():
        if number in first:
            raise DatasetError(
                f"{place}: the folders {format_names([first[number]])} and {format_names([folder])} both stand for the "
                f"class {classes.wnids[number]}. Merge them, or rename the wrong one"
            )
        first[number] = folder


def check_not_empty(folders: Sequence[str], filled: set[str], place: str) -> None:
    """Refuse class folders without images: an incomplete copy is likelier than an unused class."""
    if empty := [name for name in folders if name not in filled]:
        raise DatasetError(
            f"{place}: no images in {len(empty)} of {len(folders)} class folders: {format_names(empty)}. "
            "Add images, or remove the folders"
        )


# The label file of images without class folders: the one that --labels names, or the only candidate.
#
# Candidates are files with the usual names, in the folder of the images and in the folder around it. Two candidates
# are an error: the program cannot know which one is right, and wrong labels look like a bad model.


_LABEL_FILE_NAMES = ("val.txt", "val.csv", "labels.txt", "labels.csv", "LOC_val_solution.csv")


def resolve_labels_option(path: Path) -> LabelFile:
    """Return the label file for `--labels`: a list, a ground truth, or the ground truth in a devkit's folder.

    Raises UsageError when the path does not exist, DatasetError when a folder is not a devkit.
    """
    if os.path.isdir(path):  # noqa: PTH112 - see _is_file
        found = [label_file(folder / GROUND_TRUTH) for folder in _devkit_folders(path)]
        if len(found) != 1:
            raise DatasetError(
                f"{path}: {'no' if not found else 'more than one'} {GROUND_TRUTH} in this folder, its `data` folder or "
                "its devkit folders. Pass the devkit's folder, or the label file itself"
            )
        return found[0]
    if not _is_file(path):
        raise UsageError(f"{path}: no such file or folder. Pass a list of labels, or the devkit's folder")
    return label_file(path)


def find_label_file(source: Source, path: Path, subfolder: str) -> LabelFile | None:
    """Return the only label file in or next to a dataset, or None.

    path: of the dataset; subfolder: the folder in it that holds the images. Raises DatasetError for several candidates.
    """
    candidates = {file.path: file for file in _candidates(source, path, subfolder)}
    if len(candidates) > 1:
        raise DatasetError(
            f"{path}: several files may contain the labels: {', '.join(map(str, candidates))}. "
            "Choose one with --labels FILE"
        )
    return next(iter(candidates.values()), None)


def has_label_file(source: Source, path: Path, subfolder: str) -> bool:
    """Return whether a folder of a dataset contains a file that is named like a label file."""
    return not source.other_files(subfolder).keys().isdisjoint((*_label_file_names(path), GROUND_TRUTH))


def _label_file_names(path: Path) -> tuple[str, ...]:
    stem = path.name.partition(".")[0] or path.name
    return (*_LABEL_FILE_NAMES, f"{stem}.txt", f"{stem}.csv")


def _candidates(source: Source, path: Path, subfolder: str) -> Iterator[LabelFile]:
    label_file_names = _label_file_names(path)
    parts = subfolder.split("/") if subfolder else []
    for folder in ("/".join(parts[:depth]) for depth in range(len(parts), -1, -1)):
        names = source.other_files(folder)
        for name in (*label_file_names, GROUND_TRUTH):
            if name in names:
                yield LabelFile(source, folder, name, path / folder / name)
        if isinstance(source, FolderSource):
            for devkit in _devkit_folders(path / folder):
                yield label_file(devkit / GROUND_TRUTH)
    if not subfolder or not isinstance(source, FolderSource):
        parent = path.absolute().parent
        for name in label_file_names:
            if _is_file(parent / name) and parent / name != path.absolute():
                yield label_file(parent / name)
        for devkit in _devkit_folders(parent):
            yield label_file(devkit / GROUND_TRUTH)


def _devkit_folders(folder: Path) -> list[Path]:
    """Return the folders with a ground truth: this folder, its `data`, and both in subfolders named like a devkit."""
    try:
        devkits = sorted(entry for entry in folder.iterdir() if "devkit" in entry.name.lower() and entry.is_dir())
    except OSError:  # a folder next to the dataset may be unreadable; the user did not name it
        devkits = []
    candidates = [candidate for base in (folder, *devkits) for candidate in (base, base / "data")]
    return [candidate for candidate in candidates if _is_file(candidate / GROUND_TRUTH)]


def _is_file(path: Path) -> bool:
    """Return whether a file exists; False where its folder is unreadable or its name is too long."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises in both cases
