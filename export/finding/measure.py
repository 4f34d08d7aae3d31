"""Runs a net on candidates: what each gets of each image, kept in a file so that a repeated command goes on from there.

Of a labeled image that is the log loss of its class at several temperatures, and of the classes of the other images,
for a control; of an image with a reference output, the difference.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from ...evaluator.arrays import Float64Array, UInt8Array
from ...evaluator.datasets.dataset import Dataset, Sample
from ...evaluator.engine.runtimes.onnx import RawOnnxModel
from ...evaluator.errors import ImageError, UsageError
from ...evaluator.imaging.decode import decode_image
from ...evaluator.imaging.views import make_views
from ...evaluator.machine import cores
from ...evaluator.preparation import Preparation
from ...evaluator.terminal import progress
from ..foreign.read_net import NetInterface
from .candidates import Candidate

# A net that is too sure has a larger log loss where its input has more contrast, although it is right as often. At the
# temperature that suits it best (Guo et al. 2017), what it knows counts.
TEMPERATURES = 2.0 ** np.arange(-2, 5.5, 0.5)
_SUMS_TO_ONE = 1e-2  # as for half precision
_LEAST = 1e-12  # probability whose logarithm is taken
_WORST = 1e3  # of a net that returns infinity or NaN


class Judge(Protocol):
    """Turns outputs of the net into numbers."""

    @property
    def values(self) -> int:
        """How many numbers an image has."""
        ...

    def __call__(self, output: Float64Array, image: int) -> Float64Array: ...


@dataclass(frozen=True)
class Labels:
    """Log losses of the true class at each temperature, then those expected of the other images' classes, then whether
    the answer is wrong.

    labels: class index of each image.
    """

    labels: Sequence[int]
    values: int = 2 * len(TEMPERATURES) + 1

    def __call__(self, output: Float64Array, image: int) -> Float64Array:
        logits = _logits(output)
        losses = -log_softmax(logits[None] / TEMPERATURES[:, None])
        others = np.delete(np.asarray(self.labels), image)
        own = self.labels[image]
        wrong = float((logits > logits[own]).sum() + (logits == logits[own]).sum() > 1)
        return np.array([*losses[:, own], *losses[:, others].mean(1), wrong])


@dataclass(frozen=True)
class References:
    """The largest difference to the reference output, as a part of its largest number. outputs: (images, K)."""

    outputs: Float64Array
    values: int = 1

    def __call__(self, output: Float64Array, image: int) -> Float64Array:
        wanted = self.outputs[image]
        if _are_probabilities(wanted) and not _are_probabilities(output):
            output = np.exp(log_softmax(output))
        return np.array([np.abs(output - wanted).max() / max(np.abs(wanted).max(), _LEAST)])


def log_softmax(logits: Float64Array) -> Float64Array:
    """Return the logarithms of the probabilities along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: Float64Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _are_probabilities(output: Float64Array) -> bool:
    return bool(output.min() >= 0 and abs(output.sum() - 1) < _SUMS_TO_ONE)


def _logits(output: Float64Array) -> Float64Array:
    """Return logits of an output, one for each class; of one score, that of the second of two classes."""
    if len(output) == 1:
        score = output[0]
        return np.log([max(1 - score, _LEAST), max(score, _LEAST)]) if 0 <= score <= 1 else np.array([0.0, score])
    return np.log(np.maximum(output, _LEAST)) if _are_probabilities(output) else output


