"""Finds how a net's images were prepared in training: one question after the other, each with the answers that fit.

Labels tell what fits the net best, by the log loss of the true class. Outputs of the original pipeline tell more: the
candidate that reproduces them is it.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...evaluator.arrays import Float64Array
from ...evaluator.contract import ClassEntry
from ...evaluator.datasets.dataset import DatasetSpec
from ...evaluator.datasets.labels.class_file import read_class_list
from ...evaluator.datasets.open import open_from_spec, open_images
from ...evaluator.errors import UsageError
from ...evaluator.files import sha256_of
from ...evaluator.machine import cores
from ...evaluator.terminal import report
from ...training.importing.preprocessing import Layout, Preprocessing
from ..foreign.adopt import check_classes
from ..foreign.quantized import loader
from ..foreign.read_net import find_interface, read_net
from ..foreign.sidecars import ClassList, read_sidecars
from .candidates import QUESTIONS, Candidate, Question, first_candidate, options
from .decide import EXACT, TOLERATED, Standing, better_than_chance, by_labels, by_references, ranked, usable
from .measure import Labels, Measurements, References

CONFIDENCE = 0.95
IMAGES = 400
FEWEST, FEWEST_REFERENCES = 50, 5
_STAGES = 24, 96  # images that all answers are tried on first, then those that are left; all images come last
_EARLY_ERROR = 0.005  # in each of the first stages; the rest of 1 - CONFIDENCE is for the last one
_ROUNDS = 3  # at most; a further one where an answer changed another
_FIRST_REFERENCES = 2
_RUNS_PER_IMAGE = 25  # about: most answers end with the first images
_CONTRASTS = 1 / 2, 2**-0.5, 2**0.5, 2
_TOLERATED: dict[Question, float] = {"geometry": TOLERATED, "filter": TOLERATED}
GIVEN = "as given"


@dataclass(frozen=True)
class Answer:
    """One answer to a question. names: several if they give the net the same input; standing: beside the best."""

    names: tuple[str, ...]
    candidate: Candidate
    standing: Standing


@dataclass(frozen=True)
class Found:
    """What was found.

    candidate: the best answers together; answers: to each question, best first; images: how many were used;
    undecodable: how many more could not be; data: fingerprint of the dataset; difference: of references, the largest of
    the best candidate, as a part of the largest number of an output, None with labels; contrast: by how much more of it
    the net's input should have, 1 if none fits better.
    """

    candidate: Candidate
    answers: dict[Question, tuple[Answer, ...]]
    images: int
    undecodable: int
    data: str
    difference: float | None
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
    classes: str | os.PathLike[str] | Sequence[ClassEntry] | None = None,
    reference: str | os.PathLike[str] | None = None,
    images: int = IMAGES,
    log: str | os.PathLike[str] | None = None,
    crop: int | None = None,
    layout: Layout | None = None,
    net_output: str | None = None,
    given: Preprocessing | None = None,
) -> Found:
    """Find the preprocessing of an ONNX classifier.

    data: labeled images in any layout of docs/datasets.md, of which `images` are drawn, or the images of the reference;
    classes: of the net, in the order of its outputs, or a file of them, or imagenet-1k, needed for labels; None: those
    beside the net or in its metadata; reference: .npy file with the outputs of the original pipeline, (images,
    classes), in the order of the images' names; log: file that keeps what was computed, and from which a repeated call
    goes on; crop, layout, net_output: as for `prelunet adopt`; given: one more candidate.
    Raises UsageError for too few images, and for a net that knows the labels under no candidate; otherwise as
    `prelunet adopt` does.
    """
    path, log = Path(net), None if log is None else Path(log)
    model = read_net(path, Path(os.devnull))
    interface = find_interface(path, model, crop=crop, layout=layout, output=net_output)
    first = first_candidate(interface.crop, gray=interface.channels == 1)
    listed = _class_list(path, classes)
    if reference is None and not listed.entries:
        raise UsageError(f"{path}: no classes. Give the list of the net's outputs, or a reference in place of labels")
    if reference is None:
        dataset = open_from_spec(DatasetSpec(Path(data)), listed.entries)
        drawn = np.random.default_rng(0).permutation(len(dataset.samples))[:images]
        samples = [dataset.samples[place] for place in drawn]
        judge: Labels | References = Labels([sample.label for sample in samples])
        if len(samples) < FEWEST:
            raise UsageError(
                f"{data}: {len(samples)} labeled images are too few to tell answers apart. Give at least {FEWEST}, "
                f"better {IMAGES}; or outputs of the original pipeline, of which {FEWEST_REFERENCES} are enough"
            )
    else:
        dataset = open_images(Path(data), listed.entries)
        samples = list(dataset.samples)
        judge = References(_read_outputs(Path(reference), len(samples)))
    identity = {
        "net": sha256_of(path), "data": dataset.fingerprint, "images": len(samples), "crop": interface.crop,
        "judge": type(judge).__name__, "version": 1,
    }  # fmt: skip
    measured = Measurements(
        dataset, samples, loader(path, model)(), interface, judge, log, identity, first.preprocessing.preparation
    )
    search = _Search(path, measured, len(samples), exact=reference is not None)
    search.check(listed, first)
    return search.run(first, given)


def _class_list(net: Path, classes: str | os.PathLike[str] | Sequence[ClassEntry] | None) -> ClassList:
    if classes is None:
        return read_sidecars(net, values=False).classes or ClassList((), "no list of classes")
    if isinstance(classes, (str, os.PathLike)):
        return ClassList(read_class_list(Path(classes)), str(classes))
    return ClassList(tuple(classes), "classes")


def _read_outputs(file: Path, images: int) -> Float64Array:
    try:
        outputs = np.asarray(np.load(file, allow_pickle=False), np.float64)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{file}: not a .npy file of numbers: {error}. Write it with numpy.save") from error
    if outputs.ndim != 2 or len(outputs) != images or not np.isfinite(outputs).all():
        raise UsageError(
            f"{file}: {' x '.join(map(str, outputs.shape))} numbers, but there are {images} images. Give finite "
            "outputs, (images, classes), in the order of the images' names"
        )
    if images < FEWEST_REFERENCES:
        raise UsageError(f"{file}: {images} outputs are too few. Give at least {FEWEST_REFERENCES}, better 20")
    return outputs


class _Search:
    """Asks the questions. exact: compare with reference outputs instead of labels."""

    def __init__(self, path: Path, measured: Measurements, images: int, *, exact: bool) -> None:
        self.path, self.measured, self.images, self.exact = path, measured, images, exact
        self.stages = (*(stage for stage in (() if exact else _STAGES) if stage < images), images)
        self.given: Candidate | None = None

    def check(self, classes: ClassList, first: Candidate) -> None:
        """Raise UsageError if the classes or the outputs do not fit the net; say how long the search takes."""
        outputs = self.measured.outputs(first)
        if not self.exact:
            check_classes(self.path, classes, outputs)
        elif outputs != (given := self.measured.judge.outputs.shape[1]):  # type: ignore[attr-defined]
            raise UsageError(f"{self.path}: has {outputs} outputs, but the reference {given}. Give that of this net")
        start = time.monotonic()
        self.measured.outputs(first)
        minutes = _RUNS_PER_IMAGE * self.images * (time.monotonic() - start) / 60 / cores()
        report(f"{self.path.name}: {self.images} images, at most {max(1, math.ceil(minutes))} min on {cores()} cores")

    def run(self, first: Candidate, given: Preprocessing | None) -> Found:
        """Start with the best of all orders, means and geometries together, then ask question by question."""
        if given is not None:
            self.given = replace(first, preprocessing=given)
        current, answers = self._start(first), dict[Question, tuple[Answer, ...]]()
        if not self.exact:
            self._check_knowledge(current)
        for _ in range(_ROUNDS):
            before = current
            for question in QUESTIONS:
                answers[question] = self._ask(question, current)
                if answers[question]:
                    current = answers[question][0].candidate
            if current == before:
                break
        values = usable(self.measured.of([current], self.images, "the answers together"))
        used, difference = values.shape[1], float(values[0, :, 0].max()) if self.exact else None
        contrast = 1.0 if self.exact else self._better_contrast(current)
        data = self.measured.dataset.fingerprint
        return Found(current, answers, used, self.images - used, data, difference, contrast)

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
        values = usable(self.measured.of([current, *changed], self.images, "contrast"))
        standings = by_labels(values, 1 - CONFIDENCE)
        return 1.0 if standings[0].kept else _CONTRASTS[ranked(standings, values)[0] - 1]

    def _start(self, first: Candidate) -> Candidate:
        """Return the best of all channel orders and normalizations; with references, of all geometries, too."""
        questions: tuple[Question, ...] = ("channel order", "mean and std", *(("geometry",) if self.exact else ()))
        candidates = [first]
        for question in questions:
            candidates = [new for each in candidates for new in self._options(question, each).values() or [each]]
        candidates += [] if self.given is None else [self.given]
        images = _FIRST_REFERENCES if self.exact else self.stages[0]
        values = usable(self.measured.of(candidates, images, "starting points"))
        judged = by_references(values) if self.exact else by_labels(values, 1 - CONFIDENCE)
        return candidates[ranked(judged, values)[0]]

    def _options(self, question: Question, candidate: Candidate) -> dict[str, Candidate]:
        if question == "mean and std" and self.measured.interface.takes_bytes:
            return {}
        return options(question, candidate, exact=self.exact)

    def _check_knowledge(self, candidate: Candidate) -> None:
        values = usable(self.measured.of([candidate], self.images, "labels"))[0]
        if not better_than_chance(values, _EARLY_ERROR):
            raise UsageError(
                f"{self.path}: knows the labels no better than by chance, whatever its input, so nothing can be found. "
                "The classes may be in another order than its outputs, the images of other classes, or the labels wrong"
            )

    def _ask(self, question: Question, current: Candidate) -> tuple[Answer, ...]:
        """Return the answers to a question, the rest being as in a candidate, best first."""
        names: dict[Candidate, list[str]] = {}
        for name, candidate in self._options(question, current).items():
            names.setdefault(candidate, []).append(name)
        names.setdefault(current, [GIVEN])
        alive, done = list(names), list[Answer]()
        for stage in self.stages:
            values = usable(self.measured.of(alive, stage, question))
            last = stage == self.images
            early = _EARLY_ERROR * (len(self.stages) - 1)
            standings = (
                by_references(values) if self.exact
                else by_labels(values, 1 - CONFIDENCE - early if last else _EARLY_ERROR, _TOLERATED.get(question, 0.0))
            )  # fmt: skip
            places = ranked(standings, values)
            out = [place for place in places if last or not standings[place].kept]
            done = [*(Answer(tuple(names[alive[place]]), alive[place], standings[place]) for place in out), *done]
            alive = [alive[place] for place in places if place not in out]
        return tuple(done)


def _lines(found: Found) -> Iterator[str]:
    """Yield a line for each answer."""
    for question, answers in found.answers.items():
        for place, answer in enumerate(answers):
            name, standing = " = ".join(answer.names), answer.standing
            if found.difference is not None:
                cost = f"differs by {standing.cost:.1e}"
            else:
                points = f"{standing.cost:.1f} ± {standing.margin:.1f} points of error"
                excluded = f"costs {points} ({standing.images} images)"
                cost = "" if place == 0 else f"cannot be told apart ({points})" if standing.kept else excluded
            yield f"{question if place == 0 else '':15} {name}{': ' if cost else ''}{cost}"
    if found.difference is None:
        yield (
            f"from {found.images} labeled images, {CONFIDENCE:.0%} confidence for each question. This is what fits the "
            "net, which need not be what it was trained with: a larger crop or a sharper filter may fit better"
        )
    elif found.exact:
        yield f"reproduces the outputs for all {found.images} images, to {found.difference:.1e} of their largest number"
    else:
        yield (
            f"no answer reproduces the outputs for {found.images} images: the best differ by {found.difference:.1%} of "
            "the largest number. One step of the original pipeline is not in the table"
        )
    if found.contrast != 1:
        yield (
            f"{found.contrast:.2g} times the contrast would fit better: its mean and std are not in the table, or a "
            "std is folded into its first layer. Compare --std by hand"
        )
    if found.undecodable:
        yield f"{found.undecodable} images could not be decoded"
