"""The class list of a net that is made or adopted: text or JSON, in the forms in which people have them.

Text, one class a line: `wnid<TAB>name`; `wnid name` where every line begins with a wnid (n and eight digits); else the
whole line is the name. JSON: a list of names, a list of {"wnid", "name"}, or an object from class index to
[wnid, name] (imagenet_class_index.json) or to the name.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets.labels.class_names import WNID
from prelunet.evaluator.errors import UsageError, from_os_error
from prelunet.evaluator.json_checks import parse_json, require_keys, require_list, require_str

MAX_CLASSES = 100_000  # a typing error beyond this would ask for more memory than machines have


def read_class_list(path: Path) -> tuple[ClassEntry, ...]:
    """Read a class list; the class index is the place in it.

    A class without a wnid gets its name as one; where several have that name, each with its class index behind, as
    `crane (134)`. Raises UsageError for anything that is no class list, naming the line, for a wnid given twice, and
    for more than MAX_CLASSES.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise from_os_error(error) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start}), so no class list. Save it as UTF-8") from error
    try:
        pairs = _from_json(parse_json(content)) if content.lstrip()[:1] in {"[", "{"} else _from_lines(content)
        return _entries(pairs)
    except ValueError as error:
        raise UsageError(
            f"{path}: {error}. A class list is text, one class a line (wnid and name, or the name), or JSON"
        ) from error


def _from_lines(content: str) -> list[tuple[str, str]]:
    """Return (wnid, name) of each line; the wnid is empty where there is none."""
    lines = [line.strip() for line in content.rstrip().split("\n")]
    if "" in lines:
        raise ValueError(f"line {lines.index('') + 1} is empty")
    if _alike("has a tab", ["\t" in line for line in lines]):
        separator = "\t"
    elif _alike("begins with a wnid", [bool(WNID.fullmatch(line.split()[0])) for line in lines]):
        separator = " "
    else:
        return [("", line) for line in lines]
    parts = (line.partition(separator) for line in lines)
    return [(wnid.strip(), name.strip() or wnid.strip()) for wnid, _, name in parts]


def _alike(what: str, of_lines: Sequence[bool]) -> bool:
    """Return what is true of every line; ValueError where it is true of some."""
    if len(set(of_lines)) > 1:
        first, other = ("line 1", f"line {of_lines.index(False) + 1}")
        if not of_lines[0]:
            first, other = f"line {of_lines.index(True) + 1}", "line 1"
        raise ValueError(f"{first} {what}, but {other} does not")
    return of_lines[0]


def _from_json(data: Any) -> list[tuple[str, str]]:
    """Return (wnid, name) of each class of parsed JSON; the wnid is empty where there is none."""
    if isinstance(data, dict):
        expected = [str(index) for index in range(len(data))]
        if missing := sorted(set(expected) - data.keys(), key=int):
            raise ValueError(f"of {len(data)} classes, class index {missing[0]} is missing")
        return [_class_from_json(data[index], f"class {index}") for index in expected]
    return [_class_from_json(value, f"class {index}") for index, value in enumerate(require_list(data, "it"))]


def _class_from_json(value: Any, what: str) -> tuple[str, str]:
    if isinstance(value, str):
        return "", value
    if isinstance(value, dict):
        entry = require_keys(value, what, {"wnid", "name"})
        return require_str(entry["wnid"], f"wnid of {what}"), require_str(entry["name"], f"name of {what}")
    pair = [require_str(part, what) for part in require_list(value, what)]
    if len(pair) != 2:
        raise ValueError(f"{what} should be a name, or a wnid and a name, not {len(pair)} texts")
    return pair[0], pair[1]


def _entries(pairs: Sequence[tuple[str, str]]) -> tuple[ClassEntry, ...]:
    """Give each class a wnid; ValueError for none at all, an empty one, one that is given twice."""
    if not pairs:
        raise ValueError("no class is listed")
    if len(pairs) > MAX_CLASSES:
        raise ValueError(f"{len(pairs)} classes, but a net has 1 to {MAX_CLASSES}")
    names = Counter(name for wnid, name in pairs if not wnid)
    first: dict[str, int] = {}
    entries = []
    for index, (given, name) in enumerate(pairs):
        wnid = given or (name if names[name] == 1 else f"{name} ({index})")
        if not wnid.strip():
            raise ValueError(f"class {index} has neither a wnid nor a name")
        if wnid in first:
            raise ValueError(f"class {index} repeats the wnid {wnid} of class {first[wnid]}; remove one")
        first[wnid] = index
        entries.append(ClassEntry(wnid, name))
    return tuple(entries)