@dataclass
class Measurements:
    """The values of candidates on images, (values,) each, computed when they are first asked for.

    samples: images in the order in which they are used; net: with one thread, for one image at a time; log: file of all
    values, None to keep them in memory; identity: what must be equal in a file that is continued; decoding: what all
    candidates have in common; room: bytes for decoded images. Of images that cannot be decoded the values are NaN.
    """

    dataset: Dataset
    samples: Sequence[Sample]
    net: RawOnnxModel
    interface: NetInterface
    judge: Judge
    log: Path | None
    identity: Mapping[str, Any]
    decoding: Preparation
    room: int = 2**29
    _known: dict[tuple[str, int], Float64Array] = field(default_factory=dict)
    _decoded: dict[int, Image.Image] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.log is not None and self.log.exists():
            self._known = dict(_read(self.log, self.identity, self.judge.values))

    def of(self, candidates: Sequence[Candidate], images: int, what: str) -> Float64Array:
        """Return float64 (candidates, images, values) of the first images. what: for the progress."""
        keys = [_key(each) for each in candidates]
        missing = {
            image: [place for place, key in enumerate(keys) if (key, image) not in self._known]
            for image in range(images)
        }
        total = sum(map(len, missing.values()))
        with ExitStack() as stack:
            lines = None if self.log is None else stack.enter_context(self.log.open("a", encoding="utf-8"))
            if lines is not None and not lines.tell():
                lines.write(json.dumps(self.identity) + "\n")
            advance = stack.enter_context(progress(what, total, "runs")) if total else None
            pool = stack.enter_context(ThreadPoolExecutor(cores()))
            todo = [(image, [candidates[place] for place in places]) for image, places in missing.items() if places]
            for image, rows in pool.map(self._measure, todo):
                for place, row in zip(missing[image], rows, strict=True):
                    self._known[keys[place], image] = row
                    if lines is not None:
                        numbers = [float(f"{number:.7g}") for number in row]
                        lines.write(json.dumps([keys[place], image, numbers]) + "\n")
                if advance:
                    advance(len(rows))
        return np.array([[self._known[key, image] for image in range(images)] for key in keys])

    def outputs(self, candidate: Candidate) -> int:
        """Return how many outputs the net has for an image."""
        image = np.zeros((candidate.crop, candidate.crop, 3), np.uint8)
        return len(self._run(candidate, image))

    def _run(self, candidate: Candidate, crop: UInt8Array) -> Float64Array:
        """Return the net's output for one crop, (K,)."""
        ready = self.interface.feed(candidate.preprocessing.apply(crop))
        output = self.net.run({self.interface.input: ready}, self.interface.output)
        row: Float64Array = output.reshape(self.interface.batch or 1, -1)[0].astype(np.float64)
        return row

    def _measure(self, asked: tuple[int, Sequence[Candidate]]) -> tuple[int, list[Float64Array]]:
        """Return the values of some candidates on one image, which is decoded once and resized once for each filter."""
        image, candidates = asked
        picture = self._picture(image)
        if picture is None:
            return image, [np.full(self.judge.values, np.nan)] * len(candidates)
        crops: dict[Any, UInt8Array] = {}
        rows = []
        for candidate in candidates:
            own = candidate.preprocessing
            resizing = candidate.scale, own.interpolation, own.preparation
            if resizing not in crops:
                crops[resizing] = make_views(picture, candidate.protocol)[0].image
            row = self._run(candidate, crops[resizing])
            rows.append(self.judge(row, image) if np.isfinite(row).all() else np.full(self.judge.values, _WORST))
        return image, rows

    def _picture(self, image: int) -> Image.Image | None:
        """Return a decoded image; None if it cannot be."""
        if image not in self._decoded:
            try:
                picture = decode_image(self.dataset.read(self.samples[image]), preparation=self.decoding)
            except ImageError:
                return None
            self.room -= 4 * picture.width * picture.height
            if self.room < 0:
                return picture
            self._decoded[image] = picture
        return self._decoded[image]


def _key(candidate: Candidate) -> str:
    own = candidate.preprocessing
    return json.dumps([own.to_json(), own.interpolation, own.preparation.to_json(), candidate.scale, candidate.crop])


def _read(log: Path, identity: Mapping[str, Any], values: int) -> Iterator[tuple[tuple[str, int], Float64Array]]:
    """Yield what an earlier command measured; a last line that a kill cut off is left out."""
    head, *lines = log.read_text(encoding="utf-8").split("\n")
    if head != json.dumps(identity):
        raise UsageError(f"{log}: of another net, dataset or version. Give another file, or remove this one")
    if lines and lines.pop():
        log.write_text("\n".join([head, *lines, ""]), encoding="utf-8")
    for line in lines:
        key, image, numbers = json.loads(line)
        if len(numbers) == values:
            yield (key, image), np.array(numbers)
