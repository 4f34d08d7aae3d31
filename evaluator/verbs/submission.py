"""`prelunet submission`: write or check a file for the ILSVRC2012 server."""

from pathlib import Path
from typing import Annotated

import typer

from prelunet.evaluator.datasets.labels.imagenet_devkit import read_devkit_ids
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.terminal import echo, report
from prelunet.evaluator.validation.run import read_run
from prelunet.evaluator.validation.submission import (
    GUESSES,
    PLACEHOLDER,
    check_submission,
    refuse_devkit_as_target,
    write_submission,
)

TEST_IMAGES = 100_000  # of ILSVRC2012


def submission(
    *,
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a finished run or ensemble, with or without labels.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", "--output", help="File to write.")] = None,
    devkit: Annotated[
        Path | None,
        typer.Option(help="Mapping of classes to ids: the development kit's folder, its meta.mat, or a text file."),
    ] = None,
    allow_refused: Annotated[
        bool,
        typer.Option(
            "--allow-refused",
            help=f"Write '{' '.join(map(str, PLACEHOLDER))}' for refused images, which then count as errors.",
        ),
    ] = False,
    check: Annotated[Path | None, typer.Option(help="Check this file instead of writing one.")] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="With --check: number of images in the set (test set: 100000).")
    ] = None,
) -> None:
    """Write the top five classes of each image for the ILSVRC2012 server (task 1), or check such a file."""
    if check is not None:
        if run is not None or out is not None or devkit is not None or allow_refused:
            raise UsageError("--check checks an existing file: give it alone or with --images")
        echo(_success_line(check, check_submission(check, images)))
        return
    if run is None or out is None or devkit is None or images is not None:
        raise UsageError(
            "give a run, a file and the ids: prelunet submission RUN -o FILE --devkit DIR; "
            "or check a file: prelunet submission --check FILE --images 100000"
        )
    refuse_devkit_as_target(out, devkit)
    finished = read_run(run)
    ids = read_devkit_ids(devkit, [entry.wnid for entry in finished.info.classes])
    refused = write_submission(finished, ids, out, ids_from=devkit, allow_refused=allow_refused)
    if refused:
        report(
            f"warning: {refused:,} images were refused and have the line '{' '.join(map(str, PLACEHOLDER))}'; "
            f"{run / 'predictions.jsonl'} lists them with the reasons"
        )
    count = len(finished.predictions)
    if count != TEST_IMAGES:
        report(f"note: the test set of ILSVRC2012 has {TEST_IMAGES:,} images, this run has {count:,}")
    echo(_success_line(out, count))


def _success_line(path: Path, lines: int) -> str:
    return f"{path}: OK, {lines:,} lines of {GUESSES} devkit ids"
