"""What layout a folder or an archive has, and the label of each image in it. docs/datasets.md lists them.

Nothing is guessed: where two readings are possible, the error names both and the option that decides.
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

SHARDS = "webdataset shards"  # as a layout is called


@dataclass(frozen=True)
class ImageListing:
    """The images in one folder of a source. names: sorted, relative to it; sizes: bytes; place: of it, for people."""

    source: Source
    path: Path
    subfolder: str
    names: Sequence[str]
    sizes: Sequence[int]

    @property
    def place(self) -> str:
        """Return where they lie, for people."""
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
    """List the images in a folder; DatasetError for a name that could not be written to a run, nor printed."""
    found = sorted(source.images(subfolder))
    names = [name for name, _ in found]
    images = ImageListing(source, path, subfolder, names, array("q", (size for _, size in found)))
    _check_names((*source.folders(subfolder), *names), images.place)
    return images


def label_training_images(images: ImageListing, split: str) -> tuple[LabelledListing, tuple[str, ...]]:
    """Label images by their class folders in sorted order, or as shards do; also return the classes.

    Raises DatasetError where there are neither, a class folder is empty, or labels do not fit (`open_training_shards`).
    """
    if tars := _tars(images):
        paths = shards_of_split(tars, split)
        table, labels, reader, classes = open_training_shards(paths, complete=split == "train")
        return LabelledListing(table.names, table.sizes, labels, reader, SHARDS, [_span(images, paths)]), classes
    folders = tuple(images.source.folders(images.subfolder))
    if not folders:
        raise DatasetError(
            f"{images.place}: no class folders here ({len(images.names)} images lie loose). "
            "Put the images of each class into a folder named as the class, or give webdataset shards"
        )
    return _by_folder(images, folders, {folder: index for index, folder in enumerate(folders)}, []), folders


def label_images(
    images: ImageListing, split: str, classes: ClassList, labels: Path | None, *, no_labels: bool
) -> LabelledListing:
    """Find out how a model's images are labelled, and label them; errors as of `open_dataset`."""
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
            f"{images.place}: {loose:,} images lie loose and {len(images.names) - loose:,} in folders that are no "
            f"classes of the model ({format_names(folders)}). Give the labels of all with --labels FILE, or the folder that "
            "is meant as --data"
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
    """Label images by their folders; images that lie loose beside the folders are left out."""
    check_not_empty(folders, {name.partition("/")[0] for name in images.names if "/" in name}, images.place)
    subfolder = [place for place, name in enumerate(images.names) if "/" in name]
    loose = len(images.names) - len(subfolder)
    if loose:
        left_out = f"{images.place}: {loose:,} images lie loose beside the class folders and are left out"
        remarks = [*remarks, left_out]
        sizes = array("q", (images.sizes[place] for place in subfolder))
        images = replace(images, names=[images.names[place] for place in subfolder], sizes=sizes)
    return _found(images, [index[name.partition("/")[0]] for name in images.names], "class folders", remarks)


def _flat(images: ImageListing, classes: ClassList) -> LabelledListing:
    """Label images that lie loose: by the wnids in their names, or by the one file that gives their labels."""
    if not images.names:
        raise DatasetError(f"{images.place}: no images here. Give a folder or an archive that holds some")
    if (labels := wnids_in_names(images.names, classes)) is not None:
        return _found(images, labels, "flat, wnids in the names")
    file = find_label_file(images.source, images.path, images.subfolder)
    if file is None:
        raise DatasetError(
            f"{images.place}: {len(images.names):,} images lie loose, without class folders, and no labels were found "
            "in or beside it. Give them with --labels FILE (a list of names and labels) or --labels DIR (the devkit); "
            "for a test set, whose labels nobody has, say --no-labels"
        )
    try:
        return _by_file(images, file, classes)
    except DatasetError as error:
        raise DatasetError(
            f"{error}. These labels were found by their name: give others with --labels, or for a test set, whose "
            "labels nobody has, say --no-labels"
        ) from error


def _by_file(images: ImageListing, file: LabelFile, classes: ClassList) -> LabelledListing:
    """Label images by a list or by the devkit."""
    if not images.names:
        raise DatasetError(f"{images.place}: no images here. Give a folder or an archive that holds some")
    remarks, how = [], "flat" if not any("/" in name for name in images.names) else "folders"
    if any(map(classes.contains, images.source.folders(images.subfolder))):
        remarks = [
            f"{images.place}: some folders are named as classes; the labels are those of {file.path} all the same"
        ]
    if file.name == GROUND_TRUTH:
        labels, more = labels_of_devkit(file, images.names, classes)
        how += ", devkit labels"
    else:
        labels, more = labels_of_list(file, images.names, classes, images.subfolder)
        how += f", labels from {file.path.name}"
    return _found(images, labels, how, [*more, *remarks], file.path if isinstance(file.source, FolderSource) else None)


