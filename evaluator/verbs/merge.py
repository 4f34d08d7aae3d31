"""`prelunet merge`: the shards of a run become one run."""

from pathlib import Path
from typing import Annotated

import typer

from prelunet.evaluator.terminal import echo
from prelunet.evaluator.validation.merge import merge as join_shards


def merge(
    *,
    shards: Annotated[
        list[Path],
        typer.Argument(help="Folders of all shards, in any order, as `prelunet validate --shard` wrote them."),
    ],
    run: Annotated[Path, typer.Option(help="Folder of the merged run: made, or gone on with if it holds this run.")],
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run that lies there and start anew.")] = False,
) -> None:
    """Join the shards of a run, after proof that none is missing or doubled; the same command resumes.

    The merged run is the one that a single machine would have made, byte for byte.
    """
    merged = join_shards(shards, run, fresh=fresh, report=lambda text: echo(text, err=True))
    echo(f"{run}: {len(shards)} shards, {len(merged.predictions):,} images; none is missing, none doubled")
    echo(f"per-class report: prelunet report {run}", err=True)
