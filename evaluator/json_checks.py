"""Strict checks of JSON data that others may have written.

Python's json module accepts NaN and infinity, keeps the last of repeated keys, treats `true` as 1, and overflows the
stack on deep nesting. The functions here raise a ValueError that says what is wrong; the caller adds the file.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

from msgspec import convert


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):  # 1e999
        raise ValueError(f"{digits[:20]} is not a finite number")
    return number


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # some readers would take the first value, others the last
        (repeated, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {repeated[:40]!a} occurs more than once in one object")
    return found


# The constants are NaN and the infinities.
_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite, object_pairs_hook=_no_repeats)


def parse_json(text: str | bytes, *, file_names: bool = False) -> Any:
    """Parse a JSON text in UTF-8.

    file_names: whether strings may hold bytes that are not UTF-8, as Python represents them in names of files.
    """
    text = text if isinstance(text, str) else text.decode("utf-8")
    try:
        value = _DECODER.decode(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape" if file_names else "strict")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("a string contains half a character (a lone surrogate)") from error
    return value


class Stored(Protocol):
    """A dataclass whose fields declare an object of a file."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        ...


_StoredT = TypeVar("_StoredT", bound=Stored)


def read_stored(data: Any, kind: type[_StoredT]) -> _StoredT:
    """Convert plain data to a declared type, which must write itself back equal: no key ignored, none assumed."""
    found = replace(convert(data, kind))  # msgspec leaves the default of a missing key in the class
    require_same(data, found.to_json())
    return found


def require_same(stated: Mapping[str, Any], written: Mapping[str, Any], place: str = "") -> None:
    """Refuse an object that would be written in another way, with the first key that differs. place: of the object."""
    for key in {**written, **stated}:
        if key not in stated:
            raise ValueError(f"no key '{place}{key}'")
        if key not in written:
            raise ValueError(f"unknown key {place + key[:40]!a}")
        there, here = stated[key], written[key]
        if isinstance(there, dict) and isinstance(here, dict):
            require_same(there, here, f"{place}{key}.")
        elif there != here:
            raise ValueError(f"'{place}{key}' is {_described(there)}, but should be {_described(here)}")


def require_object(value: Any, what: str) -> dict[str, Any]:
    """Return the value, a JSON object."""
    if type(value) is not dict:
        raise ValueError(f"{what} should be an object, not {_described(value)}")
    return value


def require_int(value: Any, what: str, low: int, high: int | None = None) -> int:
    """Return the value, an integer from low to high."""
    if type(value) is not int or value < low or (high is not None and value > high):
        limits = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise ValueError(f"{what} should be a whole number {limits}, not {_described(value)}")
    return value


def _described(value: Any) -> str:
    """Describe a value in a few words, without its nested contents, which could be very deep."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a huge number"
    return json.dumps(value, default=str)[:40]  # TOML has dates


# Differences between two pieces of JSON data, for error messages.


_SHOWN = 8  # lines


def differences(
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    *,
    ignored: Collection[tuple[str, ...]] = (),
    places: tuple[str, str] = ("in the folder", "now"),
) -> list[str]:
    """Compare two objects field by field; return one line for each difference.

    there: stored data; here: requested data; ignored: paths to skip, with all that is below them; places: words for
    there and here in a line.
    """
    before, now = dict(_flatten(there)), dict(_flatten(here))
    return [
        f"{'.'.join(key)}: {before.get(key, '(absent)')} {places[0]}, {now.get(key, '(absent)')} {places[1]}"
        for key in [*before, *(key for key in now if key not in before)]
        if before.get(key) != now.get(key) and not any(key[: len(path)] == path for path in ignored)
    ]


def format_differences(found: Sequence[str]) -> str:
    """Return the first eight differences as indented lines."""
    more = [f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "\n".join(f"  {line}" for line in [*found[:_SHOWN], *more])


def _flatten(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, leaf) for nested JSON data; lists of numbers are leaves."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        yield (*path, "length"), len(value)
        for index, inner in enumerate(value):
            yield from _flatten(inner, (*path, str(index)))
    else:
        yield path, value
