"""Detect the layout of a folder or an archive and label its images. docs/datasets.md lists the layouts.

Nothing is guessed: where a dataset can be read in two ways, the error names both and the option that decides.
"""

import os.path
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import DatasetError, UsageError
from .dataset import CLASS_FOLDERS, UNLABELLED, Dataset, DatasetSpec, Reader, Sample
from .labels.class_names import ClassList
from .labels.imagenet_devkit import GROUND_TRUTH, labels_of_devkit, wnids_in_names
from .labels.label_lists import labels_of_list, read_label_list
from .labels.real_labels import IMAGENET_REAL, labels_of_real
from .sources.archive import ArchiveReader, ArchiveSource
from .sources.base import TAR, LabelFile, Source, describe_place, format_names
from .sources.folder import FolderSource, label_file
from .webdataset import (
    classes_of_labels,
    is_shard,
    read_labels,
    read_shards,
    shards_of_split,
)

SHARDS = "webdataset shards"  # the name of the layout


@dataclass(frozen=True)
class ImageListing:
    """The images in one folder of a source.

    names: sorted, relative to the folder; sizes: in bytes; exact_sizes: see `Dataset`.
    """

    source: Source
    path: Path
    subfolder: str
    names: Sequence[str]
    sizes: Sequence[int]
    reader: Reader
    exact_sizes: bool = True

    @property
    def place(self) -> str:
        return describe_place(self.path, self.subfolder)

    def labeled(
        self,
        wnids: Sequence[str],
        labels: Sequence[int],
        layout: str,
        remarks: Iterable[str] = (),
        labels_from: Path | None = None,
    ) -> Dataset:
        """Return the dataset of these images. wnids, layout, remarks: see `Dataset`; labels_from: see `DatasetSpec`."""
        samples = [Sample(*each) for each in zip(self.names, labels, self.sizes, strict=True)]
        spec = DatasetSpec(self.path, labels_from)
        return Dataset(
            self.path,
            tuple(wnids),
            samples,
            self.reader,
            layout,
            tuple(remarks),
            spec=spec,
            exact_sizes=self.exact_sizes,
        )


@dataclass(frozen=True)
class Choice:
    """What the user wants of a dataset. listed_only: as in `DatasetSpec`; of_some_classes: if it has `classes`."""

    listed_only: bool = False
    of_some_classes: bool = False


def list_images(source: Source, path: Path, subfolder: str) -> ImageListing:
    """List the images in a folder. Raises DatasetError for a name that can be neither printed nor written to a run."""
    found = sorted(source.images(subfolder))
    names, sizes = [name for name, _ in found], array("q", (size for _, size in found))
    images = ImageListing(source, path, subfolder, names, sizes, source.reader(subfolder))
    for name in (*source.folders(subfolder), *names):
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DatasetError(f"{images.place}: the name {name!a} is not valid UTF-8. Rename it") from error
    return images


def label_training_images(images: ImageListing, split: str) -> Dataset:
    """Label training images by their class folders in sorted order, or by the labels in shards.

    Validation images outside any folder are labeled by a list, as those of Tiny-ImageNet and of Kaggle's ILSVRC.

    Raises DatasetError when there are neither class folders nor shards, when a class folder is empty, or when the
    labels of the shards are inconsistent (`classes_of_labels`).
    """
    if tars := shard_files(images, TAR):
        images, words, found_at, remarks = _open_shards(images, *shards_of_split(tars, split))
        wnids = classes_of_labels(found_at, complete=split == "train")
        index = {word: number for number, word in enumerate(wnids)}
        return images.labeled(wnids, [index[word] for word in words], SHARDS, remarks)
    folders = images.source.folders(images.subfolder)
    file = None if folders or split == "train" else find_label_file(images.source, images.path, images.subfolder)
    if file is not None and file.name != GROUND_TRUTH:
        wnids = tuple(sorted({entry.label for entry in read_label_list(file)[0]}))
        return _by_file(images, file, ClassList(wnids))
    if not folders:
        raise DatasetError(
            f"{images.place}: no class folders found ({len(images.names)} images outside any folder). "
            "Put the images of each class into a folder named after the class, or use webdataset shards"
        )
    if empty := _empty_folders(images, folders):
        raise DatasetError(
            f"{images.place}: no images in {len(empty)} of {len(folders)} class folders: {format_names(empty)}. "
            "Add images, or remove the folders"
        )
    return _by_folder(images, {folder: index for index, folder in enumerate(folders)}, folders, [])


