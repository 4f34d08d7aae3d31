"""Evaluate two models until it is known which is better: `prelunet compare --until-decided`."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..arrays import Int64Array
from ..errors import RunFolderError, UsageError
from ..files import create_folder, remove_leftovers, write_atomically
from ..json_checks import differences, format_differences, parse_json
from ..validation.portions import ComparedModel, check_same_images, evaluate_portions, merge_portions
from ..validation.run import Run, read_run
from .checks import Check, check_comparison, difference_cells
from .compare import METRICS, compare_runs, count_pairs
from .html import signed
from .sequence import bounds_of_all, expected_images
from .statistics import DECIMALS, error_percent

Verdict = Literal["B is better", "B is worse", "within the margin", "cannot tell", "undecided"]

DECISION_FILE, DECISION_VERSION = "decision.json", 1
_USUAL_DISCORDANT, _CLEAR = 0.1, 2.0  # share of images and points, for what is expected beforehand
_RESULT_KEYS = ("margin", "limit", "verdict", "images", "looks")  # of decision.json, which a repeated call may change


@dataclass(frozen=True)
class Decision:
    """What was decided. data: the content of decision.json; folders: of the merged runs of A and B."""

    data: dict[str, Any]
    folders: tuple[Path, Path]

    def __str__(self) -> str:
        metric, a, b, difference, interval, verdict = self.row
        some = self.data["images"] < self.data["of"]
        of_what = "the difference on all images is" if some else "for images like these the difference is"
        files = (*self.folders, self.folders[0].parent / DECISION_FILE)
        refused = "".join(
            f"\n{name} refused {count:,} images"
            for name, count in zip("AB", self.last["refused"], strict=True)
            if count
        )
        return (
            f"{verdict}: {metric} error {b} against {a}, {difference} points; {of_what} {interval}, "
            f"with 95 % confidence{refused}\n{', '.join(map(str, files))}"
        )

    @property
    def last(self) -> dict[str, Any]:
        """Return the last look."""
        look: dict[str, Any] = self.data["looks"][-1]
        return look

    @property
    def row(self) -> list[str]:
        """Return the result as a row of `markdown_of`."""
        data = self.data
        words = {"undecided": "undecided which is better", "cannot tell": "cannot tell which is better"}
        which = words.get(data["verdict"], data["verdict"])
        verdict = f"{which} after {data['images']:,} of {data['of']:,} images"
        last = self.last
        errors = ["–" if last[key] is None else f"{last[key]:.2f} %" for key in ("a_error", "b_error")]
        return [f"top-{METRICS[data['metric']]}", *errors, *difference_cells(last), verdict]


def compare_until_decided(
    a: ComparedModel,
    b: ComparedModel,
    *,
    folder: Path,
    margin: float,
    limit: float | None = None,
    metric: str = "top1",
    seed: int = 0,
    report: Callable[[str], None] = lambda _text: None,
) -> Decision:
    """Evaluate two models on random portions of a dataset until their difference is known, or resume such a call.

    folder: for decision.json, the portions and, at the end, the merged runs `a` and `b`; margin: a difference in points
    that does not matter; limit: stop instead when it is known whether B's error exceeds A's by more points than this
    (`check_decision`); metric: `top1` or `top5`; seed: of the order of the images; report: receives a sentence
    beforehand and after each portion. While images are left, the verdict is about those of the dataset
    (`bounds_of_all`); after all, about images like these.
    Raises UsageError for a margin that is smaller than an image, RunFolderError if the folder holds another comparison,
    DatasetError if the models have different classes, and as `validate` does.
    """
    check_same_images(a, b)
    images, k = len(a.dataset.samples), METRICS[metric]
    if margin * images < 100:
        raise UsageError(
            f"--margin {margin:g}: one of {images:,} images is already {100 / images:.2g} points. Give a larger margin"
        )
    start = {
        "version": DECISION_VERSION,
        "a": _described(a),
        "b": _described(b),
        "dataset": a.dataset.fingerprint,
        "metric": metric,
        "seed": seed,
        "of": images,
    }
    result: dict[str, Any] = {"margin": margin, "limit": limit, "verdict": "undecided", "images": 0, "looks": []}
    data: dict[str, Any] = {**start, **result}
    written = _open(folder, start, data)
    report(_expectation(images, margin))
    pairs: list[tuple[Run, Run]] = []
    ranks = np.empty((2, 0), np.int64)  # of the true class in A and B; 0 where an image was refused
    for (run_a, run_b), files in evaluate_portions((a, b), folder, seed):
        pairs.append((run_a, run_b))
        of_files = [{line.file: line.rank for line in run.predictions} for run in (run_a, run_b)]
        ranks = np.hstack([ranks, [[of_file[file] for file in files] for of_file in of_files]])
        look = _look(ranks, k, images)
        low, high = look["interval"]
        data |= {"images": look["images"], "looks": [*data["looks"], look]}
        data["verdict"] = _verdict(low, high, margin, complete=look["images"] == images)
        if len(data["looks"]) > written:
            _write(folder, data)
        report(f"{look['images']:,} of {images:,} images: difference between {_points(low)} and {_points(high)} points")
        if data["verdict"] != "undecided" if limit is None else low > limit or high <= limit:
            break
    _write(folder, data)
    for each, runs in zip((a, b), zip(*pairs, strict=True), strict=True):
        merge_portions(each, runs, folder / each.name, seed, report)
    return Decision(data, (folder / a.name, folder / b.name))


def _expectation(images: int, margin: float) -> str:
    clear, within = (f"{expected_images(points, _USUAL_DISCORDANT, images):,}" for points in (_CLEAR, margin))
    return (
        f"{images:,} images; if only one model is right on {100 * _USUAL_DISCORDANT:g} % of them, expected to need "
        f"about {clear} where the errors differ by {_CLEAR:g} points, {within} to show that it is at most {margin:g}"
    )


def _points(difference: float) -> str:
    return signed(difference, minus="-")


def _look(ranks: Int64Array, k: int, images: int) -> dict[str, Any]:
    """Return what is known after a portion: errors on the images that both evaluated, and bounds of their difference.

    ranks: (2, t), 0 where refused; k: an image is wrong beyond this rank. While images are left, the bounds are for all
    of them (`bounds_of_all`). After all, they are the interval of `compare`, for images like these; images that
    only one model evaluated widen it by as much as they may differ.
    """
    refused, seen = ranks == 0, ranks.shape[1]
    unknown = refused[0] != refused[1]
    (paired,) = count_pairs(np.zeros(seen, np.int64), list(ranks), k, classes=1)
    if seen < images:
        wrong_a, wrong_b = (ranks > k).astype(np.int64)
        low, high = bounds_of_all(np.where(refused.any(axis=0), 0, wrong_b - wrong_a), unknown, images)
    else:
        more = 100 * float(unknown.mean())
        low, high = paired.interval or (-100.0, 100.0)
        low, high = round(max(-100.0, low - more), DECIMALS), round(min(100.0, high + more), DECIMALS)
    return {
        "images": seen,
        "refused": [int(of_run.sum()) for of_run in refused],
        "a_error": error_percent(paired.wrong_a, paired.images),
        "b_error": error_percent(paired.wrong_b, paired.images),
        "difference": paired.difference,
        "interval": [low, high],
    }


def _verdict(low: float, high: float, margin: float, *, complete: bool) -> Verdict:
    """Return what is known. low, high: bounds in points; complete: no images are left."""
    if high < 0:
        return "B is better"
    if low > 0:
        return "B is worse"
    if -margin <= low and high <= margin:
        return "within the margin"
    return "cannot tell" if complete else "undecided"


def _write(folder: Path, data: Mapping[str, Any]) -> None:
    write_atomically(folder / DECISION_FILE, (json.dumps(data, indent=1) + "\n").encode())


def _described(model: ComparedModel) -> dict[str, Any]:
    """Return what determines a model's scores."""
    info = model.run_info(model.dataset)
    batching = info.batching and info.batching.to_json()
    circumstances = dict(info.circumstances)
    return {"model": info.model["sha256"], "protocol": info.protocol.to_json(), **circumstances, "batching": batching}


