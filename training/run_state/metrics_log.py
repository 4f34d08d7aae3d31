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
        *lines, last = self.path.read_bytes().split(b"\n")
        if last and not last.startswith(b"{"):  # otherwise empty, or a line truncated by a crash
            lines.append(last)
        kept = []
        for number, line in enumerate(lines, start=1):
            try:
                entry = require_object(parse_json(line), "it")
                at = require_int(entry.get("step"), "step", 0)
            except ValueError as error:
                raise RunFolderError(
                    f"{self.path}: line {number} is damaged ({error}). Remove that line, or start over with --fresh"
                ) from error
            if at < step or (at == step and (evaluated or "top1_error" not in entry)):
                kept.append(line + b"\n")
        write_atomically(self.path, b"".join(kept))

    def write(self, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")
