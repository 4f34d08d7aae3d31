"""Amounts of memory as text: 900M, 1.5G."""

import math
import re

from .errors import UsageError

MAX_MEMORY = 2**60
_UNITS = "MGT"
_AMOUNT = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,6})?)(?P<unit>[MGTmgt])(?:iB|(?P<decimal>B))?", re.ASCII)


def parse_memory(text: str | None, option: str = "--memory-limit") -> int | None:
    """Parse an amount of memory to bytes: 900M, 6G or 1.5GiB in powers of 1024, 6GB in powers of 1000; None for None.

    Raises UsageError for anything else, so that 6 or 6Gb is not misread. option: named in the error.
    """
    if text is None:
        return None
    match = _AMOUNT.fullmatch(text)
    value = 0
    if match:
        power = _UNITS.index(match["unit"].upper()) + 2
        value = int(float(match["number"]) * (1000 if match["decimal"] else 1024) ** power)
    if not match or not 1 <= value <= MAX_MEMORY:
        raise UsageError(
            f"{option} {text}: not an amount of memory. Write it with its unit: 900M, 6G or 1.5GiB in powers of "
            "1024, 6GB in powers of 1000"
        )
    return value


def format_bytes(value: int) -> str:
    """Format an amount of memory to three digits, rounded up, in the units that `parse_memory` reads: 1.17G."""
    for power, unit in reversed(list(enumerate(_UNITS, 2))):
        if value >= 1024**power or power == 2:
            amount = value / 1024**power
            digits = 2 if amount <= 9.99 else 1 if amount <= 99.9 else 0
            return f"{math.ceil(amount * 10**digits) / 10**digits:.{digits}f}{unit}"
    raise AssertionError("unreachable: the smallest unit always applies")
