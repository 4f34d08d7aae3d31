"""The report of one run as plain data: a pure function, the same run gives the same bytes.

The published schema is docs/report.schema.json; `prelunet.v1.Report` is its twin on the wire. Errors are percent over
evaluated images; refused images are counted and listed, never taken for errors.
"""

import csv
import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evaluator.contract import ClassEntry
from evaluator.errors import RunFolderError
from evaluator.protocols import View
from evaluator.reporting.statistics import error_percent, wilson_interval
from evaluator.validation.run import Prediction, Run

REPORT_VERSION = 1
CONFUSIONS_OF_A_CLASS = 5
CONFUSIONS_OVERALL = 50

Report = dict[str, Any]


def build_report(run: Run) -> Report:
    """Return report.json of a finished run as plain data (docs/report.schema.json).

    Raises RunFolderError when a prediction names a class that the model does not have.
    """
    _check_class_indices(run)
    info = run.info
    evaluated = [prediction for prediction in run.predictions if prediction.refused is None]
    return {
        "version": REPORT_VERSION,
        "images": len(run.predictions),
        "evaluated": len(evaluated),
        "refused": len(run.predictions) - len(evaluated),
        "capped": sum(prediction.capped for prediction in evaluated),
        **_errors([prediction.rank for prediction in evaluated]),
        "model": dict(info.model),
        "protocol": info.protocol.to_json(),
        "dataset": dict(info.dataset),
        "circumstances": dict(info.circumstances),
        "views": _views(info.views, evaluated),
        "classes": _classes(info.classes, run.predictions),
        "confusions": _confusions(evaluated),
        "refusals": [{"file": p.file, "reason": p.refused} for p in run.predictions if p.refused is not None],
    }


def report_bytes(report: Report) -> bytes:
    """Return report.json. ASCII only, so that no file name, however damaged, can spoil the encoding."""
    return (json.dumps(report, indent=1, allow_nan=False) + "\n").encode("ascii")


def classes_csv(report: Report) -> bytes:
    """Return classes.csv: a row per class with the numbers of report.json; an empty cell where there is no image."""
    columns = ("index", "wnid", "name", "images", "evaluated", "refused")
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow((*columns, *(f"{top}_{what}" for top in ("top1", "top5") for what in ("error", "low", "high"))))
    for entry in report["classes"]:
        errors = (number for top in ("top1", "top5") for number in (entry[f"{top}_error"], *entry[f"{top}_interval"]))
        table.writerow((*(entry[column] for column in columns), *errors))
    return text.getvalue().encode("utf-8", errors="backslashreplace")


def headline(report: Report) -> str:
    """Return the report in one line: the errors with their circumstances."""
    if report["evaluated"]:
        total = f"of {report['evaluated']:,}"
        errors = " · ".join(
            f"top-{k} error {report[f'top{k}_error']:.2f} % ({wrong_images(report, f'top{k}'):,} {total})"
            for k in (1, 5)
        )
    else:
        errors = "no image evaluated"
    refused = f"; {report['refused']:,} of {report['images']:,} images refused, listed" if report["refused"] else ""
    circumstances = report["circumstances"]
    return (
        f"{errors}{refused} | {describe_protocol(report['protocol'])} | model {report['model']['sha256'][:8]}… | "
        f"{short_provider(circumstances)}, {circumstances['precision']}"
    )


def wrong_images(report: Report, key: str) -> int:
    """Return how many images are wrong by `key` (top1 or top5): whole again, since errors carry 4 decimals."""
    error: float = report[f"{key}_error"] or 0.0
    evaluated: int = report["evaluated"]
    return round(error * evaluated / 100)


