"""The report of one run as plain data: a pure function of the run.

The schema is docs/report.schema.json; `prelunet.v1.Report` is its message; docs/statistics.md defines each figure.
Errors are in percent of the evaluated images; refused images are counted and listed separately.
"""

import csv
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..imaging.decode import TRAITS
from ..protocols import ProtocolKind
from ..validation.run import Run, require_labels, require_unsharded
from .statistics import TOPS, calibration, rank_summary, risk_coverage
from .tables import (
    class_table,
    confusion_pairs,
    evaluated_images,
    macro_fields,
    run_errors,
    same_names,
    view_tables,
    worst_matrix,
)

REPORT_VERSION = 2

Report = dict[str, Any]


def build_report(run: Run) -> Report:
    """Return the contents of report.json for a finished run (docs/report.schema.json).

    Raises RunFolderError if the run is a shard, UsageError if its images have no labels.
    """
    require_unsharded(run.info, run.where)
    require_labels(run)
    info = run.info
    seen = evaluated_images(run.predictions, len(info.views))
    classes = class_table(info.classes, run.predictions, seen)
    candidates = len(info.candidates or info.classes)
    errors = run_errors(seen)
    calibrated = calibration(seen.score, seen.rank == 1)
    selective = risk_coverage(seen.score, seen.rank == 1)
    traits = Counter(trait for prediction in run.predictions for trait in prediction.traits)
    return {
        "version": REPORT_VERSION,
        "images": len(run.predictions),
        "evaluated": len(seen.rank),
        "refused": len(run.predictions) - len(seen.rank),
        "capped": sum(prediction.capped for prediction in run.predictions),
        **({"traits": {trait: traits[trait] for trait in TRAITS if traits[trait]}} if traits else {}),
        **errors,
        "macro": macro_fields(classes),
        "calibration": None if calibrated is None else asdict(calibrated),
        "risk_coverage": None if selective is None else asdict(selective),
        "ranks": asdict(rank_summary(seen.rank, candidates)),
        **view_tables(info.views, seen),
        "model": dict(info.model),
        "protocol": info.protocol.to_json(),
        "dataset": dict(info.dataset),
        "circumstances": dict(info.circumstances),
        "members": [dict(member) for member in info.members],
        "classes": classes,
        "confusions": confusion_pairs(seen),
        "worst": worst_matrix(classes, seen),
        "same_names": same_names(info.classes),
        "suspicion": label_order_suspicion(errors["top1_error"], candidates),
        "refusals": [{"file": p.file, "reason": p.refused} for p in run.predictions if p.refused is not None],
    }


def classes_csv(report: Report) -> bytes:
    """Return classes.csv: a row per class with the numbers of report.json; cells without images are empty."""
    columns = (
        *("index", "wnid", "name", "images", "evaluated", "refused"),
        *(f"{top}_{what}" for top in ("top1", "top5") for what in ("wrong", "error", "low", "high")),
        *("confidence", "median_rank"),
    )
    text = io.StringIO()
    table = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for entry in report["classes"]:
        ends = {
            f"{top}_{end}": bound
            for top in ("top1", "top5")
            for end, bound in zip(("low", "high"), entry[f"{top}_interval"] or ("", ""), strict=True)
        }
        table.writerow({**entry, **ends})
    return text.getvalue().encode("utf-8", errors="backslashreplace")


def headline(report: Report) -> str:
    """Return the report as one line to cite: the errors, dataset, protocol, model and provider."""
    if report["evaluated"]:
        errors = " · ".join(f"top-{k} error {error_with_interval(report, k, 2, unit=' %')}" for k in TOPS)
        errors += f" of {report['evaluated']:,} images"
    else:
        errors = "no image evaluated"
    refused = f"; {report['refused']:,} of {report['images']:,} refused, listed" if report["refused"] else ""
    model, dataset, circumstances = report["model"], report["dataset"], report["circumstances"]
    only = f", only {dataset['selection']}" if dataset["selection"] else ""
    over = f", {words}" if (words := scored_over(report)) else ""
    digest = "" if report["members"] else f", {model['sha256'][:8]}…"
    return (
        f"{errors}{refused} | {dataset['name']}{only}{over} | {report['protocol']['name']}: "
        f"{describe_protocol(report['protocol'])} | {model['file']} ({model['architecture']}{digest}) | "
        f"{short_provider(circumstances)}, {circumstances['precision']}"
    )


