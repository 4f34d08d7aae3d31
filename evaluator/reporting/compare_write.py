"""Writes what `prelunet compare` leaves in a folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prelunet.evaluator.errors import RunFolderError, UsageError
from prelunet.evaluator.files import make_folder, write_atomically
from prelunet.evaluator.reporting.compare import Comparison, compare_runs, comparison_csv
from prelunet.evaluator.reporting.compare_page import gather_flips, render_comparison
from prelunet.evaluator.reporting.report import describe_protocol
from prelunet.evaluator.reporting.text import json_bytes
from prelunet.evaluator.reporting.write import REPORT_FOLDER
from prelunet.evaluator.strict import parse_json
from prelunet.evaluator.validation.run import read_run


@dataclass(frozen=True)
class WrittenComparison:
    """A comparison and the files that hold it."""

    comparison: Comparison
    json: Path
    csv: Path
    html: Path


def write_comparison(a: Path, b: Path, *, out: Path | None = None, data: Path | None = None) -> WrittenComparison:
    """Write compare.json, compare.csv and compare.html of two finished runs; A is the baseline.

    out: folder for them; None for one in B's report folder that is named after A.
    data: folder or archive of the images, for those that flipped; None looks where the runs found them.
    Raises RunFolderError when a run is missing, unfinished, damaged or of other images than the other, DatasetError
    when `data` is another dataset, UsageError when the folder named after A holds the comparison with another run of
    that name, EnvironmentFault or OSError when a file cannot be written: it is whole or absent.
    """
    run_a, run_b = read_run(a), read_run(b)
    comparison = compare_runs(run_a, run_b)
    target = out or b / REPORT_FOLDER / f"compared-with-{a.resolve().name}"
    if out is None:
        _check_same_baseline(target / "compare.json", comparison)
    page = render_comparison(comparison, gather_flips(comparison, run_a, run_b, data))
    make_folder(target, "--out")
    written = WrittenComparison(comparison, target / "compare.json", target / "compare.csv", target / "compare.html")
    write_atomically(written.json, json_bytes(comparison))
    write_atomically(written.csv, comparison_csv(comparison))
    write_atomically(written.html, page)
    return written


def _check_same_baseline(file: Path, comparison: Comparison) -> None:
    """Refuse to replace the comparison with another baseline: runs of one name may lie in different folders."""
    if not file.exists():
        return
    try:
        there = parse_json(file.read_bytes())
        same = _baseline(there) == _baseline(comparison)
        model, protocol = there["a"]["model"], describe_protocol(there["a"]["protocol"])
        told = f"{model['file']} ({model['sha256'][:8]}…, {protocol}) on {there['dataset']['name']}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{file}: not a comparison that can be read, so it is not replaced. "
            "Move it away, or say where this comparison goes: --out DIR"
        ) from error
    if not same:
        raise UsageError(
            f"{file} is the comparison with another run of that name, {told}, and is not replaced. "
            "Say where this one goes: --out DIR"
        )


def _baseline(comparison: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what makes a baseline this one: its model, its members, its protocol and its dataset."""
    a = comparison["a"]
    members = [(member["model"]["sha256"], member["weight"]) for member in a["members"]]
    return a["model"]["sha256"], members, a["protocol"], comparison["dataset"]["fingerprint"]
