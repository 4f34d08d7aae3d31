"""Name maps: from the names of somebody's tensors to those of a checkpoint, as a table in TOML or JSON.

    "features.0.*" = "conv1.*"      `*` stands for one or more characters, none of them a dot,
    "module.**" = "**"              `**` for any; on the right they are what they stood for on the left, in order
    "fc.weight" = "fc3.weight"      an exact name goes before patterns, an earlier pattern before a later one
    "n_averaged" = ""               nothing: this tensor is left out

Names that no line fits stay as they are.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prelunet.evaluator.errors import UsageError, from_os_error
from prelunet.evaluator.json_checks import check_plain, parse_json, require_object

_WILDCARD = re.compile(r"\*\*|\*")
_MATCHES = {"*": r"([^.]+)", "**": r"(.+)"}


@dataclass(frozen=True)
class Renamed:
    """theirs: our name → the name in the file; left_out: names in the file; faults: what cannot be, in words."""

    source: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class NameMap:
    """The lines of a table. Raises ValueError for one whose wildcards differ on its two sides."""

    lines: Mapping[str, str]

    def __post_init__(self) -> None:
        for left, right in self.lines.items():
            if right and _WILDCARD.findall(left) != _WILDCARD.findall(right):
                raise ValueError(f'"{left}" = "{right}": the wildcards (*, **) should be the same on both sides')

    def rename(self, names: Iterable[str]) -> Renamed:
        """Give names of a file ours; a line that fits none of them is a fault, and so is a name given twice."""
        patterns = {left: _as_pattern(left) for left in self.lines if "*" in left}
        source: dict[str, str] = {}
        left_out, faults, used = [], [], set()
        for name in names:
            line = name if name in self.lines else next((p for p in patterns if patterns[p].fullmatch(name)), None)
            new = name if line is None else self._new_name(name, line, patterns)
            if line is not None:
                used.add(line)
            if not new:
                left_out.append(name)
            elif new in source:
                faults.append(f"{source[new]} and {name} both become {new}")
            else:
                source[new] = name
        faults += [f'no tensor fits "{line}" of the map' for line in self.lines if line not in used]
        return Renamed(source, tuple(left_out), tuple(faults))

    def _new_name(self, name: str, line: str, patterns: Mapping[str, re.Pattern[str]]) -> str:
        """Return our name of a tensor; empty where it is left out."""
        found = patterns[line].fullmatch(name) if line in patterns else None
        parts = iter(found.groups() if found else ())
        return _WILDCARD.sub(lambda _: next(parts), self.lines[line])


def read_name_map(path: Path) -> NameMap:
    """Read a table from a .toml or .json file; tables inside tables are names with dots.

    Raises UsageError for anything that is no such table.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise from_os_error(error) from error
    try:
        if path.suffix not in {".toml", ".json"}:
            raise ValueError("its name should end in .toml or .json")
        data = parse_json(content) if path.suffix == ".json" else tomllib.loads(content.decode("utf-8"))
        check_plain(require_object(data, "it"))
        pairs = list(_flatten(data))
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name stands twice on the left")
        if not pairs:
            raise ValueError("it is empty")
        return NameMap(dict(pairs))
    except (ValueError, RecursionError) as error:  # tomllib has no limit of nesting
        raise UsageError(
            f'{path}: {error}. A name map is a table of lines such as "features.0.*" = "conv1.*" (docs/importing.md)'
        ) from error


def _as_pattern(left: str) -> re.Pattern[str]:
    between, wildcards = _WILDCARD.split(left), _WILDCARD.findall(left)
    parts = [re.escape(between[0])]
    for wildcard, text in zip(wildcards, between[1:], strict=True):
        parts += [_MATCHES[wildcard], re.escape(text)]
    return re.compile("".join(parts), re.DOTALL)


def _flatten(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{before}{name}.")
        elif isinstance(value, str):
            yield before + name, value
        else:
            raise ValueError(f"{before}{name} should become a name, that is a text")
