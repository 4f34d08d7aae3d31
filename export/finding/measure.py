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
from typing import Any

import numpy as np
from PIL import Image

from ...evaluator.arrays import Float64Array, UInt8Array
from ...evaluator.datasets.dataset import Dataset, Sample
from ...evaluator.engine.runtimes.onnx import RawOnnxModel
from ...evaluator.errors import UsageError
from ...evaluator.imaging.decode import decode_image
from ...evaluator.imaging.views import make_views
from ...evaluator.machine import cores, machine_memory
from ...evaluator.preparation import Preparation
from ...evaluator.terminal import progress
from ..foreign.read_net import NetInterface
from .candidates import Candidate

# A net that is too sure has a larger log loss where its input has more contrast, although it is right as often. At the
# temperature that suits it best (Guo et al. 2017), what it knows counts.
TEMPERATURES = 2.0 ** np.arange(-7, 5.5, 0.5)
_LEAST = 1e-12  # probability whose logarithm is taken
_WORST = 1e3  # loss, or difference, of a net that returns infinity or NaN
_ROOM = 1 / 16  # of this machine's memory, for decoded images, and as much for crops


@dataclass(frozen=True)
class Labels:
    """Log losses of the true class at each temperature, then those expected of the other images' classes, then the best
    output's index, then whether the answer is wrong.

    labels: class index of each image; probabilities: whether the net returns these, or logits.
    """

    labels: Sequence[int]
    probabilities: bool

    def __call__(self, output: Float64Array, image: int) -> Float64Array:
        if not np.isfinite(output).all():
            return np.array([*[_WORST] * 2 * len(TEMPERATURES), 0.0, 1.0])
        logits = log_probabilities(output, given=self.probabilities)
        losses = -_log_softmax(logits[None] / TEMPERATURES[:, None])
        others = np.delete(np.asarray(self.labels), image)
        own = self.labels[image]
        wrong = float((logits > logits[own]).sum() + (logits == logits[own]).sum() > 1)
        return np.array([*losses[:, own], *losses[:, others].mean(1), float(logits.argmax()), wrong])


@dataclass(frozen=True)
class References:
    """The largest difference to the reference output, as a part of its largest number.

    outputs: (images, K); probabilities, given: whether the net and the references return these, or logits. If only one
    of them does, probabilities are compared.
    """

    outputs: Float64Array
    probabilities: bool
    given: bool

    def __call__(self, output: Float64Array, image: int) -> Float64Array:
        if not np.isfinite(output).all():
            return np.array([_WORST])
        wanted = self.outputs[image]
        if self.probabilities != self.given:
            output = np.exp(log_probabilities(output, given=self.probabilities))
            wanted = np.exp(log_probabilities(wanted, given=self.given))
        return np.array([np.abs(output - wanted).max() / max(np.abs(wanted).max(), _LEAST)])


def log_probabilities(output: Float64Array, *, given: bool) -> Float64Array:
    """Return the logarithms of an output's probabilities, (classes,); of one score, those of both classes.

    given: whether the output has probabilities, and not logits.
    """
    if len(output) == 1:
        output = np.array([1 - output[0] if given else 0.0, output[0]])
    return np.log(np.maximum(output, _LEAST)) if given else _log_softmax(output)


def _log_softmax(logits: Float64Array) -> Float64Array:
    shifted = logits - logits.max(-1, keepdims=True)
    result: Float64Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def run_net(net: RawOnnxModel, interface: NetInterface, candidate: Candidate, crop: UInt8Array) -> Float64Array:
    """Return a net's output for one crop, (K,)."""
    output = net.run({interface.input: interface.feed(candidate.preprocessing.apply(crop))}, interface.output)
    row: Float64Array = output.reshape(interface.batch or 1, -1)[0].astype(np.float64)
    return row


class Room:
    """Keeps things as long as they fit into a part of this machine's memory, so that none of them is made twice."""

    def __init__(self) -> None:
        self._left, self._kept = machine_memory() * _ROOM, dict[Any, Any]()

    def get(self, key: Any) -> Any:
        """Return what is kept under a key, or None."""
        return self._kept.get(key)

    def keep(self, key: Any, thing: Any, size: int) -> None:
        """Keep a thing of `size` bytes if there is room."""
        if size <= self._left:
            self._left -= size
            self._kept[key] = thing


class Pictures:
    """The images of a dataset, decoded. preparation: what all candidates have in common of it."""

    def __init__(self, dataset: Dataset, preparation: Preparation) -> None:
        self._dataset, self._preparation, self._room = dataset, preparation, Room()

    def of(self, sample: Sample) -> Image.Image:
        """Return a decoded image. Raises ImageError."""
        picture: Image.Image | None = self._room.get(sample.file)
        if picture is None:
            picture = decode_image(self._dataset.read(sample), preparation=self._preparation)
            self._room.keep(sample.file, picture, 4 * picture.width * picture.height)
        return picture


@dataclass
class Measurements:
    """The values of candidates on images, as a judge returns them, computed when they are first asked for.

    samples: images in the order in which they are used, which can be decoded; net: with one thread; log: file of all
    values, None to keep them in memory; identity: what must be equal in a file that is continued.
    """

    pictures: Pictures
    samples: Sequence[Sample]
    net: RawOnnxModel
    interface: NetInterface
    judge: Labels | References
    log: Path | None
    identity: Mapping[str, Any]
    _known: dict[tuple[str, int], Float64Array] = field(default_factory=dict)
    _crops: Room = field(default_factory=Room)

    def __post_init__(self) -> None:
        if self.log is not None and self.log.exists():
            self._known = dict(_read(self.log, self.identity))

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
                    numbers = [float(f"{number:.7g}") for number in row]
                    self._known[keys[place], image] = np.array(numbers)
                    if lines is not None:
                        lines.write(json.dumps([keys[place], image, numbers]) + "\n")
                if advance:
                    advance(len(rows))
        return np.array([[self._known[key, image] for image in range(images)] for key in keys])

    def _measure(self, asked: tuple[int, Sequence[Candidate]]) -> tuple[int, list[Float64Array]]:
        """Return the values of some candidates on one image."""
        image, candidates = asked
        rows, crops, picture = list[Float64Array](), dict[Any, UInt8Array](), None
        for candidate in candidates:
            resizing = candidate.scale, candidate.preprocessing.interpolation, candidate.preprocessing.preparation
            crop = crops.get(resizing, self._crops.get((image, resizing)))
            if crop is None:
                picture = picture or self.pictures.of(self.samples[image])
                crop = make_views(picture, candidate.protocol)[0].image
                self._crops.keep((image, resizing), crop, crop.nbytes)
            crops[resizing] = crop
            rows.append(self.judge(run_net(self.net, self.interface, candidate, crop), image))
        return image, rows


def _key(candidate: Candidate) -> str:
    own = candidate.preprocessing
    return json.dumps([own.to_json(), own.interpolation, own.preparation.to_json(), candidate.scale])


def _read(log: Path, identity: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], Float64Array]]:
    """Yield what an earlier command measured; a last line that a kill cut off is removed from the file."""
    whole, _, rest = log.read_text(encoding="utf-8").rpartition("\n")
    if rest:
        log.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
    head, *lines = whole.split("\n")
    if head and head != json.dumps(identity):
        raise UsageError(f"{log}: damaged, or of another version. Delete it, or give another folder with --find-log")
    for number, line in enumerate(lines, 2):
        try:
            key, image, numbers = json.loads(line)
            yield (key, image), np.array(numbers, np.float64)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{log}: line {number} is damaged. Delete the file; its runs are repeated") from error
