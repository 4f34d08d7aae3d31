"""Read the stored scores of finished runs block by block, and check that they agree with the run's lines."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..arrays import BoolArray, Float32Array
from ..datasets.dataset import DatasetSpec
from ..engine.scores import ranks_of, restrict
from ..errors import RunFolderError
from ..files import open_regular
from ..terminal import escape_unprintable, progress
from .predictions import LARGEST_SCORE, Prediction
from .run import SCORES_FILE, Run
from .run_log import RESUMED, STARTED, find_dataset, spec_to_log
from .writer import RunWriter, scores_header

BLOCK = 1024  # images read at a time: 4 MB at 1000 classes
_SUM_TOLERANCE = 2e-2  # of an image's scores; `adopt` takes nets in half precision whose sums are 1e-2 from 1


def check_scores(run: Run) -> None:
    """Check that the stored scores of a run are complete probabilities, and that each row agrees with its line.

    Raises RunFolderError with the file, the row and the image.
    """
    path, images, classes = _path(run), run.info.images, len(run.info.classes)
    header = scores_header(images, classes)
    fix = "Restore the file, or repeat the run with --fresh"
    try:
        with open_regular(path) as file:
            found = file.read(len(header))
        size = path.stat().st_size
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read ({error.strerror}). {fix}") from error
    if found != header:
        raise RunFolderError(
            f"{path}: the header should be that of float32 scores of {images} images x {classes} classes. {fix}"
        )
    if size != (expected := len(header) + 4 * images * classes):
        raise RunFolderError(f"{path}: {size} bytes, but the scores take {expected}. {fix}")
    with progress(f"check {path}", images, "images") as advance:
        for first in range(0, images, BLOCK):
            end = min(first + BLOCK, images)
            lines, rows = run.predictions[first:end], read_rows(run, first, end)
            refused = np.array([line.refused is not None for line in lines])
            good = np.where(refused, np.isnan(rows).all(axis=1), _are_probabilities(rows))
            if good.all() and not refused.all():
                restricted = restrict(rows[~refused], run.info.candidates)
                good[~refused] = _same_best(restricted, [line for line in lines if line.refused is None])
            if not good.all():
                row = int(np.argmin(good))
                raise RunFolderError(
                    f"{path}: row {first + row} ({escape_unprintable(lines[row].file)}) has different best classes or "
                    "scores than its line, is not NaN although the image was refused, or holds no probabilities (from "
                    "0 to 1, of sum 1). The scores are damaged or from another run: restore the file, or repeat the "
                    "run with --fresh"
                )
            advance(end - first)


def read_rows(run: Run, first: int, end: int) -> Float32Array:
    """Return the stored scores of some images, float32 (end - first, classes), without checking them."""
    classes = len(run.info.classes)
    offset = len(scores_header(run.info.images, classes)) + 4 * classes * first
    rows = np.fromfile(_path(run), "<f4", (end - first) * classes, offset=offset)
    return rows.reshape(end - first, classes)


def _path(run: Run) -> Path:
    assert run.folder is not None, "a run without a folder has no stored scores"
    return run.folder / SCORES_FILE


def _are_probabilities(rows: Float32Array) -> BoolArray:
    """Return for each row whether its scores, averaged as probabilities or as logits, are from 0 to 1 and of sum 1."""
    good: BoolArray = np.all((rows >= 0) & (rows <= LARGEST_SCORE), axis=1)  # false for NaN
    good &= np.abs(rows.sum(axis=1, dtype=np.float64) - 1) <= _SUM_TOLERANCE
    return good


def _same_best(rows: Float32Array, lines: Sequence[Prediction]) -> BoolArray:
    """Return for each row whether its best classes, their order and their scores are those of its line.

    Scores may differ in the last bit of float32: a line's decimal is rounded twice, first to float64, which changes
    7.038531e-26 to a neighboring float32.
    """
    classes = np.array([[index for index, _ in line.top] for line in lines], np.int64)
    stated = np.array([[score for _, score in line.top] for line in lines]).astype(np.float32)
    stored = np.take_along_axis(rows, classes, axis=1)
    same: BoolArray = (np.abs(stated - stored) <= np.spacing(stored)).all(axis=1)
    for place in range(classes.shape[1]):
        same &= ranks_of(rows, classes[:, place]) == place + 1
    return same


# Used by merged runs and ensembles, which are derived from the folders of other runs.


def log_start(
    writer: RunWriter,
    images: int,
    sources: Sequence[Path],
    report: Callable[[str], None],
    spec: DatasetSpec | None = None,
) -> None:
    """Report and log where the writing of a derived run starts.

    The log also records where the dataset was, by default from the first source whose log has it: reports look there.
    """
    if writer.done == images:
        report(f"{writer.folder}: already finished")
        return
    new = writer.done == 0
    report(f"{writer.folder}: {'new' if new else f'resuming after {writer.done} of {images} images'}")
    spec = spec or next((found for source in sources if (found := find_dataset(source)) is not None), None)
    writer.log(
        STARTED if new else RESUMED,
        done=writer.done,
        **({} if spec is None else spec_to_log(spec)),
        sources=[str(source.resolve()) for source in sources],
    )
