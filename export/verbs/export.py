"""`prelunet export`: write a checkpoint as a model file."""

from pathlib import Path
from typing import Annotated

import typer

from prelunet.evaluator.contract import Canvas, FilePrecision
from prelunet.evaluator.files import require_new
from prelunet.evaluator.terminal import echo, report


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint written by `prelunet train` or `prelunet init`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="ONNX model file to write.")],
    canvas: Annotated[
        Canvas,
        typer.Option(
            help="`ragged`: images of any sizes can share a batch. `exact`: no masks; images must fill their canvas."
        ),
    ] = "ragged",
    precision: Annotated[
        FilePrecision,
        typer.Option(help="`fp16`: half the size and faster on GPUs; scores differ in the third decimal."),
    ] = "fp32",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Export a checkpoint to one ONNX file with the dense head inside.

    The file is checked against the PyTorch net on images of several sizes before it is put in place; a mismatch leaves
    no file.
    """
    from prelunet.export.dense.export import export_checkpoint
    from prelunet.export.dense.half_precision import FLOAT16_MAX

    require_new(output, force=force)
    result = export_checkpoint(checkpoint, output, canvas, precision)
    worst = max(result.deviations, key=lambda d: d.scores)
    echo(
        f"{output}: {output.stat().st_size / 1e6:.1f} MB, {precision}, canvas {canvas}; {len(result.deviations)} runs "
        f"agree with the PyTorch net, largest score deviation {worst.scores:.1e} (at {worst.height}x{worst.width}, "
        f"{worst.case})"
    )
    if result.magnitudes:
        layer, largest = max(result.magnitudes.items(), key=lambda item: item[1])
        echo(f"largest activation: {largest:.4g} ({layer}); the float16 maximum is {FLOAT16_MAX:g}")
    for warning in result.warnings:
        report(f"warning: {warning}")
