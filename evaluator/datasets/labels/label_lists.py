"""Read lists of labels with lines `name label` or `name,label`: Caffe's val.txt, Kaggle's LOC_val_solution.csv."""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ...errors import DatasetError
from ...imaging.decode import SUFFIXES
from ...json_checks import parse_json
from ..dataset import UNLABELLED
from ..sources.base import LabelFile, format_names
from .class_file import WNID
from .class_names import ClassList

_NAME_HEADERS = {"name", "file", "filename", "file_name", "image", "imageid", "image_id", "path", "id"}
_LABEL_HEADERS = {"label", "wnid", "class", "predictionstring", "synset", "class_id", "index", "target"}
_ROW_NUMBER = "index"  # pandas writes the row number under this name; others write the class
_BOX = 5  # words per box in Kaggle's list: wnid and four coordinates
_NUMBER = re.compile(r"-?\d+", re.ASCII)
_WORD = re.compile(r"[^\s,;]+")
_DIGITS = re.compile(r"(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class LabelEntry:
    """One line of a list. name: of the image, '' in a list of labels only; label: as written in the list."""

    line: int
    name: str
    label: str


def labels_of_list(
    file: LabelFile, images: Sequence[str], classes: ClassList, subfolder: str, *, listed_only: bool = False
) -> tuple[list[int], list[str]]:
    """Return the label of each image from a list, and remarks for the user.

    images: names in sorted order; subfolder: the folder of the dataset that contains them; listed_only: lines and
    images that do not match are left out; such an image gets UNLABELLED.
    Raises DatasetError, with file, line and fix, when the list cannot be read, labels an image that does not exist or
    labels one twice, leaves images without a label, or contains labels that are not classes of the model.
    """
    entries, columns = read_label_list(file)
    words: dict[str, str] = {}
    for entry in entries:
        words.setdefault(entry.label, f"{file.path}: line {entry.line}")
    by_position = not entries[0].name
    index, kind = classes.resolve_labels(words, by_position=by_position)
    remarks = [f"labels from {file.path}, read as {kind}{columns}"]
    if by_position:
        check_positions(len(entries), images, file.path)
        remarks.append(f"{file.path} contains no image names: line i is the label of the i-th name in sorted order")
        return [index[entry.label] for entry in entries], remarks
    key = _key_of_names(entries, images, subfolder, file.path)
    positions = _match(entries, images, key, file.path, listed_only=listed_only)
    missing, unlisted = len(entries) - sum(place >= 0 for place in positions), positions.count(-1)
    if missing or unlisted:
        left_out = f"{unlisted:,} images that it does not list, and {missing:,} lines without an image"
        remarks.append(f"{file.path}: left out {left_out}")
    return [index[entries[place].label] if place >= 0 else UNLABELLED for place in positions], remarks


def check_positions(labels: int, images: Sequence[str], path: Path) -> None:
    """Refuse a list of labels by position that is longer or shorter than the images, or whose order is not clear."""
    if labels != len(images):
        raise DatasetError(
            f"{path}: {labels:,} labels for {len(images):,} images, so labels cannot be matched to images by position. "
            "Use all images of the list, or a list of names and labels"
        )
    if (orders := orders_of(images)) is not None:
        raise DatasetError(
            f"{path}: line i is the label of the i-th image, but the order of the images is not clear: {orders}. Use a "
            "list of names and labels, or rename the images with leading zeros"
        )


def orders_of(names: Sequence[str]) -> str | None:
    """Return in words how sorted names would follow each other by their numbers, None if in the same order."""
    by_number = sorted(names, key=_by_number)
    if list(names) == by_number:
        return None
    first = next(place for place, pair in enumerate(zip(names, by_number, strict=True)) if pair[0] != pair[1])
    shown = slice(max(0, first - 1), first + 3)
    return f"as text {format_names(names[shown])}, but by number {format_names(by_number[shown])}"


def read_label_list(file: LabelFile) -> tuple[list[LabelEntry], str]:
    """Read a list of labels. Also return a note on the columns named by its header, '' without a header.

    Raises DatasetError, naming the line, when the list is malformed or empty.
    """
    lines = file.text.splitlines()
    filled = next((line for line in lines if line.strip()), None)
    if filled is None:
        raise DatasetError(f"{file.path}: empty. Use a list with a line `name label` for each image")
    if filled.lstrip()[:1] in {"{", "["}:
        return _read_json(file)
    if "\0" in filled:
        raise DatasetError(f"{file.path}: not UTF-8 text; perhaps UTF-16 without its mark. Save the list as UTF-8")
    for form, what in ((_NUMBER, "number"), (WNID, "wnid")):
        if form.fullmatch(filled.strip()):
            return _labels_alone(lines, form, what, file.path), ""
    if all(
        _WORD.fullmatch(line.strip()) and not line.strip().lower().endswith(SUFFIXES) for line in lines if line.strip()
    ):
        return _labels_alone(lines, _WORD, "class", file.path), ""
    return _read_table(lines, filled, file.path)


def _read_table(lines: list[str], filled: str, path: Path) -> tuple[list[LabelEntry], str]:
    """Read lines with a name and a label, as `read_label_list` returns them. filled: the first one."""
    words: dict[str, str] = {}  # keeps one copy of each label in memory
    entries, columns, width, columns_note = list[LabelEntry](), None, 2, ""
    for line, row in _rows(lines, filled, path):
        if columns is None:
            columns = _header(row, f"{path}: line {line}")
            if columns is not None:
                head, label_head = (row[column].strip() for column in columns)
                width, columns_note = len(row), f" (columns {head!r} and {label_head!r})"
                continue
            # With a box: as in Tiny-ImageNet's annotations.
            boxed = len(row) == 1 + _BOX and WNID.fullmatch(row[1]) and all(map(str.isdigit, row[2:]))
            columns, width = (0, 1), len(row) if boxed else 2
        name, label = (row[column].strip() for column in columns) if len(row) == width else ("", "")
        if not name:
            raise DatasetError(
                f"{path}: line {line} should be `name label` or `name,label`, not {','.join(row)!a:.80}. "
                "Fix the line, or name the columns in the first line: name,label"
            )
        word = _word(label, path, line)
        entries.append(LabelEntry(line, name, words.setdefault(word, word)))
    if not entries:
        raise DatasetError(f"{path}: contains only a header. Use a list with a line `name,label` for each image")
    return entries, columns_note


def _labels_alone(lines: Sequence[str], form: re.Pattern[str], what: str, path: Path) -> list[LabelEntry]:
    """Return the labels of a list that names no images. form, what: of each line."""
    entries = [LabelEntry(line, "", text.strip()) for line, text in enumerate(lines, 1) if text.strip()]
    if odd := next((entry for entry in entries if not form.fullmatch(entry.label)), None):
        raise DatasetError(
            f"{path}: line {odd.line} should be one {what}, like the first line, not {odd.label!a:.80}. Fix the file"
        )
    return entries


def _read_json(file: LabelFile) -> tuple[list[LabelEntry], str]:
    """Read a list in JSON: labels alone; an object from name to label; or objects, each with a name and a label, in a
    list or one a line (Hugging Face's metadata.jsonl). The line of an entry is its number.
    """
    try:
        try:
            data = parse_json(file.text, file_names=True)
        except ValueError:
            data = [parse_json(line, file_names=True) for line in file.text.splitlines() if line.strip()]
    except ValueError as error:
        raise DatasetError(f"{file.path}: neither JSON nor JSON in each line ({error}). Fix the file") from error
    if isinstance(data, dict) and not {*map(str.casefold, data)}.isdisjoint(_NAME_HEADERS):  # of a single line
        data = [data]
    rows, note = data if isinstance(data, list) else [], ""
    if isinstance(data, dict):
        pairs = list(data.items())
    elif not any(isinstance(row, dict) for row in rows):
        pairs = [(None, label) for label in rows]
    else:
        keys = list(rows[0]) if isinstance(rows[0], dict) else []
        if (columns := _header(keys, f"{file.path}: its first object")) is None:
            raise _no_list(file.path, 1)
        name, label = (keys[column] for column in columns)
        note = f" (keys {name!r} and {label!r})"
        pairs = [(row.get(name, ""), row.get(label)) if isinstance(row, dict) else ("", None) for row in rows]
    entries = []
    for number, (named, labeled) in enumerate(pairs, 1):
        if (named is not None and (not isinstance(named, str) or not named)) or type(labeled) not in {str, int}:
            raise _no_list(file.path, number)
        entries.append(LabelEntry(number, named or "", _word(str(labeled), file.path, number)))
    if not entries:
        raise DatasetError(f"{file.path}: empty. Use a list with a label for each image")
    return entries, note


def _no_list(path: Path, number: int) -> DatasetError:
    return DatasetError(
        f"{path}: entry {number} is no image with a label, and this is not a list of lists of class indices (ReaL). "
        'Use an object from image name to label, or one for each image, such as {"file_name": "a.jpg", "label": "cat"}'
    )


def _rows(lines: list[str], filled: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield number and fields of each line: CSV if the first line has `,`, a tab or `;`, otherwise `name label`."""
    separator = next((mark for mark in ",\t;" if mark in filled), None)
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
        raise DatasetError(f"{path}: line {reader.line_num} is not valid CSV ({error}). Fix the file") from error


def _header(row: list[str], place: str) -> tuple[int, int] | None:
    """Return the columns of names and labels if the first row is a header, otherwise None.

    Raises DatasetError if several columns could hold names or labels, or if the header does not name both.
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
                    f"{place}: the columns {both} could both hold the {what}. Remove all but the right one"
                )
        return names[0], labels[0]
    if (names or labels) and not any(word.endswith(SUFFIXES) for word in words):
        raise DatasetError(
            f"{place} looks like a header ({format_names(row)}), but does not say which columns hold names and labels. "
            f"Start the file with a header that uses one of {', '.join(sorted(_NAME_HEADERS))} for names, and one of "
            f"{', '.join(sorted(_LABEL_HEADERS))} for labels"
        )
    return None


def _word(label: str, path: Path, line: int) -> str:
    """Return the label in a field; for Kaggle's boxes, the wnid that they share."""
    if not label.strip():
        raise DatasetError(f"{path}: line {line} has no label. Add a label for each image")
    words = label.split()
    if len(words) % _BOX or not all(words[number].isdigit() for number in range(1, _BOX)):
        return label
    different = sorted(set(words[::_BOX]))
    if len(different) > 1:
        raise DatasetError(
            f"{path}: line {line} has boxes of {len(different)} classes ({format_names(different)}), but an image has "
            "one label. Keep the right one"
        )
    return words[0]


def _match(
    entries: list[LabelEntry], images: Sequence[str], key: "_Key", path: Path, *, listed_only: bool
) -> list[int]:
    """Return the position of each image's entry, -1 if it has none.

    Raises DatasetError unless entries and images match one to one, or, with listed_only, at most one.
    """
    position_of = {key(name): position for position, name in enumerate(images)}
    if len(position_of) < len(images):
        twice = next(name for name, count in Counter(map(key, images)).items() if count > 1)
        parts = "suffixes" if key.stem else "folders"
        raise DatasetError(f"{path}: several images match the name {format_names([twice])}. Name them with {parts}")
    entry_of = [-1] * len(images)
    for number, entry in enumerate(entries):
        position = position_of.get(key(entry.name))
        if position is None and listed_only:
            continue
        if position is None:
            unknown = [e.name for e in entries if key(e.name) not in position_of]
            raise DatasetError(
                f"{path}: line {entry.line} is the first of {len(unknown):,} lines that name missing images: "
                f"{format_names(unknown)}. Restore the images, or remove the lines, or use --listed-only"
            )
        if entry_of[position] >= 0:
            raise DatasetError(
                f"{path}: line {entry.line} names {entry.name} a second time, after line "
                f"{entries[entry_of[position]].line}. Keep only the right one"
            )
        entry_of[position] = number
    missing = [name for name, number in zip(images, entry_of, strict=True) if number < 0]
    if missing and not listed_only:
        raise DatasetError(
            f"{path}: no label for {len(missing):,} of {len(images):,} images: {format_names(missing)}. Add lines for "
            "them, remove the images, or use --listed-only"
        )
    return entry_of


def _by_number(name: str) -> list[str | tuple[int, str]]:
    """Return the parts of a name between and of digits, the latter so that they compare as numbers."""
    parts = enumerate(_DIGITS.split(name))
    return [(len(part.lstrip("0")), part.lstrip("0")) if place % 2 else part for place, part in parts]


@dataclass(frozen=True)
class _Key:
    """How names are compared.

    under: folder to remove from the start; base: ignore folders; stem: ignore the image suffix.
    """

    under: str = ""
    base: bool = False
    stem: bool = False

    def __call__(self, name: str) -> str:
        name = name.replace("\\", "/").removeprefix("./").removeprefix(self.under)
        if self.base:
            name = name.rpartition("/")[2]
        if self.stem:
            stem, _, suffix = name.rpartition(".")
            if stem and f".{suffix.lower()}" in SUFFIXES:
                name = stem
        return name


def _key_of_names(entries: list[LabelEntry], images: Sequence[str], subfolder: str, path: Path) -> _Key:
    """Choose the strictest comparison under which at least one entry matches an image."""
    listed = [entry.name for entry in entries]
    with_folders = [("", False), (f"{subfolder}/", False)] if subfolder else [("", False)]
    for (under, base), stem in product([*with_folders, ("", True)], (False, True)):
        key = _Key(under, base, stem)
        if not set(map(key, images)).isdisjoint(map(key, listed)):
            return key
    raise DatasetError(
        f"{path}: names none of the {len(images):,} images (it lists {format_names(listed)}; the images are "
        f"{format_names(images)}). Pass the list for these images with --labels FILE"
    )
