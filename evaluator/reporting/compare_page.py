"""compare.html: one self-contained page, built from compare.json and the flipped images."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..datasets.selection import IN_RANDOM_ORDER
from ..files import create_folder, write_atomically
from ..validation.mistakes import choose_mistakes
from ..validation.run import Run, read_run
from .charts import FEW_CLASSES
from .compare import (
    METRICS,
    Comparison,
    compare_runs,
    comparison_csv,
    format_p_value,
    judgment,
)
from .compare_charts import change_of, difference_chart
from .gallery import Gallery, build_galleries
from .html import json_bytes, render_html, signed
from .report import describe_protocol, short_provider
from .report_page import REPORT_FOLDER
from .statistics import NO_MACRO_INTERVAL

MAX_FLIPPED_PER_DIRECTION = 24  # flipped images shown per direction; compare.json lists all
MAX_MOVED_CLASSES = 10
LEFT_OUT_SHOWN = 200


def gather_flips(comparison: Comparison, a: Run, b: Run, data: Path | None) -> dict[str, Gallery]:
    """Choose the images that flipped by top-1, as the report chooses its mistakes, and load them.

    Returns `worse`, the mistakes of B that A did not make, and `better`, those of A that B did not make.
    data: folder or archive of the images; None to look where the runs found them, in which case missing images are no
    error. Raises DatasetError if `data` is not the dataset of these runs.
    """
    totals: dict[str, int] = {}
    shown: list[Run] = []
    for direction, wrong in (("worse", b), ("better", a)):
        files = {flip["file"] for flip in comparison["flips"] if flip["top1"] == direction}
        chosen = choose_mistakes([prediction for prediction in wrong.predictions if prediction.file in files])
        shown.append(replace(wrong, predictions=chosen[:MAX_FLIPPED_PER_DIRECTION]))
        totals[direction] = len(files)
    galleries = zip(totals.items(), build_galleries(shown, data), strict=True)
    return {direction: replace(gallery, total=total) for (direction, total), gallery in galleries}


def render_comparison(comparison: Comparison, flipped: Mapping[str, Gallery]) -> bytes:
    """Return compare.html; the same comparison and images give the same bytes."""
    sides = {key: comparison[key] for key in ("a", "b")}
    worst_first = sorted(  # the table's initial order; classes without images come last
        comparison["classes"], key=lambda e: (not e["evaluated"], -(e["top1"]["difference"] or 0), e["index"])
    )
    seen = [entry for entry in comparison["classes"] if entry["evaluated"]]
    shown = {mistake.prediction.file for gallery in flipped.values() for mistake in gallery.mistakes}
    return render_html(
        "compare.html.j2",
        comparison=comparison,
        sides=sides,
        titles=run_titles(comparison),
        remark=" ".join(remarks(comparison)),
        protocols=_described({key: side["protocol"] for key, side in sides.items()}),
        providers={key: short_provider(side["circumstances"]) for key, side in sides.items()},
        metrics={key: f"top-{k}" for key, k in METRICS.items()},
        judgments={key: judgment(comparison[key]) for key in METRICS},
        format_p_value=format_p_value,
        no_macro_interval=NO_MACRO_INTERVAL,
        change_of=change_of,
        charts={key: chart for key in METRICS if (chart := difference_chart(comparison, key))},
        classes=comparison["classes"],
        worst_first=worst_first,
        table=[  # the values by which compare.js searches, filters and sorts a class, in its order
            [
                *(e["index"], e["wnid"], e["name"], e["evaluated"]),
                *([e[key][name] for name in ("a_error", "b_error", "difference", "stands")] for key in METRICS),
            ]
            for e in worst_first
        ],
        seen=seen,
        few=len(seen) <= FEW_CLASSES,
        moved={direction: most_changed_classes(comparison, "top1", direction) for direction in ("improved", "worse")},
        reach=max((abs(bound) for e in seen for key in METRICS for bound in e[key]["interval"]), default=100.0),
        flipped=flipped,
        flips={flip["file"]: flip for flip in comparison["flips"] if flip["file"] in shown},
        left_out_shown=LEFT_OUT_SHOWN,
    )


def run_titles(comparison: Comparison) -> dict[str, str]:
    """Return the display names of A and B: their model files, with the protocol or the letter if they are the same."""
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


_ARITHMETIC = ("provider", "precision")  # in the circumstances of a run


def remarks(comparison: Comparison) -> list[str]:
    """Return what to know about the figures."""
    stopped = (
        "These are the images on which compare --until-decided stopped. The intervals and p-values here do not allow "
        "for that; decision.json has those that do."
    )
    chosen = IN_RANDOM_ORDER in (comparison["dataset"]["selection"] or "")
    return [text for text in (protocol_remark(comparison), stopped if chosen else "") if text]


def protocol_remark(comparison: Comparison) -> str:
    """Return a remark if the protocols differ, stating whether the models differ too; else an empty string."""
    of_model = {"name", "crop", "interpolation", "preparation"}  # the name, and what follows from the model
    a, b = ({k: v for k, v in comparison[side]["protocol"].items() if k not in of_model} for side in ("a", "b"))
    if a == b:
        return ""
    if _net(comparison["a"]) == _net(comparison["b"]):
        same = "A and B are the same model evaluated with different protocols"
        if any(comparison["a"]["circumstances"][key] != comparison["b"]["circumstances"][key] for key in _ARITHMETIC):
            return f"{same}, and with another device or precision. The difference may be due to any of these."
        return f"{same}. Any difference is due to the protocols."
    return "A and B are different models evaluated with different protocols. The difference may be due to either."


def _net(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what identifies a run's net, also in files for crops and for whole images, and what it sees."""
    return run["model"].get("checkpoint_sha256") or run["model"]["sha256"], run["protocol"].get("preparation")


