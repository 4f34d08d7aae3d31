"""`prelunet compare`: compare two runs on the same images, class by class (the paper's Fig. 7)."""

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import CheckFailed, UsageError
from ..reporting.compare import METRICS, Comparison
from ..reporting.compare_page import write_comparison
from ..reporting.html import json_bytes
from ..terminal import echo, report

Metric = Literal["top1", "top5", "both"]


def compare(
    a: Annotated[Path, typer.Argument(help="Folder of a finished run: the baseline.")],
    b: Annotated[Path, typer.Argument(help="Folder of the run to compare with it, on the same dataset.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            "--output",
            help="Folder for compare.json, .csv and .html.",
            show_default="B/report/compared-with-NAME-OF-A",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder or archive of the images, to show those whose result changed.",
            show_default="where the runs found them",
        ),
    ] = None,
    fail_if_worse: Annotated[
        float | None,
        typer.Option(
            metavar="POINTS",
            min=0,
            help="Exit with code 6 if B's error exceeds A's by more than this many percentage points: over the images "
            "that both evaluated, or over all that A evaluated, with those that B refused counted as wrong.",
        ),
    ] = None,
    metric: Annotated[Metric, typer.Option(help="Error that --fail-if-worse checks.")] = "both",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print compare.json to stdout instead of the summary.")
    ] = False,
) -> None:
    """Compare run B with run A, the baseline: which is better, by how much, and could it be chance."""
    if fail_if_worse is not None and not math.isfinite(fail_if_worse):
        raise UsageError(f"--fail-if-worse {fail_if_worse}: give a number of points, e.g. --fail-if-worse 0.5")
    written = write_comparison(a, b, out=out, data=data)
    try:
        echo(json_bytes(written.comparison).decode("ascii") if as_json else f"{written}\n", end="")
        if refused := written.comparison["refused_by_b_only"]:
            report(
                f"warning: B refused {refused:,} image{'s' if refused > 1 else ''} that A evaluated. Both errors leave "
                "them out; --fail-if-worse also counts them as wrong in B"
            )
    finally:  # also if the reader of stdout has closed it
        if fail_if_worse is not None:
            check_not_worse(written.comparison, fail_if_worse, metric)


def check_not_worse(comparison: Comparison, points: float, metric: Metric) -> None:
    """Raise CheckFailed if B's error exceeds A's by more than `points`, or if no image can be compared.

    metric: error to check. Differences are those of compare.json, with 4 decimals: over the images that both
    evaluated, and over all that A evaluated. The latter counts images that B refused as wrong; otherwise B could pass
    by refusing images.
    """
    if not comparison["evaluated"]:
        raise CheckFailed("no image was evaluated in both runs, so it is unknown whether B is worse than A")
    worse = []
    for key in METRICS if metric == "both" else [metric]:
        found, title = comparison[key], f"top-{METRICS[key]} error"
        a_error, b_error = (comparison[side][f"{key}_error"] for side in ("a", "b"))
        if found["difference"] > points:
            worse.append(f"{title} {b_error:.2f} % against {a_error:.2f} %, {found['difference']:+g} points")
        elif found["difference_with_refusals"] > points:
            worse.append(
                f"{title} {found['difference_with_refusals']:+g} points, counting the images that only B refused "
                f"({comparison['refused_by_b_only']:,}) as wrong in B; {found['difference']:+g} without them"
            )
    if worse:
        raise CheckFailed(f"B is worse than A by more than {points:g} points: {'; '.join(worse)}")
