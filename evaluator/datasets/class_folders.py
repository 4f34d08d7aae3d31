"""Labels from the folders that images lie in: named by wnid, by number, or by the name of the class."""

from collections.abc import Mapping, Sequence

from prelunet.evaluator.datasets.classes import ClassList
from prelunet.evaluator.datasets.source import some
from prelunet.evaluator.errors import DatasetError


def labels_of_folders(folders: Sequence[str], classes: ClassList, place: str) -> tuple[dict[str, int], list[str]]:
    """Return the class index of each class folder, and what a person should know of it.

    folders: sorted; place: where they lie, for people. Raises DatasetError when a folder is no class of the model, or
    may be several.
    """
    index, remarks = _understood(folders, classes, place)
    _check_apart(index, classes, place)
    found = set(index.values())
    lacking = [wnid for number, wnid in enumerate(classes.wnids) if number not in found]
    if lacking:
        remarks.append(
            f"{place}: no folders for {len(lacking):,} of the model's {len(classes.wnids):,} classes "
            f"({some(lacking)}); labels stay those of the whole model"
        )
    return index, remarks


def _understood(folders: Sequence[str], classes: ClassList, place: str) -> tuple[dict[str, int], list[str]]:
    if all(folder in classes.by_wnid for folder in folders):
        return {folder: classes.by_wnid[folder] for folder in folders}, []
    numbers = classes.folder_numbers(folders, place)
    if numbers is not None:
        return numbers, [
            f"{place}: the folders are the numbers 0 to {len(folders) - 1}, taken as class indices in the order of the "
            "numbers (as text, 10 would come before 2)"
        ]
    unknown = [folder for folder in folders if not classes.knows(folder)]
    if unknown:
        raise DatasetError(
            f"{place}: {len(unknown)} of {len(folders)} class folders are not among the model's {len(classes.wnids)} "
            f"classes: {some(unknown)}. The model's begin with {some(classes.wnids)}. "
            "Rename the folders to the model's wnids, take them away, or give the labels with --labels FILE"
        )
    meaning = classes.understand({folder: f"{place}/{folder}" for folder in folders})
    return dict(meaning.index), [f"{place}: the folders are matched to the model's classes by {meaning.kind}"]


def _check_apart(index: Mapping[str, int], classes: ClassList, place: str) -> None:
    """Refuse two folders that mean one class: they may be two classes of another list."""
    first: dict[int, str] = {}
    for folder, number in index.items():
        if number in first:
            raise DatasetError(
                f"{place}: the folders {some([first[number]])} and {some([folder])} both mean the class "
                f"{classes.wnids[number]}. Put their images into one folder, or rename the wrong one"
            )
        first[number] = folder


def check_filled(folders: Sequence[str], filled: set[str], place: str) -> None:
    """Refuse class folders without images: rather a mistake in copying than a class that nobody needs."""
    if empty := [name for name in folders if name not in filled]:
        raise DatasetError(
            f"{place}: no images in {len(empty)} of {len(folders)} class folders: {some(empty)}. "
            "Put images there, or remove the folders"
        )
