"""Where a file may be written: not over one of those that it is made of."""

import os
from collections.abc import Iterable
from pathlib import Path

from evaluator.errors import UsageError


def check_not_input(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to write over an input, by whatever name or link it goes; UsageError."""
    for path in inputs:
        try:
            same = os.path.samefile(output, path)
        except OSError:  # one of them is not there, which whoever reads it will say
            continue
        if same:
            raise UsageError(f"{output}: is the input itself ({path}); choose another name")
