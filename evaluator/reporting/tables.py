"""The tables of a report: counts per class, per view and per pair of classes.

At the size of ImageNet, loops over images and classes would dominate the run time, so this module works on arrays.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Int64Array
from ..contract import ClassEntry
from ..protocols import View
from ..validation.predictions import Prediction
from .statistics import (
    DECIMALS,
    TOPS,
    error_percent,
    macro_error,
    macro_interval,
    wilson_interval,
)

CONFUSIONS_PER_CLASS = 5
CONFUSIONS_OVERALL = 50
WORST_MATRIX_SIZE = 20  # classes; a larger matrix is unreadable on a page


@dataclass(frozen=True)
class EvaluatedImages:
    """The evaluated images of a run, in its order, as arrays of length `images`."""

    label: Int64Array  # class index of the truth
    answer: Int64Array  # class index of the best score; ties: the lower index; of a right image, its label
    score: npt.NDArray[np.float64]  # of the answer, 0..1
    rank: Int64Array  # of the true class, from 1
    view_ranks: Int64Array  # (images, views): rank of the true class in each view alone


def evaluated_images(predictions: Sequence[Prediction], views: int) -> EvaluatedImages:
    """Return the images that were not refused. views: their number in the run, 0 for an ensemble."""
    seen = [prediction for prediction in predictions if prediction.refused is None]
    return EvaluatedImages(
        label=np.array([p.label for p in seen], np.int64),
        answer=np.array([p.top[0][0] if p.rank > 1 else p.label for p in seen], np.int64),
        score=np.array([p.top[0][1] for p in seen], np.float64),
        rank=np.array([p.rank for p in seen], np.int64),
        view_ranks=np.array([p.view_ranks for p in seen], np.int64).reshape(len(seen), views),
    )


def error_fields(wrong: Sequence[int], total: int) -> dict[str, Any]:
    """Return top-1 and top-5 error with counts and intervals. wrong: number of wrong images by top-1 and by top-5."""
    result: dict[str, Any] = {}
    for k, count in zip(TOPS, wrong, strict=True):
        result[f"top{k}_wrong"] = count
        result[f"top{k}_error"] = error_percent(count, total)
        result[f"top{k}_interval"] = wilson_interval(count, total)
    return result


def run_errors(seen: EvaluatedImages) -> dict[str, Any]:
    """Return `error_fields` over all evaluated images of a run."""
    return error_fields([int((seen.rank > k).sum()) for k in TOPS], len(seen.rank))


def macro_fields(classes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean errors over classes. classes: as returned by `class_table`."""
    totals = [entry["evaluated"] for entry in classes]
    result: dict[str, Any] = {"classes": sum(total > 0 for total in totals)}
    for k in TOPS:
        wrong = [entry[f"top{k}_wrong"] for entry in classes]
        result[f"top{k}_error"] = macro_error(wrong, totals)
        result[f"top{k}_interval"] = macro_interval(wrong, [0] * len(wrong), totals)
    return result


def view_tables(views: Sequence[View], seen: EvaluatedImages) -> dict[str, list[dict[str, Any]]]:
    """Return the tables `views`, `scales` and `mirrors`, each in the protocol's order.

    They hold the errors of each view alone, and the mean errors of single views by scale and by mirroring.
    """
    ranks = seen.view_ranks
    tables = {"views": [{**view.to_json(), **_errors_only(ranks[:, [place]])} for place, view in enumerate(views)]}
    for table, key in (("scales", "scale"), ("mirrors", "mirrored")):
        places: defaultdict[Any, list[int]] = defaultdict(list)
        for place, view in enumerate(views):
            places[getattr(view, key)].append(place)
        tables[table] = [
            {key: kind, "views": len(of_kind), **_errors_only(ranks[:, of_kind])} for kind, of_kind in places.items()
        ]
    return tables


def _errors_only(ranks: Int64Array) -> dict[str, Any]:
    return {f"top{k}_error": error_percent(int(np.count_nonzero(ranks > k)), ranks.size) for k in TOPS}