def _shards(
    images: ImageListing, split: str, classes: ClassList, labels: Path | None, *, no_labels: bool
) -> LabelledListing | None:
    """Label the images of webdataset shards, of one or of a folder of them; None where there are none."""
    source, subfolder = images.source, images.subfolder
    tars = _tars(images)
    sidecars = any(
        map(classes.contains, source.folders(subfolder))
    )  # beside images in class folders: these tell the labels
    if not tars and (sidecars or not isinstance(source, ArchiveSource) or not is_shard(source, subfolder)):
        return None
    if labels is not None:
        raise DatasetError(f"{images.place}: webdataset shards hold their own labels. Leave --labels out")
    layout = "unlabelled" if no_labels else SHARDS
    if tars:
        paths = shards_of_split(tars, split)
        table, indices, reader = open_shards(paths, classes, no_labels=no_labels)
        return LabelledListing(table.names, table.sizes, indices, reader, layout, [_span(images, paths)])
    assert isinstance(source, ArchiveSource), "or there would be tars"
    indices = [UNLABELLED] * len(images.names) if no_labels else labels_in_shard(source, subfolder, classes)
    return _found(images, indices, layout)


def _tars(images: ImageListing) -> list[Path]:
    """Return the tars in a folder that has no images beside them."""
    source = images.source
    if not isinstance(source, FolderSource) or images.names:
        return []
    return [
        source.root / images.subfolder / name for name in source.other_files(images.subfolder) if name.endswith(".tar")
    ]


def _span(images: ImageListing, paths: Sequence[Path]) -> str:
    return f"{images.place}: {len(paths):,} shards, {paths[0].name} to {paths[-1].name}"


