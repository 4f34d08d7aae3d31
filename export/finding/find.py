"""Finds how a net's images were prepared in training: one question after the other, each with the answers that fit.

Labels tell what fits the net best, by the log loss of the true class. Outputs of the original pipeline tell more: the
candidate that reproduces them is it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...evaluator.arrays import Float64Array
from ...evaluator.contract import ClassEntry
from ...evaluator.datasets.dataset import Dataset, DatasetSpec, Sample
from ...evaluator.datasets.labels.label_lists import orders_of
from ...evaluator.datasets.open import open_from_spec, open_images
from ...evaluator.errors import ImageError, UsageError, from_os_error
from ...evaluator.files import create_folder, sha256_of
from ...evaluator.machine import cores
from ...training.importing.preprocessing import Layout, Preprocessing
from ..foreign.adopt import OutputKind, are_probabilities, check_classes, pictures_of
from ..foreign.quantized import loader
from ..foreign.read_net import digest_of, find_interface, read_net
from ..foreign.sidecars import ClassList, find_net, read_classes, read_sidecars
from .candidates import QUESTIONS, Candidate, Question, candidate_of, first_candidate, options, with_answer
from .decide import (
    EXACT,
    TOLERATED,
    Standing,
    better_than_chance,
    by_labels,
    by_references,
    fits_another_order,
    ranked,
)
from .measure import Labels, Measurements, Pictures, References, run_net

CONFIDENCE = 0.95
IMAGES = 400
FEWEST, FEWEST_REFERENCES = 50, 5
_STAGES = 24, 96  # images that all answers are tried on first, then those that are left; all images come last
_EARLY_ERROR = 0.005  # in each of the first stages; the rest of 1 - CONFIDENCE is for the last one
_ROUNDS = 3  # at most; a question is asked again where what it was asked with is excluded afterwards
_FIRST_REFERENCES = 2  # on which all answers are tried in all combinations
_TOLERATED: dict[Question, float] = {"geometry": TOLERATED, "filter": TOLERATED}
_SUM_TOLERANCE = 1e-2  # of outputs that are probabilities, as for half precision
_CONTRASTS = 1 / 2, 2**-0.5, 2**0.5, 2
_SHOWN = 12  # answers to a question, at least; with references there are all scales
_GIVEN = "as given"


@dataclass(frozen=True)
class Answer:
    """One answer to a question.

    names: several if they give the net the same input of these images; alike: number of ways among them that differ on
    others; standing: beside the best.
    """

    names: tuple[str, ...]
    candidate: Candidate
    standing: Standing
    alike: int = 1


@dataclass(frozen=True)
class Found:
    """What was found.

    candidate: the best answers together; answers: to each question, best first; images: how many were used;
    undecodable: how many more could not be; data: fingerprint of the dataset; difference: of references, the largest of
    the best candidate, as a part of the largest number of an output, None with labels; error: with labels, top-1 of the
    best candidate in percent; contrast: by how much more of it the net's input should have, 1 if none fits better.
    """

    candidate: Candidate
    answers: dict[Question, tuple[Answer, ...]]
    images: int
    undecodable: int
    data: str
    difference: float | None
    error: float | None = None
    contrast: float = 1.0

    @property
    def exact(self) -> bool:
        """Whether the best candidate reproduces the reference outputs."""
        return self.difference is not None and self.difference <= EXACT

    def to_json(self) -> dict[str, Any]:
        """Return what a model file records: which answers could not be told apart, from which data."""
        kept = {question: [" = ".join(each.names) for each in answers if each.standing.kept]
                for question, answers in self.answers.items()}  # fmt: skip
        how: dict[str, Any] = {"confidence": CONFIDENCE} if self.difference is None else {"difference": self.difference}
        return {"data": self.data, "images": self.images, **how, "answers": kept}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def find_input(  # noqa: PLR0913 - one argument per option
    net: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    classes: str | os.PathLike[str] | Sequence[ClassEntry | str] | None = None,
    reference: str | os.PathLike[str] | None = None,
    images: int = IMAGES,
    log: str | os.PathLike[str] | None = None,
    crop: int | None = None,
    layout: Layout | None = None,
    net_output: str | None = None,
    kind: OutputKind = "auto",
    dense: bool = False,
    given: Preprocessing | None = None,
    given_scale: int | None = None,
) -> Found:
    """Find the preprocessing of an ONNX classifier.

    data: labeled images in any layout of docs/datasets.md, of which `images` are drawn, or the images of the reference;
    classes: of the net, or their names, in the order of its outputs, or a file of them, or imagenet-1k, needed for
    labels; None: those beside the net or in its metadata; reference: .npy file with the outputs of the original
    pipeline, (images, classes), in the order of the images' names; log: folder for a file that keeps every run of the
    net, from which a repeated call goes on; crop, layout, net_output, kind, dense: as for `prelunet adopt`; given,
    given_scale: one more answer to each question, and the pixels of its resized side.
    Raises UsageError for too few images, and for a net that does not know the labels; otherwise as `prelunet adopt`.
    """
    if log is not None:
        create_folder(Path(log), "--find-log")  # before the images are read
    path = find_net(Path(net))
    model = read_net(path)
    digest = digest_of(model)
    interface = find_interface(path, model, crop=crop, layout=layout, output=net_output)
    gray = interface.channels == 1 or (given is not None and given.channels == "gray")
    first = first_candidate(interface.crop, gray=gray, takes_bytes=interface.takes_bytes)
    run = loader(path, model)()
    rows = [run_net(run, interface, first, picture) for picture in pictures_of(interface.crop).values()]
    probabilities, outputs = are_probabilities(path, kind, rows, half=interface.half, form=None), len(rows[0])
    listed = _class_list(path, classes)
    preparation = first.preprocessing.preparation
    if reference is None:
        if not listed.entries:
            raise UsageError(f"{path}: no classes, which labels need. Give the net's classes, or reference outputs")
        check_classes(path, listed, outputs)
        dataset = open_from_spec(DatasetSpec(Path(data)), listed.entries)
        pictures = Pictures(dataset, preparation)
        samples, failed = _drawn(dataset, pictures, images)
        if len({sample.label for sample in samples}) < 2:
            raise UsageError(
                f"{dataset.location}: images of one class only tell nothing. Give images of several classes"
            )
        judge: Labels | References = Labels([sample.label for sample in samples], probabilities)
    else:
        dataset = open_images(Path(data), listed.entries)
        pictures, failed = Pictures(dataset, preparation), 0
        samples = _in_clear_order(dataset, pictures)
        judge = _references(Path(reference), len(samples), outputs, probabilities=probabilities)
    identity = {
        "version": 2, "net": digest, "input": [interface.layout, interface.crop], "output": interface.output,
        "probabilities": probabilities, "gray": gray, "data": dataset.fingerprint, "images": len(samples),
        "reference": None if reference is None else sha256_of(Path(reference)),
    }  # fmt: skip
    file = None if log is None else Path(log) / _log_name(path, identity)
    measured = Measurements(pictures, samples, run, interface, judge, file, identity)
    search = _Search(path, measured, len(samples), exact=reference is not None, shorter=dense)
    if given is not None and (given.mean is None) == interface.takes_bytes:
        search.given = candidate_of(given, interface.crop, gray=gray, scale=given_scale)
    return search.run(first, failed)


def _class_list(net: Path, classes: str | os.PathLike[str] | Sequence[ClassEntry | str] | None) -> ClassList:
    if classes is None:
        return read_sidecars(net, values=False).classes or ClassList((), "no list of classes")
    if isinstance(classes, (str, os.PathLike)):
        return read_classes(Path(classes))
    entries = (each if isinstance(each, ClassEntry) else ClassEntry(each, each) for each in classes)
    return ClassList(tuple(entries), "classes")


def _log_name(net: Path, identity: dict[str, Any]) -> str:
    return f"{net.stem}.{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]}.find-input.jsonl"


def _drawn(dataset: Dataset, pictures: Pictures, count: int) -> tuple[list[Sample], int]:
    """Draw images, and return how many cannot be decoded and were replaced. Raises UsageError for too few."""
    order = [dataset.samples[place] for place in np.random.default_rng(0).permutation(len(dataset.samples))]
    found, tried = list[Sample](), 0
    while len(found) < count and tried < len(order):
        portion = order[tried : tried + count - len(found)]
        tried += len(portion)
        found += _decodable(pictures, portion)
    if len(found) < FEWEST:
        raise UsageError(
            f"{dataset.location}: {len(found)} labeled images are too few to tell answers apart. Give at least "
            f"{FEWEST}, better {IMAGES}; or outputs of the original pipeline, of which {FEWEST_REFERENCES} are enough"
        )
    return found, tried - len(found)


def _in_clear_order(dataset: Dataset, pictures: Pictures) -> list[Sample]:
    """Return all images. Raises UsageError where it is not clear which output is whose."""
    good = _decodable(pictures, dataset.samples)
    orders = orders_of([sample.file for sample in dataset.samples])
    if len(good) < len(dataset.samples):
        reason = f"of {len(dataset.samples)} images {len(dataset.samples) - len(good)} cannot be decoded"
    elif orders is not None:
        reason = f"the order of the images is not clear: {orders}"
    else:
        return good
    fix = "Give only images with outputs, named with leading zeros"
    raise UsageError(f"{dataset.location}: row i is the output for the i-th image, but {reason}. {fix}")


def _decodable(pictures: Pictures, samples: Sequence[Sample]) -> list[Sample]:
    def is_decodable(sample: Sample) -> bool:
        try:
            pictures.of(sample)
        except ImageError:
            return False
        return True

    with ThreadPoolExecutor(cores()) as pool:
        return [sample for sample, fine in zip(samples, pool.map(is_decodable, samples), strict=True) if fine]


def _references(file: Path, images: int, outputs: int, *, probabilities: bool) -> References:
    try:
        rows = np.asarray(np.load(file, allow_pickle=False), np.float64)
    except OSError as error:
        raise from_os_error(error) from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{file}: not a .npy file of numbers. Write it with numpy.save") from error
    if rows.shape != (images, outputs):
        raise UsageError(
            f"{file}: its shape is {rows.shape}, but should be ({images}, {outputs}): {images} images, in the order of "
            f"their names, and {outputs} outputs of the net"
        )
    if not np.isfinite(rows).all() or not rows.any():
        what = "has only zeros" if np.isfinite(rows).all() else "has numbers that are infinite or NaN"
        raise UsageError(f"{file}: {what}. Give outputs of the original pipeline")
    if images < FEWEST_REFERENCES:
        raise UsageError(f"{file}: {images} outputs are too few. Give at least {FEWEST_REFERENCES}, better 20")
    within = bool(rows.min() >= 0 and rows.max() <= 1 + _SUM_TOLERANCE)
    given = within and (outputs == 1 or bool(np.abs(rows.sum(1) - 1).max() < _SUM_TOLERANCE))
    return References(rows, probabilities, given)


class _Search:
    """Asks the questions. exact: compare with reference outputs instead of labels; shorter: only such geometries."""

    def __init__(self, path: Path, measured: Measurements, images: int, *, exact: bool, shorter: bool) -> None:
        self.path, self.measured, self.images, self.exact, self.shorter = path, measured, images, exact, shorter
        self.stages = (*(stage for stage in (() if exact else _STAGES) if stage < images), images)
        self.given: Candidate | None = None

    def run(self, first: Candidate, failed: int) -> Found:
        """Start with the best combination, then ask question by question."""
        points, answers = self._starting_points(first), dict[Question, tuple[Answer, ...]]()
        values = self.measured.of(points, _FIRST_REFERENCES if self.exact else self.stages[0], "starting points")
        judged = by_references(values) if self.exact else by_labels(values, 1 - CONFIDENCE)
        current = points[ranked(judged)[0]]
        if not self.exact:
            self._check_knowledge(current, points)
        open_questions = {question for question in QUESTIONS if len(self._options(question, current)) > 1}
        asked = frozenset(open_questions)
        for question in _ROUNDS * QUESTIONS:
            if question in open_questions:
                answers[question] = self._ask(question, current)
                kept = [answer.candidate for answer in answers[question] if answer.standing.kept]
                open_questions = (open_questions if current in kept else {*asked}) - {question}
                current = kept[0]
        values = self.measured.of([current], self.images, "the answers together")
        difference = float(values[0, :, 0].max()) if self.exact else None
        error = None if self.exact else 100 * float(values[0, :, -1].mean())
        contrast = 1.0 if self.exact else self._better_contrast(current)
        data = str(self.measured.identity["data"])
        return Found(current, answers, self.images, failed, data, difference, error, contrast)

    def _better_contrast(self, current: Candidate) -> float:
        """Return by how much more contrast the net's input should have, 1 if none fits better."""
        own = current.preprocessing
        if own.mean is None or own.std is None:
            return 1.0
        factor = 255 / own.pixel_range
        mean, std = (np.array(each) * factor for each in (own.mean, own.std))
        changed = [
            replace(current, preprocessing=replace(own, mean=tuple(mean), std=tuple(std / more), pixel_range=255))
            for more in _CONTRASTS
        ]
        values = self.measured.of([current, *changed], self.images, "contrast")
        standings = by_labels(values, 1 - CONFIDENCE)
        return 1.0 if standings[0].kept else _CONTRASTS[ranked(standings)[0] - 1]

    def _starting_points(self, first: Candidate) -> list[Candidate]:
        """Return all channel orders and normalizations together; with references, all combinations."""
        candidates = [first]
        for question in QUESTIONS if self.exact else QUESTIONS[:2]:
            fine = self.exact and question == "filter"
            candidates = [
                new for each in candidates for new in self._options(question, each, exact=fine).values() or [each]
            ]
        return [*dict.fromkeys([*candidates, *([] if self.given is None else [self.given])])]

    def _options(self, question: Question, current: Candidate, *, exact: bool | None = None) -> dict[str, Candidate]:
        """Return the answers to a question, the given one included."""
        found = options(question, current, exact=self.exact if exact is None else exact)
        if self.given is not None and found:
            found[_GIVEN] = with_answer(question, current, self.given)
        if self.shorter and question == "geometry":
            found = {name: each for name, each in found.items() if not each.preprocessing.preparation.whole}
        return found

    def _check_knowledge(self, current: Candidate, points: Sequence[Candidate]) -> None:
        """Raise UsageError for a net that does not know the labels.

        With wrong labels the best starting point, `current`, is a wrong one, so all of them are looked at.
        """
        some = min(self.images, _STAGES[-1])
        values = self.measured.of(points, some, "labels")
        assert isinstance(self.measured.judge, Labels), "there is nothing to know of references"
        labels = np.array(self.measured.judge.labels[:some])
        known = 1 - float(values[:, :, -1].mean(1).min())
        if any(fits_another_order(own[:, -2].astype(np.int64), labels, known) for own in values):
            raise UsageError(
                f"{self.path}: would know far more of the labels if its outputs were other classes. Give the classes "
                "in the order of its outputs"
            )
        if not better_than_chance(self.measured.of([current], self.images, "labels")[0], _EARLY_ERROR):
            raise UsageError(
                f"{self.path}: knows the labels no better than by chance, so nothing can be found. The classes may be "
                "in another order than its outputs, the images of other classes, or the labels wrong"
            )

    def _ask(self, question: Question, current: Candidate) -> tuple[Answer, ...]:
        """Return the answers to a question, the rest being as in a candidate, best first."""
        names: dict[Candidate, list[str]] = {}
        for name, candidate in self._options(question, current).items():
            names.setdefault(candidate, []).append(name)
        alive, done = list(names), list[Answer]()
        alike: dict[Candidate, int] = dict.fromkeys(names, 1)
        for stage in self.stages:
            values, last = self.measured.of(alive, stage, question), stage == self.images
            if last:
                alive, values = _merged(alive, values, names, alike)
            late = 1 - CONFIDENCE - _EARLY_ERROR * (len(self.stages) - 1)
            standings = (
                by_references(values) if self.exact
                else by_labels(values, late if last else _EARLY_ERROR, _TOLERATED.get(question, 0.0))
            )  # fmt: skip
            places = ranked(standings)
            out = [place for place in places if last or not standings[place].kept]
            ended = [(alive[place], standings[place]) for place in out]
            done = [*(Answer(tuple(names[each]), each, standing, alike[each]) for each, standing in ended), *done]
            alive = [alive[place] for place in places if place not in out]
        return tuple(done)


