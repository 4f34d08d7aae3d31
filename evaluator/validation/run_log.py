"""The log of a run folder, log.jsonl: where its dataset lay, so that its images can be found again.

It is told to the reader and never decides a result: what is damaged in it is as if it were not there.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prelunet.evaluator.datasets.dataset import DatasetPlace
from prelunet.evaluator.json_checks import a_list, an_object, flag, parse_json, text, whole

LOG_FILE = "log.jsonl"
BEGINNINGS = STARTED, RESUMED = "start", "resume"  # events that name the dataset


def find_dataset(folder: Path) -> DatasetPlace | None:
    """Return where the dataset of a run lay when it was last worked on, as log.jsonl tells; None if it does not."""
    entry = last_beginning(folder)
    try:
        return None if entry is None else place_from_log(entry)
    except ValueError:
        return None


def place_to_log(place: DatasetPlace) -> dict[str, Any]:
    """Return what log.jsonl says of where a dataset lies, so that it can be opened again from anywhere."""
    return {
        "dataset": str(place.path.resolve()),
        "labels": place.labels and str(place.labels.resolve()),
        "no_labels": place.no_labels,
        "limit": place.limit,
        "classes": list(place.classes),
    }


def place_from_log(entry: Mapping[str, Any]) -> DatasetPlace:
    """Read what `place_to_log` wrote; ValueError when it is not that. What is not told is as `DatasetPlace` has it."""
    labels, limit = entry.get("labels"), entry.get("limit")
    return DatasetPlace(
        path=_path(entry.get("dataset"), "dataset"),
        labels=None if labels is None else _path(labels, "labels"),
        no_labels=flag(entry.get("no_labels", False), "no_labels"),
        limit=None if limit is None else whole(limit, "limit", 1),
        classes=tuple(text(wnid, "a class") for wnid in a_list(entry.get("classes", []), "classes")),
    )


def _path(value: Any, what: str) -> Path:
    if b"\0" in os.fsencode(text(value, what)):  # a ValueError too where it is no text of this system
        raise ValueError(f"{what} should be a path")
    return Path(value)


def last_beginning(folder: Path) -> dict[str, Any] | None:
    """Return the last line of log.jsonl that tells of a start and where the dataset lay; None if there is none."""
    try:
        log = folder / LOG_FILE
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    except OSError:
        return None
    for line in reversed(lines):
        try:
            entry = an_object(parse_json(line), "it")
            if entry.get("event") in BEGINNINGS and _path(entry.get("dataset"), "dataset"):
                return entry
        except ValueError:
            continue
    return None
