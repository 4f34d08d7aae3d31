"""Name maps: tables in TOML or JSON that map the tensor names of a file to those of a checkpoint.

    "features.0.*" = "conv1.*"      `*` matches one or more characters other than a dot,
    "module.**" = "**"              `**` any characters; on the right they stand for the matched text, in order
    "fc.weight" = "fc3.weight"      an exact name takes precedence over patterns, an earlier pattern over later ones
    "n_averaged" = ""               the tensor is omitted

Names that match no line are kept.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...evaluator.errors import UsageError, from_os_error
from ...evaluator.files import read_regular
from ...evaluator.json_checks import parse_json, require_object

_WILDCARD = re.compile(r"(\*\*|\*)")
_MATCHES = {"*": r"([^.]+)", "**": r"(.+)"}


@dataclass(frozen=True)
class Renamed:
    """source: name in the checkpoint → name in the file; left_out: omitted names of the file; faults: descriptions."""

    source: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class NameMap:
    """The lines of a table. Raises ValueError if the wildcards of the two sides of a line differ."""

    lines: Mapping[str, str]

    def __post_init__(self) -> None:
        for left, right in self.lines.items():
            if right and _WILDCARD.findall(left) != _WILDCARD.findall(right):
                raise ValueError(f'"{left}" = "{right}": the wildcards (*, **) should be the same on both sides')

    def rename(self, names: Iterable[str]) -> Renamed:
        """Rename the tensors of a file; a line that matches none of them and a duplicate result are faults."""
        patterns = {
            left: re.compile("".join(_MATCHES.get(p) or re.escape(p) for p in _WILDCARD.split(left)), re.DOTALL)
            for left in self.lines
            if "*" in left
        }
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
        faults += [f'no tensor matches "{line}" of the map' for line in self.lines if line not in used]
        return Renamed(source, tuple(left_out), tuple(faults))

    def _new_name(self, name: str, line: str, patterns: Mapping[str, re.Pattern[str]]) -> str:
        """Return the new name of a tensor, or an empty string if it is omitted."""
        found = patterns[line].fullmatch(name) if line in patterns else None
        parts = iter(found.groups() if found else ())
        return _WILDCARD.sub(lambda _: next(parts), self.lines[line])


def read_name_map(path: Path) -> NameMap:
    """Read a name map in TOML, or in JSON from a .json file; nested tables are names with dots.

    Raises UsageError for anything else.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise from_os_error(error) from error
    try:
        data = parse_json(content) if path.suffix == ".json" else tomllib.loads(content.decode("utf-8"))
        return NameMap(dict(_flatten(require_object(data, "it"))))
    except ValueError as error:
        raise UsageError(
            f'{path}: {error}. A name map is a table of lines such as "features.0.*" = "conv1.*" (docs/importing.md)'
        ) from error


def _flatten(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{before}{name}.")
        elif isinstance(value, str):
            yield before + name, value
        else:
            raise ValueError(f"{before}{name} should map to a name, which is a string")
