"""Read the class list of a new or imported net from text, JSON or YAML, in the usual formats.

Text has one class per line: `wnid<TAB>name`; `wnid name` if every line starts with a wnid (n and eight digits); class
index and name, in either order; else the whole line is the name. JSON: a list of names, a list of {"wnid", "name"}, an
object from class index to [wnid, name] (imagenet_class_index.json) or to the name, or from name to class index
(torchvision's class_to_idx, Keras's class_indices); a config.json of Hugging Face, with `id2label`. Python's notation
of the same, and YAML with `names:` (Ultralytics).
"""

import ast
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, convert

from ...contract import ClassEntry
from ...errors import UsageError, from_os_error
from ...files import read_regular
from ...json_checks import parse_json
from ..sources.base import UTF_16

WNID = re.compile(r"n\d{8}", re.ASCII)  # of ImageNet
IMAGENET_1K = "imagenet-1k"  # the name of the built-in list: ImageNet's 1000 classes in sorted wnid order
MAX_CLASSES = 100_000  # a typo beyond this would request more memory than machines have
_LISTS = ("id2label", "label_names", "names")  # the key of the classes in files of Hugging Face, timm and Ultralytics
_YAML_NAMES = re.compile(r"^names\s*:", re.MULTILINE)
_NUMBERED = (
    re.compile(r"(?P<index>\d{1,6})\s*[,;:\t]\s*(?P<name>\S.*)", re.ASCII),
    re.compile(r"(?P<name>.*\S)\s*[,;\t]\s*(?P<index>\d{1,6})", re.ASCII),
)
_NUMBER_AND_NAME = re.compile(r"(?P<index>\d{1,6}) +(?P<name>\S.*)", re.ASCII)  # perhaps only a name, such as 2 euro


class _Class(Struct, forbid_unknown_fields=True):
    wnid: str
    name: str


def read_class_list(path: Path) -> tuple[ClassEntry, ...]:
    """Read a class list, or the built-in one for the path `imagenet-1k`; the position in the list is the class index.

    Raises UsageError, naming the line, for a file that cannot be read, and as `parse_class_list` does.
    """
    if str(path) == IMAGENET_1K:
        path = Path(__file__).with_name(f"{IMAGENET_1K}.txt")
    try:
        data = read_regular(path)
        content = data.decode("utf-16" if data.startswith(UTF_16) else "utf-8-sig")
        content = content.replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError as error:
        raise UsageError(
            f"{path}: no such file. Give an existing class list, or {IMAGENET_1K} for ImageNet's 1000 classes"
        ) from error
    except OSError as error:
        raise from_os_error(error) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start}). Save the class list as UTF-8") from error
    return parse_class_list(content, str(path))


def parse_class_list(content: str, where: str) -> tuple[ClassEntry, ...]:
    """Parse the content of a class list. where: names it in errors.

    A class without a wnid uses its name as the wnid; if several classes share that name, the class index is appended,
    as in `crane (134)`. Raises UsageError, naming the line, for a malformed list, a repeated wnid, and more than
    MAX_CLASSES classes.
    """
    try:
        if content.lstrip()[:1] in {"[", "{"}:
            return _entries(_from_data(_parsed(content)))
        if _YAML_NAMES.search(content):
            return _entries(_from_data(_parsed_yaml(content)))
        return _entries(_from_lines(content))
    except ValueError as error:
        raise UsageError(
            f"{where}: {error}. Use text with one class per line (wnid and name, or only the name), or JSON"
        ) from error


def _parsed(content: str) -> Any:
    """Parse JSON, or the same in Python's notation."""
    try:
        return parse_json(content)
    except ValueError:
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return ast.literal_eval(content.strip())
        raise


def _parsed_yaml(content: str) -> Any:
    """Parse YAML, in which all values are strings: as YAML has it, a class called `no` would be false."""
    import yaml

    try:
        return yaml.load(content, yaml.BaseLoader)  # noqa: S506 - it creates only strings, lists and dicts
    except (yaml.YAMLError, RecursionError, OverflowError, ValueError) as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())[:200]}") from None