def label_images(
    images: ImageListing, split: str, classes: ClassList, labels: Path | None, choice: Choice, *, no_labels: bool
) -> Dataset:
    """Detect how images are labeled, and label them with a model's classes. Raises as `open_dataset`."""
    source, folders, tars = images.source, images.source.folders(images.subfolder), shard_files(images, TAR)
    in_class_folders = any(map(classes.contains, folders))  # then the folders are the labels, even in an archive
    one_shard = isinstance(source, ArchiveSource) and not in_class_folders and is_shard(source, images.subfolder)
    if labels is not None and (tars or one_shard):
        raise DatasetError(f"{images.place}: webdataset shards contain their own labels. Remove --labels")
    remarks = list[str]()
    if tars:
        chosen = shards_of_split(tars, split, or_test=split == "val")
        images, words, found_at, remarks = _open_shards(images, *chosen, no_labels=no_labels)
    if no_labels:
        return images.labeled(classes.wnids, [UNLABELLED] * len(images.names), "unlabelled", remarks)
    if isinstance(source, ArchiveSource) and one_shard:
        words, found_at = read_labels(source, images.subfolder)
    if tars or one_shard:
        index, kind = classes.resolve_labels(found_at)
        remarks.append(f"{images.place}: labels read as {kind}")
        return images.labeled(classes.wnids, [index[word] for word in words], SHARDS, remarks)
    if not images.names and (labels is not None or not folders):
        raise DatasetError(f"{images.place}: no images found. Pass a folder or an archive that contains images")
    if labels is not None:
        return _by_file(images, resolve_labels_option(labels), classes, listed_only=choice.listed_only)
    loose = sum("/" not in name for name in images.names)
    if loose and loose == len(images.names):
        return _flat(images, classes, listed_only=choice.listed_only)
    if loose and not in_class_folders and classes.folder_numbers(folders, images.place) is None:
        raise DatasetError(
            f"{images.place}: {loose:,} images are outside any folder, and {len(images.names) - loose:,} are in "
            f"folders that are not classes of the model ({format_names(folders)}). Pass labels for all images with "
            "--labels FILE, or pass the intended folder as --data"
        )
    return _by_class_folder(images, folders, classes, extra=choice.of_some_classes)


def with_real_labels(dataset: Dataset, labels: Path, classes: ClassList) -> Dataset:
    """Return an unlabelled dataset with ReaL's labels, without the images that have none.

    Raises as `labels_of_real` does.
    """
    if labels != IMAGENET_REAL:
        resolve_labels_option(labels)  # refuses a path that does not exist
    truths, remarks = labels_of_real(labels, [sample.file for sample in dataset.samples], classes)
    pairs = zip(dataset.samples, truths, strict=True)
    samples = [replace(sample, label=truth[0], also=truth[1:]) for sample, truth in pairs if truth]
    return replace(
        dataset,
        samples=samples,
        layout="ReaL labels",
        remarks=(*dataset.remarks, *remarks),
        selection="images with ReaL labels",
        spec=dataset.spec and replace(dataset.spec, labels=labels),
    )


def shard_files(images: ImageListing, suffix: str) -> list[Path]:
    """Return the files in a folder whose names end with a suffix, unless the folder also contains images."""
    source, folder = images.source, images.subfolder
    if not isinstance(source, FolderSource) or images.names:
        return []
    return [source.root / folder / name for name in source.other_files(folder) if name.endswith(suffix)]


def _open_shards(
    images: ImageListing, paths: Sequence[Path], remarks: Sequence[str], *, no_labels: bool = False
) -> tuple[ImageListing, list[str], dict[str, str], list[str]]:
    """Return the images in the shards of a folder, the label of each, where each label first occurs, and remarks."""
    table, words, found_at = read_shards(paths, no_labels=no_labels)
    remark = f"{images.place}: {len(paths):,} shards, {paths[0].name} to {paths[-1].name}"
    listed = replace(images, names=table.names, sizes=table.sizes, reader=ArchiveReader(tuple(paths), table))
    return listed, words, found_at, [*remarks, remark]


