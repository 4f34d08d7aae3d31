"""report.html: one self-contained page, built from report.json, the run's predictions and the gallery."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import MissingExtra
from ..files import create_folder, write_atomically
from ..validation.run import Run, read_run
from .charts import FEW_CLASSES, error_chart
from .gallery import Gallery, Mistake, build_gallery
from .html import json_bytes, render_html
from .page_data import describe_view, page_data
from .report import (
    Report,
    build_report,
    classes_csv,
    describe_protocol,
    describe_traits,
    headline,
    scored_over,
    short_provider,
)
from .score_charts import bin_sizes_chart, histogram_chart, reliability_chart, risk_chart
from .statistics import NO_MACRO_INTERVAL
from .tables import worst_classes, worst_first

WORST_CLASSES = 10
MATRIX_FILLED = 0.1  # share of the cells off the diagonal from which on a matrix shows more than the list of pairs
CONFUSIONS_SHOWN = 20
REFUSALS_SHOWN = 200
COVERAGES_SHOWN = (95, 90, 80, 50)  # percent of the images that are answered
VIEWS_SHOWN = 16  # single views; more are collapsed into their scales until "Show all" is clicked
ACTIVATIONS = {"prelu": "PReLU", "prelu-shared": "PReLU, shared slopes", "relu": "ReLU", "lrelu": "leaky ReLU"}


def render_page(report: Report, run: Run, gallery: Gallery) -> bytes:
    """Return report.html; the same report, run and gallery give the same bytes."""
    classes, pairs = report["classes"], report["confusions"]
    seen = [entry for entry in classes if entry["evaluated"]]
    charts = {
        "error": error_chart(report),
        "reliability": reliability_chart(report),
        "bins": bin_sizes_chart(report),
        "histogram": histogram_chart(report),
        "risk": risk_chart(report),
    }
    return render_html(
        "report.html.j2",
        report=report,
        gallery=gallery,
        page_data=page_data(report, run, gallery),
        charts={name: chart for name, chart in charts.items() if chart},
        headline=headline(report),
        over=scored_over(report),
        several=sum(bool(prediction.also) for prediction in run.predictions),
        protocol=describe_protocol(report["protocol"]),
        traits=describe_traits(report),
        provider=short_provider(report["circumstances"]),
        activation=ACTIVATIONS.get(report["model"]["activation"], report["model"]["activation"]),
        classes=classes,
        seen=seen,
        few=len(seen) <= FEW_CLASSES,
        worst_first=sorted(classes, key=worst_first),
        worst=worst_classes(classes, "top1", min(WORST_CLASSES, (len(seen) + 1) // 2)),
        perfect={key: sum(not entry[f"{key}_wrong"] for entry in seen) for key in ("top1", "top5")},
        no_macro_interval=NO_MACRO_INTERVAL,
        confusions=([pair for pair in pairs if pair["count"] > 1] or pairs)[:CONFUSIONS_SHOWN],
        matrix=is_filled(report["worst"]["counts"]),
        elsewhere=any(report["worst"]["elsewhere"]),
        kept=coverage_rows(report),
        averaging=averaging_rows(report),
        views_shown=VIEWS_SHOWN,
        refusals_shown=REFUSALS_SHOWN,
    )


def is_filled(matrix: list[list[int]]) -> bool:
    """Return whether enough cells of a confusion matrix off its diagonal hold an answer."""
    others = [count for row, counts in enumerate(matrix) for column, count in enumerate(counts) if row != column]
    return any(others) and sum(map(bool, others)) >= MATRIX_FILLED * len(others)


def coverage_rows(report: Report) -> list[dict[str, Any]]:
    """Return the points of the risk-coverage curve for the page's table: the first of at least each coverage shown."""
    points = report["risk_coverage"]["points"] if report["risk_coverage"] else []
    steps = pairwise([0, *(point["coverage"] for point in points)])
    return [
        point
        for point, (below, coverage) in zip(points, steps, strict=True)
        if any(below < shown <= coverage for shown in COVERAGES_SHOWN)
    ][::-1]


def averaging_rows(report: Report) -> list[dict[str, Any]]:
    """Return the errors of single views in the order of the page: each scale with its views, then plain and mirrored.

    Each row has `label`, `kind` (scale, view or mirror) and the mean errors of its views. Empty if there is nothing to
    compare: a single view, an ensemble, no images.
    """
    views, scales, mirrors = report["views"], report["scales"], report["mirrors"]
    if not report["evaluated"] or len(views) < 2:
        return []
    rows = []
    for scale in scales:
        own = [view for view in views if view["scale"] == scale["scale"]]
        if len(scales) > 1 and len(own) > 1:
            rows.append(_row("scale", f"scale {scale['scale']}, mean of {len(own)}", scale))
        rows += [_row("view", f"scale {describe_view(view)}", view) for view in own]
    if len(mirrors) > 1:
        names = {False: "plain views", True: "mirrored views"}
        rows += [
            _row("mirror", f"{names[mirror['mirrored']]}, mean of {mirror['views']}", mirror) for mirror in mirrors
        ]
    return rows


def _row(kind: str, label: str, errors: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "label": label, "top1_error": errors["top1_error"], "top5_error": errors["top5_error"]}


# The files written by `prelunet report`.


REPORT_FOLDER = "report"


@dataclass(frozen=True)
class WrittenReport:
    """A report and its files.

    html: None if the extra `report` is not installed; mistakes: those of the gallery; missing: why there is no page, or
    no pictures on it; None if it has them or needs none.
    """

    report: Report
    json: Path
    csv: Path
    html: Path | None
    mistakes: tuple[Mistake, ...]
    missing: str | None = None


def write_report(folder: Path, *, out: Path | None = None, data: Path | None = None) -> WrittenReport:
    """Write report.json, classes.csv and, with the extra `report`, report.html of a finished run.

    out: folder for them, created if missing; None for the folder `report` of the run.
    data: folder or archive of the run's images, for the gallery; None to look where the run found them.
    Raises RunFolderError if the run is missing, unfinished or damaged, DatasetError if `data` is a different dataset,
    EnvironmentFault or OSError if a file cannot be written. Files are written atomically.
    """
    run = read_run(folder)
    report = build_report(run)
    gallery = build_gallery(run, data)
    missing = gallery.missing
    try:
        page = render_page(report, run, gallery)  # before any file is written, so that a wrong `data` leaves none
    except MissingExtra as error:
        page, missing = None, str(error)
    target = out or folder / REPORT_FOLDER
    create_folder(target, "--out")
    html = None if page is None else target / "report.html"
    written = WrittenReport(report, target / "report.json", target / "classes.csv", html, gallery.mistakes, missing)
    write_atomically(written.json, json_bytes(report))
    write_atomically(written.csv, classes_csv(report))
    if html is not None and page is not None:
        write_atomically(html, page)
    return written
