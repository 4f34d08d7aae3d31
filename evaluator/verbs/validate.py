"""`prelunet validate`: evaluate a model on a labelled dataset."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from evaluator.datasets.opening import open_dataset
from evaluator.engine.session import Device, open_session
from evaluator.protocols import make_protocol
from evaluator.reporting.statistics import error_percent, wilson_interval
from evaluator.validation.run import Run
from evaluator.validation.validate import validate as evaluate_dataset


def validate(
    *,
    model: Annotated[Path, typer.Option(help="Model file, as `prelunet export` wrote it.")],
    data: Annotated[
        Path, typer.Option(help="Folder, .tar or .zip of class folders named by wnid; a `val` folder in it is entered.")
    ],
    run: Annotated[Path, typer.Option(help="Folder of the run: made, or gone on with if it holds this very run.")],
    protocol: Annotated[
        str, typer.Option(help="How images are looked at: center, dense-S (as dense-256) or multi-scale.")
    ] = "multi-scale",
    device: Annotated[
        Device, typer.Option(help="Where the model runs; auto is CUDA where it comes up, else the CPU.")
    ] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Threads of the model and of decoding; 0 is one per core.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run that lies there and start anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Evaluate a model on a labelled dataset; the same command resumes."""
    session = open_session(model, device, threads=threads)
    looks = make_protocol(protocol, session.contract)
    _note(f"{model.name}: {session.contract.name} on {session.circumstances}")
    dataset = open_dataset(data, split="val", class_names=[entry.wnid for entry in session.contract.classes])
    found = len({sample.label for sample in dataset.samples})
    _note(f"{data}: {len(dataset.samples):,} images of {found:,} of the model's {len(dataset.classes):,} classes")
    finished = evaluate_dataset(session, model.name, dataset, looks, run, fresh=fresh, threads=threads, announce=_note)
    numbers = result(finished)
    if numbers["refused"]:
        _note(
            f"warning: {numbers['refused']:,} of {numbers['images']:,} images were refused and not evaluated; "
            f"{run / 'predictions.jsonl'} says which and why"
        )
    typer.echo(json.dumps({"run": str(run), **numbers}) if as_json else result_line(finished, numbers))
    _note(f"per-class report: prelunet report {run}")


def result(run: Run) -> dict[str, Any]:
    """Return the counts of a run and its errors in percent, each with its Wilson 95 % interval."""
    evaluated = [prediction for prediction in run.predictions if prediction.refused is None]
    numbers: dict[str, Any] = {
        "images": len(run.predictions),
        "evaluated": len(evaluated),
        "refused": len(run.predictions) - len(evaluated),
    }
    for k in (1, 5):
        errors = sum(prediction.rank > k for prediction in evaluated)
        numbers[f"top{k}_error"] = error_percent(errors, len(evaluated))
        numbers[f"top{k}_interval"] = list(wilson_interval(errors, len(evaluated)))
    return numbers


def result_line(run: Run, numbers: dict[str, Any]) -> str:
    """Return the result in one line: what was evaluated, how, and the errors with their intervals."""
    protocol = run.info.protocol
    what = ", ".join([run.info.model["architecture"], protocol.name, *(["mirrored"] if protocol.mirror else [])])
    counts = f"{numbers['evaluated']:,} of {numbers['images']:,} images"
    if not numbers["evaluated"]:
        return f"{what}: no error can be told, {counts}"
    top1, top5 = (
        f"top-{k} {numbers[f'top{k}_error']:.2f} [{', '.join(f'{bound:.1f}' for bound in numbers[f'top{k}_interval'])}]"
        for k in (1, 5)
    )
    return f"{what}: {top1} {top5} %, {counts}"


def _note(text: str) -> None:
    """Say something beside the result."""
    typer.echo(text, err=True)
