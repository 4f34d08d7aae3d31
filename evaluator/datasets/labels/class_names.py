"""Resolve the class labels that people write in folder names, lists and options.

A label is a wnid of the model, a class index or a class name. All labels of a dataset are of one kind. The kind is
determined from all of them together, so that a number is never an index in one line and something else in the next.
"""

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ...errors import DatasetError
from ..sources.base import format_names
from .class_file import IMAGENET_1K, WNID, read_class_list

NUMBER = re.compile(r"-?\d{1,9}", re.ASCII)
_IMAGENET_WNIDS = "ImageNet's wnids, matched to the model's class names by the list of ImageNet's 1000 classes"
_RENUMBERED, _IMAGENET = 200, 1000  # classes of ImageNet-A and -R, which copies may number on their own, and of all
NO_LABEL = "-1"  # the label in public copies of ImageNet's test set


@dataclass(frozen=True)
class ClassList:
    """A model's classes. names: display names, in the order of the wnids; empty if unknown."""

    wnids: tuple[str, ...]
    names: tuple[str, ...] = ()

    @cached_property
    def by_wnid(self) -> dict[str, int]:
        return {wnid: index for index, wnid in enumerate(self.wnids)}

    @cached_property
    def by_name(self) -> dict[str, list[int]]:
        """Return the class indices for each normalized name; a class is listed by its full name and first synonym."""
        found: dict[str, list[int]] = {}
        for index, name in enumerate(self.names):
            for form in dict.fromkeys((_normalized(name), _normalized(name.partition(",")[0]))):
                found.setdefault(form, []).append(index)
        return found

    @cached_property
    def by_imagenet_wnid(self) -> dict[str, list[int]]:
        """Return the class indices for each wnid of ImageNet's 1000 classes, if the model's classes have only names.

        If all names agree with ImageNet's in order, each wnid has one index. Otherwise the name of a class finds its
        wnid, or all wnids of that name.
        """
        if any(map(WNID.fullmatch, self.wnids)):
            return {}
        entries = read_class_list(Path(IMAGENET_1K))
        imagenet = ClassList(tuple(entry.wnid for entry in entries), tuple(entry.name for entry in entries))
        matches = [imagenet.by_name.get(_normalized(name), []) for name in self.names]
        if len(matches) == len(entries) and all(index in match for index, match in enumerate(matches)):
            return {wnid: [index] for index, wnid in enumerate(imagenet.wnids)}
        found: dict[str, list[int]] = {}
        for index, match in enumerate(matches):
            for position in match:
                found.setdefault(imagenet.wnids[position], []).append(index)
        return found

    def contains(self, word: str) -> bool:
        """Return whether a word is a wnid or a name of at least one class, or a wnid of ImageNet with such a name."""
        return word in self.by_wnid or _normalized(word) in self.by_name or self._is_imagenet_wnid(word)

    def resolve_labels(
        self, words: Mapping[str, str], *, by_position: bool = False, chosen: bool = False
    ) -> tuple[dict[str, int], str]:
        """Return the class index of every label, and the kind of the labels as text.

        words: label → where it first occurs, for messages; by_position: the labels cover a whole set by position, as a
        ground truth does, so class indices without a 0 are suspicious; chosen: the words select some classes, so a
        missing 0 is normal.
        Raises DatasetError for a word that is not a class, for numbers that may count from 1, and for a name shared by
        several classes.
        """
        if all(word in self.by_wnid for word in words):
            return {word: self.by_wnid[word] for word in words}, "wnids"
        # Numbers are names if every one of them is a name. Next to wnids that are numbers, they are damaged wnids.
        named = all(_normalized(word) in self.by_name for word in words) or any(word in self.by_wnid for word in words)
        if not named and all(map(NUMBER.fullmatch, words)):
            index = self._indices(words, by_position=by_position, chosen=chosen)
            span = f"{min(index.values())} to {max(index.values())}"
            return index, f"class indices, counted from 0 (found {span})"
        kind = _IMAGENET_WNIDS if any(map(self._is_imagenet_wnid, words)) else "class names"
        names_first = sorted(words, key=lambda word: bool(NUMBER.fullmatch(word)))  # so that a misspelt one is reported
        return {word: self._index_by_name(word, words[word]) for word in names_first}, kind

    def folder_numbers(self, folders: Sequence[str], place: str) -> dict[str, int] | None:
        """Return the class index of each folder if all names are different class indices; otherwise None.

        Raises DatasetError if they may be counted from 1: none is 0, and all are from 1 to the number of classes.
        """
        if not folders or any(map(self.contains, folders)) or not all(map(NUMBER.fullmatch, folders)):
            return None
        numbers = {folder: int(folder) for folder in folders}
        in_order = sorted(numbers.values())
        if 1 <= in_order[0] <= in_order[-1] <= len(self.wnids):
            raise DatasetError(f"{place}: the folders are {_one_based_hint(numbers.values())}, or rename the folders")
        if in_order == list(range(_RENUMBERED)) and len(self.wnids) == _IMAGENET:  # perhaps ImageNet-A or -R
            return None
        different = len(set(in_order)) == len(in_order)
        return numbers if different and in_order[0] >= 0 and in_order[-1] < len(self.wnids) else None

    def _is_imagenet_wnid(self, word: str) -> bool:
        return bool(WNID.fullmatch(word)) and word in self.by_imagenet_wnid

    def _indices(self, words: Mapping[str, str], *, by_position: bool, chosen: bool) -> dict[str, int]:
        """Read class indices, counted from 0."""
        count, index = len(self.wnids), {word: int(word) for word in words}
        if NO_LABEL in index:
            raise DatasetError(
                f"{words[NO_LABEL]}: the label -1 means that the class is unknown. "
                "Use the images without labels, as a test set: --no-labels"
            )
        low, high = min(index.values()), max(index.values())
        # Labels 1 to count-1: counted from 1 with no images of the last class, or from 0 with none of the first.
        all_but_one = not chosen and set(index.values()) == set(range(1, count))
        if low >= 1 and (high == count or (by_position and high < count) or all_but_one):
            place = next(words[word] for word, number in index.items() if number == high)
            raise DatasetError(f"{place}: the labels are {_one_based_hint(index.values())}, or subtract 1 from each")
        for word, number in index.items():
            if not 0 <= number < count:
                raise DatasetError(
                    f"{words[word]}: the label {word} is not one of the model's {count} classes, 0 to {count - 1}. "
                    "Use a dataset with the model's classes"
                )
        return index

    def _index_by_name(self, word: str, place: str) -> int:
        """Return the index of the only class with a name, or of a wnid."""
        if word in self.by_wnid:
            return self.by_wnid[word]  # a wnid among names is still unambiguous
        if self._is_imagenet_wnid(word):  # of the only class whose name ImageNet gives to this wnid, and to no other
            found = self.by_imagenet_wnid[word]
            wnids = [other for other, indices in self.by_imagenet_wnid.items() if not set(found).isdisjoint(indices)]
            if len(found) > 1 or len(wnids) > 1:
                classes = " and ".join(f"{self.wnids[index]!a:.80} (class index {index})" for index in found)
                raise DatasetError(
                    f"{place}: the model's classes have names but no wnids, and by name {' and '.join(wnids)} could be "
                    f"{classes}. Use class names or indices for the labels, or adopt the model again with wnids in its "
                    f"--classes ({IMAGENET_1K} if they are ImageNet's 1000 in order)"
                )
            return found[0]
        found = self.by_name.get(_normalized(word), [])
        index = NUMBER.fullmatch(word) and 0 <= int(word) < len(self.wnids)
        if not found and index and not any(map(NUMBER.fullmatch, self.wnids)):
            raise DatasetError(f"{place}: {word} is a class index, but others are names or wnids. Use one kind for all")
        if not found:
            raise DatasetError(
                f"{place}: the label {word!a:.80} is not one of the model's {len(self.wnids)} classes, which start "
                f"with {format_names(self.wnids)}. Use wnids, or class indices from 0 to {len(self.wnids) - 1}"
            )
        if len(found) > 1:
            both = " and ".join(f"{self.wnids[index]} ({self.names[index]})" for index in found[:3])
            raise DatasetError(
                f"{place}: {word!a:.80} could be {both}, class indices {found[0]} and {found[1]}. Use wnids"
            )
        return found[0]


def _normalized(name: str) -> str:
    """Normalize a name for comparison: folder names may have '_' or '-' for spaces and '/', and decomposed accents."""
    return " ".join(re.split(r"[\s_/-]+", unicodedata.normalize("NFC", name.strip().casefold())))


def _one_based_hint(numbers: Collection[int]) -> str:
    """Return the end of the message about numeric labels without a 0; the caller appends its own alternative."""
    return (
        f"numbers {min(numbers)} to {max(numbers)}, and none of them is 0: are they devkit ids (ILSVRC2012_ID, which "
        "has its own order), or class indices counted from 1? prelunet counts class indices from 0, in the order of "
        "the model's classes. For devkit ids, pass the devkit with --labels DIR (ground truth and meta.mat); "
        "otherwise use wnids instead of numbers"
    )
