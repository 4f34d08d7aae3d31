"""Read the stored scores of finished runs block by block."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..arrays import Float32Array
from ..datasets.dataset import DatasetSpec
from ..errors import RunFolderError
from ..files import open_regular
from .run import SCORES_FILE, Run
from .run_log import RESUMED, STARTED, find_dataset, spec_to_log
from .writer import RunWriter, scores_header

BLOCK = 1024  # images read at a time: 4 MB at 1000 classes


def check_scores(run: Run) -> None:
    """Check that a run has stored scores of its images and classes, all of them. Raises RunFolderError."""
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


def read_rows(run: Run, first: int, end: int) -> Float32Array:
    """Return the stored scores of some images, float32 (end - first, classes), without checking them."""
    classes = len(run.info.classes)
    offset = len(scores_header(run.info.images, classes)) + 4 * classes * first
    rows = np.fromfile(_path(run), "<f4", (end - first) * classes, offset=offset)
    return rows.reshape(end - first, classes)


def _path(run: Run) -> Path:
    assert run.folder is not None, "a run without a folder has no stored scores"
    return run.folder / SCORES_FILE


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
