"""What both sides know of a net: how its maker runs it, and how it is adopted."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Resizer = Literal["Pillow", "tensors", "OpenCV", "TensorFlow"]


@dataclass(frozen=True)
class Pixels:
    """How the maker's code turns pixels into the net's input, to read the pixels out of it again.

    mean, std: in the net's channel order; largest: pixel value when the mean is subtracted, 1 or 255;
    channels: rgb, bgr or gray; layout: NCHW or NHWC.
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


@dataclass(frozen=True)
class MakerNet:
    """A net with its maker's pipeline.

    name: of the row; origin: what it is; adopt: what `prelunet adopt` is given, a file or a folder; options: those the
    maker's code states, none where files beside the net state them; protocol: of the evaluation, None for the default;
    resizer: what the maker resizes with, which decides the tolerance;
    run: takes an image file, returns the net's input for it, float32 (1, ...), and its scores, float (classes,);
    left_out: test images that the maker's pipeline refuses or reads otherwise, with the reason;
    controls: wrong options by name, under which the scores must differ; note: what a reader should know.
    """

    name: str
    origin: str
    adopt: Path
    run: Callable[[Path], tuple[Array, Array]]
    options: Sequence[str] = ()
    protocol: str | None = None
    resizer: Resizer = "Pillow"
    pixels: Pixels = Pixels()
    left_out: Mapping[str, str] = field(default_factory=dict)
    controls: Mapping[str, Sequence[str]] = field(default_factory=dict)
    note: str = ""


def record(net: MakerNet, images: Sequence[Path], folder: Path) -> None:
    """Run the maker's pipeline on all images; write net.json, scores.npy and pixels.npy."""
    used = [image for image in images if image.name not in net.left_out]
    answers = [net.run(image) for image in used]
    scores = np.stack([scores for _, scores in answers]).astype(np.float64)
    assert np.allclose(scores.sum(1), 1, atol=1e-5), f"{net.name}: no probabilities"
    np.save(folder / "scores.npy", scores)
    np.save(folder / "pixels.npy", np.stack([net.pixels.of_input(values) for values, _ in answers]))
    facts = {key: value for key, value in vars(net).items() if key not in {"run", "pixels"}}
    facts |= {"adopt": str(net.adopt), "images": [image.name for image in used], "pixels": asdict(net.pixels)}
    (folder / "net.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def softmax(logits: Array) -> Array:
    """Return the probabilities of logits, float64 (classes,)."""
    values = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return np.asarray(values / values.sum())


def two_classes(logit: float) -> Array:
    """Return the probabilities of both classes of a net with one logit, that of the second class."""
    second = 1 / (1 + np.exp(-np.float64(logit)))
    return np.array([1 - second, second])