def _open(folder: Path, start: Mapping[str, Any], data: Mapping[str, Any]) -> int:
    """Create the folder with a decision that is not made, or check that it holds this comparison.

    Returns the number of looks that it holds for this margin and limit, which a call that is stopped before must keep.
    """
    create_folder(folder, "--out")
    remove_leftovers(folder, (DECISION_FILE,))
    path = folder / DECISION_FILE
    if not path.exists():
        if next(folder.iterdir(), None) is not None:
            raise RunFolderError(f"{folder}: not empty and not a comparison. Choose an empty or new folder with --out")
        _write(folder, data)
        return 0
    try:
        there = dict(parse_json(path.read_bytes()))
        known = {key: there.pop(key) for key in _RESULT_KEYS}
    except (ValueError, TypeError, KeyError) as error:
        raise RunFolderError(f"{path}: damaged ({error}). Delete {folder}, or choose another with --out") from error
    if there.get("dataset") != start["dataset"]:
        raise RunFolderError(
            f"{folder}: begun with other images or labels: {there.get('of')} images then, {start['of']} now. Restore "
            "them, or choose another folder with --out"
        )
    if found := differences(there, start):
        raise RunFolderError(
            f"{folder}: holds another comparison:\n{format_differences(found)}\n"
            "Choose another folder with --out, or delete this one"
        )
    same = all(known[key] == data[key] for key in ("margin", "limit"))
    return len(known["looks"]) if same else 0


def check_decision(decision: Decision, points: float) -> Check:
    """Check whether B's error exceeds A's by more than `points`; if no images are left, as `check_comparison` does."""
    last, metric = decision.last, decision.data["metric"]
    if decision.data["images"] == decision.data["of"]:
        (check,) = check_comparison(compare_runs(*map(read_run, decision.folders)), points, [metric])
        return check
    low, high = last["interval"]
    verdict: Literal["not worse", "worse", "cannot tell"] = (
        "worse" if low > points else "not worse" if high <= points else "cannot tell"
    )
    difference = "–" if last["difference"] is None else _points(last["difference"])
    bounds = f"between {_points(low)} and {_points(high)} with 95 % confidence"
    text = f"top-{METRICS[metric]} error {difference} points above A's, {bounds}"
    return Check(metric, points, verdict, text)
