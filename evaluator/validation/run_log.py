"""The log of a run folder, log.jsonl: where its dataset lay, so that its images can be found again.

It is told to the reader and never decides a result: what is damaged in it is as if it were not there.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prelunet.evaluator.datasets.dataset import DatasetSpec
from prelunet.evaluator.json_checks import (
    parse_json,
    require_bool,
    require_int,
    require_list,
    require_object,
    require_str,
)

LOG_FILE = "log.jsonl"
START_EVENTS = STARTED, RESUMED = "start", "resume"  # events that name the dataset


def find_dataset(folder: Path) -> DatasetSpec | None:
    """Return where the dataset of a run lay when it was last worked on, as log.jsonl tells; None if it does not."""
    entry = last_start_event(folder)
    try:
        return None if entry is None else spec_from_log(entry)
    except ValueError:
        return None


def spec_to_log(spec: DatasetSpec) -> dict[str, Any]:
    """Return what log.jsonl says of where a dataset lies, so that it can be opened again from anywhere."""
    return {
        "dataset": str(spec.path.resolve()),
        "labels": spec.labels and str(spec.labels.resolve()),
        "no_labels": spec.no_labels,
        "limit": spec.limit,
        "classes": list(spec.classes),
    }


def spec_from_log(entry: Mapping[str, Any]) -> DatasetSpec:
    """Read what `spec_to_log` wrote; ValueError when it is not that. What is not told is as `DatasetSpec` has it."""
    labels, limit = entry.get("labels"), entry.get("limit")
    return DatasetSpec(
        path=_path(entry.get("dataset"), "dataset"),
        labels=None if labels is None else _path(labels, "labels"),
        no_labels=require_bool(entry.get("no_labels", False), "no_labels"),
        limit=None if limit is None else require_int(limit, "limit", 1),
        classes=tuple(require_str(wnid, "a class") for wnid in require_list(entry.get("classes", []), "classes")),
    )


def _path(value: Any, what: str) -> Path:
    if b"\0" in os.fsencode(require_str(value, what)):  # a ValueError too where it is no text of this system
        raise ValueError(f"{what} should be a path")
    return Path(value)


def last_start_event(folder: Path) -> dict[str, Any] | None:
    """Return the last line of log.jsonl that tells of a start and where the dataset lay; None if there is none."""
    try:
        log = folder / LOG_FILE
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    except OSError:
        return None
    for line in reversed(lines):
        try:
            entry = require_object(parse_json(line), "it")
            if entry.get("event") in START_EVENTS and _path(entry.get("dataset"), "dataset"):
                return entry
        except ValueError:
            continue
    return None