def _check_names(names: Iterable[str], place: str) -> None:
    """Refuse names that are no text; they could not be written to a run, nor printed."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DatasetError(f"{place}: the name {name!a} is not UTF-8. Rename it") from error


# Labels from the folders that images lie in: named by wnid, by number, or by the name of the class.


def labels_of_folders(folders: Sequence[str], classes: ClassList, place: str) -> tuple[dict[str, int], list[str]]:
    """Return the class index of each class folder, and what a person should know of it.

    folders: sorted; place: where they lie, for people. Raises DatasetError when a folder is no class of the model, or
    may be several.
    """
    index, remarks = _match_folders(folders, classes, place)
    _check_distinct(index, classes, place)
    found = set(index.values())
    missing = [wnid for number, wnid in enumerate(classes.wnids) if number not in found]
    if missing:
        remarks.append(
            f"{place}: no folders for {len(missing):,} of the model's {len(classes.wnids):,} classes "
            f"({format_names(missing)}); labels stay those of the whole model"
        )
    return index, remarks


def _match_folders(folders: Sequence[str], classes: ClassList, place: str) -> tuple[dict[str, int], list[str]]:
    if all(folder in classes.by_wnid for folder in folders):
        return {folder: classes.by_wnid[folder] for folder in folders}, []
    numbers = classes.folder_numbers(folders, place)
    if numbers is not None:
        return numbers, [
            f"{place}: the folders are the numbers 0 to {len(folders) - 1}, taken as class indices in the order of the "
            "numbers (as text, 10 would come before 2)"
        ]
    unknown = [folder for folder in folders if not classes.contains(folder)]
    if unknown:
        raise DatasetError(
            f"{place}: {len(unknown)} of {len(folders)} class folders are not among the model's {len(classes.wnids)} "
            f"classes: {format_names(unknown)}. The model's begin with {format_names(classes.wnids)}. "
            "Rename the folders to the model's wnids, take them away, or give the labels with --labels FILE"
        )
    resolved = classes.resolve_labels({folder: f"{place}/{folder}" for folder in folders})
    return dict(resolved.index), [f"{place}: the folders are matched to the model's classes by {resolved.kind}"]


def _check_distinct(index: Mapping[str, int], classes: ClassList, place: str) -> None:
    """Refuse two folders that mean one class: they may be two classes of another list."""
    first: dict[int, str] = {}
    for folder, number in index.items():
        if number in first:
            raise DatasetError(
                f"{place}: the folders {format_names([first[number]])} and {format_names([folder])} both mean the class "
                f"{classes.wnids[number]}. Put their images into one folder, or rename the wrong one"
            )
        first[number] = folder


def check_not_empty(folders: Sequence[str], filled: set[str], place: str) -> None:
    """Refuse class folders without images: rather a mistake in copying than a class that nobody needs."""
    if empty := [name for name in folders if name not in filled]:
        raise DatasetError(
            f"{place}: no images in {len(empty)} of {len(folders)} class folders: {format_names(empty)}. "
            "Put images there, or remove the folders"
        )


# Which file gives the labels of images that do not lie in class folders: the one that was named, or the only one.
#
# Looked for are names that are in use for this, in the folder of the images and in the one around it. Two such files
# are one too many: which is right cannot be told from outside, and the wrong one gives errors that look like a bad
# model.


_LABEL_FILE_NAMES = ("val.txt", "val.csv", "labels.txt", "labels.csv", "LOC_val_solution.csv")


def resolve_labels_option(path: Path) -> LabelFile:
    """Return the file that `--labels` names: a list, a ground truth, or the folder of a devkit.

    Raises UsageError when nothing is there, DatasetError when a folder is no devkit.
    """
    if os.path.isdir(path):  # noqa: PTH112 - see _is_file
        found = [label_file(folder / GROUND_TRUTH) for folder in _devkit_folders(path)]
        if len(found) != 1:
            raise DatasetError(
                f"{path}: {'no' if not found else 'more than one'} {GROUND_TRUTH} here, nor in a folder `data` here. "
                "Give the devkit's folder, or the file that holds the labels"
            )
        return found[0]
    if not _is_file(path):
        raise UsageError(f"{path}: no such file or folder. Give a list of labels, or the devkit's folder")
    return label_file(path)


def find_label_file(source: Source, path: Path, subfolder: str) -> LabelFile | None:
    """Return the one file in or beside a dataset that may give its labels, None when there is none.

    path: of the dataset; inside: the folder in it that holds the images. Raises DatasetError when there are several.
    """
    candidates = {file.path: file for file in _candidates(source, path, subfolder)}
    if len(candidates) > 1:
        raise DatasetError(
            f"{path}: more than one file may give the labels: {', '.join(map(str, candidates))}. "
            "Say which with --labels FILE"
        )
    return next(iter(candidates.values()), None)


def has_label_file(source: Source, path: Path, subfolder: str) -> bool:
    """Say whether a folder in a dataset has a file in it, by its name, that may give labels."""
    return not source.other_files(subfolder).keys().isdisjoint((*_label_file_names(path), GROUND_TRUTH))


def _label_file_names(path: Path) -> tuple[str, ...]:
    stem = path.name.partition(".")[0] or path.name
    return (*_LABEL_FILE_NAMES, f"{stem}.txt", f"{stem}.csv")


def _candidates(source: Source, path: Path, subfolder: str) -> Iterator[LabelFile]:
    own = _label_file_names(path)
    around = subfolder.split("/") if subfolder else []
    for folder in ("/".join(around[:depth]) for depth in range(len(around), -1, -1)):
        names = source.other_files(folder)
        for name in (*own, GROUND_TRUTH):
            if name in names:
                yield LabelFile(source, folder, name, path / folder / name)
        if isinstance(source, FolderSource):
            for devkit in _devkit_folders(path / folder):
                yield label_file(devkit / GROUND_TRUTH)
    if not subfolder or not isinstance(source, FolderSource):
        beside = path.absolute().parent
        for name in own:
            if _is_file(beside / name) and beside / name != path.absolute():
                yield label_file(beside / name)
        for devkit in _devkit_folders(beside):
            yield label_file(devkit / GROUND_TRUTH)


def _devkit_folders(folder: Path) -> list[Path]:
    """Return the folders with a ground truth: this one, `data` in it, and the same in folders named as a devkit."""
    try:
        devkits = sorted(entry for entry in folder.iterdir() if "devkit" in entry.name.lower() and entry.is_dir())
    except OSError:  # a folder beside the dataset may be closed to this user, who did not ask for it
        devkits = []
    places = [place for base in (folder, *devkits) for place in (base, base / "data")]
    return [place for place in places if _is_file(place / GROUND_TRUTH)]


def _is_file(path: Path) -> bool:
    """Say whether a file is there; not where its folder is closed, nor where its name is too long to be one."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises in both cases
