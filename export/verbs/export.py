"""`prelunet export`."""

from pathlib import Path
from typing import Annotated

import typer

from prelunet.evaluator.contract import Canvas, FilePrecision
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.terminal import echo


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of `prelunet train` or `prelunet init`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The ONNX file to write.")],
    canvas: Annotated[
        Canvas,
        typer.Option(
            help="`ragged`: images of any sizes share a batch. `exact`: no masks, for images that fill their canvas."
        ),
    ] = "ragged",
    precision: Annotated[
        FilePrecision,
        typer.Option(help="`fp16`: half the size and the fast way on a GPU; scores differ in the third decimal."),
    ] = "fp32",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Turn a checkpoint into one ONNX file with the dense head inside.

    The file is compared with the torch net on images of several sizes before it gets its name; on a mismatch no file
    is left.
    """
    from prelunet.export.dense.export import export_checkpoint
    from prelunet.export.dense.half_precision import FLOAT16_MAX, largest_magnitude

    if output.exists() and not force:
        raise UsageError(f"{output}: exists already. Choose another name, or replace it with --force")
    found = export_checkpoint(checkpoint, output, canvas, precision)
    worst = max(found.deviations, key=lambda d: d.scores)
    echo(
        f"{output}: {output.stat().st_size / 1e6:.1f} MB, {precision}, canvas {canvas}; {len(found.deviations)} runs "
        f"agree with the torch net, worst score off by {worst.scores:.1e} (at {worst.height}x{worst.width}, "
        f"{worst.case})"
    )
    if found.magnitudes:
        layer, largest = largest_magnitude(found.magnitudes)
        echo(f"largest number between the layers: {largest:.4g} ({layer}); float16 ends at {FLOAT16_MAX:g}")
    for warning in found.warnings:
        echo(f"note: {warning}", err=True)
