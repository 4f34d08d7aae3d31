"""compare.html: one self-contained page, made from compare.json and the images that flipped."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prelunet.evaluator.errors import RunFolderError, UsageError
from prelunet.evaluator.files import create_folder, write_atomically
from prelunet.evaluator.json_checks import parse_json
from prelunet.evaluator.reporting.charts import FEW_CLASSES
from prelunet.evaluator.reporting.compare import (
    METRICS,
    Comparison,
    compare_runs,
    comparison_csv,
    format_p_value,
    judgement,
)
from prelunet.evaluator.reporting.compare_charts import change_of, difference_chart
from prelunet.evaluator.reporting.gallery import Gallery, build_galleries, choose_mistakes
from prelunet.evaluator.reporting.html import json_bytes, render_html
from prelunet.evaluator.reporting.page import REPORT_FOLDER
from prelunet.evaluator.reporting.report import describe_protocol, short_provider
from prelunet.evaluator.reporting.statistics import NO_MACRO_INTERVAL
from prelunet.evaluator.validation.run import Run, read_run

MAX_FLIPPED_PER_DIRECTION = 24  # flipped images of each kind on the page; compare.json has all
MAX_MOVED_CLASSES = 10  # classes
LEFT_OUT_SHOWN = 200


@dataclass(frozen=True)
class FlippedImages:
    """What the page shows of the images that flipped by top-1.

    worse: mistakes of B that A did not make; better: mistakes of A that B does not make.
    """

    worse: Gallery
    better: Gallery


def gather_flips(comparison: Comparison, a: Run, b: Run, data: Path | None) -> FlippedImages:
    """Choose the flipped images, as the report chooses its mistakes, and fetch their pixels.

    data: folder or archive of the images; None to look where the runs found them, and then it is no error when they
    are gone. Raises DatasetError when `data` is not the dataset of these runs.
    """
    got_worse, got_better = (_flipped_files(comparison, direction) for direction in ("worse", "better"))
    worse, better = build_galleries([_mistakes_among(b, got_worse), _mistakes_among(a, got_better)], data)
    return FlippedImages(replace(worse, total=len(got_worse)), replace(better, total=len(got_better)))


def _flipped_files(comparison: Comparison, direction: str) -> set[str]:
    return {flip["file"] for flip in comparison["flips"] if flip["top1"] == direction}


def _mistakes_among(wrong: Run, files: Collection[str]) -> Run:
    """Return a run with nothing but its mistakes among these images that the page shows."""
    chosen = choose_mistakes([prediction for prediction in wrong.predictions if prediction.file in files])
    return replace(wrong, predictions=chosen[:MAX_FLIPPED_PER_DIRECTION])


def render_comparison(comparison: Comparison, flipped: FlippedImages) -> bytes:
    """Return compare.html; the same comparison and images give the same bytes."""
    sides = {key: comparison[key] for key in ("a", "b")}
    worst_first = sorted(comparison["classes"], key=_worst_first)
    seen = [entry for entry in comparison["classes"] if entry["evaluated"]]
    shown = {mistake.prediction.file for gallery in (flipped.worse, flipped.better) for mistake in gallery.mistakes}
    return render_html(
        "compare.html.j2",
        comparison=comparison,
        sides=sides,
        titles=run_titles(comparison),
        remark=protocol_remark(comparison),
        protocols=_described({key: side["protocol"] for key, side in sides.items()}),
        providers={key: short_provider(side["circumstances"]) for key, side in sides.items()},
        metrics={key: f"top-{k}" for key, k in METRICS.items()},
        judgements={key: judgement(comparison[key]) for key in METRICS},
        format_p_value=format_p_value,
        no_macro_interval=NO_MACRO_INTERVAL,
        change_of=change_of,
        charts={key: chart for key in METRICS if (chart := difference_chart(comparison, key))},
        classes=comparison["classes"],
        worst_first=worst_first,
        table=[_table_row(entry) for entry in worst_first],
        seen=seen,
        few=len(seen) <= FEW_CLASSES,
        moved={direction: most_changed_classes(comparison, "top1", direction) for direction in ("improved", "worse")},
        reach=_axis_limit(comparison),
        flipped=flipped,
        flips={flip["file"]: flip for flip in comparison["flips"] if flip["file"] in shown},
        left_out_shown=LEFT_OUT_SHOWN,
    )


def run_titles(comparison: Comparison) -> dict[str, str]:
    """Return how the page calls A and B: by their models, with what tells them apart where that is one file."""
    names = {side: comparison[side]["model"]["file"] for side in ("a", "b")}
    if names["a"] != names["b"]:
        return names
    protocols = {side: comparison[side]["protocol"] for side in names}
    for words in ({side: str(p["name"]) for side, p in protocols.items()}, _described(protocols)):
        if words["a"] != words["b"]:
            return {side: f"{name}, {words[side]}" for side, name in names.items()}
    return {side: f"{name} ({side.upper()})" for side, name in names.items()}


def _described(protocols: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {side: describe_protocol(protocol) for side, protocol in protocols.items()}


def protocol_remark(comparison: Comparison) -> str:
    """Say that the protocols differ, and whether the models do too; empty where the protocols are the same."""
    of_model = {"name", "crop", "interpolation"}  # its name, and what follows from the model
    a, b = ({k: v for k, v in comparison[side]["protocol"].items() if k not in of_model} for side in ("a", "b"))
    if a == b:
        return ""
    if comparison["a"]["model"]["sha256"] == comparison["b"]["model"]["sha256"]:
        return "A and B are the same model under different protocols: the difference comes from the protocols."
    return "A and B are different models under different protocols: the difference comes from both."


def most_changed_classes(comparison: Comparison, key: str, direction: str) -> list[dict[str, Any]]:
    """Return the classes that `improved` or got `worse` most by `key` (top1 or top5), ties by index."""
    sign = -1 if direction == "improved" else 1
    moved = [entry for entry in comparison["classes"] if sign * (entry[key]["difference"] or 0) > 0]
    return sorted(moved, key=lambda entry: (-sign * entry[key]["difference"], entry["index"]))[:MAX_MOVED_CLASSES]


def _worst_first(entry: Mapping[str, Any]) -> tuple[float, int]:
    """Order classes as the table shows them at first: by top-1 difference, those without images at the end."""
    difference = entry["top1"]["difference"]
    return (math.inf if difference is None else -difference, entry["index"])


def _table_row(entry: Mapping[str, Any]) -> list[Any]:
    """Return what the table's script searches, filters and sorts a class by, in the order of compare.js."""
    figures = ([entry[key][name] for name in ("a_error", "b_error", "difference", "stands")] for key in METRICS)
    return [entry["index"], entry["wnid"], entry["name"], entry["evaluated"], *figures]


def _axis_limit(comparison: Mapping[str, Any]) -> float:
    """Return how far the table's meters go to either side: to the farthest bound of an interval, in points."""
    bounds = [
        abs(bound)
        for entry in comparison["classes"]
        if entry["evaluated"]
        for key in METRICS
        for bound in entry[key]["interval"]
    ]
    return max(bounds, default=100.0)


# Writes what `prelunet compare` leaves in a folder.


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
    create_folder(target, "--out")
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
