"""The classes of images without labels, as a CSV file."""

import csv
import io
import shutil
from collections.abc import Callable
from pathlib import Path

from prelunet.evaluator.datasets import DatasetSpec
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.files import open_atomically, require_writable
from prelunet.evaluator.protocols import EvaluationProtocol
from prelunet.evaluator.validation.evaluate_model import evaluate_model
from prelunet.evaluator.validation.predictions import TOP_CLASSES


def write_classes(
    session: Session,
    model: Path,
    images: Path,
    protocol: EvaluationProtocol,
    output: Path,
    *,
    top: int | None = None,
    report: Callable[[str], None],
) -> tuple[int, int]:
    """Classify all images of a folder or archive and write a row for each; return their number, and that of refusals.

    model: file of the session; top: number of classes in a row, at most 5, by default 5 or all if fewer; report:
    receives sentences on the images and the memory. Names are relative to the folder that holds all images. Until the
    file is complete, the work is in the folder OUTPUT.unfinished, where the same call resumes it. Raises as
    `evaluate_model` does.
    """
    count = min(TOP_CLASSES, len(session.contract.classes)) if top is None else top
    if count > min(TOP_CLASSES, len(session.contract.classes)):
        raise UsageError(
            f"--top {count}: a CSV file has up to {min(TOP_CLASSES, len(session.contract.classes))} classes"
        )
    folder = require_writable(output).with_name(f"{output.name}.unfinished")
    run = evaluate_model([session], model, DatasetSpec(images, no_labels=True), protocol, folder, report=report)
    classes, refused = run.info.classes, 0
    with open_atomically(output) as file:
        text = io.TextIOWrapper(file, "utf-8", errors="backslashreplace", newline="")
        table = csv.writer(text, lineterminator="\n")
        columns = [f"{what}_{place}" for place in range(1, count + 1) for what in ("wnid", "name", "score")]
        table.writerow(["file", *columns, "refused"])
        for image in run.predictions:
            refused += image.refused is not None
            top_classes = [(classes[index], score) for index, score in image.top[:count]]
            found = [cell for entry, score in top_classes for cell in (entry.wnid, entry.name, score)]
            table.writerow([image.file, *(found or [""] * len(columns)), image.refused or ""])
        text.detach()  # flushes; the file itself stays open for `open_atomically`
    shutil.rmtree(folder)
    return len(run.predictions), refused