def _from_lines(content: str) -> list[tuple[str, str]]:
    """Return (wnid, name) for each line; the wnid is empty if the line has none."""
    lines = [line.strip() for line in content.rstrip().split("\n")]
    if "" in lines:
        raise ValueError(f"line {lines.index('') + 1} is empty")
    for form in (*_NUMBERED, _NUMBER_AND_NAME):
        matches = [match for line in lines if (match := form.fullmatch(line)) is not None]
        numbered = [(match["name"], int(match["index"])) for match in matches]
        in_use = form in _NUMBERED or sorted(index for _, index in numbered) == [*range(len(lines))]
        if len(numbered) == len(lines) and in_use:
            return [("", name) for name in _by_index(numbered)]
    if _holds_for_all("has a tab", ["\t" in line for line in lines]):
        separator = "\t"
    elif _holds_for_all("begins with a wnid", [bool(WNID.fullmatch(line.split()[0])) for line in lines]):
        separator = " "
    else:
        return [("", line) for line in lines]
    parts = (line.partition(separator) for line in lines)
    return [(wnid.strip(), name.strip() or wnid.strip()) for wnid, _, name in parts]


def _holds_for_all(what: str, by_line: Sequence[bool]) -> bool:
    """Return whether a property holds for every line. Raises ValueError if it holds only for some."""
    if len(set(by_line)) > 1:
        raise ValueError(f"line {by_line.index(True) + 1} {what}, but line {by_line.index(False) + 1} does not")
    return by_line[0]


def _by_index(numbered: Sequence[tuple[str, int]]) -> list[str]:
    """Return names in the order of their numbers; ValueError unless these are class indices."""
    names = dict.fromkeys(range(len(numbered)), "")
    for name, index in numbered:
        if names.get(index) != "":
            expected = f"from 0 to {len(numbered) - 1}, each once"
            raise ValueError(f"'{name[:40]}' has the number {index}, but {len(numbered)} class indices go {expected}")
        names[index] = name
    return list(names.values())


def _from_data(data: Any) -> list[tuple[str, str]]:
    """Return (wnid, name) for each class in parsed JSON or YAML; the wnid is empty if the class has none."""
    if isinstance(data, dict):
        data = next((data[key] for key in _LISTS if isinstance(data.get(key), dict | list)), data)
    if isinstance(data, dict) and data and all(type(value) is int for value in data.values()):
        data = _by_index([(str(name), index) for name, index in data.items()])
    elif isinstance(data, dict):
        data = {str(index): value for index, value in data.items()}
        expected = [str(index) for index in range(len(data))]
        if missing := sorted(set(expected) - data.keys(), key=int):
            raise ValueError(f"class index {missing[0]} of {len(data)} classes is missing")
        data = [data[index] for index in expected]
    pairs = []
    for value in convert(data, list[str | tuple[str, str] | _Class]):
        if isinstance(value, str):
            pairs.append(("", value))
        else:
            pairs.append(value if isinstance(value, tuple) else (value.wnid, value.name))
    return pairs


def _entries(pairs: Sequence[tuple[str, str]]) -> tuple[ClassEntry, ...]:
    """Give each class a wnid. Raises ValueError for an empty list, an empty wnid or a repeated wnid."""
    if not pairs:
        raise ValueError("lists no classes")
    if len(pairs) > MAX_CLASSES:
        raise ValueError(f"{len(pairs)} classes, but a net has 1 to {MAX_CLASSES}")
    names = Counter(name for wnid, name in pairs if not wnid)
    first: dict[str, int] = {}
    entries = []
    for index, (listed, name) in enumerate(pairs):
        wnid = listed or (name if names[name] == 1 else f"{name} ({index})")
        if not wnid.strip():
            raise ValueError(f"class {index} has neither a wnid nor a name")
        if wnid in first:
            raise ValueError(f"class {index} repeats the wnid {wnid} of class {first[wnid]}; remove one")
        first[wnid] = index
        entries.append(ClassEntry(wnid, name))
    return tuple(entries)
