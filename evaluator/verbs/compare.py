"""`prelunet compare`: compare two runs on the same images, class by class (the paper's Fig. 7), or two models."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..datasets import DatasetSpec, open_from_spec
from ..engine.load import open_with_placement
from ..engine.session import Placement
from ..errors import UsageError
from ..files import require_writable
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
from ..reporting.deciding import Decision, check_decision, compare_until_decided
from ..reporting.html import json_bytes
from ..terminal import echo, report
from ..validation.evaluate_model import name_of, require_outside_images
from ..validation.portions import ComparedModel
from ..validation.run import RUN_FILE
from .options import Only, ProtocolOption, derive_options

Metric = Literal["top1", "top5", "both"]

_DECIDE = "Until decided"  # heading of options
_SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"  # in which GitHub's and Gitea's runners name a file


@derive_options
def compare(
    *,
    a: Annotated[Path, typer.Argument(help="Folder of a finished run, the baseline; a model with --until-decided.")],
    b: Annotated[Path, typer.Argument(help="Folder of the run to compare with it, on the same dataset; or a model.")],
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
            help="Exit with code 6 if B's error exceeds A's by more than this many percentage points: over the images "
            "that both evaluated, or over all that A evaluated, with those that B refused counted as wrong. Exit with "
            "code 7 if the images cannot tell: the 95 % interval of the difference reaches beyond.",
        ),
    ] = None,
    metric: Annotated[
        Metric | None,
        typer.Option(
            help="Error that --fail-if-worse checks, or that decides.", show_default="both; top1 with --until-decided"
        ),
    ] = None,
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
            help="Evaluate the models A and B on random portions of the images until it is known which is better, or, "
            "with --fail-if-worse, whether B is worse by more.",
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
    placement: Annotated[Placement, Only("device", "precision", "threads", "gpu_memory")],
) -> None:
    """Compare run B with run A, the baseline: which is better, by how much, and could it be chance."""
    for name, points in (("--fail-if-worse", fail_if_worse), ("--margin", margin)):
        if points is not None and not 0 <= points < math.inf:
            raise UsageError(f"{name} {points:g}: give a number of points, 0 or more, e.g. {name} 0.5")
    if junit is not None and fail_if_worse is None:
        raise UsageError("--junit writes the verdicts of --fail-if-worse; give --fail-if-worse POINTS too")
    outputs = _Outputs(markdown, junit, as_json=as_json)
    evaluated = _Evaluated(labels, protocol, overrides, placement)
    if until_decided:
        decision = _decide(a, b, data, out, evaluated, margin, fail_if_worse, metric or "top1", seed)
        checks = [] if fail_if_worse is None else [check_decision(decision, fail_if_worse)]
        outputs.write(f"{decision}\n", decision.data, {"a": a.name, "b": b.name}, [decision.row], checks)
        return
    if (margin, seed, evaluated) != (0.5, 0, _Evaluated()):
        raise UsageError(
            "--margin, --seed, --labels and the options of protocols and devices belong to --until-decided, which "
            "evaluates models. Give it, or omit them"
        )
    for folder in (a, b):
        if folder.is_file():
            raise UsageError(f"{folder}: a file, not the folder of a run. To compare models: --until-decided")
    if data is not None and (data / RUN_FILE).exists():
        raise UsageError(f"{data}: a third run; compare two at a time. `prelunet runs DIR` shows all")
    written = write_comparison(a, b, out=out, data=data)
    metrics = [metric] if metric in METRICS else list(METRICS)
    checks = [] if fail_if_worse is None else check_comparison(written.comparison, fail_if_worse, metrics)
    rows = comparison_rows(written.comparison)
    outputs.write(f"{written}\n", written.comparison, run_titles(written.comparison), rows, checks)


@dataclass(frozen=True)
class _Evaluated:
    """How models are evaluated."""

    labels: Path | None = None
    protocol: str | None = None
    overrides: ProtocolOverrides = ProtocolOverrides()
    placement: Placement = Placement()

    def model(self, name: str, model: Path, data: Path) -> ComparedModel:
        """Open a model and the dataset with labels for its classes."""
        if model.is_dir():
            raise UsageError(f"{model}: a folder, not a model file. To compare runs, omit --until-decided")
        session = open_with_placement(model, self.placement, preallocate=True)
        contract = session.contract
        chosen = build_protocol(self.protocol or default_protocol_name(contract), contract, self.overrides)
        report(f"{model.name}: {contract.name} on {session.circumstances}")
        dataset = open_from_spec(DatasetSpec(data, self.labels), contract.classes)
        return ComparedModel(name, session, model, chosen, dataset)


def _decide(
    a: Path,
    b: Path,
    data: Path | None,
    out: Path | None,
    evaluated: _Evaluated,
    margin: float,
    limit: float | None,
    metric: Metric,
    seed: int,
) -> Decision:
    """Evaluate two models until it is known which is better."""
    if data is None:
        raise UsageError("--until-decided evaluates models on images: prelunet compare A.onnx B.onnx DATA")
    if metric == "both":
        raise UsageError("--metric both: --until-decided needs one error that decides. Give top1 or top5")
    one, other = (evaluated.model(name, model, data) for name, model in (("a", a), ("b", b)))
    for remark in one.dataset.remarks:
        report(remark)
    folder = out or Path("runs", f"{b.stem}-against-{a.stem}-{name_of(data)}")
    require_outside_images(folder, one.dataset, "--out")
    return compare_until_decided(
        one, other, folder=folder, margin=margin, limit=limit, metric=metric, seed=seed, report=report
    )


class _Outputs:
    """Where a comparison is written, besides its own files.

    markdown, junit: files; as_json: to stdout, instead of a text. Raises UsageError if a file cannot be written.
    """

    def __init__(self, markdown: Path | None, junit: Path | None, *, as_json: bool) -> None:
        self._markdown, self._junit, self._as_json = markdown, junit, as_json
        named = os.environ.get(_SUMMARY_VARIABLE) if markdown is not None else None
        self._summary = Path(named) if named else None
        for path in (markdown, junit, self._summary):
            if path is not None:
                require_writable(path)

    def write(
        self,
        text: str,
        result: dict[str, Any],
        titles: Mapping[str, str],
        rows: Sequence[Sequence[str]],
        checks: Sequence[Check],
    ) -> None:
        """Print the result and write the files, then raise if a check did not pass."""
        try:
            echo(json_bytes(result).decode("ascii") if self._as_json else text, end="")
            if refused := result.get("refused_by_b_only"):
                report(
                    f"warning: B refused {refused:,} image{'s' if refused > 1 else ''} that A evaluated. Both errors "
                    "leave them out; --fail-if-worse also counts them as wrong in B"
                )
        finally:  # also if the reader of stdout has closed it
            try:
                if self._markdown is not None:
                    write_markdown(self._markdown, markdown_of(titles, rows, checks), self._summary)
                if self._junit is not None:
                    write_junit(self._junit, titles, checks)
            finally:  # also if the disk is full: the verdict decides the exit code
                raise_unless_passed(checks)
