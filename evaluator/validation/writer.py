"""Write a run folder so that the process can be killed at any moment and the run can be resumed.

run.json is written first, atomically. A chunk is done when its lines are on disk; its scores are written before them.
When the run is opened again, everything after the last complete chunk is truncated. Files that are not the run's are
never touched. Only one process writes at a time: it holds a lock on the folder, which the system releases when the
process dies.
"""

import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..datasets.dataset import Sample
from ..errors import EnvironmentFault, RunFolderError, from_os_error
from ..files import (
    create_folder,
    leftovers,
    locked_folder,
    open_regular,
    remove_leftovers,
    write_atomically,
)
from ..json_checks import differences, format_differences
from .predictions import Prediction, parse_prediction
from .run import (
    HEAT_MAPS_FILE,
    PREDICTIONS_FILE,
    RUN_FILE,
    SCORES_FILE,
    RunInfo,
    is_run_folder,
    read_run_info,
)
from .run_log import LOG_FILE

# Reports of a run, deleted when it is started over.
_REPORTS = ("report/report.json", "report/classes.csv", "report/report.html", "report/compared-with-*/compare.*")
_ATOMIC_FILES = (RUN_FILE, PREDICTIONS_FILE, SCORES_FILE)  # written by `write_atomically`
# Keys of run.json that are only descriptive: a renamed file is the same file, the fingerprint covers the data, and the
# model's sha256 its checkpoint and provenance, which runs of earlier versions lack.
DESCRIPTIVE_KEYS = {
    ("model", "file"),
    ("model", "provenance"),
    ("model", "checkpoint_sha256"),
    ("dataset", "name"),
    ("dataset", "layout"),
    ("dataset", "restriction", "name"),
}


class RunWriter:
    """A run folder that is open for writing. done: number of images on disk; chunk: number of images per write."""

    def __init__(self, folder: Path, info: RunInfo, done: int) -> None:
        self.folder = folder
        self.done = done
        self.chunk = info.chunk
        self._info = info
        self._files: dict[str, io.FileIO] = {}  # opened on first write: a finished run may be on a read-only disk

    def append(self, predictions: Sequence[Prediction], scores: npt.NDArray[np.float32]) -> None:
        """Write one chunk: its lines and its rows of scores, float32 (images, classes), NaN where refused.

        Raises EnvironmentFault when the disk is full or fails; earlier chunks stay and the run can be resumed.
        """
        assert scores.shape == (len(predictions), len(self._info.classes)), "one row of scores for each line"
        lines = "".join(json.dumps(prediction.to_json(), allow_nan=False) + "\n" for prediction in predictions)
        self._write(SCORES_FILE, scores.astype("<f4").tobytes(), durable=True)
        self._write(PREDICTIONS_FILE, lines.encode(), durable=True)
        self.done += len(predictions)

    def append_heat_map(self, line: bytes) -> None:
        """Append a line to heatmaps.jsonl. Raises as `append` does."""
        self._write(HEAT_MAPS_FILE, line, durable=True)

    def log(self, event: str, **fields: Any) -> None:
        date = datetime.now().astimezone().isoformat(timespec="seconds")
        self._write(LOG_FILE, (json.dumps({"event": event, "date": date, **fields}) + "\n").encode())

    def close(self) -> None:
        """Close the files. Writes are not buffered."""
        for file in self._files.values():
            file.close()

    def _write(self, name: str, data: bytes, *, durable: bool = False) -> None:
        if name not in self._files:
            self._files[name] = (self.folder / name).open("ab", buffering=0)
        file = self._files[name]
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            if durable:
                os.fsync(file.fileno())
        except OSError as error:
            raise EnvironmentFault(
                f"{from_os_error(OSError(error.errno, error.strerror, str(file.name)))}. {self.done} of "
                f"{self._info.images} images are done and saved"
            ) from error


