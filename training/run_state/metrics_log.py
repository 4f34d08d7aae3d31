"""The metrics of a run: errors on the validation split, and metrics.jsonl."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...evaluator.errors import RunFolderError
from ...evaluator.files import write_atomically
from ...evaluator.json_checks import parse_json, require_int, require_object


@dataclass(frozen=True)
class ErrorRates:
    """Errors in percent over the evaluated images, after `step` steps of training.

    val_loss: mean cross-entropy of these images.
    """

    step: int
    top1_error: float
    top5_error: float
    val_loss: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"top-1 error {self.top1_error:.2f} % top-5 error {self.top5_error:.2f} %"


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log; an incomplete last one, as after a crash, is ignored.

    Raises RunFolderError for a line that is damaged.
    """
    entries = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            entry = require_object(parse_json(line), "it")
            require_int(entry.get("step"), "step", 0)
        except ValueError as error:
            raise RunFolderError(
                f"{path}: line {number} is damaged ({error}). Remove that line, or start over with train --fresh"
            ) from error
        entries.append(entry)
    return entries


class MetricsLog:
    """metrics.jsonl: one line per entry, in the order of steps, written immediately."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def truncate_after(self, step: int, *, evaluated: bool) -> None:
        """Remove the lines of steps after a resumed state, which will be repeated, and an incomplete last line.

        evaluated: whether the state includes the evaluation at `step`.
        """
        if not self.path.exists():
            return
        kept = [
            json.dumps(entry) + "\n"
            for entry in read_log(self.path)
            if entry["step"] < step or (entry["step"] == step and (evaluated or "top1_error" not in entry))
        ]
        write_atomically(self.path, "".join(kept).encode())

    def write(self, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")
