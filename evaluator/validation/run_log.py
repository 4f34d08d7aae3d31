"""The log of a run folder, log.jsonl. It records where the dataset was, so that its images can be found again.

The log is only for information and never affects a result. Damaged lines are ignored.
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
    """Return where the dataset was when the run was last started or resumed, None if log.jsonl does not say."""
    entry = last_start_event(folder)
    try:
        return None if entry is None else spec_from_log(entry)
    except ValueError:
        return None


def spec_to_log(spec: DatasetSpec) -> dict[str, Any]:
    """Return a dataset's location for log.jsonl, with absolute paths so that it can be opened from anywhere."""
    return {
        "dataset": str(spec.path.resolve()),
        "labels": spec.labels and str(spec.labels.resolve()),
        "no_labels": spec.no_labels,
        "limit": spec.limit,
        "classes": list(spec.classes),
    }


def spec_from_log(entry: Mapping[str, Any]) -> DatasetSpec:
    """Parse the output of `spec_to_log`; missing fields default as in `DatasetSpec`. Raises ValueError."""
    labels, limit = entry.get("labels"), entry.get("limit")
    return DatasetSpec(
        path=_path(entry.get("dataset"), "dataset"),
        labels=None if labels is None else _path(labels, "labels"),
        no_labels=require_bool(entry.get("no_labels", False), "no_labels"),
        limit=None if limit is None else require_int(limit, "limit", 1),
        classes=tuple(require_str(wnid, "a class") for wnid in require_list(entry.get("classes", []), "classes")),
    )


def _path(value: Any, what: str) -> Path:
    if b"\0" in os.fsencode(require_str(value, what)):  # also raises ValueError if it cannot be encoded
        raise ValueError(f"{what} should be a path")
    return Path(value)


def last_start_event(folder: Path) -> dict[str, Any] | None:
    """Return the last start or resume event in log.jsonl that names a dataset, or None."""
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
