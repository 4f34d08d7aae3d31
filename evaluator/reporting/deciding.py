"""Evaluate two models until it is known which is better: `prelunet compare --until-decided`."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..arrays import Int64Array
from ..errors import RunFolderError, UsageError
from ..files import create_folder, write_atomically
from ..json_checks import differences, format_differences, parse_json
from ..validation.portions import Contestant, check_same_images, evaluate_portions, merge_portions
from ..validation.run import Run
from .checks import Check, difference_cells
from .compare import METRICS
from .html import signed
from .sequence import DifferenceSequence, expected_images
from .statistics import error_percent

DECISION_FILE, DECISION_VERSION = "decision.json", 1
_USUAL_DISCORDANT, _CLEAR = 0.1, 2.0  # share of images and points, for what is expected beforehand
_FOUND = ("margin", "verdict", "images", "looks")  # keys of decision.json that a repeated call may change


@dataclass(frozen=True)
class Decision:
    """What was decided. data: the content of decision.json; folders: of the merged runs of A and B."""

    data: dict[str, Any]
    folders: tuple[Path, Path]

    def __str__(self) -> str:
        metric, a, b, difference, interval, verdict = self.row
        return (
            f"{verdict}: {metric} error {b} against {a}, {difference} points; on all images {interval}, with 95 % "
            f"confidence at all times\n{', '.join(map(str, self.folders))}, {DECISION_FILE}"
        )

    @property
    def row(self) -> list[str]:
        """Return the result as a row of `markdown_of`."""
        data = self.data
        verdict = f"{data['verdict']} after {data['images']:,} of {data['of']:,} images"
        last = data["looks"][-1]
        errors = ["–" if last[key] is None else f"{last[key]:.2f} %" for key in ("a_error", "b_error")]
        return [f"top-{METRICS[data['metric']]}", *errors, *difference_cells(last), verdict]


def compare_until_decided(
    a: Contestant,
    b: Contestant,
    folder: Path,
    *,
    margin: float,
    metric: str = "top1",
    seed: int = 0,
    report: Callable[[str], None] = lambda _text: None,
) -> Decision:
    """Evaluate two models on random portions of a dataset until their difference is known, or resume such a call.

    folder: for decision.json, the portions and, at the end, the merged runs `a` and `b`; margin: a difference in points
    that does not matter; metric: `top1` or `top5`; seed: of the order of the images; report: receives a sentence
    beforehand and after each portion. The verdict is about the images of the dataset (`DifferenceSequence`).
    Raises UsageError for a margin that is smaller than an image, RunFolderError if the folder holds another comparison,
    DatasetError if the models have different classes, and as `validate` does.
    """
    check_same_images(a, b)
    images = len(a.dataset.samples)
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
    data: dict[str, Any] = {**start, "margin": margin, "verdict": "undecided", "images": 0, "looks": []}
    _open(folder, start, data)
    report(_expectation(images, margin))
    order = np.random.default_rng(seed).permutation(images).tolist()
    pairs: list[tuple[Run, Run]] = []
    ranks = np.empty((2, 0), np.int64)  # of the true class in A and B; 0 where an image was refused
    for (run_a, run_b), files in evaluate_portions((a, b), folder, order):
        pairs.append((run_a, run_b))
        of_files = [{line.file: line.rank for line in run.predictions} for run in (run_a, run_b)]
        ranks = np.hstack([ranks, [[of_file[file] for file in files] for of_file in of_files]])
        seen = _sequence(ranks, METRICS[metric], images)
        look = _look(ranks, METRICS[metric], seen)
        data |= {"verdict": seen.verdict(margin), "images": look["images"], "looks": [*data["looks"], look]}
        _write(folder, data)
        low, high = seen.interval
        report(f"{data['images']:,} of {images:,} images: difference from {low:+.2f} to {high:+.2f} points")
        if data["verdict"] != "undecided":
            break
    for each, runs in zip((a, b), zip(*pairs, strict=True), strict=True):
        merge_portions(each, runs, folder / each.name, order, report)
    return Decision(data, (folder / a.name, folder / b.name))


def _expectation(images: int, margin: float) -> str:
    clear, within = (f"{expected_images(points, _USUAL_DISCORDANT, images):,}" for points in (_CLEAR, margin))
    return (
        f"{images:,} images; expected to need about {clear} if the errors differ by {_CLEAR:g} points, {within} to "
        f"show that they differ by no more than {margin:g} (if only one is right on {100 * _USUAL_DISCORDANT:g} %)"
    )


def _look(ranks: Int64Array, k: int, seen: DifferenceSequence) -> dict[str, Any]:
    """Return what is known after a portion; the errors are of the images that both evaluated."""
    both = ranks[:, (ranks > 0).all(axis=0)]
    a_error, b_error = (error_percent(int((of_run > k).sum()), both.shape[1]) for of_run in both)
    return {
        "images": len(seen.differences),
        "a_error": a_error,
        "b_error": b_error,
        "difference": seen.difference,
        "interval": list(seen.interval),
    }


def _write(folder: Path, data: dict[str, Any]) -> None:
    write_atomically(folder / DECISION_FILE, (json.dumps(data, indent=1) + "\n").encode())


def _described(contestant: Contestant) -> dict[str, Any]:
    session = contestant.session
    circumstances = session.circumstances.to_json()
    return {
        "model": session.model_sha256,
        "protocol": contestant.protocol.to_json(),
        "provider": circumstances["provider"],
        "precision": circumstances["precision"],
    }


def _open(folder: Path, start: dict[str, Any], data: dict[str, Any]) -> None:
    """Create the folder with a decision that is not made, or check that it holds this comparison."""
    create_folder(folder, "--out")
    path = folder / DECISION_FILE
    if not path.exists():
        if next(folder.iterdir(), None) is not None:
            raise RunFolderError(f"{folder}: not empty and not a comparison. Choose an empty or new folder with --out")
        _write(folder, data)
        return
    try:
        there = {key: value for key, value in parse_json(path.read_bytes()).items() if key not in _FOUND}
    except (ValueError, AttributeError) as error:
        raise RunFolderError(f"{path}: damaged ({error}). Delete {folder}, or choose another with --out") from error
    if found := differences(there, start):
        raise RunFolderError(
            f"{folder}: holds another comparison:\n{format_differences(found)}\n"
            "Choose another folder with --out, or delete this one"
        )


def _sequence(ranks: Int64Array, k: int, images: int) -> DifferenceSequence:
    """Return the differences of two runs. ranks: (2, t), 0 where refused; k: an image is wrong beyond this rank."""
    refused, wrong = ranks == 0, (ranks > k).astype(np.int64)
    return DifferenceSequence(np.where(refused.any(axis=0), 0, wrong[1] - wrong[0]), refused[0] != refused[1], images)


def check_decision(decision: Decision, points: float) -> Check:
    """Return whether B's error exceeds A's by more than `points` on the images of the dataset."""
    last, metric = decision.data["looks"][-1], decision.data["metric"]
    low, high = last["interval"]
    verdict: Literal["not worse", "worse", "cannot tell"] = (
        "worse" if low > points else "not worse" if high <= points else "cannot tell"
    )
    bounds = " to ".join(signed(bound, minus="-") for bound in (low, high))
    text = f"top-{METRICS[metric]} error {bounds} points above A's on all images, with 95 % confidence at all times"
    return Check(metric, points, verdict, text)