def _flat(images: ImageListing, classes: ClassList, *, listed_only: bool) -> Dataset:
    """Label images outside any folder: by the wnids in their names, or by the only label file found."""
    if (found := wnids_in_names(images.names, classes)) is not None:
        return images.labeled(classes.wnids, found[0], "flat, wnids in the names", found[1])
    file = find_label_file(images.source, images.path, images.subfolder)
    if file is None:
        raise DatasetError(
            f"{images.place}: {len(images.names):,} images without class folders, and no label file in or next to the "
            "dataset. Pass labels with --labels FILE (a list of names and labels) or --labels DIR (the devkit). "
            "For a test set without labels, use validate --no-labels"
        )
    try:
        return _by_file(images, file, classes, listed_only=listed_only)
    except DatasetError as error:
        raise DatasetError(
            f"{error}. This label file was found by its name. Pass another one with --labels. "
            "For a test set without labels, use validate --no-labels"
        ) from error


def _by_file(images: ImageListing, file: LabelFile, classes: ClassList, *, listed_only: bool = False) -> Dataset:
    """Label images from a list or from the devkit. listed_only: see `DatasetSpec`."""
    layout = "folders" if any("/" in name for name in images.names) else "flat"
    if file.name == GROUND_TRUTH:
        labels, remarks = labels_of_devkit(file, images.names, classes)
        layout += ", devkit labels"
    else:
        labels, remarks = labels_of_list(file, images.names, classes, images.subfolder, listed_only=listed_only)
        layout += f", labels from {file.path.name}"
    if any(map(classes.contains, images.source.folders(images.subfolder))):
        remarks.append(f"{images.place}: some folders are named after classes, but the labels come from {file.path}")
    labels_from = file.path if isinstance(file.source, FolderSource) else None
    dataset = images.labeled(classes.wnids, labels, layout, remarks, labels_from)
    listed = [sample for sample in dataset.samples if sample.label != UNLABELLED]
    if len(listed) == len(dataset.samples):
        return dataset
    return replace(dataset, samples=listed, selection=f"images listed in {file.path.name}")


def _by_class_folder(
    images: ImageListing, folders: Sequence[str], classes: ClassList, *, extra: bool = False
) -> Dataset:
    """Label images by their folders, which are named by wnid, class index or class name.

    extra: leave out folders that are not classes of the model.
    Raises DatasetError when a folder is not a class of the model or could be several, and when two folders stand for
    the same class: in another class list they may be two classes.
    """
    others = [folder for folder in folders if not classes.contains(folder)] if extra else []
    if 0 < len(others) < len(folders):
        folders = [folder for folder in folders if folder not in others]
    index, remarks = _match_folders(folders, classes, images.place)
    if len(folders) > 0 and others and others[0] not in index:
        count = sum(name.partition("/")[0] in others for name in images.names if "/" in name)
        remarks.append(
            f"{images.place}: left out {count:,} images in {len(others):,} folders that are not classes of the model: "
            f"{format_names(others)}"
        )
    folder_of: dict[int, str] = {}
    for folder, number in index.items():
        if (first := folder_of.setdefault(number, folder)) != folder:
            raise DatasetError(
                f"{images.place}: the folders {format_names([first])} and {format_names([folder])} both stand for the "
                f"class {classes.wnids[number]}. Merge them, or rename the wrong one"
            )
    if missing := [wnid for number, wnid in enumerate(classes.wnids) if number not in folder_of]:
        remarks.append(
            f"{images.place}: no folders for {len(missing):,} of the model's {len(classes.wnids):,} classes "
            f"({format_names(missing)}); class indices are still those of the full model"
        )
    return _by_folder(images, index, classes.wnids, remarks)


