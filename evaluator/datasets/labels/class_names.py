"""What the words for classes mean that people write into folders' names, lists and options.

A word is a wnid of the model, a class index, or a class's name. All words of one dataset are of one kind, and the kind
is found from all of them together, so that a number is never an index in one line and something else in the next.
"""

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from prelunet.evaluator.datasets.sources.base import format_names
from prelunet.evaluator.errors import DatasetError

NUMBER = re.compile(r"-?\d{1,9}", re.ASCII)
WNID = re.compile(r"n\d{8}", re.ASCII)  # of ImageNet
NO_LABEL = "-1"  # what public copies of ImageNet's test set have for a label


@dataclass(frozen=True)
class ResolvedLabels:
    """index: class index of each word; kind: of words, in words."""

    index: Mapping[str, int]
    kind: str


@dataclass(frozen=True)
class ClassList:
    """A model's classes. names: for people, in the order of the wnids; empty where they are not known."""

    wnids: tuple[str, ...]
    names: tuple[str, ...] = ()

    @cached_property
    def by_wnid(self) -> dict[str, int]:
        """Return the index of each wnid."""
        return {wnid: index for index, wnid in enumerate(self.wnids)}

    @cached_property
    def by_name(self) -> dict[str, list[int]]:
        """Return the indices of the classes with a name, written any way: whole, or its first synonym."""
        found: dict[str, list[int]] = {}
        for index, name in enumerate(self.names):
            for form in dict.fromkeys((_normalized(name), _normalized(name.partition(",")[0]))):
                found.setdefault(form, []).append(index)
        return found

    def contains(self, word: str) -> bool:
        """Say whether a word is a wnid or a name of one of the classes, or of several."""
        return word in self.by_wnid or _normalized(word) in self.by_name

    def resolve_labels(
        self, words: Mapping[str, str], *, by_position: bool = False, chosen: bool = False
    ) -> ResolvedLabels:
        """Find the class index of every word. words: each with the place where it was found first, for people.

        by_position: the words are of a whole set by position, as a ground truth is, where numbers without a 0 are
        strange; chosen: they are no labels but name some classes, where they are not.

        Raises DatasetError for a word that is no class, for numbers that may be counted from 1, and for a name that
        several classes have.
        """
        if all(word in self.by_wnid for word in words):
            return ResolvedLabels({word: self.by_wnid[word] for word in words}, "wnids")
        # Numbers are names where all of them are; and beside wnids that are numbers they are damaged wnids.
        named = all(_normalized(word) in self.by_name for word in words) or any(word in self.by_wnid for word in words)
        odd = [word for word in words if not NUMBER.fullmatch(word)]
        if not named and not odd:
            index = self._indices(words, by_position=by_position, chosen=chosen)
            span = f"{min(index.values())} to {max(index.values())}"
            return ResolvedLabels(index, f"class indices, counted from 0 (there are {span})")
        numbers = len(words) - len(odd)
        if (
            not named
            and numbers > len(odd)
            and not any(self.contains(word) for word in words if NUMBER.fullmatch(word))
        ):
            raise DatasetError(
                f"{words[odd[0]]}: {odd[0]!a:.80} is no whole number, but the {numbers} others are class indices. Give "
                "labels of one kind: class indices, or wnids"
            )
        return ResolvedLabels(
            {word: self._index_by_name(word, place) for word, place in words.items()}, "names of classes"
        )

    def folder_numbers(self, folders: Sequence[str], place: str) -> dict[str, int] | None:
        """Return the class index of each folder where they are the numbers from 0 on, one for each class; else None.

        Raises DatasetError where they are the numbers from 1 on.
        """
        if not folders or any(map(self.contains, folders)) or not all(map(NUMBER.fullmatch, folders)):
            return None
        numbers = {folder: int(folder) for folder in folders}
        if sorted(numbers.values()) == list(range(1, len(self.wnids) + 1)):
            raise DatasetError(f"{place}: the folders are {_one_based_hint(numbers.values())}, or rename the folders")
        return numbers if sorted(numbers.values()) == list(range(len(self.wnids))) else None

    def _indices(self, words: Mapping[str, str], *, by_position: bool, chosen: bool) -> dict[str, int]:
        """Read class indices, counted from 0."""
        count, index = len(self.wnids), {word: int(word) for word in words}
        if NO_LABEL in index:
            raise DatasetError(
                f"{words[NO_LABEL]}: the label -1 says that nobody knows the class. "
                "Take the images without labels, as a test set: --no-labels"
            )
        low, high = min(index.values()), max(index.values())
        # Of a set that is counted from 1 the last class may have no images, of one counted from 0 the first.
        all_but_one = not chosen and set(index.values()) == set(range(1, count))
        if low >= 1 and (high == count or (by_position and high < count) or all_but_one):
            place = next(words[word] for word, number in index.items() if number == high)
            raise DatasetError(f"{place}: the labels are {_one_based_hint(index.values())}, or subtract 1 from each")
        for word, number in index.items():
            if not 0 <= number < count:
                raise DatasetError(
                    f"{words[word]}: the label {word} is none of the model's {count} classes, 0 to {count - 1}. "
                    "Give a dataset of the model's classes"
                )
        return index

    def _index_by_name(self, word: str, place: str) -> int:
        """Return the index of the one class with a name."""
        if word in self.by_wnid:
            return self.by_wnid[word]  # a wnid among names is one class all the same
        found = self.by_name.get(_normalized(word), [])
        if not found:
            raise DatasetError(
                f"{place}: the label {word!a:.80} is none of the model's {len(self.wnids)} classes, which begin with "
                f"{format_names(self.wnids)}. Give wnids, or class indices from 0 to {len(self.wnids) - 1}"
            )
        if len(found) > 1:
            both = " and ".join(f"{self.wnids[index]} ({self.names[index]})" for index in found[:3])
            raise DatasetError(
                f"{place}: {word!a:.80} may be {both}, class indices {found[0]} and {found[1]}. Use wnids"
            )
        return found[0]


def _normalized(name: str) -> str:
    """Return a name as it is compared: folders have '_' or '-' for spaces, and some take accents apart."""
    return " ".join(re.split(r"[\s_-]+", unicodedata.normalize("NFC", name.strip().casefold())))


def _one_based_hint(numbers: Collection[int]) -> str:
    """Return the question that numbers put of which none is 0, up to its last way out."""
    return (
        f"numbers {min(numbers)} to {max(numbers)}, and none of them is 0: are they the devkit's ids (ILSVRC2012_ID, "
        "in an order of their own), or class indices counted from 1? prelunet counts class indices from 0, in the "
        "order of the model's classes. For devkit ids give the devkit with --labels DIR (ground truth and meta.mat); "
        "otherwise give wnids for numbers"
    )
