"""Writes what `prelunet report` leaves in a run folder."""

from dataclasses import dataclass
from pathlib import Path

from evaluator.files import write_atomically
from evaluator.reporting.gallery import make_gallery
from evaluator.reporting.page import render_page
from evaluator.reporting.report import Report, build_report, classes_csv, report_bytes
from evaluator.validation.run import read_run

REPORT_FOLDER = "report"


@dataclass(frozen=True)
class WrittenReport:
    """A report and the files that hold it."""

    report: Report
    json: Path
    csv: Path
    html: Path


def write_report(folder: Path, *, data: Path | None = None) -> WrittenReport:
    """Write report.json, classes.csv and report.html of a finished run into its folder `report`.

    data: folder or archive of the run's images, for the gallery; None looks where the run found them.
    Raises RunFolderError when the run is missing, unfinished or damaged, DatasetError when `data` is another dataset,
    EnvironmentFault or OSError when the files cannot be written; each file is whole or absent.
    """
    run = read_run(folder)
    report = build_report(run)
    page = render_page(report, run, make_gallery(run, data))  # before any file is written: a wrong `data` leaves none
    target = folder / REPORT_FOLDER
    target.mkdir(exist_ok=True)
    written = WrittenReport(report, target / "report.json", target / "classes.csv", target / "report.html")
    write_atomically(written.json, report_bytes(report))
    write_atomically(written.csv, classes_csv(report))
    write_atomically(written.html, page)
    return written
