"""Which file gives the labels of images that do not lie in class folders: the one that was named, or the only one.

Looked for are names that are in use for this, in the folder of the images and in the one around it. Two such files are
one too many: which is right cannot be told from outside, and the wrong one gives errors that look like a bad model.
"""

import os.path
from collections.abc import Iterator
from pathlib import Path

from prelunet.evaluator.datasets.folders import FolderSource, label_file
from prelunet.evaluator.datasets.imagenet import GROUND_TRUTH
from prelunet.evaluator.datasets.source import LabelFile, Source
from prelunet.evaluator.errors import DatasetError, UsageError

_LISTS = ("val.txt", "val.csv", "labels.txt", "labels.csv", "LOC_val_solution.csv")


def named_labels(path: Path) -> LabelFile:
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


def found_labels(source: Source, path: Path, inside: str) -> LabelFile | None:
    """Return the one file in or beside a dataset that may give its labels, None when there is none.

    path: of the dataset; inside: the folder in it that holds the images. Raises DatasetError when there are several.
    """
    candidates = {file.path: file for file in _candidates(source, path, inside)}
    if len(candidates) > 1:
        raise DatasetError(
            f"{path}: more than one file may give the labels: {', '.join(map(str, candidates))}. "
            "Say which with --labels FILE"
        )
    return next(iter(candidates.values()), None)


def has_list(source: Source, path: Path, inside: str) -> bool:
    """Say whether a folder in a dataset has a file in it, by its name, that may give labels."""
    return not source.others(inside).keys().isdisjoint((*_names(path), GROUND_TRUTH))


def _names(path: Path) -> tuple[str, ...]:
    stem = path.name.partition(".")[0] or path.name
    return (*_LISTS, f"{stem}.txt", f"{stem}.csv")


def _candidates(source: Source, path: Path, inside: str) -> Iterator[LabelFile]:
    own = _names(path)
    around = inside.split("/") if inside else []
    for folder in ("/".join(around[:depth]) for depth in range(len(around), -1, -1)):
        names = source.others(folder)
        for name in (*own, GROUND_TRUTH):
            if name in names:
                yield LabelFile(source, folder, name, path / folder / name)
        if isinstance(source, FolderSource):
            for devkit in _devkit_folders(path / folder):
                yield label_file(devkit / GROUND_TRUTH)
    if not inside or not isinstance(source, FolderSource):
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
