"""`prelunet merge`: join the shards of a run."""

from pathlib import Path
from typing import Annotated

import typer

from ..terminal import echo, report
from ..validation.merge import merge as join_shards
from .options import report_next_command


def merge(
    *,
    shards: Annotated[
        list[Path], typer.Argument(help="Folders of all shards, in any order, written by `prelunet validate --shard`.")
    ],
    run: Annotated[
        Path,
        typer.Option(
            "--run", "-o", "--output", help="Folder of the merged run: created, or resumed if it holds this run."
        ),
    ],
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the existing run and start over.")] = False,
) -> None:
    """Join the shards of a run, after checking that none is missing or duplicated; the same command resumes.

    The merged run equals the run of a single machine, byte for byte.
    """
    merged = join_shards(shards, run, fresh=fresh, report=report)
    echo(f"{run}: {len(shards)} shards, {len(merged.predictions):,} images; none missing or duplicated")
    report_next_command(merged, run)
