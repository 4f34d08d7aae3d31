"""What a training measures: errors on the validation split, and the log of a run."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evaluator.engine.scores import rank_of
from evaluator.errors import RunFolderError
from evaluator.files import write_atomically


@dataclass(frozen=True)
class Errors:
    """Errors in percent over the evaluated images, after `step` steps of training."""

    step: int
    top1_error: float
    top5_error: float

    def to_json(self) -> dict[str, Any]:
        """Return plain data for metrics.jsonl and `prelunet.metrics`."""
        return {"step": self.step, "top1_error": self.top1_error, "top5_error": self.top5_error}

    def __str__(self) -> str:
        return f"top-1 error {self.top1_error:.2f} % top-5 error {self.top5_error:.2f} %"


def ranks(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the rank of each true class, 1 for a hit.

    logits: (N, K); labels: (N,). As in a run folder: 1 + the classes that score higher, or the same with a lower index.
    """
    found = [rank_of(row, int(label)) for row, label in zip(logits, labels, strict=True)]
    return np.array(found, dtype=np.int64)


def errors_of(step: int, all_ranks: Iterable[npt.NDArray[np.int64]]) -> Errors:
    """Count the errors of a whole split, given the ranks of its batches."""
    rank = np.concatenate(list(all_ranks))
    return Errors(step, *(round(100 * float((rank > k).mean()), 4) for k in (1, 5)))


class MetricsLog:
    """metrics.jsonl: one line per measured point, in the order of steps, written as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def cut_after(self, step: int, *, evaluated: bool) -> None:
        """Take back the lines of steps that were lost with a crash and will be done again; a torn last line too.

        evaluated: whether the evaluation at `step` itself is part of the state that is resumed.
        """
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = []
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                done = entry["step"] < step or (entry["step"] == step and (evaluated or "top1_error" not in entry))
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):
                    break
                raise RunFolderError(f"{self.path}: line {number} is damaged. Start anew with --fresh") from error
            if done:
                kept.append(line + "\n")
        write_atomically(self.path, "".join(kept).encode())

    def write(self, entry: dict[str, Any]) -> None:
        """Append one line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")
