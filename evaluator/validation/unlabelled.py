"""The classes of images without labels, as a CSV file, as JSON lines, or both."""

import csv
import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from ..datasets import DatasetSpec
from ..engine.session import Session
from ..errors import RunFolderError, UsageError
from ..files import open_atomically, require_writable
from ..protocols import EvaluationProtocol
from .evaluate_model import evaluate_model
from .predictions import TOP_CLASSES, Prediction
from .run import Run


def write_classes(
    session: Session,
    model: Path,
    images: Path,
    protocol: EvaluationProtocol,
    outputs: Mapping[str, Path],
    *,
    top: int | None = None,
    report: Callable[[str], None],
) -> tuple[int, int]:
    """Classify all images of a folder or archive and write a line for each; return their number, and that of refusals.

    model: file of the session; outputs: files to write, at least one, by format: `csv`, `jsonl`; top: number of classes
    in a line, at most 5, by default 5 or all if fewer; report: receives sentences on the images and the memory. Names
    are relative to the folder that holds all images. Until the files are complete, the work is in the folder
    OUTPUT.unfinished of the first one, where the same call resumes it. Raises as `evaluate_model` does.
    """
    most = min(TOP_CLASSES, len(session.contract.classes))
    if (count := top or most) > most:
        raise UsageError(f"--top {count}: a file of all images has up to {most} classes for each")
    first, *_ = [require_writable(output) for output in outputs.values()]
    folder = first.with_name(f"{first.name}.unfinished")
    try:
        run = evaluate_model([session], model, DatasetSpec(images, no_labels=True), protocol, folder, report=report)
    except RunFolderError as error:
        raise RunFolderError(
            f"{error}. For `classify`, delete {folder} unless another command is writing it, or name another file"
        ) from error
    for kind, output in outputs.items():
        with open_atomically(output) as file:
            text = io.TextIOWrapper(file, "utf-8", errors="backslashreplace", newline="")
            _WRITERS[kind](text, run, count)
            text.detach()  # flushes; the file itself stays open for `open_atomically`
    shutil.rmtree(folder)
    return len(run.predictions), sum(image.refused is not None for image in run.predictions)


def _write_csv(text: TextIO, run: Run, count: int) -> None:
    table = csv.writer(text, lineterminator="\n")
    columns = [f"{what}_{place}" for place in range(1, count + 1) for what in ("wnid", "name", "score")]
    table.writerow(["file", *columns, "refused"])
    for image in run.predictions:
        found = [cell for wnid, name, score in _top(run, image, count) for cell in (wnid, name, score)]
        table.writerow([image.file, *(found or [""] * len(columns)), image.refused or ""])


def _write_json_lines(text: TextIO, run: Run, count: int) -> None:
    for image in run.predictions:
        line: dict[str, Any] = {"file": image.file}
        if image.refused is None:
            line["predictions"] = [
                {"wnid": wnid, "name": name, "score": score} for wnid, name, score in _top(run, image, count)
            ]
        else:
            line["refused"] = image.refused
        text.write(json.dumps(line) + "\n")


def _top(run: Run, image: Prediction, count: int) -> list[tuple[str, str, float]]:
    """Return wnid, name and score of the best classes of an image; none if it was refused."""
    classes = run.info.classes
    return [(classes[index].wnid, classes[index].name, score) for index, score in image.top[:count]]


_WRITERS = {"csv": _write_csv, "jsonl": _write_json_lines}
