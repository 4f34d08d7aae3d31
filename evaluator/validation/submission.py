"""Write files for the ILSVRC2012 evaluation server, classification (task 1).

The format is that of the development kit's readme: one line per image, in the order of the file names, with the devkit
ids (1 to 1000) of the predicted classes, separated by spaces, most confident first. The server accepts up to five ids.
prelunet writes exactly five, because omitting a guess can only increase the error.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from ..datasets.labels.label_lists import orders_of
from ..errors import RunFolderError, UsageError
from ..files import open_atomically
from ..terminal import escape_unprintable
from .predictions import Prediction
from .run import Run, require_unsharded

GUESSES = 5  # per image
DEVKIT_IDS = 1000
PLACEHOLDER = (1, 2, 3, 4, 5)  # ids for a refused image; constant, so they are recognizable as no prediction


def write_submission(
    run: Run,
    devkit_ids: Mapping[str, int],
    path: Path,
    *,
    ids_from: Path | None = None,
    allow_refused: bool = False,
) -> int:
    """Write the five best classes of every image of a run. Return the number of images with placeholders.

    devkit_ids: wnid → devkit id; ids_from: the file or folder they were read from, for messages; allow_refused: write
    PLACEHOLDER for images that the run refused. The format requires a line for each image, and these images count as
    errors, as they should.
    Raises RunFolderError when the run does not cover the whole dataset or has refused images, UsageError when a class
    has no devkit id of its own.
    """
    require_unsharded(run.info, run.where)
    if (selection := run.info.dataset["selection"]) is not None:  # the server identifies images by line number
        raise RunFolderError(
            f"{run.where}: covers only part of the dataset ({selection}). The server requires every image of the set: "
            "validate without a selection"
        )
    ids = _ids_of_classes(run, devkit_ids, ids_from)
    lines = sorted(run.predictions, key=_base_name)
    for one, other in pairwise(lines):
        if _base_name(one) == _base_name(other):
            raise RunFolderError(
                f"{run.folder}: {escape_unprintable(one.file)} and {escape_unprintable(other.file)} have the same "
                "name, so their order is undefined. A submission needs distinct names, such as "
                "ILSVRC2012_test_00000001.JPEG"
            )
    if (orders := orders_of(list(map(_base_name, lines)))) is not None:
        raise RunFolderError(
            f"{run.folder}: line i is about the i-th image, but the order of the images is not clear: {orders}. A "
            "submission needs names with leading zeros, such as ILSVRC2012_test_00000001.JPEG"
        )
    refused = [line for line in lines if line.refused is not None]
    if refused and not allow_refused:
        first = escape_unprintable(f"{refused[0].file}: {refused[0].refused}")
        raise RunFolderError(
            f"{run.folder}: {len(refused):,} images were refused ({first}), but the file needs a line for each image. "
            f"Fix the images and validate again, or use --allow-refused to write '{' '.join(map(str, PLACEHOLDER))}' "
            "for them, which will count as errors"
        )
    with open_atomically(path) as file:
        for line in lines:
            guesses = PLACEHOLDER if line.refused is not None else [ids[index] for index, _ in line.top]
            file.write((" ".join(map(str, guesses)) + "\n").encode("ascii"))
    return len(refused)


def _ids_of_classes(run: Run, devkit_ids: Mapping[str, int], ids_from: Path | None) -> list[int]:
    """Return the devkit id of each class index."""
    classes = run.info.classes
    if (count := len(run.info.candidates or classes)) < GUESSES:
        raise UsageError(
            f"{run.folder}: predictions among {count} classes, but a line needs {GUESSES}. Use a model with "
            "ImageNet's classes, without --restrict-classes"
        )
    if missing := [entry.wnid for entry in classes if entry.wnid not in devkit_ids]:
        raise UsageError(
            f"{run.folder}: {len(missing):,} of the model's {len(classes):,} classes have no devkit id "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}). Use a model with ImageNet's classes, or "
            "pass the matching development kit with --devkit"
        )
    where, fix = ids_from or "the devkit's ids", "Pass the development kit of ILSVRC2012 with --devkit"
    wnid_of: dict[int, str] = {}
    for entry in classes:
        devkit_id = devkit_ids[entry.wnid]
        if not 1 <= devkit_id <= DEVKIT_IDS:
            raise UsageError(
                f"{where}: gives {entry.wnid} the id {devkit_id}, but the server's ids are 1 to {DEVKIT_IDS}. {fix}"
            )
        if (other := wnid_of.setdefault(devkit_id, entry.wnid)) != entry.wnid:
            raise UsageError(f"{where}: gives {other} and {entry.wnid} the same id, {devkit_id}. {fix}")
    return [devkit_ids[entry.wnid] for entry in classes]


def _base_name(line: Prediction) -> str:
    return line.file.rpartition("/")[2]
