"""`prelunet compare`: compare two runs on the same images, class by class (the paper's Fig. 7), or two models."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..datasets import DatasetSpec, open_from_spec
from ..engine.load import open_with_placement
from ..engine.session import Placement
from ..errors import PreluNetError, UsageError
from ..protocols import ProtocolOverrides, build_protocol, default_protocol_name
from ..reporting.checks import (
    Check,
    check_comparison,
    comparison_rows,
    markdown_of,
    raise_unless_passed,
    write_junit,
    write_markdown,
)
from ..reporting.compare import METRICS
from ..reporting.compare_page import run_titles, write_comparison
from ..reporting.deciding import check_decision, compare_until_decided
from ..reporting.html import json_bytes
from ..terminal import echo, report
from ..validation.evaluate_model import require_outside_images
from ..validation.portions import Contestant
from .options.derive import Only, derive_options
from .options.shared import ProtocolOption

Metric = Literal["top1", "top5", "both"]

_DECIDE = "Until decided"  # heading of options


@derive_options
def compare(
    *,
    a: Annotated[Path, typer.Argument(help="Folder of a finished run, the baseline; a model with --until-decided.")],
    b: Annotated[Path, typer.Argument(help="Folder of the run to compare with it, on the same dataset; or a model.")],
    images: Annotated[Path | None, typer.Argument(metavar="[DATA]", help="The same as --data.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            "--output",
            help="Folder for compare.json, .csv and .html, or for the portions with --until-decided.",
            show_default="B/report/compared-with-NAME-OF-A, or runs/B-against-A-DATA",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder or archive of the images: to show those whose result changed, or to evaluate.",
            show_default="where the runs found them",
        ),
    ] = None,
    fail_if_worse: Annotated[
        float | None,
        typer.Option(
            metavar="POINTS",
            min=0,
            help="Exit with code 6 if B's error exceeds A's by more than this many percentage points: over the images "
            "that both evaluated, or over all that A evaluated, with those that B refused counted as wrong. Exit with "
            "code 7 if it may, with 95 % confidence, and the images cannot tell.",
        ),
    ] = None,
    metric: Annotated[Metric, typer.Option(help="Error that --fail-if-worse checks.")] = "both",
    markdown: Annotated[
        Path | None,
        typer.Option(
            help="Markdown file for the result. It is also appended to the file that GITHUB_STEP_SUMMARY names."
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="JUnit file (XML) for the verdicts of --fail-if-worse, as test cases.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print compare.json, or decision.json, to stdout instead of the summary.")
    ] = False,
    until_decided: Annotated[
        bool,
        typer.Option(
            "--until-decided",
            help="Evaluate the models A and B on random portions of the images until it is known which is better.",
            rich_help_panel=_DECIDE,
        ),
    ] = False,
    margin: Annotated[
        float,
        typer.Option(metavar="POINTS", help="A difference that does not matter.", rich_help_panel=_DECIDE),
    ] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of images.", rich_help_panel=_DECIDE)] = 0,
    labels: Annotated[
        Path | None, typer.Option(help="Labels of flat images, as for validate.", rich_help_panel=_DECIDE)
    ] = None,
    protocol: ProtocolOption = None,
    overrides: ProtocolOverrides,
    placement: Annotated[Placement, Only("device", "precision", "threads", "memory", "gpu_memory")],
) -> None:
    """Compare run B with run A, the baseline: which is better, by how much, and could it be chance."""
    for name, points in (("--fail-if-worse", fail_if_worse), ("--margin", margin)):
        if points is not None and not 0 <= points < math.inf:
            raise UsageError(f"{name} {points}: give a number of points, e.g. {name} 0.5")
    if junit is not None and fail_if_worse is None:
        raise UsageError("--junit writes the verdicts of --fail-if-worse; give --fail-if-worse POINTS too")
    if images is not None and data is not None:
        raise UsageError(f"{images}: --data is given too. Give one of them")
    data = images or data
    outputs = _Outputs(markdown, junit, as_json=as_json)
    if not until_decided:
        written = write_comparison(a, b, out=out, data=data)
        metrics = list(METRICS) if metric == "both" else [metric]
        checks = [] if fail_if_worse is None else check_comparison(written.comparison, fail_if_worse, metrics)
        rows = comparison_rows(written.comparison)
        outputs.write(f"{written}\n", written.comparison, run_titles(written.comparison), rows, checks)
        return
    if data is None:
        raise UsageError("--until-decided evaluates models on images: prelunet compare A.onnx B.onnx DATA")
    spec = DatasetSpec(data, labels)
    sides = [_contestant(name, model, spec, protocol, overrides, placement) for name, model in (("a", a), ("b", b))]
    folder = out or Path("runs", f"{b.stem}-against-{a.stem}-{data.resolve().stem}")
    require_outside_images(folder, sides[0].dataset, "--out")
    key = "top5" if metric == "top5" else "top1"
    decision = compare_until_decided(sides[0], sides[1], folder, margin=margin, metric=key, seed=seed, report=report)
    checks = [] if fail_if_worse is None else [check_decision(decision, fail_if_worse)]
    outputs.write(f"{decision}\n", decision.data, {"a": a.name, "b": b.name}, [decision.row], checks)


@dataclass(frozen=True)
class _Outputs:
    """Where a comparison is written, besides its own files. markdown, junit: files; as_json: to stdout, for a text."""

    markdown: Path | None
    junit: Path | None
    as_json: bool

    def write(
        self,
        text: str,
        result: dict[str, Any],
        titles: Mapping[str, str],
        rows: Sequence[Sequence[str]],
        checks: Sequence[Check],
    ) -> None:
        """Print the result and write the files; then raise if a check did not pass, else if a file was not written."""
        try:
            echo(json_bytes(result).decode("ascii") if self.as_json else text, end="")
            if refused := result.get("refused_by_b_only"):
                report(
                    f"warning: B refused {refused:,} image{'s' if refused > 1 else ''} that A evaluated. Both errors "
                    "leave them out; --fail-if-worse also counts them as wrong in B"
                )
        finally:  # also if the reader of stdout has closed it
            fault = None
            try:
                if self.markdown is not None:
                    write_markdown(self.markdown, markdown_of(titles, rows, checks))
                if self.junit is not None:
                    write_junit(self.junit, titles, checks)
            except (PreluNetError, OSError) as error:
                report(f"warning: {error}")
                fault = error
            raise_unless_passed(checks)
            if fault is not None:
                raise fault


def _contestant(
    name: str,
    model: Path,
    data: DatasetSpec,
    protocol: str | None,
    overrides: ProtocolOverrides,
    placement: Placement,
) -> Contestant:
    """Open a model and the dataset with labels for its classes."""
    session = open_with_placement(model, placement, preallocate=True)
    chosen = build_protocol(protocol or default_protocol_name(session.contract), session.contract, overrides)
    report(f"{model.name}: {session.contract.name} on {session.circumstances}")
    return Contestant(name, session, model, chosen, open_from_spec(data, session.contract.classes))
