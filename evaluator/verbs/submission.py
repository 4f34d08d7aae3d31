"""`prelunet submission`: write a file for the ILSVRC2012 server."""

from pathlib import Path
from typing import Annotated

import typer

from ..datasets.labels.imagenet_devkit import read_devkit_ids
from ..files import check_not_input
from ..terminal import echo, report
from ..validation.run import read_run
from ..validation.submission import GUESSES, PLACEHOLDER, write_submission

TEST_IMAGES = 100_000  # of ILSVRC2012


def submission(
    *,
    run: Annotated[Path, typer.Argument(help="Folder of a finished run or ensemble, with or without labels.")],
    out: Annotated[Path, typer.Option("--out", "-o", "--output", help="File to write.")],
    devkit: Annotated[
        Path,
        typer.Option(help="Mapping of classes to ids: the development kit's folder, its meta.mat, or a text file."),
    ],
    allow_refused: Annotated[
        bool,
        typer.Option(
            "--allow-refused",
            help=f"Write '{' '.join(map(str, PLACEHOLDER))}' for refused images, which then count as errors.",
        ),
    ] = False,
) -> None:
    """Write the top five classes of each image for the ILSVRC2012 server (task 1)."""
    check_not_input(out, [devkit])
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
    echo(f"{out}: {count:,} lines of {GUESSES} devkit ids")
