"""Average the stored scores of several models on the same images: the paper's multi-model results (Table 7).

The score of a class is the sum over the members, in the order given, of weight x score, in float64 and rounded to
float32 once; the weights are positive and their sum is 1. The paper does not say how its six models were combined.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from shlex import join
from typing import Any

import numpy as np

from prelunet.evaluator.arrays import BoolArray, Float32Array, Int64Array
from prelunet.evaluator.datasets.dataset import UNLABELLED, Sample
from prelunet.evaluator.engine.scores import ranks_of, shortest_decimal, top_k
from prelunet.evaluator.errors import RunFolderError, UsageError
from prelunet.evaluator.json_checks import differences, format_differences
from prelunet.evaluator.protocols import command_line_options
from prelunet.evaluator.terminal import progress
from prelunet.evaluator.validation.predictions import TOP_CLASSES, Prediction
from prelunet.evaluator.validation.run import (
    Run,
    RunInfo,
    read_run,
    read_run_info,
    require_same_images,
    require_unsharded,
)
from prelunet.evaluator.validation.run_schema import sanitize_name
from prelunet.evaluator.validation.stored_runs import BLOCK, check_scores, log_start, read_rows, refuse_source_as_target
from prelunet.evaluator.validation.writer import RunWriter, open_run

_NAME = "ensemble of {}"  # in place of a model file's


@dataclass(frozen=True)
class ErrorCount:
    """Errors among labelled images that every member evaluated. top1_wrong, top5_wrong: images of these."""

    images: int
    top1_wrong: int
    top5_wrong: int


@dataclass(frozen=True)
class Ensemble:
    """A written ensemble and what its parts give on the same images.

    alone: each member by itself; first: the first one, the first two, ... members with their weights; the last is the
    ensemble. Both are empty where the images have no labels.
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
    """Average finished runs of different models into a run folder; an earlier call that was killed is gone on with.

    folder: of the ensemble's run, made if missing; weights: positive, one per run, of any sum; None: all alike;
    fresh: start it anew; announce: told in one sentence where it starts.
    An image that one member refused is refused. In memory are the lines of all members, and of the scores a block.
    Raises UsageError for weights that cannot be, RunFolderError when the runs do not belong together, are unfinished
    or damaged, or when the folder holds anything but this very ensemble; EnvironmentFault when it cannot be written.
    """
    given = _checked_weights(len(folders), weights)
    refuse_source_as_target(folders, folder)
    infos = [read_run_info(path) for path in folders]
    _require_compatible(folders, infos)
    runs = [read_run(path) for path in folders]
    for run in runs[1:]:
        require_same_images(runs[0], run)
    for run in runs:
        check_scores(run)
    samples = [Sample(line.file, line.label, 0) for line in runs[0].predictions]
    with open_run(folder, ensemble_info(infos, _normalised(given)), samples, fresh=fresh) as writer:
        log_start(writer, infos[0].images, folders, report)
        member_errors, cumulative_errors = _average(runs, given, writer)
    return Ensemble(read_run(folder), member_errors, cumulative_errors)


def ensemble_info(infos: Sequence[RunInfo], shares: Sequence[float]) -> RunInfo:
    """Describe the ensemble of these runs. shares: weight of each, of sum 1."""
    models = [info.model for info in infos]
    return RunInfo(
        model={
            "file": _NAME.format(len(infos)),
            "sha256": ensemble_sha256([model["sha256"] for model in models], shares),
            "architecture": _joined(model["architecture"] for model in models),
            "activation": common[0] if len(common := _distinct(m["activation"] for m in models)) == 1 else "mixed",
        },
        classes=infos[0].classes,
        protocol=infos[0].protocol,
        dataset=infos[0].dataset,
        circumstances=_circumstances([info.circumstances for info in infos]),
        chunk=BLOCK,
        members=tuple({"model": dict(model), "weight": share} for model, share in zip(models, shares, strict=True)),
    )


def ensemble_sha256(digests: Sequence[str], shares: Sequence[float]) -> str:
    """Return what identifies an ensemble: the sha256 of a line `SHA256 WEIGHT` for each member, in order.

    A weight is written with the fewest decimals that give the same float64, as in run.json: `0.5`.
    """
    lines = (f"{digest} {share!r}\n" for digest, share in zip(digests, shares, strict=True))
    return hashlib.sha256("".join(lines).encode("ascii")).hexdigest()


def _checked_weights(members: int, weights: Sequence[float] | None) -> list[float]:
    """Return a weight for each member, of any sum; UsageError for what cannot be one."""
    if members < 2:
        raise UsageError("an ensemble needs at least two runs. Give several: prelunet ensemble RUN RUN --run DIR")
    given = [1.0] * members if weights is None else [float(weight) for weight in weights]
    if len(given) != members:
        raise UsageError(f"--weights: {len(given)} weights for {members} runs. Give one for each, in their order")
    if not all(0 < weight < float("inf") for weight in given) or min(given) / max(given) < 1e-6:
        raise UsageError(f"--weights: {given} should be positive and within a factor of a million of each other")
    return given


