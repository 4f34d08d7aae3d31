"""The file that the ILSVRC2012 server takes for classification (task 1), and its check.

The format (the development kit's readme): a line per image in the order of the file names; on it the devkit ids (1 to
1000) of the predicted classes, the most confident first, with a blank between. The server takes up to five; we write
and ask for just five, since a guess that is left out can only lose.
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
from prelunet.evaluator.validation.predictions import Prediction
from prelunet.evaluator.validation.run import Run, is_run_folder, require_unsharded

GUESSES = 5  # per image
DEVKIT_IDS = 1000
PLACEHOLDER = (1, 2, 3, 4, 5)  # ids for an image that was refused: always the same, so that they claim nothing
_LONGEST_LINE = 2**16  # bytes; five ids take 24 at most
_MAX_PARSED = 64  # characters of a line
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
    """Write the five best classes of every image of a run; returns for how many images placeholders stand.

    devkit_ids: of each wnid; ids_from: the file or folder that tells them, for messages; allow_refused: write
    PLACEHOLDER for images that the run refused. The format must have a line for each image, and there is nothing to say
    of these: they will count as errors, as they should. What is written is checked (`check_submission`) before it
    replaces a file that was there.
    Raises RunFolderError when the run is not of the whole dataset or has refused images, UsageError when a class has
    no devkit id of its own or `path` lies in a run, CheckFailed when the written file is wrong.
    """
    require_unsharded(run.info, run.where)
    _refuse_selection(run)
    _refuse_run_as_target(path)
    ids = _ids_of_classes(run, devkit_ids, ids_from)
    lines = _in_name_order(run)
    refused = [line for line in lines if line.refused is not None]
    if refused and not allow_refused:
        first = escape_unprintable(f"{refused[0].file}: {refused[0].refused}")
        raise RunFolderError(
            f"{run.folder}: {len(refused):,} images were refused ({first}), but the file must have a line for each "
            f"image. Mend the images and validate anew, or write the line '{' '.join(map(str, PLACEHOLDER))}' for "
            "them, which will count as errors: --allow-refused"
        )
    with open_atomically(path) as file:
        for line in lines:
            guesses = PLACEHOLDER if line.refused is not None else [ids[index] for index, _ in line.top]
            file.write((" ".join(map(str, guesses)) + "\n").encode("ascii"))
        file.flush()
        check_submission(Path(file.name), len(lines))
    return len(refused)


def check_submission(path: Path, images: int | None = None) -> int:
    """Check a file for the server; returns its lines. images: how many lines there should be; None: any number but 0.

    Raises CheckFailed that names the first faulty lines and how to mend them, UsageError when it cannot be read.
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
        messages.append("it is empty; write it anew with: prelunet submission RUN -o FILE --devkit DIR")
    elif cut:
        messages.append(f"what follows was not read: line {count} has more than {_LONGEST_LINE:,} characters")
    elif images is not None and count != images:
        messages.append(
            f"{count:,} lines for {images:,} images; each image has one line, in the order of the file names"
        )
    if messages:
        raise CheckFailed("\n  ".join((f"{path}: not what the server takes:", *messages)))
    return count


def _refuse_selection(run: Run) -> None:
    """Refuse a run of a part of its dataset: the server counts lines, not names."""
    if (selection := run.info.dataset["selection"]) is not None:
        raise RunFolderError(
            f"{run.where}: of a part of the dataset ({selection}). The server wants every image of the set: validate "
            "without a selection"
        )


def refuse_devkit_as_target(path: Path, devkit: Path) -> None:
    """Refuse to write a submission over what it is made of. devkit: folder or file that tells the ids."""
    _refuse_run_as_target(path)
    folders = (devkit, devkit / "data")
    files = [devkit, *(folder / name for folder in folders for name in (GROUND_TRUTH, META_MAT, *MAPPING_FILES))]
    if path.exists() and any(file.is_file() and file.samefile(path) for file in files):
        raise UsageError(f"{path}: a file of the development kit, which is read. Choose another file with -o")