@contextmanager
def open_run(folder: Path, info: RunInfo, samples: Sequence[Sample], *, fresh: bool) -> Iterator[RunWriter]:
    """Open a run folder for writing: a new one, or one of the same run, truncated to its last complete chunk.

    fresh: start over; deletes the files of the existing run, and no others.
    Raises RunFolderError when the folder contains something else or another run (the error shows the difference), or
    another process is writing it. Raises EnvironmentFault when it is not writable.
    """
    assert all(one.file < following.file for one, following in pairwise(samples)), "samples are sorted by file name"
    _require_run_or_empty(folder)
    create_folder(folder, "--run")
    with locked_folder(folder, "--run"):
        remove_leftovers(folder, _ATOMIC_FILES)
        if fresh:  # lines without scores do not count, and a run without lines is one that has just begun
            reports = [path for name in _REPORTS for path in folder.glob(name)]
            files = [folder / name for name in (HEAT_MAPS_FILE, SCORES_FILE, PREDICTIONS_FILE)]
            for path in (folder / LOG_FILE, *reports, *files):
                path.unlink(missing_ok=True)
        if not fresh and (folder / RUN_FILE).exists():
            there = read_run_info(folder)
            if found := differences(there.to_json(), info.to_json(), ignored=DESCRIPTIVE_KEYS):
                raise RunFolderError(
                    f"{folder}: contains another run:\n{format_differences(found)}\n"
                    "Choose another folder with --run, overwrite this one with --fresh, or delete it"
                )
        else:
            write_atomically(folder / RUN_FILE, (json.dumps(info.to_json(), indent=1) + "\n").encode())
        writer = RunWriter(folder, info, _truncate_to_chunk(folder, info, samples))
        try:
            yield writer
        finally:
            writer.close()


def scores_header(images: int, classes: int) -> bytes:
    """Return the .npy header for all scores, float32 (images, classes); rows are appended to it."""
    header = io.BytesIO()
    description = {"descr": "<f4", "fortran_order": False, "shape": (images, classes)}
    np.lib.format.write_array_header_1_0(header, description)
    return header.getvalue()


def _require_run_or_empty(folder: Path) -> None:
    """Refuse a folder that is neither empty nor a run."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: a file, not a folder. Choose another path with --run")
    if is_run_folder(folder):
        return
    own_files = set(leftovers(folder, _ATOMIC_FILES))  # of a process killed before it wrote run.json
    if others := sorted(path.name for path in folder.iterdir() if path not in own_files):
        raise RunFolderError(
            f"{folder}: not empty ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''}) and not a run. "
            "Choose an empty or new folder with --run"
        )


def _truncate_to_chunk(folder: Path, info: RunInfo, samples: Sequence[Sample]) -> int:
    """Truncate both files to the last complete chunk. Return the number of images that are done."""
    scores, lines = folder / SCORES_FILE, folder / PREDICTIONS_FILE
    header = scores_header(len(samples), len(info.classes))
    row = 4 * len(info.classes)
    ends = _line_ends(lines, info, samples)
    done = 0
    if scores.exists():
        with scores.open("rb") as file:
            if file.read(len(header)) == header:
                done = min(len(ends), (scores.stat().st_size - len(header)) // row)
    if done < len(samples):
        done -= done % info.chunk
    if done == 0:
        write_atomically(scores, header)
        write_atomically(lines, b"")
    else:
        _truncate(scores, len(header) + done * row)
        _truncate(lines, ends[done - 1])
    return done


def _truncate(path: Path, size: int) -> None:
    if path.stat().st_size != size:  # a finished run is not touched
        os.truncate(path, size)


def _line_ends(path: Path, info: RunInfo, samples: Sequence[Sample]) -> list[int]:
    """Return the end of each line in bytes, up to the first that is cut off or does not match its sample."""
    ends: list[int] = []
    if not os.path.lexists(path):
        return ends
    end, classes, views = 0, len(info.classes), len(info.views)
    candidates = info.candidates and frozenset(info.candidates)
    with open_regular(path) as lines:
        for line, sample in zip(lines, samples, strict=False):
            try:
                prediction = parse_prediction(line, classes, views, candidates)
            except ValueError:
                break
            if not line.endswith(b"\n") or (prediction.file, prediction.labels) != (sample.file, sample.labels):
                break
            end += len(line)
            ends.append(end)
    return ends