def _match_folders(folders: Sequence[str], classes: ClassList, place: str) -> tuple[dict[str, int], list[str]]:
    """Return the class index of each class folder, and remarks for the user."""
    if all(folder in classes.by_wnid for folder in folders):
        return {folder: classes.by_wnid[folder] for folder in folders}, []
    numbers = classes.folder_numbers(folders, place)
    if numbers is not None:
        return numbers, [
            f"{place}: the folders are named {min(numbers.values())} to {max(numbers.values())}; the names are read as "
            "class indices, in numeric order (in text order, 10 would come before 2)"
        ]
    unknown = [folder for folder in folders if not classes.contains(folder)]
    if unknown:
        raise DatasetError(
            f"{place}: {len(unknown)} of {len(folders)} class folders are not among the model's {len(classes.wnids)} "
            f"classes: {format_names(unknown)}. The model's classes start with {format_names(classes.wnids)}. "
            "Rename the folders to the model's wnids, or remove them; `evaluate` and `validate` can also select the "
            "model's own with --only-classes, or take labels with --labels FILE"
        )
    index, kind = classes.resolve_labels({folder: f"{place}/{folder}" for folder in folders})
    return index, [f"{place}: folders matched to the model's classes by {kind}"]


def _by_folder(images: ImageListing, index: Mapping[str, int], wnids: Sequence[str], remarks: Sequence[str]) -> Dataset:
    """Label images by their folders, skipping images outside the folders. index: folder → class index.

    Raises DatasetError if all folders are empty.
    """
    in_folders = [position for position, name in enumerate(images.names) if name.partition("/")[0] in index]
    empty = _empty_folders(images, list(index))
    if len(empty) == len(index):
        raise DatasetError(
            f"{images.place}: no images in {len(index)} class folders: {format_names(empty)}. Add images"
        )
    if empty:
        remarks = [*remarks, f"{images.place}: {len(empty):,} class folders are empty: {format_names(empty)}"]
    if loose := sum("/" not in name for name in images.names):
        remarks = [*remarks, f"{images.place}: skipped {loose:,} images that are outside the class folders"]
    if len(in_folders) < len(images.names):
        sizes = array("q", (images.sizes[position] for position in in_folders))
        images = replace(images, names=[images.names[position] for position in in_folders], sizes=sizes)
    labels = [index[name.partition("/")[0]] for name in images.names]
    return images.labeled(wnids, labels, CLASS_FOLDERS, remarks)


def _empty_folders(images: ImageListing, folders: Sequence[str]) -> list[str]:
    filled = {name.partition("/")[0] for name in images.names if "/" in name}
    return [folder for folder in folders if folder not in filled]


# The label file of images without class folders: the one that --labels names, or the only candidate.
#
# Candidates are files with the usual names, in the folder of the images and in the folder around it. Two candidates
# are an error: the program cannot know which one is right, and wrong labels look like a bad model.


TINY_IMAGENET_LABELS = "val_annotations.txt"
_LABEL_FILE_NAMES = ("val.txt", "val.csv", "labels.txt", "labels.csv", "LOC_val_solution.csv", TINY_IMAGENET_LABELS,
    "metadata.jsonl", "metadata.csv")  # fmt: skip
KAGGLE_IMAGES = "Data/CLS-LOC"  # in Kaggle's folder ILSVRC, whose LOC_val_solution.csv lies beside that folder


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
            if name in names and not (isinstance(source, FolderSource) and _is_predictions(path / folder / name)):
                yield LabelFile(source, folder, name, path / folder / name)
        if isinstance(source, FolderSource):
            for devkit in _devkit_folders(path / folder):
                yield label_file(devkit / GROUND_TRUTH)
    if not subfolder or subfolder.startswith(KAGGLE_IMAGES) or not isinstance(source, FolderSource):
        parent = path.absolute().parent
        for name in label_file_names:
            file = parent / name
            if _is_file(file) and file != path.absolute() and not _is_predictions(file):
                yield label_file(file)
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


def _is_predictions(path: Path) -> bool:
    """Return whether a file is one that `classify IMAGES --csv FILE` wrote."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(12) == b"file,wnid_1,"
    return False


def _is_file(path: Path) -> bool:
    """Return whether a file exists; False where its folder is unreadable or its name is too long."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises in both cases
