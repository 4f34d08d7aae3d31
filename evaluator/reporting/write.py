"""Writes what `prelunet report` leaves in a run folder."""

from dataclasses import dataclass
from pathlib import Path

from prelunet.evaluator.files import make_folder, write_atomically
from prelunet.evaluator.reporting.gallery import make_gallery
from prelunet.evaluator.reporting.page import render_page
from prelunet.evaluator.reporting.report import Report, build_report, classes_csv
from prelunet.evaluator.reporting.text import json_bytes
from prelunet.evaluator.validation.run import read_run

REPORT_FOLDER = "report"


@dataclass(frozen=True)
class WrittenReport:
    """A report and the files that hold it. missing: why the page has no pictures; None where it has, or needs none."""

    report: Report
    json: Path
    csv: Path
    html: Path
    missing: str | None = None


def write_report(folder: Path, *, out: Path | None = None, data: Path | None = None) -> WrittenReport:
    """Write report.json, classes.csv and report.html of a finished run.

    out: folder for them, made when it is missing; None for the run's own folder `report`.
    data: folder or archive of the run's images, for the gallery; None looks where the run found them.
    Raises RunFolderError when the run is missing, unfinished or damaged, DatasetError when `data` is another dataset,
    EnvironmentFault or OSError when the files cannot be written; each file is whole or absent.
    """
    run = read_run(folder)
    report = build_report(run)
    gallery = make_gallery(run, data)
    page = render_page(report, run, gallery)  # before any file is written: a wrong `data` leaves none
    target = out or folder / REPORT_FOLDER
    make_folder(target, "--out")
    written = WrittenReport(
        report, target / "report.json", target / "classes.csv", target / "report.html", gallery.missing
    )
    write_atomically(written.json, json_bytes(report))
    write_atomically(written.csv, classes_csv(report))
    write_atomically(written.html, page)
    return written
