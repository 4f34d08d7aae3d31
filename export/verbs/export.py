"""`prelunet export`: write a checkpoint as a model file."""

from pathlib import Path
from typing import Annotated

import typer

from ...evaluator.contract import Canvas, FilePrecision
from ...evaluator.datasets import DatasetSpec
from ...evaluator.errors import UsageError
from ...evaluator.files import require_new
from ...evaluator.terminal import echo, report

DEFAULT_IMAGES = 300  # of a calibration
_INT8 = "Calibration of int8"


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint written by `prelunet train` or `prelunet init`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="ONNX model file to write.")],
    canvas: Annotated[
        Canvas | None,
        typer.Option(
            help="`ragged`: images of any sizes can share a batch. `exact`: no masks; images must fill their canvas.",
            show_default="ragged; exact for int8",
        ),
    ] = None,
    precision: Annotated[
        FilePrecision,
        typer.Option(
            help="`fp16`: half the size and faster on GPUs; scores differ in the third decimal. `int8`: a quarter of "
            "the size and faster on CPUs with --device openvino; needs --calibrate, and changes some answers."
        ),
    ] = "fp32",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="For int8: typical images, in any form that `validate` reads. Half of those chosen give the ranges of "
            "the activations, the others show what int8 costs.",
            metavar="DATA",
            rich_help_panel=_INT8,
        ),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Number of images, spread evenly over --calibrate.",
            show_default=str(DEFAULT_IMAGES),
            metavar="N",
            rich_help_panel=_INT8,
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="Labels of flat images in --calibrate, as for `validate`.", rich_help_panel=_INT8),
    ] = None,
    no_labels: Annotated[
        bool,
        typer.Option(
            "--no-labels", help="The images have no labels: count other first answers only.", rich_help_panel=_INT8
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Export a checkpoint to one ONNX file with the dense head inside.

    The file is checked against the PyTorch net on images of several sizes before it is put in place; a mismatch leaves
    no file.
    """
    from ..dense.export import export_checkpoint
    from ..dense.half_precision import FLOAT16_MAX

    require_new(output, force=force)
    spec = None
    if calibrate is not None:
        spec = DatasetSpec(calibrate, labels, no_labels, limit=images or DEFAULT_IMAGES)
    elif images or labels or no_labels:
        option = "--images" if images else "--labels" if labels else "--no-labels"
        raise UsageError(
            f"{option} is for the images of --calibrate: add --calibrate DATA --precision int8, or remove it"
        )
    canvas = canvas or ("exact" if precision == "int8" else "ragged")
    result = export_checkpoint(checkpoint, output, canvas, precision, spec)
    worst = max(result.deviations, key=lambda d: d.scores)
    reference = "the PyTorch net" if result.cost is None else "the PyTorch net with the same rounding to int8"
    echo(
        f"{output}: {output.stat().st_size / 1e6:.1f} MB, {precision}, canvas {canvas}; {len(result.deviations)} runs "
        f"agree with {reference}, largest score deviation {worst.scores:.1e} (at {worst.height}x{worst.width}, "
        f"{worst.case})"
    )
    if result.cost is not None:
        echo(f"int8 beside fp32: {result.cost}")
    if result.magnitudes:
        layer, largest = max(result.magnitudes.items(), key=lambda item: item[1])
        echo(f"largest activation: {largest:.4g} ({layer}); the float16 maximum is {FLOAT16_MAX:g}")
    for warning in result.warnings:
        report(f"warning: {warning}")