def _refuse_run_as_target(path: Path) -> None:
    for folder in Path(os.path.realpath(path)).parents:
        if is_run_folder(folder):
            raise UsageError(
                f"{path}: lies in {folder}, a run, whose files stay as they are. Choose another file with -o"
            )


def _ids_of_classes(run: Run, devkit_ids: Mapping[str, int], ids_from: Path | None) -> list[int]:
    """Return the devkit id of each class index."""
    classes = run.info.classes
    if len(classes) < GUESSES:
        raise UsageError(
            f"{run.folder}: the model knows {len(classes)} classes, but a line has {GUESSES}. Take a model of "
            "ImageNet's classes"
        )
    if missing := [entry.wnid for entry in classes if entry.wnid not in devkit_ids]:
        raise UsageError(
            f"{run.folder}: {len(missing):,} of the model's {len(classes):,} classes have no devkit id "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}). Take a model of ImageNet's classes, or "
            "the development kit of its year with --devkit"
        )
    where, fix = ids_from or "the devkit's ids", "Take the development kit of ILSVRC2012 with --devkit"
    wnid_of: dict[int, str] = {}
    for entry in classes:
        devkit_id = devkit_ids[entry.wnid]
        if not 1 <= devkit_id <= DEVKIT_IDS:
            raise UsageError(
                f"{where}: gives {entry.wnid} the id {devkit_id}, but the server's are 1 to {DEVKIT_IDS}. {fix}"
            )
        if (other := wnid_of.setdefault(devkit_id, entry.wnid)) != entry.wnid:
            raise UsageError(f"{where}: gives {other} and {entry.wnid} the same id, {devkit_id}. {fix}")
    return [devkit_ids[entry.wnid] for entry in classes]


def _in_name_order(run: Run) -> Sequence[Prediction]:
    """Return the lines of a run by the base names of their files; these must differ."""
    lines = sorted(run.predictions, key=_base_name)
    for one, other in pairwise(lines):
        if _base_name(one) == _base_name(other):
            raise RunFolderError(
                f"{run.folder}: {escape_unprintable(one.file)} and {escape_unprintable(other.file)} have the same name, so that nobody "
                "could tell their lines apart. A submission is of images with names of their own, as "
                "ILSVRC2012_test_00000001.JPEG"
            )
    return lines


def _base_name(line: Prediction) -> str:
    return line.file.rpartition("/")[2]


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is too long its beginning, which is the last that should be taken."""
    fix = "Give the path of a text file that is there"
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: cannot be read (not a regular file). {fix}")
    try:
        with path.open("rb") as file:
            while line := file.readline(_LONGEST_LINE + 1):
                yield line
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). {fix}") from error


def _faults_of(line: bytes) -> Iterator[str]:
    """Yield what is wrong with a line, and the mend; each check relies on those before it."""
    text = line.decode("ascii", errors="backslashreplace")
    body = text.removesuffix("\n")
    guesses = body[:_MAX_PARSED].split(" ")
    if body == text or len(body) > _MAX_PARSED:
        yield "has no end, or is too long: five ids and a newline make a line. The file may be cut off"
    if not body.strip():
        yield "is blank; every image has a line of five ids"
    if body.endswith("\r"):
        yield "ends as on Windows; end lines with a newline alone"
    if "" in guesses or "\t" in body:
        yield "has tabs or blanks that are too many; write one blank between ids and none elsewhere"
    for guess in guesses:
        if not _NUMBER.fullmatch(guess) or int(guess) > DEVKIT_IDS:
            yield f"has {guess[:20]!r}, which is no devkit id; ids are 1 to {DEVKIT_IDS}, without zeros in front"
    if len(guesses) != GUESSES:
        yield f"has {len(guesses)} ids; write the {GUESSES} best"
    if len(set(guesses)) != len(guesses):
        yield f"has an id twice; write {GUESSES} different ones"
