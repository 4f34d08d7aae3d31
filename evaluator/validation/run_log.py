"""The log of a run folder, log.jsonl. It records where the dataset was, so that its images can be found again.

The log is only for information and never affects a result. Damaged lines are ignored.
"""

import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, convert

from ..datasets.dataset import DatasetSpec
from ..datasets.labels.real_labels import IMAGENET_REAL
from ..json_checks import parse_json

LOG_FILE = "log.jsonl"
STARTED, RESUMED = "start", "resume"  # events that name the dataset


class _StartEvent(Struct):
    event: Literal["start", "resume"]
    dataset: str
    labels: str | None = None
    no_labels: bool = False
    limit: Annotated[int, Meta(ge=1)] | None = None
    classes: tuple[str, ...] = ()
    listed_only: bool = False
    first_random: tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=0)]] | None = None


class _Event(Struct):
    date: datetime
    images: Annotated[int, Meta(ge=0)] = 0  # of a chunk, as are its seconds
    seconds: Annotated[float, Meta(ge=0)] = 0.0


def speed_and_date(log: Iterable[bytes]) -> tuple[float | None, datetime | None]:
    """Return the images per second over all chunks, and the date of the last event; None if the log does not say."""
    images, seconds, date = 0, 0.0, None
    for line in log:
        try:
            event = convert(parse_json(line, file_names=True), _Event)
        except ValueError:
            continue
        images, seconds, date = images + event.images, seconds + event.seconds, event.date
    return (images / seconds if images and seconds else None), date


def find_dataset(folder: Path) -> DatasetSpec | None:
    """Return where the dataset was when the run was last started or resumed, None if log.jsonl does not say."""
    try:
        log = folder / LOG_FILE
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    except OSError:
        return None
    for line in reversed(lines):
        try:
            start = convert(parse_json(line, file_names=True), _StartEvent)
            labels = None if start.labels is None else _path(start.labels)
            return DatasetSpec(
                _path(start.dataset), labels, start.no_labels, start.limit, start.classes,
                listed_only=start.listed_only, first_random=start.first_random,
            )  # fmt: skip
        except ValueError:
            continue
    return None


def _path(text: str) -> Path:
    if b"\0" in os.fsencode(text):  # also raises ValueError if it cannot be encoded
        raise ValueError("a path should not contain a zero byte")
    return Path(text)


def spec_to_log(spec: DatasetSpec) -> dict[str, Any]:
    """Return what `find_dataset` reads, with absolute paths so that the dataset can be opened from anywhere."""
    return {
        "dataset": str(spec.path.resolve()),
        "labels": spec.labels and str(spec.labels if spec.labels == IMAGENET_REAL else spec.labels.resolve()),
        "no_labels": spec.no_labels,
        "limit": spec.limit,
        "classes": list(spec.classes),
        "listed_only": spec.listed_only,
        **({} if spec.first_random is None else {"first_random": list(spec.first_random)}),
    }