def _merged(
    candidates: Sequence[Candidate],
    values: Float64Array,
    names: dict[Candidate, list[str]],
    alike: dict[Candidate, int],
) -> tuple[list[Candidate], Float64Array]:
    """Return the candidates without those that gave the same results as an earlier one, which gets their names."""
    firsts: dict[bytes, int] = {}
    for place, (candidate, row) in enumerate(zip(candidates, values, strict=True)):
        if (first := firsts.setdefault(row.tobytes(), place)) != place:
            names[candidates[first]] += names[candidate]
            alike[candidates[first]] += 1
    kept = list(firsts.values())
    return [candidates[place] for place in kept], values[kept]


def _lines(found: Found) -> Iterator[str]:
    """Yield a line for each answer, then what they mean."""
    for question, answers in found.answers.items():
        shown = max(_SHOWN, sum(_kept(answers)))
        for place, answer in enumerate(answers[:shown]):
            first = question if place == 0 else ""
            yield f"{first:15} {' = '.join(answer.names)}{_cost(found, answer, best=not place)}"
        if rest := answers[shown:]:
            yield f"{'':15} and {len(rest)} more"
    still = [question for question, answers in found.answers.items() if sum(_kept(answers)) > 1 or answers[0].alike > 1]
    if found.error is not None:
        yield (
            f"The best answers together have a top-1 error of {found.error:.1f} % on {found.images} labeled images. "
            f"Answers are judged by the log loss, each question with {CONFIDENCE:.0%} confidence. This is what fits "
            "the net, which need not be what it was trained with: a larger crop or a sharper filter may fit better"
        )
    elif found.exact:
        yield (
            f"The best answers together reproduce the outputs of all {found.images} images, to "
            f"{_part(found.difference)} of their largest number"
        )
    else:
        yield (
            f"No answer reproduces the outputs of the {found.images} images: the best differ by "
            f"{_part(found.difference)} of the largest number. A step of the original pipeline is not in the table, "
            "the outputs are in another order than the images' names, or the net has other weights"
        )
    if still and (found.exact or found.error is not None):
        fix = "" if found.error is not None else ". Images of other sizes and contents tell more"
        yield f"These images leave open: {', '.join(still)}{fix}"
    yield f"As options: {found.candidate.options}"
    if found.contrast != 1:
        yield (
            f"{found.contrast:.2g} times the contrast fits better: its mean and std may not be in the table, or a std "
            "folded into its first layer. Compare --std by hand"
        )
    if found.undecodable:
        yield f"Images that cannot be decoded, and were left out: {found.undecodable}"


def _part(difference: float | None) -> str:
    """Return a part of the largest number: in percent, or as a power of ten where it is tiny."""
    difference = difference or 0.0
    return f"{difference:.1%}" if difference >= EXACT else f"{difference:.0e}"


def _kept(answers: Sequence[Answer]) -> list[bool]:
    return [answer.standing.kept for answer in answers]


def _cost(found: Found, answer: Answer, *, best: bool) -> str:
    """Return what is said of an answer behind its name."""
    standing = answer.standing
    if found.difference is not None:
        return f": differs by {_part(standing.loss)}"
    if best:
        return ""
    errors = standing.errors
    low, high = errors.interval or (0.0, 0.0)
    points = "{:.1f} [{:.1f}, {:.1f}] points of error".format(
        *(round(x or 0.0, 1) + 0.0 for x in (errors.difference, low, high))
    )
    if standing.kept:
        return f": not excluded ({points})"
    return f": {'costs' if low > 0 else 'excluded by its loss,'} {points} ({errors.images} images)"
