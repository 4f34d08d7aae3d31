"""Rows → a Markdown table."""

from collections.abc import Iterable, Sequence
from typing import Any


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table; values are written as `cell` does."""
    lines = [header, ["---"] * len(header), *(list(map(cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """Return a value as a reader wants it: three digits, – for nothing, yes or no, 2x256x341 for a list."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return "x".join(map(str, value))
    if not isinstance(value, float):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
