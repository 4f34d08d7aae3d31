"""`prelunet compare`: two runs on the same images, class by class (the paper's Fig. 7)."""

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from evaluator.errors import CheckFailed, UsageError
from evaluator.reporting.compare import METRICS, Comparison, judgement, shown_p
from evaluator.reporting.compare_page import protocol_remark
from evaluator.reporting.compare_write import WrittenComparison, write_comparison
from evaluator.reporting.report import describe_protocol, report_bytes

Metric = Literal["top1", "top5", "both"]


def compare(
    a: Annotated[Path, typer.Argument(help="Folder of a finished run: the baseline.")],
    b: Annotated[Path, typer.Argument(help="Folder of the run that is compared with it, on the same dataset.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for compare.json, .csv and .html. Default: B/report/compared-with-NAME-OF-A."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder or archive of the images, for those that flipped; else where the runs found them."),
    ] = None,
    fail_if_worse: Annotated[
        float | None,
        typer.Option(metavar="POINTS", min=0, help="Exit with 6 when B's error is more than so many points above A's."),
    ] = None,
    metric: Annotated[Metric, typer.Option(help="Which error --fail-if-worse looks at.")] = "both",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print compare.json to stdout instead of the summary.")
    ] = False,
) -> None:
    """Compare run B with run A, the baseline: which is better, by how much, and is it chance."""
    if fail_if_worse is not None and not math.isfinite(fail_if_worse):
        raise UsageError(f"--fail-if-worse {fail_if_worse}: give a number of points, as --fail-if-worse 0.5")
    written = write_comparison(a, b, out=out, data=data)
    typer.echo(report_bytes(written.comparison).decode("ascii") if as_json else summary(written), nl=False)
    if fail_if_worse is not None:
        check_not_worse(written.comparison, fail_if_worse, metric)


def check_not_worse(comparison: Comparison, points: float, metric: Metric) -> None:
    """Raise CheckFailed when B's error is more than so many points above A's, or when that cannot be told.

    metric: which error. The difference is taken as compare.json has it, with 4 decimals.
    """
    if not comparison["evaluated"]:
        raise CheckFailed("no image was evaluated in both runs, so it cannot be told whether B is worse than A")
    a, b = comparison["a"], comparison["b"]
    worse = [
        f"top-{METRICS[key]} error {b[f'{key}_error']:.2f} % against {a[f'{key}_error']:.2f} %, {difference:+g} points"
        for key in (METRICS if metric == "both" else [metric])
        if (difference := comparison[key]["difference"]) > points
    ]
    if worse:
        raise CheckFailed(f"B is worse than A by more than {points:g} points: {'; '.join(worse)}")


def summary(written: WrittenComparison) -> str:
    """Return what a person wants to see first, and where the rest is."""
    comparison = written.comparison
    lines = [_run(comparison, "a", "A, the baseline"), _run(comparison, "b", "B")]
    left_out = comparison["images"] - comparison["evaluated"]
    only = comparison["dataset"]["selection"]
    lines.append(
        f"{comparison['evaluated']:,} of {comparison['images']:,} images evaluated in both"
        + (f" (only {only})" if only else "")
        + (f"; {left_out:,} refused in A or B and left out" if left_out else "")
    )
    if remark := protocol_remark(comparison):
        lines.append(remark)
    for key in METRICS:
        lines += ["", *_metric(comparison, key)]
    lines += ["", f"{written.html}, {written.json.name}, {written.csv.name}"]
    return "\n".join(lines) + "\n"


def _run(comparison: Comparison, side: str, name: str) -> str:
    run = comparison[side]
    errors = " ".join(
        f"top-{beyond} {run[f'{key}_error']:.2f} %"
        for key, beyond in METRICS.items()
        if run[f"{key}_error"] is not None
    )
    protocol = run["protocol"]
    looked_at = f"{protocol['name']} ({describe_protocol(protocol)})"
    return f"{name}: {run['model']['file']} ({run['model']['architecture']}), {looked_at}  {errors}".rstrip()


def _metric(comparison: Comparison, key: str) -> list[str]:
    """Return the lines on one metric: who is better, by how much, how surely, and how many classes moved."""
    found, title = comparison[key], f"top-{METRICS[key]}"
    if found["difference"] is None:
        return [f"{title}: {judgement(found)}"]
    low, high = found["interval"]
    stand = found["classes_improved_that_stand"] + found["classes_worse_that_stand"]
    return [
        f"{title}: {judgement(found)}: {found['difference']:+.2f} points of error, "
        f"95 % interval {low:+.2f} to {high:+.2f}",
        f"  images: {found['only_a_wrong']:,} wrong in A only, {found['only_b_wrong']:,} wrong in B only; "
        f"McNemar {shown_p(found['p'])}",
        f"  classes: {found['classes_improved']:,} improved, {found['classes_unchanged']:,} unchanged, "
        f"{found['classes_worse']:,} worse; {stand:,} of these differences stand at 5 % (Benjamini-Hochberg)",
    ]