def class_table(
    classes: Sequence[ClassEntry], predictions: Sequence[Prediction], seen: EvaluatedImages
) -> list[dict[str, Any]]:
    """Return a row per class of the model, including classes without images in the dataset."""
    count = len(classes)
    labels = np.fromiter((prediction.label for prediction in predictions), np.int64)
    images = np.bincount(labels, minlength=count).tolist()
    evaluated = np.bincount(seen.label, minlength=count).tolist()
    wrong = list(zip(*(np.bincount(seen.label[seen.rank > k], minlength=count).tolist() for k in TOPS), strict=True))
    scores = np.bincount(seen.label, weights=np.minimum(seen.score, 1.0), minlength=count).tolist()
    ranks = np.split(seen.rank[np.argsort(seen.label, kind="stable")], np.cumsum(evaluated)[:-1])  # by class
    views = [
        {k: np.bincount(seen.label[of_view > k], minlength=count).tolist() for k in TOPS}
        for of_view in seen.view_ranks.T
    ]
    confusions = _confusions_by_class(classes, seen)
    return [
        {
            "index": index,
            "wnid": entry.wnid,
            "name": entry.name,
            "images": images[index],
            "evaluated": evaluated[index],
            "refused": images[index] - evaluated[index],
            **error_fields(wrong[index], evaluated[index]),
            "confidence": round(100 * scores[index] / evaluated[index], DECIMALS) if evaluated[index] else None,
            "median_rank": float(np.median(ranks[index])) if evaluated[index] else None,
            "views": [
                {f"top{k}_error": error_percent(of_class[index], evaluated[index]) for k, of_class in view.items()}
                for view in views
            ],
            "confusions": confusions[index],
        }
        for index, entry in enumerate(classes)
    ]


def _wrong_pairs(seen: EvaluatedImages) -> list[tuple[int, int, int]]:
    """Return (label, answer, count) of all wrong answers, most frequent first, ties by class indices."""
    pairs = np.stack([seen.label, seen.answer], axis=1)[seen.rank > 1]
    different, counts = np.unique(pairs, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")  # np.unique sorted by label, then answer
    return [(*pair, count) for pair, count in zip(different[order].tolist(), counts[order].tolist(), strict=True)]


def _confusions_by_class(classes: Sequence[ClassEntry], seen: EvaluatedImages) -> dict[int, list[dict[str, Any]]]:
    """Return the most frequent wrong answers to the images of each class."""
    of_class: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for label, answer, count in _wrong_pairs(seen):
        if len(of_class[label]) < CONFUSIONS_PER_CLASS:
            entry = classes[answer]
            of_class[label].append({"index": answer, "wnid": entry.wnid, "name": entry.name, "count": count})
    return of_class


def confusion_pairs(seen: EvaluatedImages) -> list[dict[str, Any]]:
    """Return the most frequent pairs (true class, wrong answer). share: percent of the true class's images."""
    of_class = np.bincount(seen.label).tolist()
    return [
        {"label": label, "predicted": answer, "count": count, "share": error_percent(count, of_class[label])}
        for label, answer, count in _wrong_pairs(seen)[:CONFUSIONS_OVERALL]
    ]


def worst_classes(classes: Sequence[dict[str, Any]], key: str, limit: int) -> list[dict[str, Any]]:
    """Return the worst classes by `key` (top1 or top5), of those with errors."""
    return sorted((entry for entry in classes if entry[f"{key}_error"]), key=lambda e: worst_first(e, key))[:limit]


def worst_first(entry: dict[str, Any], key: str = "top1") -> tuple[float, ...]:
    """Return the sort key of a class: by the lower end of its interval, so that a single unlucky image does not lead.

    Ties: by the error, then by the other error, then by confidence. Classes without evaluated images come last.
    """
    if not entry["evaluated"]:
        return 1, entry["index"]
    (low, _), (low5, _) = entry[f"{key}_interval"], entry["top5_interval"]
    return -low, -entry[f"{key}_error"], -low5, -entry["confidence"], entry["index"]


def worst_matrix(classes: Sequence[dict[str, Any]], seen: EvaluatedImages) -> dict[str, Any]:
    """Return the confusion matrix of the worst classes by top-1 error, with their other answers.

    classes: as returned by `class_table`. counts: a row per true class, a column per answer; elsewhere: per row, the
    images answered with a class outside the matrix.
    """
    worst = [entry["index"] for entry in worst_classes(classes, "top1", WORST_MATRIX_SIZE)]
    place = np.full(len(classes), -1)
    place[worst] = np.arange(len(worst))
    row, column = place[seen.label], place[seen.answer]
    counts = np.zeros((len(worst), len(worst) + 1), dtype=np.int64)  # the last column, place -1, is `elsewhere`
    np.add.at(counts, (row[row >= 0], column[row >= 0]), 1)
    return {"classes": worst, "counts": counts[:, :-1].tolist(), "elsewhere": counts[:, -1].tolist()}


def same_names(classes: Sequence[ClassEntry]) -> list[list[int]]:
    """Return the groups of classes with the same name, like ImageNet's two kinds of crane; only their wnids differ."""
    of_name: defaultdict[str, list[int]] = defaultdict(list)
    for index, entry in enumerate(classes):
        of_name[entry.name].append(index)
    return [indices for indices in of_name.values() if len(indices) > 1]
