"""`prelunet export`."""

from pathlib import Path
from typing import Annotated

import typer

from evaluator.contract import Canvas
from evaluator.errors import UsageError
from evaluator.terminal import say


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of `prelunet train` or `prelunet init`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The ONNX file to write.")],
    canvas: Annotated[
        Canvas,
        typer.Option(
            help="`ragged`: images of any sizes share a batch. `exact`: no masks, for images that fill their canvas."
        ),
    ] = "ragged",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Turn a checkpoint into one ONNX file with the dense head inside.

    The file is compared with the torch net on images of several sizes before it gets its name; on a mismatch no file
    is left.
    """
    from export.exporting import export_checkpoint  # here, so that --help needs neither torch nor onnx

    if output.exists() and not force:
        raise UsageError(f"{output}: exists already. Choose another name, or replace it with --force")
    deviations = export_checkpoint(checkpoint, output, canvas)
    worst = max(deviations, key=lambda d: d.scores)
    say(
        f"{output}: {output.stat().st_size / 1e6:.1f} MB, canvas {canvas}; {len(deviations)} runs agree with the torch "
        f"net, worst score off by {worst.scores:.1e} (at {worst.height}x{worst.width}, {worst.case})"
    )
