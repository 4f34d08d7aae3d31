"""The report of one run as plain data: a pure function, the same run gives the same bytes.

The published schema is docs/report.schema.json; `prelunet.v1.Report` is its twin on the wire; docs/statistics.md
defines each figure. Errors are percent over evaluated images; refused images are counted and listed, never taken for
errors.
"""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from evaluator.datasets.sample import UNLABELLED
from evaluator.errors import RunFolderError, UsageError
from evaluator.protocols import Kind
from evaluator.reporting.statistics import calibration, rank_summary
from evaluator.reporting.tables import (
    TOPS,
    Evaluated,
    class_table,
    confusion_pairs,
    error_fields,
    evaluated_of,
    macro_fields,
    mirror_table,
    same_names,
    scale_table,
    view_table,
    worst_matrix,
)
from evaluator.validation.run import Prediction, Run
from evaluator.validation.suspicion import label_order_suspicion

REPORT_VERSION = 2

Report = dict[str, Any]


def build_report(run: Run) -> Report:
    """Return report.json of a finished run as plain data (docs/report.schema.json).

    Raises UsageError when the run has no labels, RunFolderError when it is a shard, or when a prediction names a class
    that the model does not have or contradicts itself.
    """
    _check_reportable(run)
    _check_predictions(run)
    info = run.info
    seen = evaluated_of(run.predictions, len(info.views))
    classes = class_table(info.classes, run.predictions, seen)
    errors = error_fields([int((seen.rank > k).sum()) for k in TOPS], len(seen.rank))
    return {
        "version": REPORT_VERSION,
        "images": len(run.predictions),
        "evaluated": len(seen.rank),
        "refused": len(run.predictions) - len(seen.rank),
        "capped": sum(prediction.capped for prediction in run.predictions),
        **errors,
        "macro": macro_fields(classes),
        "calibration": _calibration(seen),
        "ranks": _ranks(seen, len(info.classes)),
        "views": view_table(info.views, seen),
        "scales": scale_table(info.views, seen),
        "mirrors": mirror_table(info.views, seen),
        "model": dict(info.model),
        "protocol": info.protocol.to_json(),
        "dataset": dict(info.dataset),
        "circumstances": dict(info.circumstances),
        "members": [dict(member) for member in info.members],
        "classes": classes,
        "confusions": confusion_pairs(seen),
        "worst": worst_matrix(classes, seen),
        "same_names": same_names(info.classes),
        "suspicion": label_order_suspicion(errors["top1_error"], len(info.classes)),
        "refusals": [{"file": p.file, "reason": p.refused} for p in run.predictions if p.refused is not None],
    }


def _calibration(seen: Evaluated) -> dict[str, Any] | None:
    """Return how far the scores of the answers can be believed; None without any."""
    found = calibration(seen.score, seen.rank == 1)
    if found is None:
        return None
    return {**asdict(found), "bins": [asdict(each) for each in found.bins]}


def _ranks(seen: Evaluated, classes: int) -> dict[str, Any]:
    """Return where the truth stands. `from` is a word of Python, so the steps have other names there."""
    found = rank_summary(seen.rank, classes)
    steps = [{"from": step.first, "to": step.last, "images": step.images} for step in found.counts]
    return {**asdict(found), "counts": steps}


def report_bytes(report: Report) -> bytes:
    """Return report.json. ASCII only, so that no file name, however damaged, can spoil the encoding."""
    return (json.dumps(report, indent=1, allow_nan=False) + "\n").encode("ascii")


def classes_csv(report: Report) -> bytes:
    """Return classes.csv: a row per class with the numbers of report.json; an empty cell where there is no image."""
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
            for end, bound in zip(("low", "high"), entry[f"{top}_interval"], strict=True)
        }
        table.writerow({**entry, **ends})
    return text.getvalue().encode("utf-8", errors="backslashreplace")


def headline(report: Report) -> str:
    """Return the report in one line that can be cited: the errors with their circumstances."""
    if report["evaluated"]:
        errors = " · ".join(
            f"top-{k} error {report[f'top{k}_error']:.2f} % [{low:.2f}, {high:.2f}]"
            for k in (1, 5)
            for low, high in [report[f"top{k}_interval"]]
        )
        errors += f" of {report['evaluated']:,} images"
    else:
        errors = "no image evaluated"
    refused = f"; {report['refused']:,} of {report['images']:,} refused, listed" if report["refused"] else ""
    model, dataset, circumstances = report["model"], report["dataset"], report["circumstances"]
    only = f", only {dataset['selection']}" if dataset["selection"] else ""
    digest = "" if report["members"] else f", {model['sha256'][:8]}…"
    return (
        f"{errors}{refused} | {dataset['name']}{only} | {report['protocol']['name']}: "
        f"{describe_protocol(report['protocol'])} | {model['file']} ({model['architecture']}{digest}) | "
        f"{short_provider(circumstances)}, {circumstances['precision']}"
    )


_PARTS_SHOWN: Mapping[Kind, str] = {
    "dense": "",
    "spp-18": ", nine windows",
    "center": ", central crop {crop}",
    "ten-crop": ", five crops {crop}",
}


def describe_protocol(protocol: Mapping[str, Any]) -> str:
    """Return a protocol in a few words: `scales 256,384,480 mirrored`."""
    scales = ",".join(map(str, protocol["scales"]))
    words = f"scale{'s' if len(protocol['scales']) > 1 else ''} {scales}"
    words += _PARTS_SHOWN[protocol["kind"]].format(crop=protocol["crop"])
    words += " mirrored" if protocol["mirror"] else ""
    words += ", logits averaged" if protocol["averaging"] == "logit" else ""
    return words + (", every window alike" if protocol["weights"] == "view" else "")


def short_provider(circumstances: Mapping[str, Any]) -> str:
    """Return what ran the model, without the runtime's suffix: `CUDA`, `CPU`."""
    return str(circumstances["provider"]).removesuffix("ExecutionProvider")


def _check_reportable(run: Run) -> None:
    """Refuse a run that has no errors to count, or that is not all of its dataset."""
    name = run.folder or "run"
    if run.info.shard is not None:
        number, of = run.info.shard
        raise RunFolderError(f"{name}: shard {number} of {of}; join them: prelunet merge SHARD... --run DIR")
    if not run.labelled:
        raise UsageError(
            f"{name} has no labels, so there are no errors; `prelunet submission {name}` writes its answers"
        )


def _check_predictions(run: Run) -> None:
    """Refuse predictions that no run of this model can hold; every number of the report would be wrong."""
    classes = len(run.info.classes)
    for number, prediction in enumerate(run.predictions, start=1):
        if fault := _fault_of(prediction, classes):
            raise RunFolderError(
                f"{run.folder or 'run'}: prediction {number} ({prediction.file}) has {fault}. "
                "Start the run anew with --fresh"
            )


def _fault_of(prediction: Prediction, classes: int) -> str | None:
    """Return what contradicts itself in a prediction; None where nothing does."""
    if prediction.label == UNLABELLED:
        return "no label, but others have one"
    answers = [index for index, _ in prediction.top]
    for index in (prediction.label, *answers):
        if not 0 <= index < classes:
            return f"class index {index}, but the model has {classes} classes"
    if prediction.refused is not None:
        return None
    rank = prediction.rank
    if not answers or not 1 <= rank <= classes:
        return f"rank {rank}, {len(answers)} answers, but the model has {classes} classes"
    if answers[rank - 1] != prediction.label if rank <= len(answers) else prediction.label in answers:
        return f"rank {rank} for class {prediction.label}, but its answers are {answers}"
    return None
