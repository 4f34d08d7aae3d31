"""Where a file may be written: not over one of those that it is made of."""

from collections.abc import Iterable
from pathlib import Path

from prelunet.evaluator.errors import UsageError


def check_not_input(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to write over an input, by whatever name or link it goes; UsageError."""
    for path in inputs:
        try:
            same = output.samefile(path)
        except (OSError, ValueError):  # one is not there, or no path at all, which whoever reads it will say
            continue
        if same:
            raise UsageError(f"{output}: is the input itself ({path}); choose another name")
