"""Write and check files for the ILSVRC2012 evaluation server, classification (task 1).

The format is that of the development kit's readme: one line per image, in the order of the file names, with the devkit
ids (1 to 1000) of the predicted classes, separated by spaces, most confident first. The server accepts up to five ids.
prelunet writes and requires exactly five, because omitting a guess can only increase the error.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from prelunet.evaluator.datasets.labels.imagenet_devkit import GROUND_TRUTH, MAPPING_FILES, META_MAT
from prelunet.evaluator.errors import CheckFailed, RunFolderError, UsageError
from prelunet.evaluator.files import open_atomically
from prelunet.evaluator.terminal import escape_unprintable
from prelunet.evaluator.validation.predictions import Prediction, open_regular
from prelunet.evaluator.validation.run import Run, is_run_folder, require_unsharded

GUESSES = 5  # per image
DEVKIT_IDS = 1000
PLACEHOLDER = (1, 2, 3, 4, 5)  # ids for a refused image; constant, so they are recognizable as no prediction
_LONGEST_LINE = 2**16  # bytes; five ids take 24 at most
_MAX_PARSED = 64  # characters per line
_MAX_FAULTS_SHOWN = 5
_NUMBER = re.compile(r"[1-9]\d{0,3}", re.ASCII)


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
    errors, as they should. The output is checked (`check_submission`) before it replaces an existing file.
    Raises RunFolderError when the run does not cover the whole dataset or has refused images, UsageError when a class
    has no devkit id of its own or `path` is in a run folder, CheckFailed when the written file is wrong.
    """
    require_unsharded(run.info, run.where)
    if (selection := run.info.dataset["selection"]) is not None:  # the server identifies images by line number
        raise RunFolderError(
            f"{run.where}: covers only part of the dataset ({selection}). The server requires every image of the set: "
            "validate without a selection"
        )
    _refuse_run_as_target(path)
    ids = _ids_of_classes(run, devkit_ids, ids_from)
    lines = _in_name_order(run)
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
        file.flush()
        check_submission(Path(file.name), len(lines))
    return len(refused)


def check_submission(path: Path, images: int | None = None) -> int:
    """Check a file for the server. Return its number of lines. images: expected lines, None for any number but 0.

    Raises CheckFailed with the first faulty lines and how to fix them, UsageError when the file cannot be read.
    """
    count, faults, messages, cut = 0, 0, [], False
    for count, line in enumerate(_lines(path), start=1):
        if fault := next(_faults_of(line), None):
            faults += 1
            messages += [f"line {count}: {fault}"] if faults <= _MAX_FAULTS_SHOWN else []
        if cut := len(line) > _LONGEST_LINE:
            break
    if faults > _MAX_FAULTS_SHOWN:
        messages.append(f"... and {faults - _MAX_FAULTS_SHOWN:,} more lines")
    if not count:
        messages.append("it is empty; write it again with: prelunet submission RUN -o FILE --devkit DIR")
    elif cut:
        messages.append(f"the rest was not read: line {count} has more than {_LONGEST_LINE:,} characters")
    elif images is not None and count != images:
        messages.append(
            f"{count:,} lines for {images:,} images; write one line per image, in the order of the file names"
        )
    if messages:
        raise CheckFailed("\n  ".join((f"{path}: not a valid submission:", *messages)))
    return count


def refuse_devkit_as_target(path: Path, devkit: Path) -> None:
    """Refuse to overwrite the inputs of a submission. devkit: folder or file with the ids."""
    _refuse_run_as_target(path)
    folders = (devkit, devkit / "data")
    files = [devkit, *(folder / name for folder in folders for name in (GROUND_TRUTH, META_MAT, *MAPPING_FILES))]
    if path.exists() and any(file.is_file() and file.samefile(path) for file in files):
        raise UsageError(f"{path}: a file of the development kit, which is an input. Choose another file with -o")


def _refuse_run_as_target(path: Path) -> None:
    for folder in Path(os.path.realpath(path)).parents:
        if is_run_folder(folder):
            raise UsageError(
                f"{path}: is inside the run folder {folder}, whose files must not change. Choose another file with -o"
            )


def _ids_of_classes(run: Run, devkit_ids: Mapping[str, int], ids_from: Path | None) -> list[int]:
    """Return the devkit id of each class index."""
    classes = run.info.classes
    if len(classes) < GUESSES:
        raise UsageError(
            f"{run.folder}: the model has {len(classes)} classes, but a line needs {GUESSES}. Use a model with "
            "ImageNet's classes"
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


def _in_name_order(run: Run) -> Sequence[Prediction]:
    """Return the lines of a run sorted by the base names of their files, which must be distinct."""
    lines = sorted(run.predictions, key=_base_name)
    for one, other in pairwise(lines):
        if _base_name(one) == _base_name(other):
            raise RunFolderError(
                f"{run.folder}: {escape_unprintable(one.file)} and {escape_unprintable(other.file)} have the same "
                "name, so their order is undefined. A submission needs distinct names, such as "
                "ILSVRC2012_test_00000001.JPEG"
            )
    return lines


def _base_name(line: Prediction) -> str:
    return line.file.rpartition("/")[2]


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file. For a line that is too long, yield its start; the caller should stop there."""
    try:
        with open_regular(path) as file:
            while line := file.readline(_LONGEST_LINE + 1):
                yield line
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}). Pass the path of an existing text file"
        ) from error


def _faults_of(line: bytes) -> Iterator[str]:
    """Yield the faults of a line, each with the fix. Each check relies on the ones before it."""
    text = line.decode("ascii", errors="backslashreplace")
    body = text.removesuffix("\n")
    guesses = body[:_MAX_PARSED].split(" ")
    if body == text or len(body) > _MAX_PARSED:
        yield "has no newline, or is too long: write five ids and a newline. The file may be truncated"
    if not body.strip():
        yield "is blank; write five ids for every image"
    if body.endswith("\r"):
        yield "has a Windows line ending; end lines with only a newline"
    if "" in guesses or "\t" in body:
        yield "has tabs or extra spaces; write one space between ids and none elsewhere"
    for guess in guesses:
        if not _NUMBER.fullmatch(guess) or int(guess) > DEVKIT_IDS:
            yield f"has {guess[:20]!r}, which is not a devkit id; ids are 1 to {DEVKIT_IDS}, without leading zeros"
    if len(guesses) != GUESSES:
        yield f"has {len(guesses)} ids; write the {GUESSES} best"
    if len(set(guesses)) != len(guesses):
        yield f"has an id twice; write {GUESSES} different ones"
