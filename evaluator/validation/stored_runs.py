"""The stored scores of finished runs: read in pieces, and believed only where they agree with the run's lines."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from prelunet.evaluator.arrays import BoolArray, Float32Array
from prelunet.evaluator.datasets.dataset import UNLABELLED
from prelunet.evaluator.engine.scores import ranks_of
from prelunet.evaluator.errors import RunFolderError, UsageError
from prelunet.evaluator.terminal import escape_unprintable, progress
from prelunet.evaluator.validation.predictions import Prediction
from prelunet.evaluator.validation.run import SCORES_FILE, Run, RunInfo
from prelunet.evaluator.validation.run_log import RESUMED, STARTED, last_start_event
from prelunet.evaluator.validation.writer import RunWriter, scores_header

BLOCK = 1024  # images read at a time: 4 MB at 1000 classes
SUM_TOLERANCE = 1e-3  # of a row: half precision may add or lose as much; float32 alone stays below 1e-6


def check_scores(run: Run) -> None:
    """Check that the stored scores of a finished run are whole and are those its lines tell of; in pieces.

    A refused image has a row of NaN, any other a row of finite numbers from 0 to 1 whose sum is 1 within
    SUM_TOLERANCE, whose best classes are those of its line, and in which the truth has the rank of its line. What
    cannot be seen is a change that is smaller than that, and among classes behind the best ones.
    Raises RunFolderError naming the file, the row and the image.
    """
    path, images = _path(run), run.info.images
    _check_header(path, run.info)
    with progress(f"check {path}", images, "images") as advance:
        for first in range(0, images, BLOCK):
            end = min(first + BLOCK, images)
            lines = run.predictions[first:end]
            if fault := _fault_in(read_rows(run, first, end), lines):
                row, what = fault
                raise RunFolderError(
                    f"{path}: row {first + row} ({escape_unprintable(lines[row].file)}) {what}. The scores are damaged or "
                    "another run's: restore the file, or do the run anew with the same command and --fresh"
                )
            advance(end - first)


def read_rows(run: Run, first: int, end: int) -> Float32Array:
    """Return the stored scores of some images, float32 (end - first, classes); not checked."""
    classes = len(run.info.classes)
    offset = len(scores_header(run.info.images, classes)) + 4 * classes * first
    rows = np.fromfile(_path(run), "<f4", (end - first) * classes, offset=offset)
    return rows.reshape(end - first, classes)


def _path(run: Run) -> Path:
    assert run.folder is not None, "a run without a folder has no stored scores"
    return run.folder / SCORES_FILE


def _check_header(path: Path, info: RunInfo) -> None:
    """Check the header and the length of the file."""
    header = scores_header(info.images, len(info.classes))
    fix = "Restore the file, or do the run anew with the same command and --fresh"
    try:
        with path.open("rb") as file:
            found = file.read(len(header))
        size = path.stat().st_size
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read ({error.strerror}). {fix}") from error
    if found != header:
        raise RunFolderError(
            f"{path}: its header is not that of float32 scores of {info.images} images x {len(info.classes)} classes. "
            + fix
        )
    expected = len(header) + 4 * info.images * len(info.classes)
    if size != expected:
        raise RunFolderError(f"{path}: {size} bytes long, but its scores take {expected}. {fix}")


def _fault_in(rows: Float32Array, lines: Sequence[Prediction]) -> tuple[int, str] | None:
    """Return the first row that is not what its line tells, and what is wrong with it."""
    refused = np.array([line.refused is not None for line in lines])
    if (spoilt := refused & ~np.isnan(rows).all(axis=1)).any():
        return int(np.argmax(spoilt)), "has scores, but its line says that it was refused"
    evaluated = np.flatnonzero(~refused).tolist()
    if not evaluated:
        return None
    for wrong, what in _faults(rows[evaluated], [lines[row] for row in evaluated]):
        if wrong.any():
            return int(evaluated[np.argmax(wrong)]), what
    return None


def _faults(rows: Float32Array, lines: Sequence[Prediction]) -> Iterator[tuple[BoolArray, str]]:
    """Yield (which rows it concerns, what is wrong) of images that were evaluated; each relies on those before it."""
    labels = np.array([line.label for line in lines], np.int64)
    stated = np.array([line.rank for line in lines], np.int64)
    yield np.asarray(~np.isfinite(rows).all(axis=1)), "has a score that is no number (NaN or infinite)"
    sums = rows.sum(axis=1, dtype=np.float64)
    yield (
        np.asarray((rows < 0).any(axis=1) | (np.abs(sums - 1) > SUM_TOLERANCE)),
        "has scores that are no probabilities of sum 1",
    )
    yield ~_same_best(rows, lines), "has other best classes or scores than its line"
    ranks = ranks_of(rows, np.maximum(labels, 0))
    yield (labels != UNLABELLED) & (ranks != stated), "gives the true class another rank than its line"


def _same_best(rows: Float32Array, lines: Sequence[Prediction]) -> BoolArray:
    """Say of each row whether its best classes, their order and their scores are those of its line.

    Scores may differ in the last bit of float32: a line's decimal is read as float64 first, and rounded twice, which
    gives 7.038531e-26 a neighbour.
    """
    classes = np.array([[index for index, _ in line.top] for line in lines], np.int64)
    stated = np.array([[score for _, score in line.top] for line in lines]).astype(np.float32)
    stored = np.take_along_axis(rows, classes, axis=1)
    same: BoolArray = (np.abs(stated - stored) <= np.spacing(stored)).all(axis=1)
    for place in range(classes.shape[1]):
        same &= ranks_of(rows, classes[:, place]) == place + 1
    return same


# What merged runs and ensembles share: they are made from the folders of other runs.


_SOURCE_ONLY_KEYS = {"event", "date", "done"}  # of a beginning in its log, not what a derived run takes over


def refuse_source_as_target(sources: Sequence[Path], folder: Path) -> None:
    """Refuse to write into a folder that is read: with --fresh it would be deleted first."""
    for source in sources:
        if source.exists() and folder.exists() and source.samefile(folder):
            raise UsageError(f"{folder}: is one of the runs that are read. Choose a new folder with --run")


def log_start(writer: RunWriter, images: int, sources: Sequence[Path], report: Callable[[str], None]) -> None:
    """Say and log where the writing of a derived run starts.

    The log tells where the dataset lay, as the log of the first source does that knows it: a report looks there.
    """
    if writer.done == images:
        report(f"{writer.folder}: finished already; comparing it with the runs it is made of")
        return
    new, place = writer.done == 0, f"{writer.done} of {images} images"
    report(f"{writer.folder}: {'new' if new else f'going on after {place}'}")
    known = next((entry for source in sources if (entry := last_start_event(source)) is not None), {})
    fields = {key: value for key, value in known.items() if key not in _SOURCE_ONLY_KEYS}
    writer.log(
        STARTED if new else RESUMED,
        **{**fields, "done": writer.done, "sources": [str(source.resolve()) for source in sources]},
    )
