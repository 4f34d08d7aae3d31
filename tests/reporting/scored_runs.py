"""Run folders with stored scores, written without the code of the program."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prelunet.evaluator.validation.run import Run
from tests.helpers.run_folders import VIEWS, refused, write_run

CLASSES = [{"wnid": f"n{index:02}", "name": f"class {index}"} for index in range(7)]


def random_scores(seed: int, images: int, classes: int = 7) -> np.ndarray:
    """Return probabilities of images; all are equal in every seventh image, two tie in every fifth."""
    logits = np.random.default_rng(seed).normal(scale=2, size=(images, classes))
    logits[::7] = 0
    logits[::5, 1] = logits[::5, 4]
    powers = np.exp(logits)
    return (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)


def best_first(row: np.ndarray) -> list[int]:
    """Return the class indices of one row, best first; ties by index."""
    return sorted(range(len(row)), key=lambda index: (-float(row[index]), index))


def write_scored_run(
    folder: Path,
    scores: np.ndarray,
    labels: Sequence[int | None],
    *,
    refusals: Mapping[int, str] | None = None,
    files: Sequence[str] | None = None,
    classes: Sequence[dict[str, str]] = CLASSES,
    model: Mapping[str, str] | None = None,
    changes: Mapping[str, Any] | None = None,
    data: str | None = None,
) -> Path:
    """Write a finished run. refusals: image → reason; model: fields of its description; changes: to run.json."""
    refusals = refusals or {}
    files = files or [f"val/{index:05}.png" for index in range(len(scores))]
    scores = scores.astype("<f4")
    lines = []
    for index, (file, label, row) in enumerate(zip(files, labels, scores, strict=True)):
        if index in refusals:
            row[:] = np.nan
            lines.append({**refused(file, 0, refusals[index]), "label": label})
            continue
        order = best_first(row)
        rank = None if label is None else 1 + order.index(label)
        lines.append(
            {
                "file": file,
                "label": label,
                "top": [[best, float(str(row[best]))] for best in order[:5]],
                "rank": rank,
                "view_ranks": [] if rank is None else [rank] * len(VIEWS),
                "capped": index % 11 == 3,
            }
        )
    write_run(folder, lines, classes=classes, data=data)
    run = json.loads((folder / "run.json").read_text())
    run = {**run, "model": {**run["model"], **(model or {})}, **(changes or {})}
    (folder / "run.json").write_text(json.dumps(run))
    np.save(folder / "scores.f32.npy", scores)
    return folder


def check_agreement(run: Run) -> None:
    """Compare each line of a run with its row of stored scores, among the classes to which the run is restricted."""
    assert run.folder is not None
    among = list(run.info.candidates or range(len(run.info.classes)))
    for line, row in zip(run.predictions, np.load(run.folder / "scores.f32.npy"), strict=True):
        assert np.isnan(row).all() == (line.refused is not None)
        if line.refused is None:
            chosen = row[among].astype(np.float64)
            scores = (chosen / chosen.sum() if run.info.candidates else chosen).astype(np.float32)
            assert [(among[best], float(str(scores[best]))) for best in best_first(scores)[:5]] == list(line.top)


def changed_info(folder: Path, *path: str, value: Any) -> None:
    """Set one value of run.json, given by its keys."""
    info = json.loads((folder / "run.json").read_text())
    inner = info
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (folder / "run.json").write_text(json.dumps(info))
