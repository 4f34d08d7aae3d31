"""Lists of labels: `name label` or `name,label` line by line, as Caffe's val.txt and Kaggle's LOC_val_solution.csv."""

import csv
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from prelunet.evaluator.datasets.labels.class_names import ClassList
from prelunet.evaluator.datasets.sources.base import LabelFile, format_names
from prelunet.evaluator.errors import DatasetError
from prelunet.evaluator.imaging.decode import SUFFIXES

_NAME_HEADERS = {"name", "file", "filename", "file_name", "image", "imageid", "image_id", "path", "id"}
_LABEL_HEADERS = {"label", "wnid", "class", "predictionstring", "synset", "class_id", "index", "target"}
_ROW_NUMBER = "index"  # pandas writes the number of the row under this name, others the class
_BOX = 5  # words for a box in Kaggle's list: wnid and four sides
_LONE_NUMBER = re.compile(r"\s*-?\d+\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class LabelEntry:
    """One line of a list. name: of the image, None in a list of labels alone; label: a word for its class."""

    line: int
    name: str | None
    label: str


def labels_of_list(
    file: LabelFile, images: Sequence[str], classes: ClassList, subfolder: str
) -> tuple[list[int], list[str]]:
    """Return the label of each image as a list gives it, and what a person should know of it.

    images: names in sorted order; inside: the folder of the dataset in which they lie.
    Raises DatasetError naming file, line and mend when the list cannot be read, gives labels to images that do not
    exist or twice, gives some images none, or has labels that are no class of the model.
    """
    entries, columns = read_label_list(file)
    words: dict[str, str] = {}
    for entry in entries:
        words.setdefault(entry.label, f"{file.path}: line {entry.line}")
    resolved = classes.resolve_labels(words, by_position=entries[0].name is None)
    remarks = [f"labels from {file.path}, read as {resolved.kind}{columns}"]
    if entries[0].name is None:
        check_count(len(entries), images, file.path)
        remarks.append(f"{file.path} names no images: its line i is the label of the i-th name in sorted order")
        return [resolved.index[entry.label] for entry in entries], remarks
    key = _key_of_names(entries, images, subfolder, file.path)
    if key.composed:
        remarks.append(f"{file.path}: names are compared in Unicode's form NFC, since accents are written another way")
    places = _match(entries, images, key, file.path)
    return [resolved.index[entries[place].label] for place in places], remarks


def check_count(labels: int, images: Sequence[str], path: Path) -> None:
    """Refuse a list of labels by position with another number of lines than there are images."""
    if labels != len(images):
        raise DatasetError(
            f"{path}: {labels:,} labels for {len(images):,} images, so it is not known which label is whose. Give all "
            "images of the list (and --limit or --classes for some of them), or a list of names and labels"
        )


def read_label_list(file: LabelFile) -> tuple[list[LabelEntry], str]:
    """Read a list of labels; also return words for the columns that its header names, '' where it has none.

    Raises DatasetError naming the line when it is no such list, or empty.
    """
    lines = file.text.splitlines()
    filled = next((line for line in lines if line.strip()), None)
    if filled is None:
        raise DatasetError(f"{file.path}: empty. Give a list with a line `name label` for each image")
    if _LONE_NUMBER.fullmatch(filled):
        return [_number(line, number, file.path) for number, line in enumerate(lines, 1) if line.strip()], ""
    words: dict[str, str] = {}  # one copy of each
    entries, columns, width, columns_note = list[LabelEntry](), None, 2, ""
    for line, row in _rows(lines, filled, file.path):
        if columns is None:
            columns = _header(row, f"{file.path}: line {line}")
            if columns is not None:
                width, columns_note = len(row), _columns_in_words(row, columns)
                continue
            columns = 0, 1
        name, label = (row[place].strip() for place in columns) if len(row) == width else ("", "")
        if not name:
            raise _bad_line(file.path, line, row)
        word = _word(label, file.path, line)
        entries.append(LabelEntry(line, name, words.setdefault(word, word)))
    with_suffix = [bool(entry.name) and str(entry.name).lower().endswith(SUFFIXES) for entry in entries]
    if len(entries) > 1 and not columns_note and not with_suffix[0] and all(with_suffix[1:]):
        raise _unknown_header(f"{file.path}: line {entries[0].line}", [str(entries[0].name), entries[0].label])
    if not entries:
        raise DatasetError(f"{file.path}: a header and no more. Give a list with a line `name,label` for each image")
    return entries, columns_note


def _number(text: str, line: int, path: Path) -> LabelEntry:
    if not _LONE_NUMBER.fullmatch(text):
        raise DatasetError(f"{path}: line {line} should be one number like the first, not {text!a:.80}. Mend the file")
    return LabelEntry(line, None, text.strip())


def _rows(lines: list[str], filled: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield number and fields of each line: CSV where the first line has a comma or a tab, else `name label`."""
    separator = next((mark for mark in ",\t" if mark in filled), None)
    if separator is None:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line.rsplit(None, 1)
        return
    reader = csv.reader(lines, delimiter=separator)
    try:
        for row in reader:
            if any(field.strip() for field in row):
                yield reader.line_num, row
    except csv.Error as error:
        raise DatasetError(f"{path}: line {reader.line_num} is no CSV ({error}). Mend the file") from error


def _header(row: list[str], place: str) -> tuple[int, int] | None:
    """Return the columns of names and labels where the first row is a header, None where it is not.

    Raises DatasetError where several columns may hold the one or the other, or a word of the header is not known.
    """
    words = [field.strip().casefold() for field in row]
    names = [column for column, word in enumerate(words) if word in _NAME_HEADERS]
    labels = [column for column, word in enumerate(words) if word in _LABEL_HEADERS]
    if len(labels) > 1:
        labels = [column for column in labels if words[column] != _ROW_NUMBER] or labels
    if names and labels:
        for columns, what in ((names, "names"), (labels, "labels")):
            if len(columns) > 1:
                both = " and ".join(repr(row[column].strip()) for column in columns)
                raise DatasetError(
                    f"{place}: the columns {both} may both hold the {what}. Take away all but the right one"
                )
        return names[0], labels[0]
    if (names or labels) and not any(word.endswith(SUFFIXES) for word in words):
        raise _unknown_header(place, row)
    return None


def _unknown_header(place: str, row: list[str]) -> DatasetError:
    return DatasetError(
        f"{place} looks like a header ({format_names(row)}), but does not say which columns hold names and labels. Known words "
        f"are {', '.join(sorted(_NAME_HEADERS))} for names, and {', '.join(sorted(_LABEL_HEADERS))} for labels. Begin "
        "the file with such a line"
    )


def _columns_in_words(row: list[str], columns: tuple[int, int]) -> str:
    name, label = (row[column].strip() for column in columns)
    rows = next((word for word in row if word.strip().casefold() == _ROW_NUMBER and word.strip() != label), None)
    aside = f"; {rows.strip()!r} counts the rows" if rows else ""
    return f" (columns {name!r} and {label!r}{aside})"


def _word(label: str, path: Path, line: int) -> str:
    """Return the word for the class in a field; of Kaggle's boxes the wnid that they share."""
    if not label:
        raise DatasetError(f"{path}: line {line} has no label. Give each image its label")
    words = label.split()
    if len(words) % _BOX or not all(words[place].isdigit() for place in range(1, _BOX)):
        return label
    different = sorted(set(words[::_BOX]))
    if len(different) > 1:
        raise DatasetError(
            f"{path}: line {line} has boxes of {len(different)} classes ({format_names(different)}), but an image has one "
            "label. Keep the one that is meant"
        )
    return words[0]


def _bad_line(path: Path, line: int, row: list[str]) -> DatasetError:
    return DatasetError(
        f"{path}: line {line} should be `name label` or `name,label`, not {','.join(row)!a:.80}. "
        "Mend it, or name the columns in a first line: name,label"
    )


def _match(entries: list[LabelEntry], images: Sequence[str], key: "_Key", path: Path) -> list[int]:
    """Return for each image the place of its entry; DatasetError where the two do not fit one to one."""
    place_of = {key(name): place for place, name in enumerate(images)}
    if len(place_of) < len(images):
        twice = next(name for name, count in Counter(map(key, images)).items() if count > 1)
        fix = "Rename one: only its accents are written another way" if key.composed else "Name them with folders"
        raise DatasetError(f"{path}: as it names images, several images are named {format_names([twice])}. {fix}")
    entry_of = [-1] * len(images)
    for number, entry in enumerate(entries):
        place = place_of.get(key(entry.name or ""))
        if place is None:
            strange = [e.name or "" for e in entries if key(e.name or "") not in place_of]
            raise DatasetError(
                f"{path}: line {entry.line} is the first of {len(strange):,} that name images which do not exist: "
                f"{format_names(strange)}. Restore the images, or take the lines away"
            )
        if entry_of[place] >= 0:
            raise DatasetError(
                f"{path}: line {entry.line} names {entry.name} a second time, after line "
                f"{entries[entry_of[place]].line}. Keep the right one"
            )
        entry_of[place] = number
    if missing := [name for name, number in zip(images, entry_of, strict=True) if number < 0]:
        raise DatasetError(
            f"{path}: no label for {len(missing):,} of {len(images):,} images: {format_names(missing)}. Add their lines, or "
            "take the images away"
        )
    return entry_of


@dataclass(frozen=True)
class _Key:
    """How names are compared: whole, or without something.

    under: a folder with which they may begin; base: without folders; stem: without suffix; composed: with accents in
    one form, whichever they have.
    """

    under: str = ""
    base: bool = False
    stem: bool = False
    composed: bool = False

    def __call__(self, name: str) -> str:
        name = name.replace("\\", "/").removeprefix("./").removeprefix(self.under)
        if self.composed:
            name = unicodedata.normalize("NFC", name)
        if self.base:
            name = name.rpartition("/")[2]
        if self.stem:
            beginning, _, suffix = name.rpartition(".")
            if beginning and f".{suffix.lower()}" in SUFFIXES:
                name = beginning
        return name


def _key_of_names(entries: list[LabelEntry], images: Sequence[str], subfolder: str, path: Path) -> _Key:
    """Choose the strictest way to compare names in which the list knows an image.

    Names with accents come decomposed from some file systems; where that alone keeps names apart, they are composed.
    """
    whole = [("", False), (f"{subfolder}/", False)] if subfolder else [("", False)]
    for composed in (False, True):
        for (under, base), stem in product([*whole, ("", True)], (False, True)):
            key = _Key(under, base, stem, composed)
            known = {key(name) for name in images}
            if any(key(entry.name or "") in known for entry in entries):
                strange = [entry.name or "" for entry in entries if key(entry.name or "") not in known]
                alike = replace(key, composed=True)
                return alike if strange and {alike(name) for name in images} & set(map(alike, strange)) else key
    raise DatasetError(
        f"{path}: names none of the {len(images):,} images ({format_names([entry.name or '' for entry in entries])} against "
        f"{format_names(images)}). Give the list of these images with --labels FILE"
    )