def most_changed_classes(comparison: Comparison, key: str, direction: str) -> list[dict[str, Any]]:
    """Return the classes that `improved` or got `worse` most by `key` (top1 or top5), ties by index."""
    sign = -1 if direction == "improved" else 1
    moved = [entry for entry in comparison["classes"] if sign * (entry[key]["difference"] or 0) > 0]
    return sorted(moved, key=lambda entry: (-sign * entry[key]["difference"], entry["index"]))[:MAX_MOVED_CLASSES]


# The files written by `prelunet compare`.


@dataclass(frozen=True)
class WrittenComparison:
    """A comparison and its files. _flipped: as by `gather_flips`."""

    comparison: Comparison = field(repr=False)
    json: Path
    csv: Path
    html: Path
    _flipped: Mapping[str, Gallery] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return "\n".join([*_summary(self.comparison), "", f"{self.html}, {self.json.name}, {self.csv.name}"])


def _summary(comparison: Comparison) -> list[str]:
    """Return the lines of the main result."""
    lines = [_run_line(comparison, "a", "A, the baseline"), _run_line(comparison, "b", "B")]
    left_out = comparison["images"] - comparison["evaluated"]
    only, restriction = comparison["dataset"]["selection"], comparison["dataset"].get("restriction")
    lines.append(
        f"{comparison['evaluated']:,} of {comparison['images']:,} images evaluated in both"
        + (f" (only {only})" if only else "")
        + (f", among {len(restriction['classes']):,} classes" if restriction else "")
        + (f"; {left_out:,} refused in A or B and left out" if left_out else "")
    )
    lines += remarks(comparison)
    for key in METRICS:
        lines += ["", *_metric_lines(comparison, key)]
    return lines


def _run_line(comparison: Comparison, side: str, name: str) -> str:
    run = comparison[side]
    errors = " ".join(
        f"top-{k} error {run[f'{key}_error']:.2f} %" for key, k in METRICS.items() if run[f"{key}_error"] is not None
    )
    protocol = run["protocol"]
    views = f"{protocol['name']} ({describe_protocol(protocol)})"
    on = {}
    for key in ("a", "b"):
        circumstances = comparison[key]["circumstances"]
        on[key] = f"{short_provider(circumstances)} {circumstances['precision']}"
    where = f", {on[side]}" if on["a"] != on["b"] else ""
    return f"{name}: {run['model']['file']} ({run['model']['architecture']}), {views}{where}  {errors}".rstrip()


def _metric_lines(comparison: Comparison, key: str) -> list[str]:
    """Return the lines on one metric: the better run, the difference, its significance, and how many classes moved."""
    found, title = comparison[key], f"top-{METRICS[key]} error"
    if found["difference"] is None:
        return [f"{title}: {judgment(found)}"]
    low, high = found["interval"]
    significant = found["classes_improved_that_stand"] + found["classes_worse_that_stand"]
    return [
        f"{title}: {judgment(found)}: {signed(found['difference'], minus='-')} points, "
        f"95 % interval {signed(low, minus='-')} to {signed(high, minus='-')}",
        f"  images: {found['only_a_wrong']:,} wrong in A only, {found['only_b_wrong']:,} wrong in B only; "
        f"McNemar {format_p_value(found['p'])}",
        f"  classes: {found['classes_improved']:,} improved, {found['classes_unchanged']:,} unchanged, "
        f"{found['classes_worse']:,} worse; {significant:,} of these differences are significant at the 5 % level "
        "(Benjamini-Hochberg)",
    ]


def write_comparison(a: Path, b: Path, *, out: Path | None = None, data: Path | None = None) -> WrittenComparison:
    """Write compare.json, compare.csv and compare.html of two finished runs; A is the baseline.

    out: folder for them; None for a folder named after A in B's report folder.
    data: folder or archive of the images, to show those that flipped; None to look where the runs found them.
    Raises RunFolderError if a run is missing, unfinished or damaged or if the images differ, DatasetError if `data`
    is a different dataset, EnvironmentFault or OSError if a file cannot be written. Files are written atomically.
    """
    run_a, run_b = read_run(a), read_run(b)
    comparison = compare_runs(run_a, run_b)
    target = out or b / REPORT_FOLDER / f"compared-with-{a.resolve().name}"
    flipped = gather_flips(comparison, run_a, run_b, data)
    page = render_comparison(comparison, flipped)
    create_folder(target, "--out")
    json, csv, html = (target / f"compare.{kind}" for kind in ("json", "csv", "html"))
    written = WrittenComparison(comparison, json, csv, html, flipped)
    write_atomically(written.json, json_bytes(comparison))
    write_atomically(written.csv, comparison_csv(comparison))
    write_atomically(written.html, page)
    return written
