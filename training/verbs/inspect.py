"""`prelunet inspect`: describe a checkpoint or model file, and measure a checkpoint's layers on images."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ...evaluator.datasets import DatasetSpec
from ...evaluator.errors import UsageError
from ...evaluator.files import require_writable, write_atomically
from ...evaluator.terminal import echo, report
from ..inspection.describe_file import inspect_file, print_inspection
from ..inspection.layer_log import DEFAULT_IMAGES, read_layer_log

Inspection = dict[str, Any]  # of `inspect_file`, with the measurements if there are any


def inspect(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Checkpoints or exported models, or the folder of a run trained with --diagnose. With --plot, several "
            "checkpoints share the axes.",
            metavar="CKPT|MODEL.onnx|RUN",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Images of the checkpoint's classes, on which to measure each layer's responses and gradients. If it "
            "contains a `val` folder, that folder is used.",
            metavar="DIR|ARCHIVE",
        ),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=4096,
            help="Number of images to measure, spread evenly over --data.",
            show_default=str(DEFAULT_IMAGES),
            metavar="N",
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="Labels of a flat folder: a list of `name,label` or `name wnid`, or the ILSVRC devkit."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            "-o",
            "--output",
            help="Plot the measurements, or their history in RUN, to an SVG file.",
            metavar="FILE.svg",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: an object, or a list for several files.")
    ] = False,
) -> None:
    """Describe a checkpoint or model file, compare its slopes with the paper's, and measure its layers on images."""
    if data is None and (images or labels):
        raise UsageError(f"{'--images' if images else '--labels'}: needs images. Add --data DIR")
    if plot is not None:
        if plot.suffix.lower() != ".svg":  # a .png, say, would contain SVG text
            raise UsageError(f"--plot {plot}: plots are written as SVG. Give a name that ends in .svg")
        require_writable(plot)
    runs = [file for file in files if file.is_dir()]
    if runs and len(files) > 1:
        raise UsageError(
            f"{runs[0]}: a run is shown alone. To compare nets, give checkpoints, such as last.safetensors"
        )
    if runs:
        _show_history(runs[0], data, plot, as_json=as_json)
        return
    if plot is not None and data is None:
        raise UsageError(f"--plot {plot}: nothing to plot without measurements. Add --data DIR")
    inspections = [inspect_file(file) for file in files]
    if data is not None:
        inspections = _with_responses(files, inspections, DatasetSpec(data, labels), images)
    if as_json:
        echo(json.dumps(inspections if len(files) > 1 else inspections[0], indent=2))
    else:
        _print_inspections(inspections)
    if plot is not None:
        from ..inspection.plots import draw_layers

        _write_plot(plot, draw_layers({str(file): i["layers"] for file, i in zip(files, inspections, strict=True)}))


def _with_responses(
    files: Sequence[Path], inspections: Sequence[Inspection], data: DatasetSpec, images: int | None
) -> list[Inspection]:
    """Return the inspections of checkpoints with the measurements of their layers on images."""
    for file, inspection in zip(files, inspections, strict=True):
        if inspection["kind"] != "checkpoint":
            raise UsageError(
                f"{file}: layers cannot be measured in a model file. Give the checkpoint that it was exported from"
            )
    from ..inspection.layer_statistics import measure_checkpoint
    from ..net.checkpoints import read_checkpoint

    results = []
    for file, inspection in zip(files, inspections, strict=True):
        views, layers = measure_checkpoint(read_checkpoint(file), data, images or DEFAULT_IMAGES)
        used, refused = len(views.labels), views.refused
        for name, reason in refused.items():
            report(f"skipped: {name}: {reason}")
        if images is not None and used + len(refused) < images:
            report(f"{data.path}: has fewer than the {images} images requested, so all of them are used")
        measured = [layer.to_json() for layer in layers]
        results.append({**inspection, "images": used, "refused": refused, "layers": measured})
    return results


def _print_inspections(inspections: Sequence[Inspection]) -> None:
    from ..inspection.tables import print_responses

    console = Console()
    for number, inspection in enumerate(inspections):
        if number:
            console.rule()
        print_inspection(inspection, console)
        if "layers" in inspection:
            console.print()
            activation = inspection["architecture"]["activation"]
            print_responses(inspection["layers"], inspection["images"], activation, console)


def _show_history(folder: Path, data: Path | None, plot: Path | None, *, as_json: bool) -> None:
    """Print the measurements that `train --diagnose` wrote during a run."""
    if data is not None:
        raise UsageError(
            f"{folder}: a run folder, but --data measures one checkpoint. Use: "
            f"prelunet inspect {shlex.quote(str(folder / 'last.safetensors'))} --data {shlex.quote(str(data))}"
        )
    entries = read_layer_log(folder)
    if as_json:
        echo(json.dumps({"kind": "history", "folder": folder.name, "measurements": entries}, indent=2))
    else:
        from ..inspection.tables import print_history

        print_history(entries, Console())
    if plot is not None:
        from ..inspection.plots import draw_history

        _write_plot(plot, draw_history(entries))


def _write_plot(plot: Path, svg: bytes) -> None:
    write_atomically(plot, svg)
    report(f"plot: {plot}")
