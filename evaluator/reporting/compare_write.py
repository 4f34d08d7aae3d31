"""Writes what `prelunet compare` leaves in a folder."""

from dataclasses import dataclass
from pathlib import Path

from evaluator.files import write_atomically
from evaluator.reporting.compare import Comparison, compare_runs, comparison_csv
from evaluator.reporting.compare_page import gather_flips, render_comparison
from evaluator.reporting.report import report_bytes
from evaluator.reporting.write import REPORT_FOLDER
from evaluator.validation.run import read_run


@dataclass(frozen=True)
class WrittenComparison:
    """A comparison and the files that hold it."""

    comparison: Comparison
    json: Path
    csv: Path
    html: Path


def write_comparison(a: Path, b: Path, *, out: Path | None = None, data: Path | None = None) -> WrittenComparison:
    """Write compare.json, compare.csv and compare.html of two finished runs; A is the baseline.

    out: folder for them, made when it is missing; None for one in B's report folder that is named after A.
    data: folder or archive of the images, for those that flipped; None looks where the runs found them.
    Raises RunFolderError when a run is missing, unfinished, damaged or of other images than the other, DatasetError
    when `data` is another dataset, EnvironmentFault or OSError when a file cannot be written: it is whole or absent.
    """
    run_a, run_b = read_run(a), read_run(b)
    comparison = compare_runs(run_a, run_b)
    page = render_comparison(comparison, gather_flips(comparison, run_a, run_b, data))
    target = out or b / REPORT_FOLDER / f"compared-with-{a.resolve().name}"
    target.mkdir(parents=True, exist_ok=True)
    written = WrittenComparison(comparison, target / "compare.json", target / "compare.csv", target / "compare.html")
    write_atomically(written.json, report_bytes(comparison))
    write_atomically(written.csv, comparison_csv(comparison))
    write_atomically(written.html, page)
    return written
