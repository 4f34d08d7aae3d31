"""How two pieces of JSON data differ, for people who are refused because of it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

_SHOWN = 8  # lines


def differences(
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    *,
    ignored: Collection[tuple[str, ...]] = (),
    places: tuple[str, str] = ("in the folder", "now"),
) -> list[str]:
    """Compare field by field; one line for each that differs.

    there: in a folder; here: asked for; ignored: paths; places: how a line calls there and here.
    """
    before, now = dict(_flatten(there)), dict(_flatten(here))
    return [
        f"{'.'.join(key)}: {before.get(key, '(absent)')} {places[0]}, {now.get(key, '(absent)')} {places[1]}"
        for key in [*before, *(key for key in now if key not in before)]
        if key not in ignored and before.get(key) != now.get(key)
    ]


def shown(found: Sequence[str]) -> str:
    """Return differences as indented lines, the first eight of them."""
    more = [f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "\n".join(f"  {line}" for line in [*found[:_SHOWN], *more])


def _flatten(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, leaf) of nested JSON data; lists of numbers are leaves."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        yield (*path, "length"), len(value)
        for index, inner in enumerate(value):
            yield from _flatten(inner, (*path, str(index)))
    else:
        yield path, value
