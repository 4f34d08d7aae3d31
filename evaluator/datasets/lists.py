"""Lists of labels: `name label` or `name,label` line by line, as Caffe's val.txt and Kaggle's LOC_val_solution.csv."""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluator.datasets.classes import ClassList
from evaluator.datasets.source import LabelFile, some
from evaluator.errors import DatasetError
from evaluator.imaging.decode import SUFFIXES

_NAME_HEADERS = {"name", "file", "filename", "file_name", "image", "imageid", "image_id", "path", "id"}
_LABEL_HEADERS = {"label", "wnid", "class", "predictionstring", "synset", "class_id", "index", "target"}
_BOX = 5  # words for a box in Kaggle's list: wnid and four sides
_LONE_NUMBER = re.compile(r"\s*-?\d+\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a list. name: of the image, None in a list of labels alone; label: a word for its class."""

    line: int
    name: str | None
    label: str


def labels_of_list(file: LabelFile, images: Sequence[str], classes: ClassList) -> tuple[list[int], list[str]]:
    """Return the label of each image as a list gives it, and what a person should know of it.

    images: names in sorted order. Raises DatasetError naming file, line and mend when the list cannot be read, gives
    labels to images that do not exist or twice, gives some images none, or has labels that are no class of the model.
    """
    entries = read_list(file)
    words: dict[str, str] = {}
    for entry in entries:
        words.setdefault(entry.label, f"{file.path}: line {entry.line}")
    meaning = classes.understand(words, of_all=entries[0].name is None)
    remarks = [f"labels from {file.path}, read as {meaning.kind}"]
    if entries[0].name is None:
        check_number(len(entries), images, file.path)
        remarks.append(f"{file.path} names no images: its line i is the label of the i-th name in sorted order")
        return [meaning.index[entry.label] for entry in entries], remarks
    places = _match(entries, images, file.path)
    return [meaning.index[entries[place].label] for place in places], remarks


def check_number(labels: int, images: Sequence[str], path: Path) -> None:
    """Refuse a list of labels by position with another number of lines than there are images."""
    if labels != len(images):
        raise DatasetError(
            f"{path}: {labels:,} labels for {len(images):,} images, so it is not known which label is whose. Give all "
            "images of the list (and --limit or --classes for some of them), or a list of names and labels"
        )


def read_list(file: LabelFile) -> list[Entry]:
    """Read a list of labels; DatasetError naming the line when it is none, or empty."""
    lines = file.text.splitlines()
    filled = next((line for line in lines if line.strip()), None)
    if filled is None:
        raise DatasetError(f"{file.path}: empty. Give a list with a line `name label` for each image")
    if _LONE_NUMBER.fullmatch(filled):
        return [_number(line, number, file.path) for number, line in enumerate(lines, 1) if line.strip()]
    words: dict[str, str] = {}  # one copy of each
    entries, columns, width = [], None, 2
    for line, row in _rows(lines, filled, file.path):
        if columns is None:
            columns = _header(row)
            if columns is not None:
                width = len(row)
                continue
            columns = 0, 1
        name, label = (row[place].strip() for place in columns) if len(row) == width else ("", "")
        if not name:
            raise _bad_line(file.path, line, row)
        word = _word(label, file.path, line)
        entries.append(Entry(line, name, words.setdefault(word, word)))
    if not entries:
        raise DatasetError(f"{file.path}: a header and no more. Give a list with a line `name,label` for each image")
    return entries


def _number(text: str, line: int, path: Path) -> Entry:
    if not _LONE_NUMBER.fullmatch(text):
        raise DatasetError(f"{path}: line {line} should be one number like the first, not {text!a:.80}. Mend the file")
    return Entry(line, None, text.strip())


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


def _header(row: list[str]) -> tuple[int, int] | None:
    """Return the columns of names and labels where a row is a header."""
    words = [field.strip().casefold() for field in row]
    names = [place for place, word in enumerate(words) if word in _NAME_HEADERS]
    labels = [place for place, word in enumerate(words) if word in _LABEL_HEADERS]
    return (names[0], labels[0]) if names and labels else None


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
            f"{path}: line {line} has boxes of {len(different)} classes ({some(different)}), but an image has one "
            "label. Keep the one that is meant"
        )
    return words[0]


def _bad_line(path: Path, line: int, row: list[str]) -> DatasetError:
    return DatasetError(
        f"{path}: line {line} should be `name label` or `name,label`, not {','.join(row)!a:.80}. "
        "Mend it, or name the columns in a first line: name,label"
    )


def _match(entries: list[Entry], images: Sequence[str], path: Path) -> list[int]:
    """Return for each image the place of its entry; DatasetError where the two do not fit one to one."""
    key = _key_of_names(entries, images, path)
    place_of = {key(name): place for place, name in enumerate(images)}
    if len(place_of) < len(images):
        twice = next(name for name, count in Counter(map(key, images)).items() if count > 1)
        raise DatasetError(
            f"{path}: names images without their folders, but several images are named {twice}. Name them with folders"
        )
    entry_of = [-1] * len(images)
    for number, entry in enumerate(entries):
        place = place_of.get(key(entry.name or ""))
        if place is None:
            strange = [e.name or "" for e in entries if key(e.name or "") not in place_of]
            raise DatasetError(
                f"{path}: line {entry.line} is the first of {len(strange):,} that name images which do not exist: "
                f"{some(strange)}. Restore the images, or take the lines away"
            )
        if entry_of[place] >= 0:
            raise DatasetError(
                f"{path}: line {entry.line} names {entry.name} a second time, after line "
                f"{entries[entry_of[place]].line}. Keep the right one"
            )
        entry_of[place] = number
    if lacking := [name for name, number in zip(images, entry_of, strict=True) if number < 0]:
        raise DatasetError(
            f"{path}: no label for {len(lacking):,} of {len(images):,} images: {some(lacking)}. Add their lines, or "
            "take the images away"
        )
    return entry_of


class _Key:
    """How names are compared: whole, without folders, or without folders and suffix."""

    def __init__(self, *, base: bool, stem: bool) -> None:
        self._base, self._stem = base, stem

    def __call__(self, name: str) -> str:
        name = name.replace("\\", "/").removeprefix("./")
        if self._base:
            name = name.rpartition("/")[2]
        if self._stem:
            beginning, _, suffix = name.rpartition(".")
            if beginning and f".{suffix.lower()}" in SUFFIXES:
                name = beginning
        return name


def _key_of_names(entries: list[Entry], images: Sequence[str], path: Path) -> _Key:
    """Choose the strictest way to compare names in which the list knows an image."""
    for base, stem in ((False, False), (False, True), (True, False), (True, True)):
        key = _Key(base=base, stem=stem)
        known = {key(name) for name in images}
        if any(key(entry.name or "") in known for entry in entries):
            return key
    raise DatasetError(
        f"{path}: names none of the {len(images):,} images ({some([entry.name or '' for entry in entries])} against "
        f"{some(images)}). Give the list of these images with --labels FILE"
    )
