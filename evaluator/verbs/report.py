"""`prelunet report`: the per-class report of a run."""

from pathlib import Path
from typing import Annotated

import typer

from ..reporting.html import json_bytes
from ..reporting.mlflow import log_to_mlflow
from ..reporting.report import error_with_interval, headline
from ..reporting.report_page import WrittenReport, write_report
from ..reporting.statistics import NO_MACRO_INTERVAL, TOPS
from ..reporting.tables import worst_classes
from ..terminal import echo
from ..terminal import report as print_message

WORST_PRINTED = 5


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run, written by `prelunet validate --run`.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", "--output", help="Folder for the three files.", show_default="RUN/report"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder or archive of the run's images, for the gallery.", show_default="where the run found them"
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print report.json to stdout instead of the summary.")
    ] = False,
    mlflow: Annotated[
        bool,
        typer.Option(
            "--mlflow",
            help="Log the run with its report to MLflow, where MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say.",
        ),
    ] = False,
) -> None:
    """Write report.json, classes.csv and report.html of a run, and print its errors and worst classes."""
    written = write_report(run, out=out, data=data)
    echo(json_bytes(written.report).decode("ascii") if as_json else _summary(written), end="")
    if written.html is None:
        echo(f"note: there is no report.html: {written.missing}", err=True)
    elif written.missing is not None:
        echo(f"note: {written.html} has no images. {written.missing} Give their place with --data DIR", err=True)
    if mlflow:
        print_message(f"logged to MLflow: {log_to_mlflow(run, written)}")


def _summary(written: WrittenReport) -> str:
    """Return the main results and the paths of the files."""
    report = written.report
    worst = worst_classes(report["classes"], "top1", WORST_PRINTED)
    lines = [headline(report)]
    if report["evaluated"]:
        macro, calibration = report["macro"], report["calibration"]
        errors = " ".join(f"top-{k} error {error_with_interval(macro, k)}" for k in TOPS)
        without = f" ({NO_MACRO_INTERVAL})" if macro["top1_interval"] is None else ""
        lines += [
            f"mean over {macro['classes']:,} classes: {errors} %{without}",
            f"mean score of the top-1 class {calibration['confidence']:.1f} %, "
            f"expected calibration error {calibration['expected_error']:.1f} %",
        ]
    if report["suspicion"]:
        lines.append(f"warning: {report['suspicion']}")
    lines.append("")
    if worst:
        lines.append(f"worst {len(worst)} classes, top-1 error in percent (95 % interval):")
    for entry in worst:
        low, high = entry["top1_interval"]
        confused = entry["confusions"][0]
        lines.append(
            f"  {entry['top1_error']:5.1f} ({low:.1f} – {high:.1f})  {entry['name']}, "
            f"mostly confused with {confused['name']} ({confused['count']} of {entry['evaluated']})"
        )
    lines += [""] if worst else []
    lines += [str(path) for path in (written.html, written.json, written.csv) if path]
    return "\n".join(lines) + "\n"
