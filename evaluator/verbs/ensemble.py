"""`prelunet ensemble`: the averaged scores of several models."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from ..reporting.report import error_with_interval
from ..reporting.statistics import error_percent, wilson_interval
from ..terminal import echo, report, table_lines
from ..validation.ensemble import Ensemble, ErrorCount
from ..validation.ensemble import ensemble as average_runs
from .options import report_next_command


def ensemble(
    *,
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of finished runs of different models, with the same protocol and dataset."),
    ],
    run: Annotated[
        Path,
        typer.Option(
            "--run", "-o", "--output", help="Folder of the ensemble: created, or resumed if it holds this ensemble."
        ),
    ],
    weights: Annotated[
        str | None, typer.Option(help="Weight of each run, in order, e.g. 2,1,1.", show_default="equal weights")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the existing run and start over.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Average the stored scores of several runs into a new run; the same command resumes.

    Prints the errors of each model alone and of the first 1, 2, ... models together, in the given order.
    """
    if weights is not None and not re.fullmatch(r"\d{1,6}(\.\d{1,6})?(,\d{1,6}(\.\d{1,6})?)*", weights, re.ASCII):
        raise UsageError(f"--weights {weights[:80]}: give positive numbers, separated by commas, e.g. --weights 2,1,1")
    numbers = None if weights is None else list(map(float, weights.split(",")))
    averaged = average_runs(runs, run, weights=numbers, fresh=fresh, report=report)
    echo(json.dumps(_to_json(averaged, run)) if as_json else "\n".join(_table(averaged)))
    if averaged.cumulative_errors:
        report(
            "note: choosing the order or the weights by these errors makes them look too good; choose on other images"
        )
    report_next_command(averaged.run, run)


def _to_json(averaged: Ensemble, run: Path) -> dict[str, Any]:
    """Return the result as plain data: each member's own errors, and those of the first 1, 2, ... together."""
    lines = averaged.run.predictions
    refused = sum(line.refused is not None for line in lines)
    members = [dict(member) for member in averaged.run.info.members]
    for member, error_count in zip(members, averaged.member_errors, strict=False):  # without labels there are no errors
        member.update(_errors(error_count))
    cumulative_errors = [
        {"models": number, **_errors(error_count)}
        for number, error_count in enumerate(averaged.cumulative_errors, start=1)
    ]
    counts = {"images": len(lines), "evaluated": len(lines) - refused, "refused": refused}
    return {"run": str(run), **counts, "members": members, "first": cumulative_errors}


def _errors(error_count: ErrorCount) -> dict[str, Any]:
    """Return errors in percent with their intervals, as in a report."""
    errors: dict[str, Any] = {"counted": error_count.images}
    for key, wrong in (("top1", error_count.top1_wrong), ("top5", error_count.top5_wrong)):
        errors[f"{key}_error"] = error_percent(wrong, error_count.images)
        errors[f"{key}_interval"] = wilson_interval(wrong, error_count.images)
    return errors


def _table(averaged: Ensemble) -> Iterator[str]:
    """Yield the lines of the result for a terminal."""
    info, lines = averaged.run.info, averaged.run.predictions
    evaluated = sum(line.refused is None for line in lines)
    yield (
        f"{info.model['file']}, {info.protocol.name}: {evaluated:,} of {len(lines):,} images were evaluated by every "
        "model; all errors are over these"
    )
    if not averaged.cumulative_errors:
        return
    rows: list[Sequence[str]] = [("", "weight", "top-1 error, %", "top-5 error, %")]
    for number, (member, error_count) in enumerate(zip(info.members, averaged.member_errors, strict=True), start=1):
        what = f"model {number}: {member['model']['architecture']}, {member['model']['file']}"
        rows.append((what, f"{member['weight']:.4f}", *_shown(error_count)))
    for number, error_count in enumerate(averaged.cumulative_errors, start=1):
        rows.append((f"first {number} together" if number > 1 else "first alone", "", *_shown(error_count)))
    yield from ("", *table_lines(rows, right_aligned=()))


def _shown(error_count: ErrorCount) -> tuple[str, str]:
    """Return top-1 and top-5 error with their intervals: `22.97 [22.60, 23.30]`."""
    if not error_count.images:
        return "no image", "no image"
    errors = _errors(error_count)
    return error_with_interval(errors, 1, 2), error_with_interval(errors, 5, 2)
