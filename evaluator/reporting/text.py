"""How reports write their numbers and files: one way for pages, charts and the terminal."""

import json
from typing import Any


def json_bytes(report: dict[str, Any]) -> bytes:
    """Return report.json or compare.json. ASCII only, so that no file name, however damaged, can spoil the encoding."""
    return (json.dumps(report, indent=1, allow_nan=False) + "\n").encode("ascii")


def signed(value: float, digits: int = 2, minus: str = "−") -> str:
    """Return a difference with its sign, and what rounds to 0 without any: `+0.12`, `−3.00`, `0.00`.

    minus: as wide as the plus, where the font has it; "-" for programs.
    """
    text = f"{abs(value):.{digits}f}"
    if not float(text):
        return text
    return f"{minus if value < 0 else '+'}{text}"
