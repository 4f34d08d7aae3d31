"""`prelunet export`."""

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from evaluator.contract import Canvas
from evaluator.errors import UsageError
from export.exporting import export_checkpoint


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of `prelunet train` or `prelunet init`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The ONNX file to write.")],
    canvas: Annotated[
        str,
        typer.Option(
            help="`ragged`: images of any sizes share a batch. `exact`: no masks, for images that fill their canvas."
        ),
    ] = "ragged",
) -> None:
    """Turn a checkpoint into one ONNX file with the dense head inside.

    The file is compared with the torch net on images of several sizes before it gets its name; on a mismatch no file
    is left.
    """
    if canvas not in get_args(Canvas):
        raise UsageError(f"--canvas {canvas}: choose one of {', '.join(get_args(Canvas))}")
    deviations = export_checkpoint(checkpoint, output, cast(Canvas, canvas))
    worst = max(deviations, key=lambda d: d.scores)
    typer.echo(
        f"{output}: {output.stat().st_size / 1e6:.1f} MB, canvas {canvas}; {len(deviations)} runs agree with the torch "
        f"net, worst score off by {worst.scores:.1e} (at {worst.height}x{worst.width}, {worst.case})"
    )
