"""Open whatever holds class folders as a dataset: find the right folder inside, list it, give every image its label."""

import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol as Interface

from evaluator.datasets.archives import open_archive
from evaluator.datasets.folders import FolderSource, reading_error
from evaluator.datasets.sample import Dataset, Reader, Sample
from evaluator.errors import DatasetError, UsageError

SPLITS = ("train", "val")


class Source(Interface):
    """A tree of folders and images; `inside` is a folder's name in it with '/', '' for the top."""

    def folders(self, inside: str) -> list[str]:
        """Return the names of the visible folders directly inside, sorted."""
        ...

    def images(self, inside: str) -> Iterator[tuple[str, int]]:
        """Yield name (relative to `inside`, with '/') and byte length of all images at any depth inside."""
        ...

    def reader(self, inside: str) -> Reader:
        """Return a reader of the names that `images` yields."""
        ...


def open_dataset(path: Path, *, split: str, class_names: Sequence[str] | None = None) -> Dataset:
    """Open a folder, a .tar or a .zip of class folders.

    split: `train` or `val`; where the top, or a single folder at the top, has a folder of that name with class folders
    in it, that one is entered. class_names: the model's wnids, whose places are the labels; None (for a training
    set) takes the class folders themselves in sorted order.
    Samples are all files with an image's suffix inside a class folder, at any depth, sorted by name. Hidden files,
    `__MACOSX` and other files are left out.
    Raises UsageError when there is nothing at `path`; DatasetError when it cannot be read, has no class folders, has
    an empty one, or one that the model does not know.
    """
    source = _open_source(path)
    inside = _enter(source, path, split)
    folders = source.folders(inside)
    images = sorted(source.images(inside))
    if not folders:
        raise DatasetError(
            f"{_place(path, inside)}: no class folders here ({len(images)} images lie loose). "
            "Put the images of each class into a folder named as the class"
        )
    _check_names([*folders, *(name for name, _ in images)], _place(path, inside))
    classes = tuple(folders) if class_names is None else tuple(class_names)
    _check_known(folders, classes, _place(path, inside))
    label = {name: index for index, name in enumerate(classes)}
    samples = [Sample(name, label[name.partition("/")[0]], size) for name, size in images if "/" in name]
    _check_filled(folders, samples, _place(path, inside))
    return Dataset(path, classes, samples, source.reader(inside))


def _open_source(path: Path) -> Source:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"{path}: no such file or folder. Give a folder of class folders, or a .tar or .zip of one"
        ) from error
    except OSError as error:
        raise reading_error(error, path) from error
    if stat.S_ISDIR(mode):
        return FolderSource(path)
    if stat.S_ISREG(mode):
        return open_archive(path)
    raise DatasetError(f"{path}: neither a folder nor a file. Give a folder of class folders, or a .tar or .zip of one")


def _enter(source: Source, path: Path, split: str) -> str:
    """Return the folder that holds the class folders of the split."""
    inside = ""
    top = source.folders("")
    if split not in top and len(top) == 1 and top[0] not in SPLITS and source.folders(top[0]):
        inside = top[0]  # the one folder that most archives begin with
    below = source.folders(inside)
    splits = [name for name in {*SPLITS, split} if name in below and source.folders(_join(inside, name))]
    # A folder of that name without folders inside is a class: CIFAR-100 has trains among its classes.
    if split in splits:
        return _join(inside, split)
    if splits:
        raise DatasetError(
            f"{_place(path, inside)}: class folders in '{splits[0]}' but none in '{split}'. "
            f"Put the {split} images into a folder '{split}' of class folders beside '{splits[0]}'"
        )
    return inside


def _join(inside: str, name: str) -> str:
    return f"{inside}/{name}" if inside else name


def _place(path: Path, inside: str) -> str:
    return f"{path}/{inside}" if inside else str(path)


def _check_names(names: Iterable[str], place: str) -> None:
    """Refuse names that are no text; they could not be written to a run, nor printed."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DatasetError(f"{place}: the name {name!a} is not UTF-8. Rename it") from error


def _check_known(folders: Sequence[str], classes: Sequence[str], place: str) -> None:
    known = set(classes)
    unknown = [name for name in folders if name not in known]
    if unknown:
        raise DatasetError(
            f"{place}: {len(unknown)} of {len(folders)} class folders are not among the model's {len(classes)} "
            f"classes: {_some(unknown)}. The model's begin with {_some(classes)}. "
            "Rename the folders to the model's wnids, or take them away"
        )


def _check_filled(folders: Sequence[str], samples: Sequence[Sample], place: str) -> None:
    filled = {sample.file.partition("/")[0] for sample in samples}
    empty = [name for name in folders if name not in filled]
    if empty:
        raise DatasetError(
            f"{place}: no images in {len(empty)} of {len(folders)} class folders: {_some(empty)}. "
            "Put images there, or remove the folders"
        )


def _some(names: Sequence[str]) -> str:
    """Return the first five names as text."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
