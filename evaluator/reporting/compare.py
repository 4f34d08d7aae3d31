"""Comparison of two runs on the same images: a pure function of the runs.

A is the baseline, B is compared with it. All figures refer to the images that both evaluated; differences are in
points of error, B - A, negative where B is better. The schema is docs/compare.schema.json.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import Int64Array
from ..errors import RunFolderError
from ..validation.predictions import Prediction
from ..validation.run import (
    RESTRICTION_FIX,
    Run,
    require_labels,
    require_same_images,
    require_unsharded,
)
from .paired import NO_IMAGES, SIGNIFICANCE, PairedErrors, adjusted_p
from .statistics import TOPS, error_percent, macro_error, macro_interval, wilson_interval

COMPARISON_VERSION = 1
METRICS = {f"top{k}": k for k in TOPS}  # an image is wrong when the rank of its class exceeds this

Comparison = dict[str, Any]


def compare_runs(a: Run, b: Run) -> Comparison:
    """Return the contents of compare.json for two finished runs (docs/compare.schema.json).

    Raises RunFolderError if their images or classes differ or if one is a shard, UsageError if there are no labels.
    """
    check_comparable(a, b)
    label = np.fromiter((prediction.label for prediction in a.predictions), np.int64)
    rank_a, rank_b = (np.fromiter((prediction.rank for prediction in run.predictions), np.int64) for run in (a, b))
    ranks = rank_a, rank_b  # of the true class of every image, 0 for refused images
    counts = {key: count_pairs(label, ranks, k, len(a.info.classes)) for key, k in METRICS.items()}
    images = [count.images for count in counts["top1"]]
    metrics = {key: _class_metrics(of_class) for key, of_class in counts.items()}
    return {
        "version": COMPARISON_VERSION,
        "dataset": dict(a.info.dataset),
        "images": len(label),
        "evaluated": sum(images),
        "a": _side(a, counts, "a"),
        "b": _side(b, counts, "b"),
        "refused_by_b_only": int(np.count_nonzero((rank_a > 0) & (rank_b == 0))),
        **{
            key: _overall(counts[key], metrics[key]) | {"difference_with_refusals": _with_refusals(ranks, k)}
            for key, k in METRICS.items()
        },
        "classes": [
            {
                "index": index,
                "wnid": entry.wnid,
                "name": entry.name,
                "evaluated": images[index],
                **{key: metrics[key][index] for key in METRICS},
            }
            for index, entry in enumerate(a.info.classes)
        ],
        "flips": [
            _flip(one, other)
            for one, other in zip(a.predictions, b.predictions, strict=True)
            if one.rank and other.rank and changed_metrics(one.rank, other.rank)
        ],
        "left_out": [
            {"file": one.file, "label": one.label, "a": one.refused, "b": other.refused}
            for one, other in zip(a.predictions, b.predictions, strict=True)
            if one.refused is not None or other.refused is not None
        ],
    }


def changed_metrics(rank_a: int, rank_b: int) -> dict[str, str]:
    """Return the metrics by which B is `better` or `worse` than A on an image."""
    return {key: "worse" if rank_b > k else "better" for key, k in METRICS.items() if (rank_a > k) != (rank_b > k)}


def judgment(metric: Mapping[str, Any]) -> str:
    """Return the verdict on B by one metric of a comparison."""
    if metric["difference"] is None:
        return "no image was evaluated in both"
    if metric["p"] > SIGNIFICANCE:
        return "no significant difference" if metric["difference"] else "no difference"
    return "B is better" if metric["difference"] < 0 else "B is worse"


def format_p_value(p: float) -> str:
    """Format a p-value for display: `p = 0.014`, `p < 0.0001`."""
    digits = 2 if f"{p:.2g}" != "0.05" else 3  # 0.0501 is not significant
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.{digits}g}"


def comparison_csv(comparison: Comparison) -> bytes:
    """Return compare.csv: a row per class with the numbers of compare.json; cells without images are empty."""
    columns = ("index", "wnid", "name", "evaluated")
    numbers = ("a_error", "b_error", "difference", "low", "high", "only_a_wrong", "only_b_wrong", "p", "adjusted_p")
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow((*columns, *(f"{key}_{name}" for key in METRICS for name in (*numbers, "stands"))))
    for entry in comparison["classes"]:
        row = [entry[column] for column in columns]
        for key in METRICS:
            metric = {**entry[key], **dict(zip(("low", "high"), entry[key]["interval"] or ("", ""), strict=True))}
            row += [*(metric[name] for name in numbers), "yes" if metric["stands"] else "no"]
        table.writerow(row)
    return text.getvalue().encode("utf-8", errors="backslashreplace")


def check_comparable(a: Run, b: Run) -> None:
    """Raise RunFolderError or UsageError if the images of two runs cannot be paired."""
    for run in (a, b):
        require_unsharded(run.info, run.where)
        require_labels(run)
    wnids_a, wnids_b = ([entry.wnid for entry in run.info.classes] for run in (a, b))
    if wnids_a != wnids_b:
        raise RunFolderError(
            f"{a.where} and {b.where} have different class lists: {_first_difference(wnids_a, wnids_b)}. "
            "Compare models of the same classes, in the same order"
        )
    if a.info.dataset["fingerprint"] != b.info.dataset["fingerprint"]:
        raise RunFolderError(
            f"{a.where} and {b.where} have different images or labels and cannot be compared: "
            f"{_dataset(a)} and {_dataset(b)}. Validate both models on the same dataset"
        )
    one, other = (set(run.info.candidates or range(len(wnids_a))) for run in (a, b))
    if one != other:
        raise RunFolderError(
            f"{a.where} and {b.where} predict among different classes ({len(one):,} and {len(other):,}; "
            f"{wnids_a[min(one ^ other)]} in one run only). {RESTRICTION_FIX}"
        )
    require_same_images(a, b)


def _dataset(run: Run) -> str:
    dataset = run.info.dataset
    selection = f", {dataset['selection']}" if dataset["selection"] else ""
    return f"{dataset['images']:,} images of {dataset['name']}{selection} (fingerprint {dataset['fingerprint'][:12]}…)"


def _first_difference(a: Sequence[str], b: Sequence[str]) -> str:
    if len(a) != len(b):
        return f"{len(a):,} and {len(b):,} classes"
    index = next(index for index, (one, other) in enumerate(zip(a, b, strict=True)) if one != other)
    return f"class {index} is {a[index][:100]!r} in the first, {b[index][:100]!r} in the second"


def count_pairs(label: Int64Array, ranks: Sequence[Int64Array], k: int, classes: int) -> list[PairedErrors]:
    """Count right and wrong images per class over those that both runs evaluated.

    label: of each image; ranks: of the true class in A and B, 0 if refused; k: an image is wrong beyond this rank.
    """
    rank_a, rank_b = ranks
    kind = 4 * label + 2 * (rank_a > k) + (rank_b > k)
    table = np.bincount(kind[(rank_a > 0) & (rank_b > 0)], minlength=4 * classes).reshape(classes, 4)
    return [PairedErrors(both, only_a, only_b, neither) for neither, only_b, only_a, both in table.tolist()]


def _side(run: Run, counts: Mapping[str, Sequence[PairedErrors]], side: str) -> dict[str, Any]:
    """Describe one of the runs, with its errors over the images that both evaluated. side: `a` or `b`."""
    info = run.info
    result: dict[str, Any] = {
        "model": dict(info.model),
        "members": [dict(member) for member in info.members],
        "protocol": info.protocol.to_json(),
        "circumstances": dict(info.circumstances),
        "refused": sum(prediction.refused is not None for prediction in run.predictions),
    }
    for key, of_class in counts.items():
        wrong = [count.wrong_a if side == "a" else count.wrong_b for count in of_class]
        images = [count.images for count in of_class]
        result[f"{key}_error"] = error_percent(sum(wrong), sum(images))
        result[f"{key}_interval"] = wilson_interval(sum(wrong), sum(images))
        result[f"{key}_macro_error"] = macro_error(wrong, images)
    return result


def _overall(of_class: Sequence[PairedErrors], metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the difference over all images, its mean over classes, and the number of classes that changed (Fig. 7)."""
    only_a, only_b = [count.only_a for count in of_class], [count.only_b for count in of_class]
    images = [count.images for count in of_class]
    net = [worse - better for worse, better in zip(only_b, only_a, strict=True)]
    moved = [metric["difference"] for metric in metrics if metric["difference"] is not None]
    return {
        **_pair(sum(of_class, start=NO_IMAGES)),
        "macro_difference": macro_error(net, images),
        "macro_interval": macro_interval(only_b, only_a, images),
        "classes_improved": sum(difference < 0 for difference in moved),
        "classes_unchanged": sum(difference == 0 for difference in moved),
        "classes_worse": sum(difference > 0 for difference in moved),
        "classes_improved_that_stand": sum(metric["stands"] and metric["difference"] < 0 for metric in metrics),
        "classes_worse_that_stand": sum(metric["stands"] and metric["difference"] > 0 for metric in metrics),
    }