def _normalised(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def _require_compatible(folders: Sequence[Path], infos: Sequence[RunInfo]) -> None:
    """Refuse runs whose scores mean different things, with the difference and the mend."""
    for path, info in zip(folders, infos, strict=True):
        require_unsharded(info, path)
    for (path, info), (again, other) in combinations(zip(folders, infos, strict=True), 2):
        known = _models(path, info)
        if twice := known.keys() & _models(again, other).keys():
            raise RunFolderError(
                f"{again}: the same model as {path} ({known[min(twice)]}), so that it would count twice. Leave it "
                "out; where it should weigh more, say so with --weights"
            )
    for path, info in zip(folders[1:], infos[1:], strict=True):
        places = (f"in {folders[0]}", f"in {path}")
        for what, (there, here), fix in _comparisons(infos[0], info):
            if found := differences(there, here, places=places):
                raise RunFolderError(f"{path}: {what} than {folders[0]}:\n{format_differences(found)}\n{fix}")


def _models(path: Path, info: RunInfo) -> dict[str, str]:
    """Return sha256 and file of every model that a run is of: its own and, of an ensemble, those of its members."""
    for member in info.members:
        if re.fullmatch(_NAME.format(r"\d+"), member["model"]["file"]):
            raise RunFolderError(
                f"{path}: an ensemble of ensembles, which does not say of which models those are; one could count "
                "twice. Give the runs of the single models, with --weights"
            )
    return {model["sha256"]: model["file"] for model in (info.model, *(member["model"] for member in info.members))}


def _comparisons(one: RunInfo, other: RunInfo) -> Iterable[tuple[str, tuple[dict[str, Any], dict[str, Any]], str]]:
    """Yield what must be the same in two members: what is wrong otherwise, the two sides, and the mend.

    Names of datasets, protocols and classes may differ; what they stand for may not.
    """
    looks = join(command_line_options(one.protocol, by_scales=True))
    again = f"Validate {other.model['file']} again, with the options that it had and: {looks}"
    images = [{key: info.dataset[key] for key in ("images", "fingerprint")} for info in (one, other)]
    yield "other images", (images[0], images[1]), "All members must see the same images with the same labels"
    classes = [{"classes": [{"wnid": entry.wnid} for entry in info.classes]} for info in (one, other)]
    fix = "Scores can be averaged only where all models know the same classes in the same order"
    yield "another class list", (classes[0], classes[1]), fix
    protocols = [{**info.protocol.to_json(), "name": ""} for info in (one, other)]
    yield "another protocol", (protocols[0], protocols[1]), f"All members must look at the images alike. {again}"


def _circumstances(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return provider, precision and versions: those that all share, or all of them with + between."""
    names = _distinct(name for member in members for name in member["versions"])
    return {
        "provider": _joined(_distinct(member["provider"] for member in members)),
        "precision": _joined(_distinct(member["precision"] for member in members)),
        "versions": {
            name: _joined(_distinct(member["versions"].get(name, "none") for member in members)) for name in names
        },
    }


def _joined(names: Iterable[str]) -> str:
    return sanitize_name("+".join(names))


def _distinct(values: Iterable[str]) -> list[str]:
    """Return the values without repetitions, in the order of their first appearance."""
    return list(dict.fromkeys(values))


def _average(
    runs: Sequence[Run], weights: Sequence[float], writer: RunWriter
) -> tuple[tuple[ErrorCount, ...], tuple[ErrorCount, ...]]:
    """Write what the ensemble's run lacks; count the errors of each member and of the first 1, 2, ... of them."""
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
            for number in range(1, len(runs) + 1):
                scores = weighted_mean(rows[:number], _normalised(weights[:number]))  # NaN where one is, so refused
                ranks[number - 1, block] = ranks_of(scores, np.maximum(labels[block], 0))
            if start >= writer.done:
                writer.append(_lines(runs, block, scores, ranks[-1, block]), scores)
            advance(block.stop - block.start)
    if not (labels != UNLABELLED).any():
        return (), ()
    member_errors = [np.array([line.rank for line in run.predictions], np.int64) for run in runs]
    return tuple(_count_errors(rank, counted) for rank in member_errors), tuple(
        _count_errors(rank, counted) for rank in ranks
    )


def weighted_mean(rows: Sequence[Float32Array], shares: Sequence[float]) -> Float32Array:
    """Average scores, float32 (images, classes) of each member, adding in their order; float64 inside, float32 out.

    shares: weights of sum 1.
    """
    total = np.zeros(rows[0].shape, np.float64)
    for share, of_member in zip(shares, rows, strict=True):
        total += share * of_member.astype(np.float64)
    return total.astype(np.float32)


def _count_errors(ranks: Int64Array, counted: BoolArray) -> ErrorCount:
    own = ranks[counted]
    return ErrorCount(len(own), int((own > 1).sum()), int((own > 5).sum()))


def _lines(runs: Sequence[Run], block: slice, scores: Float32Array, ranks: Int64Array) -> list[Prediction]:
    """Return the lines of some images. scores, ranks: of the ensemble, a row and the rank of the truth for each."""
    names = [f"member {number} ({run.info.model['file']})" for number, run in enumerate(runs, start=1)]
    members = zip(*(run.predictions[block] for run in runs), strict=True)
    return [_line(lines, names, row, int(rank)) for lines, row, rank in zip(members, scores, ranks, strict=True)]


def _line(lines: Sequence[Prediction], names: Sequence[str], scores: Float32Array, rank: int) -> Prediction:
    """Return the line of one image. lines: of the members; refused where one of them refused, by the first's name."""
    one = lines[0]
    for name, line in zip(names, lines, strict=True):
        if line.refused is not None:
            return Prediction(one.file, one.label, refused=f"{name}: {line.refused}")
    return Prediction(
        file=one.file,
        label=one.label,
        top=tuple((index, shortest_decimal(score)) for index, score in top_k(scores, TOP_CLASSES)),
        rank=0 if one.label == UNLABELLED else rank,
        capped=any(line.capped for line in lines),
    )