def scored_over(report: Report) -> str:
    """Return among which classes predictions were made, if not simply among those of the images; else ''."""
    if (restriction := report["dataset"].get("restriction")) is not None:
        of_set = f" of {restriction['name']}" if restriction["name"].startswith("imagenet-") else ""
        return f"among {len(restriction['classes']):,} classes{of_set}"
    if report["dataset"]["selection"] is not None:  # says which images, and so why not all classes have some
        return ""
    classes = report["classes"]
    present = sum(entry["images"] > 0 for entry in classes)
    return "" if present == len(classes) else f"over all {len(classes):,} classes (images of {present:,})"


def error_with_interval(errors: Mapping[str, Any], k: int, digits: int = 1, *, unit: str = "") -> str:
    """Format the top-k error of `error_fields` or `macro_fields` with its interval: `22.97 [22.6, 23.3]`.

    digits: decimals of the interval, which is omitted if None; the error has two. unit: follows the error.
    """
    error, interval = f"{errors[f'top{k}_error']:.2f}{unit}", errors[f"top{k}_interval"]
    return error if interval is None else f"{error} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


_PARTS_SHOWN: Mapping[ProtocolKind, str] = {
    "dense": "",
    "spp-18": ", nine windows",
    "center": ", central crop {crop}",
    "ten-crop": ", five crops {crop}",
}


_WHOLE_SHOWN = {"squash": "squashed", "pad": "padded"}


def describe_protocol(protocol: Mapping[str, Any]) -> str:
    """Return a short description of a protocol: `scales 256,384,480 mirrored`."""
    scales = ",".join(map(str, protocol["scales"]))
    words = f"scale{'s' if len(protocol['scales']) > 1 else ''} {scales}"
    if resize := _WHOLE_SHOWN.get(protocol.get("preparation", {}).get("resize")):
        words = f"whole images {resize} to {scales}x{scales}"
    if not resize or protocol["scales"] != [protocol["crop"]]:
        words += _PARTS_SHOWN[protocol["kind"]].format(crop=protocol["crop"])
    words += " mirrored" if protocol["mirror"] else ""
    words += ", logits averaged" if protocol["averaging"] == "logit" else ""
    words += ", every window alike" if protocol["weights"] == "view" else ""
    return words + (", EXIF orientation applied" if protocol["apply_exif"] else "")


def describe_traits(report: Report) -> str:
    """Return how many files have which traits, and what became of them; '' if none has any."""
    protocol = report["protocol"]
    dropped = protocol.get("preparation", {}).get("transparency") == "dropped"
    words = {
        "alpha": f"with an alpha channel ({'dropped' if dropped else 'over white'})",
        "16-bit": "of 16 bits (the upper 8 count)",
        "cmyk": "CMYK (converted without color profiles)",
        "rotated": f"rotated by EXIF ({'applied' if protocol['apply_exif'] else 'ignored'})",
    }
    return ", ".join(f"{count:,} {words[trait]}" for trait, count in report.get("traits", {}).items())


def short_provider(circumstances: Mapping[str, Any]) -> str:
    """Return the execution provider without the runtime's suffix: `CUDA`, `CPU`."""
    return str(circumstances["provider"]).removesuffix("ExecutionProvider")


# Detection of labels that do not match the model's classes.


_MIN_CLASSES = 100  # with fewer classes, guessing has a lower error
_SUSPICIOUS_ERROR = 99.0  # percent top-1; devkit ids used as class indices give about 99.9 for 1000 classes


def label_order_suspicion(top1_error: float | None, classes: int) -> str | None:
    """Return a warning if the error suggests that the labels are in a different order than the classes, else None.

    top1_error: percent, None if no image was evaluated; classes: number of the model's classes. The usual cause is
    ILSVRC's devkit ids (1 is n02119789, kit fox) used as class indices, which follow the sorted wnids (0 is n01440764,
    tench).
    """
    if top1_error is None or classes < _MIN_CLASSES or top1_error < _SUSPICIOUS_ERROR:
        return None
    return (
        f"a top-1 error of {top1_error:.2f} % over {classes:,} classes is hardly better than guessing: the labels may "
        "be in a different order than the model's classes (devkit ids instead of sorted wnids), or the model is "
        "untrained, or was adopted with the wrong preprocessing or class list. To check, look at some "
        "images of one class: if the model's answers agree with each other and look right, the labels are wrong. "
        "To rule this out, give labels as wnids, or pass the devkit with --labels DIR"
    )
