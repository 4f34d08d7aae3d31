"""Average the stored scores of several models on the same images: the paper's multi-model results (Table 7).

The score of a class is the sum of weight x score over the members, in the given order, computed in float64 and rounded
once to float32. The weights are positive and sum to 1. The paper does not say how its six models were combined.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import BoolArray, Float32Array, Int64Array
from ..datasets.dataset import UNLABELLED, Sample
from ..engine.scores import best_ranks, restrict, shortest_decimal, top_k
from ..errors import RunFolderError, UsageError
from ..files import check_not_input
from ..json_checks import differences, format_differences
from ..terminal import progress
from .predictions import TOP_CLASSES, Prediction
from .run import (
    RESTRICTION_FIX,
    Run,
    RunInfo,
    read_run,
    read_run_info,
    require_same_images,
    require_unsharded,
    sanitize_name,
)
from .stored_runs import BLOCK, check_scores, log_start, read_rows
from .writer import RunWriter, open_run

_NAME = "ensemble of {}"  # used instead of a model file name


@dataclass(frozen=True)
class ErrorCount:
    """Errors among the labeled images that every member evaluated. top1_wrong, top5_wrong: numbers of images."""

    images: int
    top1_wrong: int
    top5_wrong: int


@dataclass(frozen=True)
class Ensemble:
    """A written ensemble, and the errors of its members on the same images.

    member_errors: of each member alone; cumulative_errors: of the first one, the first two, ... members with their
    weights; the last is the ensemble. Both are empty if the images have no labels.
    """

    run: Run
    member_errors: tuple[ErrorCount, ...]
    cumulative_errors: tuple[ErrorCount, ...]


def ensemble(
    folders: Sequence[Path],
    folder: Path,
    *,
    weights: Sequence[float] | None = None,
    fresh: bool = False,
    report: Callable[[str], None] = lambda _text: None,
) -> Ensemble:
    """Average finished runs of different models into a run folder, or resume an earlier call that was killed.

    folder: of the ensemble's run, created if missing; weights: positive, one per run, with any sum, None for equal
    weights; fresh: start over; report: receives one sentence on where the ensemble starts.
    An image that one member refused is refused. The lines of all members and one block of the scores are in memory.
    Raises UsageError for invalid weights. Raises RunFolderError when the runs do not belong together, are unfinished
    or damaged, or when the folder contains anything but this ensemble. Raises EnvironmentFault when it is not writable.
    """
    checked = _checked_weights(len(folders), weights)
    check_not_input(folder, folders)  # --fresh would delete it
    infos = [read_run_info(path) for path in folders]
    _require_compatible(folders, infos)
    runs = [read_run(path) for path in folders]
    for run in runs[1:]:
        require_same_images(runs[0], run)
    for run in runs:
        check_scores(run)
    samples = [Sample(line.file, line.label, 0, line.also) for line in runs[0].predictions]
    with open_run(folder, _ensemble_info(infos, _normalized(checked)), samples, fresh=fresh) as writer:
        log_start(writer, infos[0].images, folders, report)
        member_errors, cumulative_errors = _average(runs, checked, writer)
    return Ensemble(read_run(folder), member_errors, cumulative_errors)


def _ensemble_info(infos: Sequence[RunInfo], shares: Sequence[float]) -> RunInfo:
    """Describe the ensemble of these runs. shares: weights that sum to 1.

    Its identity is the sha256 of a line `SHA256 WEIGHT` for each member, in order. A weight is written with the fewest
    decimals that parse to the same float64, as in run.json: `0.5`.
    """
    models = [info.model for info in infos]
    lines = "".join(f"{model['sha256']} {share!r}\n" for model, share in zip(models, shares, strict=True))
    activations = {model["activation"] for model in models}
    return RunInfo(
        model={
            "file": _NAME.format(len(infos)),
            "sha256": hashlib.sha256(lines.encode("ascii")).hexdigest(),
            "architecture": sanitize_name("+".join(model["architecture"] for model in models)),
            "activation": activations.pop() if len(activations) == 1 else "mixed",
            "provenance": None,  # each member has its own
            "checkpoint_sha256": None,
        },
        classes=infos[0].classes,
        protocol=infos[0].protocol,
        dataset=infos[0].dataset,
        circumstances={
            "provider": _joined(info.circumstances["provider"] for info in infos),
            "precision": _joined(info.circumstances["precision"] for info in infos),
            "versions": {
                name: _joined(info.circumstances["versions"].get(name, "none") for info in infos)
                for name in dict.fromkeys(name for info in infos for name in info.circumstances["versions"])
            },
        },
        chunk=BLOCK,
        members=tuple({"model": dict(model), "weight": share} for model, share in zip(models, shares, strict=True)),
    )


def _checked_weights(members: int, weights: Sequence[float] | None) -> list[float]:
    """Return a weight for each member, with any sum. Raises UsageError for invalid weights."""
    if members < 2:
        raise UsageError("an ensemble needs at least two runs. Pass several: prelunet ensemble RUN RUN --run DIR")
    checked = [1.0] * members if weights is None else [float(weight) for weight in weights]
    if len(checked) != members:
        raise UsageError(f"--weights: {len(checked)} weights for {members} runs. Pass one per run, in their order")
    if not all(0 < weight < float("inf") for weight in checked) or min(checked) / max(checked) < 1e-6:
        raise UsageError(f"--weights: {checked} should be positive and within a factor of a million of each other")
    return checked


def _normalized(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def _require_compatible(folders: Sequence[Path], infos: Sequence[RunInfo]) -> None:
    """Refuse runs whose scores are not comparable; the error shows the difference and the fix."""
    for path, info in zip(folders, infos, strict=True):
        require_unsharded(info, path)
    for (path, info), (other_path, other) in combinations(zip(folders, infos, strict=True), 2):
        models = _models(path, info)
        if twice := models.keys() & _models(other_path, other).keys():
            raise RunFolderError(
                f"{other_path}: the same model as {path} ({models[min(twice)]}), so it would count twice. "
                "Remove one of them; to give a model more weight, use --weights"
            )
    for path, info in zip(folders[1:], infos[1:], strict=True):
        places = (f"in {folders[0]}", f"in {path}")
        for what, (there, here), fix in _comparisons(infos[0], info):
            if found := differences(there, here, places=places):
                raise RunFolderError(f"{path}: {what} than {folders[0]}:\n{format_differences(found)}\n{fix}")


def _models(path: Path, info: RunInfo) -> dict[str, str]:
    """Return sha256 → file of every model in a run: its own and, for an ensemble, those of its members."""
    for member in info.members:
        if re.fullmatch(_NAME.format(r"\d+"), member["model"]["file"]):
            raise RunFolderError(
                f"{path}: an ensemble of ensembles, which does not record the models of its members; one could count "
                "twice. Pass the runs of the single models, with --weights"
            )
    return {model["sha256"]: model["file"] for model in (info.model, *(member["model"] for member in info.members))}


def _comparisons(one: RunInfo, other: RunInfo) -> Iterable[tuple[str, tuple[dict[str, Any], dict[str, Any]], str]]:
    """Yield what must be equal in two members: the fault, the two sides, and the fix.

    Names of datasets, protocols and classes may differ, but not their contents.
    """
    fix = f"Validate {other.model['file']} again, with the protocol of {one.model['file']}"
    images = [{key: info.dataset[key] for key in ("images", "fingerprint")} for info in (one, other)]
    yield "other images", (images[0], images[1]), "All members need the same images with the same labels"
    classes = [{"classes": [{"wnid": entry.wnid} for entry in info.classes]} for info in (one, other)]
    classes_fix = "Scores can be averaged only if all models have the same classes in the same order"
    yield "another class list", (classes[0], classes[1]), classes_fix
    restrictions = [{"candidates": list(info.candidates or range(len(info.classes)))} for info in (one, other)]
    yield "predictions among other classes", (restrictions[0], restrictions[1]), f"{RESTRICTION_FIX} {fix}"
    protocols = [{**info.protocol.to_json(), "name": ""} for info in (one, other)]
    yield "another protocol", (protocols[0], protocols[1]), f"All members need the same protocol. {fix}"


def _joined(values: Iterable[str]) -> str:
    """Return the common value, or the distinct values joined by +."""
    return sanitize_name("+".join(dict.fromkeys(values)))


def _average(
    runs: Sequence[Run], weights: Sequence[float], writer: RunWriter
) -> tuple[tuple[ErrorCount, ...], tuple[ErrorCount, ...]]:
    """Write the missing part of the ensemble's run. Count the errors of each member and of the first 1, 2, ... ones."""
    images = runs[0].info.images
    labels = np.array([line.label for line in runs[0].predictions], np.int64)
    evaluated = np.ones(images, np.bool_)
    for run in runs:
        evaluated &= np.array([line.refused is None for line in run.predictions])
    counted = evaluated & (labels != UNLABELLED)
    ranks = np.zeros((len(runs), images), np.int64)
    with progress("ensemble", images, "images") as advance:
        for start in range(0, images, BLOCK):
            block = slice(start, min(start + BLOCK, images))
            rows = [read_rows(run, block.start, block.stop) for run in runs]
            truths = [line.labels for line in runs[0].predictions[block]]
            for number in range(1, len(runs) + 1):
                total = np.zeros(rows[0].shape, np.float64)
                for share, of_member in zip(_normalized(weights[:number]), rows, strict=False):
                    total += share * of_member.astype(np.float64)  # NaN rows of refused images stay NaN
                scores = total.astype(np.float32)
                restricted = restrict(scores, runs[0].info.candidates)
                ranks[number - 1, block] = best_ranks(restricted, truths)
            if start >= writer.done:
                writer.append(list(_lines(runs, block, restricted, ranks[-1, block])), scores)
            advance(block.stop - block.start)
    if not (labels != UNLABELLED).any():
        return (), ()
    member_ranks = [np.array([line.rank for line in run.predictions], np.int64) for run in runs]
    return tuple(_count_errors(rank, counted) for rank in member_ranks), tuple(
        _count_errors(rank, counted) for rank in ranks
    )