def describe_protocol(protocol: Mapping[str, Any]) -> str:
    """Return a protocol in a few words: `scales 256,384,480 mirrored`."""
    scales = ",".join(map(str, protocol["scales"]))
    words = f"scale{'s' if len(protocol['scales']) > 1 else ''} {scales}"
    words += f", central crop {protocol['crop']}" if protocol["kind"] == "center" else ""
    words += " mirrored" if protocol["mirror"] else ""
    words += ", logits averaged" if protocol["averaging"] == "logit" else ""
    return words + (", every window alike" if protocol["weights"] == "view" else "")


def short_provider(circumstances: Mapping[str, Any]) -> str:
    """Return what ran the model, without the runtime's suffix: `CUDA`, `CPU`."""
    return str(circumstances["provider"]).removesuffix("ExecutionProvider")


def _errors(ranks: Sequence[int]) -> dict[str, Any]:
    """Return top-1 and top-5 error with intervals of images whose true class has these ranks."""
    result: dict[str, Any] = {}
    for k in (1, 5):
        wrong = sum(rank > k for rank in ranks)
        result[f"top{k}_error"] = error_percent(wrong, len(ranks))
        result[f"top{k}_interval"] = list(wilson_interval(wrong, len(ranks)))
    return result


def _views(views: Sequence[View], evaluated: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return what each view alone would have given, in the protocol's order."""
    rows = []
    for place, shown in enumerate(views):
        alone = [prediction.view_ranks[place] for prediction in evaluated]
        errors = {f"top{k}_error": error_percent(sum(rank > k for rank in alone), len(alone)) for k in (1, 5)}
        rows.append({**shown.to_json(), **errors})
    return rows


def _classes(classes: Sequence[ClassEntry], predictions: Iterable[Prediction]) -> list[dict[str, Any]]:
    """Return every class of the model, also those of which the dataset has no image."""
    of_class: defaultdict[int, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        of_class[prediction.label].append(prediction)
    rows = []
    for index, entry in enumerate(classes):
        evaluated = [prediction for prediction in of_class[index] if prediction.refused is None]
        wrong = Counter(p.top[0][0] for p in evaluated if p.rank > 1)
        rows.append(
            {
                "index": index,
                "wnid": entry.wnid,
                "name": entry.name,
                "images": len(of_class[index]),
                "evaluated": len(evaluated),
                "refused": len(of_class[index]) - len(evaluated),
                **_errors([prediction.rank for prediction in evaluated]),
                "confusions": [
                    {"index": other, "wnid": classes[other].wnid, "name": classes[other].name, "count": count}
                    for other, count in _most_frequent(wrong, CONFUSIONS_OF_A_CLASS)
                ],
            }
        )
    return rows


def _confusions(evaluated: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return the most frequent pairs (true class, wrong answer). share: percent of the true class's images."""
    of_class = Counter(prediction.label for prediction in evaluated)
    pairs = Counter((p.label, p.top[0][0]) for p in evaluated if p.rank > 1)
    return [
        {"label": label, "predicted": other, "count": count, "share": error_percent(count, of_class[label])}
        for (label, other), count in _most_frequent(pairs, CONFUSIONS_OVERALL)
    ]


def _most_frequent(counts: Mapping[Any, int], limit: int) -> list[tuple[Any, int]]:
    """Return the largest counts; equal ones in the order of their class indices."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:limit]


def _check_class_indices(run: Run) -> None:
    """Refuse predictions of classes that the model does not have; every number below would be wrong."""
    known = range(len(run.info.classes))
    for number, prediction in enumerate(run.predictions, start=1):
        strange = [index for index in (prediction.label, *(i for i, _ in prediction.top)) if index not in known]
        if strange or (prediction.refused is None and not (prediction.top and 1 <= prediction.rank <= len(known))):
            what = f"class index {strange[0]}" if strange else f"rank {prediction.rank}, {len(prediction.top)} answers"
            raise RunFolderError(
                f"{run.folder or 'run'}: prediction {number} ({prediction.file}) has {what}, "
                f"but the model has {len(known)} classes. Start the run anew with --fresh"
            )
