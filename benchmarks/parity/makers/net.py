"""What both sides know of a net: how its maker runs it, and how it is adopted."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
CLASSES = tuple(f"class {letter}" for letter in "abcdefghij")
SPREAD = 2.0  # standard deviation of a class's logits over the images, of nets with random weights
Resizer = Literal["Pillow", "tensors", "OpenCV", "TensorFlow"]


@dataclass(frozen=True)
class Pixels:
    """How the maker's code turns pixels into the net's input, to read the pixels out of it again.

    mean, std: in the net's channel order; largest: pixel value when the mean is subtracted, 1 or 255;
    channels: rgb, bgr or gray; layout: NCHW or NHWC
    """

    mean: Sequence[float] = (0.0, 0.0, 0.0)
    std: Sequence[float] = (1.0, 1.0, 1.0)
    largest: int = 1
    channels: Literal["rgb", "bgr", "gray"] = "rgb"
    layout: Literal["NCHW", "NHWC"] = "NCHW"

    def of_input(self, values: Array) -> Array:
        """Return float32 (rows, columns, channels), 0 to 255, RGB or gray, of the input for one image."""
        image = values[0].transpose(1, 2, 0) if self.layout == "NCHW" else values[0]
        pixels = (image * np.asarray(self.std) + np.asarray(self.mean)) * (255 / self.largest)
        return np.asarray(pixels[:, :, ::-1] if self.channels == "bgr" else pixels, np.float32)


Run = Callable[[Path], tuple[Array, Array]]


@dataclass(frozen=True)
class MakerNet:
    """A net with its maker's pipeline.

    name: of the row; origin: what it is; adopt: what `prelunet adopt` is given, a file or a folder;
    run: takes an image file, returns the net's input for it, float32 (1, ...), and its scores, float (classes,);
    options: those that the maker's code states, none where files beside the net or its metadata state them; None if no
    option can state its pipeline, so that it is not adopted; resizer: what the maker resizes with, which decides the
    tolerance; other: a second pipeline, to see whose a difference is;
    left_out: test images that the maker's pipeline refuses or reads otherwise, with the reason;
    wrong: one wrong option each, under which pixels or scores must differ; refused: what the refusal must say, if it is
    to be refused; note: what a reader should know.
    """

    name: str
    origin: str
    adopt: Path
    run: Run
    options: Sequence[str] | None = ()
    resizer: Resizer = "Pillow"
    pixels: Pixels = Pixels()
    other: Run | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    wrong: Sequence[str] = ()
    refused: str = ""
    note: str = ""


def record(net: MakerNet, images: Sequence[Path], folder: Path) -> None:
    """Run the maker's pipeline on all images; write net.json, scores.npy and pixels.npy."""
    used = [image for image in images if image.name not in net.left_out]
    scores, pixels = _answers(net.run, net.pixels, used)
    assert np.allclose(scores.sum(1), 1, atol=1e-5), f"{net.name}: no probabilities"
    np.save(folder / "scores.npy", scores)
    np.save(folder / "pixels.npy", pixels)
    facts: dict[str, Any] = {key: value for key, value in vars(net).items() if key not in {"run", "pixels", "other"}}
    if net.other is not None:
        others = _answers(net.other, net.pixels, used)
        facts["other"] = [float(np.abs(a - b).max()) for a, b in zip(others, (scores, pixels), strict=True)]
    facts |= {"adopt": str(net.adopt), "images": [image.name for image in used]}
    (folder / "net.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def _answers(run: Run, pixels: Pixels, images: Sequence[Path]) -> tuple[Array, Array]:
    """Return the scores, float64 (N, classes), and the pixels of the inputs, float32 (N, rows, columns, channels)."""
    answers = [run(image) for image in images]
    scores = np.stack([scores for _, scores in answers]).astype(np.float64)
    return scores, np.stack([pixels.of_input(values) for values, _ in answers])


def softmax(logits: Array) -> Array:
    """Return the probabilities of logits, float64 (classes,)."""
    values = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return np.asarray(values / values.sum())


def two_classes(second: float) -> Array:
    """Return the scores of both classes of a net with one score, that of the second class."""
    return np.array([1 - second, second], np.float64)


def sigmoid(logit: float) -> float:
    return float(1 / (1 + np.exp(-np.float64(logit))))


def stated(words: str, classes: Sequence[str], file: Path) -> tuple[str, ...]:
    """Return options, with a file of classes that the maker's code has as a list."""
    file.write_text("\n".join(classes) + "\n", encoding="utf-8")
    return (*words.split(), "--classes", str(file))