def _count_errors(ranks: Int64Array, counted: BoolArray) -> ErrorCount:
    counted_ranks = ranks[counted]
    return ErrorCount(len(counted_ranks), int((counted_ranks > 1).sum()), int((counted_ranks > 5).sum()))


def _lines(runs: Sequence[Run], block: slice, scores: Float32Array, ranks: Int64Array) -> Iterator[Prediction]:
    """Yield the lines of some images; an image is refused if a member refused it.

    scores, ranks: of the ensemble, one row (`restrict`) and one rank of the true class for each image.
    """
    names = [f"member {number} ({run.info.model['file']})" for number, run in enumerate(runs, start=1)]
    members = zip(*(run.predictions[block] for run in runs), strict=True)
    for lines, row, rank in zip(members, scores, ranks.tolist(), strict=True):
        file, label, also = lines[0].file, lines[0].label, lines[0].also
        reasons = [
            f"{name}: {line.refused}" for name, line in zip(names, lines, strict=True) if line.refused is not None
        ]
        if reasons:
            yield Prediction(file, label, refused=reasons[0], also=also)
            continue
        top = tuple((index, shortest_decimal(score)) for index, score in top_k(row, TOP_CLASSES))
        known = rank if label != UNLABELLED else 0
        capped = any(line.capped for line in lines)
        yield Prediction(file, label, top, known, capped=capped, also=also, traits=lines[0].traits)
