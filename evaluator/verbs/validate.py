"""`prelunet validate`: evaluate a model on a labelled dataset."""

import json
from pathlib import Path
from typing import Annotated

import typer

from evaluator.datasets.opening import open_dataset
from evaluator.engine.session import Device, open_session
from evaluator.reporting.report import Report, build_report
from evaluator.validation.run import describe_dataset, run_info
from evaluator.validation.validate import validate as evaluate_dataset
from evaluator.verbs.options import (
    AveragingOption,
    FlipOption,
    ProtocolOption,
    ScalesOption,
    WeightsOption,
    protocol_asked,
)

# What --json prints of the report.
NUMBERS = ("images", "evaluated", "refused", "top1_error", "top1_interval", "top5_error", "top5_interval")


def validate(
    *,
    model: Annotated[Path, typer.Option(help="Model file, as `prelunet export` wrote it.")],
    data: Annotated[
        Path, typer.Option(help="Folder, .tar or .zip of class folders named by wnid; a `val` folder in it is entered.")
    ],
    run: Annotated[Path, typer.Option(help="Folder of the run: made, or gone on with if it holds this very run.")],
    protocol: ProtocolOption = None,
    scales: ScalesOption = None,
    flip: FlipOption = None,
    averaging: AveragingOption = None,
    weights: WeightsOption = None,
    device: Annotated[
        Device, typer.Option(help="Where the model runs; auto is CUDA where it comes up, else the CPU.")
    ] = "auto",
    threads: Annotated[
        int, typer.Option(min=0, max=1024, help="Threads of the model and of decoding; 0 is one per core.")
    ] = 0,
    exif: Annotated[bool, typer.Option("--exif", help="Obey the cameras' notes on rotation.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run that lies there and start anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Evaluate a model on a labelled dataset; the same command resumes."""
    session = open_session(model, device, threads=threads)
    looks = protocol_asked(
        protocol, session.contract, scales=scales, flip=flip, averaging=averaging, weights=weights, exif=exif
    )
    _note(f"{model.name}: {session.contract.name} on {session.circumstances}")
    dataset = open_dataset(data, split="val", class_names=[entry.wnid for entry in session.contract.classes])
    found = len({sample.label for sample in dataset.samples})
    _note(f"{data}: {len(dataset.samples):,} images of {found:,} of the model's {len(dataset.classes):,} classes")
    info = run_info(session, model.name, describe_dataset(dataset), looks)
    finished = evaluate_dataset(session, dataset, info, run, fresh=fresh, threads=threads, announce=_note)
    report = build_report(finished)
    if report["refused"]:
        _note(
            f"warning: {report['refused']:,} of {report['images']:,} images were refused and not evaluated; "
            f"{run / 'predictions.jsonl'} says which and why"
        )
    numbers = {key: report[key] for key in NUMBERS}
    typer.echo(json.dumps({"run": str(run), **numbers}) if as_json else result_line(report))
    _note(f"per-class report: prelunet report {run}")


def result_line(report: Report) -> str:
    """Return the result in one line: what was evaluated, how, and the errors with their intervals."""
    protocol = report["protocol"]
    what = ", ".join([report["model"]["architecture"], protocol["name"], *(["mirrored"] if protocol["mirror"] else [])])
    counts = f"{report['evaluated']:,} of {report['images']:,} images"
    if not report["evaluated"]:
        return f"{what}: no error can be told, {counts}"
    top1, top5 = (
        f"top-{k} {report[f'top{k}_error']:.2f} [{', '.join(f'{bound:.1f}' for bound in report[f'top{k}_interval'])}]"
        for k in (1, 5)
    )
    return f"{what}: {top1} {top5} %, {counts}"


def _note(text: str) -> None:
    """Say something beside the result."""
    typer.echo(text, err=True)