def _with_refusals(ranks: tuple[Int64Array, Int64Array], k: int) -> float | None:
    """Return the difference in points over the images that A evaluated; images that B refused count as wrong in B."""
    judged = ranks[0] > 0
    wrong_a = int(np.count_nonzero(ranks[0] > k))
    wrong_b = int(np.count_nonzero(judged & ((ranks[1] == 0) | (ranks[1] > k))))
    return error_percent(wrong_b - wrong_a, int(np.count_nonzero(judged)))


def _class_metrics(of_class: Sequence[PairedErrors]) -> list[dict[str, Any]]:
    """Return the figures of every class; classes without images have no error and are not tested."""
    adjusted = iter(adjusted_p([count.p for count in of_class if count.images]))
    rows = []
    for count in of_class:
        p = next(adjusted) if count.images else None
        a_error, b_error = error_percent(count.wrong_a, count.images), error_percent(count.wrong_b, count.images)
        stands = p is not None and p <= SIGNIFICANCE
        rows.append({"a_error": a_error, "b_error": b_error, **_pair(count), "adjusted_p": p, "stands": stands})
    return rows


def _pair(count: PairedErrors) -> dict[str, Any]:
    """Return the figures of two runs on the same images."""
    return {
        "difference": count.difference,
        "interval": count.interval,
        "both_wrong": count.both,
        "only_a_wrong": count.only_a,
        "only_b_wrong": count.only_b,
        "p": count.p if count.images else None,
    }


def _flip(a: Prediction, b: Prediction) -> dict[str, Any]:
    """Return an image that only one of the runs gets right, with both answers."""
    return {
        "file": a.file,
        "label": a.label,
        **({"also": list(a.also)} if a.also else {}),
        **dict.fromkeys(METRICS),
        **changed_metrics(a.rank, b.rank),
        **{
            side: {"answer": prediction.top[0][0], "score": prediction.top[0][1], "rank": prediction.rank}
            for side, prediction in (("a", a), ("b", b))
        },
    }
