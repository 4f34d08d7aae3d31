"""Calibration of int8 files: the ranges of a net's activations, the tolerance of its file, and what int8 costs it.

Of the images, every second one gives the ranges; the others show the cost. All views are those of the protocol
`multi-scale`, which the dense head exists for, and onnxruntime on the CPU computes them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...evaluator.architectures import Architecture
from ...evaluator.arrays import Float64Array, Int64Array, UInt8Array
from ...evaluator.contract import Calibration, ModelContract, Tolerance, golden_image, golden_sizes
from ...evaluator.datasets import Dataset, DatasetSpec, Sample, open_from_spec, select
from ...evaluator.datasets.dataset import UNLABELLED
from ...evaluator.engine.classify import classify_images
from ...evaluator.engine.session import Session
from ...evaluator.engine.verify import SMALL_LOGIT, TOLERANCES
from ...evaluator.errors import DatasetError, ImageError, UsageError
from ...evaluator.imaging.decode import decode_image
from ...evaluator.imaging.resize import DecodedImage
from ...evaluator.imaging.views import make_views, pack
from ...evaluator.protocols import EvaluationProtocol, build_protocol
from ...evaluator.terminal import progress
from ...training.net.checkpoints import Checkpoint
from ...training.net.dense_reference import dense_windows
from ...training.net.initialization import FC_LAYERS
from ...training.net.network import PreluNet, network_from_checkpoint
from ..parity import WindowArrays
from .probes import largest_values
from .quantization import LEVELS, activation_scale, quantize_weight

PROTOCOL = "multi-scale"
RULE = "largest absolute value on every second image"
RANGE_DIGITS = 4  # rounded up: more would only reflect a machine's summation order
ACCEPTED_LOSS = 1.0  # points of top-1 error on the held-out images; a larger loss is a warning

ROUNDINGS = 4  # of `int8_golden`
# Standard deviation, in levels: float32 holds 127 levels to 1e-5, and a sum of some hundred terms about as well.
FLOAT32_ERROR = 1e-5
MARGIN = 2.0  # since a few draws do not show the largest possible deviation
FEW_ROUNDINGS = 0.25  # share of the deviation from the exact net


@dataclass(frozen=True)
class CalibrationImages:
    """The images of a calibration. fingerprint: of the whole dataset from which they were chosen."""

    dataset: Dataset
    fingerprint: str
    protocol: EvaluationProtocol

    @property
    def for_ranges(self) -> Sequence[Sample]:
        return self.dataset.samples[::2]

    @property
    def held_out(self) -> Sequence[Sample]:
        return self.dataset.samples[1::2]

    def decode(self, samples: Sequence[Sample], what: str) -> Iterator[tuple[Sample, DecodedImage]]:
        """Yield each sample with its image, and show the progress. Raises DatasetError for an unreadable image."""
        with progress(what, len(samples), "images") as advance:
            for sample in samples:
                try:
                    image = decode_image(self.dataset.read(sample))
                except ImageError as error:
                    raise DatasetError(
                        f"{self.dataset.location}: {sample.file} cannot be used for calibration: {error}. Remove it, "
                        "or change --images, which selects other images"
                    ) from error
                yield sample, image
                advance()


def open_images(spec: DatasetSpec, contract: ModelContract) -> CalibrationImages:
    """Open the images of a calibration, `spec.limit` of them, spread evenly over the dataset.

    Raises DatasetError if there are fewer, and what `open_from_spec` raises.
    """
    whole = open_from_spec(replace(spec, limit=None), contract.classes)
    count = len(whole.samples)
    requested = count if spec.limit is None else spec.limit
    if count < max(requested, 2):
        fewer = f", or give --images {count}" if count > 1 else ""
        raise DatasetError(
            f"--calibrate {spec.path}: {max(requested, 2)} images are needed, but there are only {count}. Use a larger "
            f"dataset{fewer}"
        )
    chosen = select(whole, limit=requested, classes=())
    return CalibrationImages(chosen, whole.fingerprint, build_protocol(PROTOCOL, contract))


def measure_ranges(path: Path, net: Architecture, images: CalibrationImages) -> dict[str, float]:
    """Return layer → the largest absolute value of its input on the images, in the order of the layers.

    path: of the net's model file in float32, with exact canvases. Raises UsageError if a value is not finite.
    """
    layers = [*(conv.name for conv in net.convs), *FC_LAYERS]
    tensors = ["images.centred", *(f"{layer}.activation" for layer in layers[:-1])]

    def canvases() -> Iterator[tuple[UInt8Array, Int64Array]]:
        for _, image in images.decode(images.for_ranges, "calibrating"):
            for view in make_views(image, images.protocol):
                yield pack([view.image], *view.image.shape[:2])

    largest = largest_values(path, tensors, canvases())
    for tensor, value in largest.items():
        if not value <= np.finfo(np.float32).max:
            raise UsageError(
                f"--precision int8: {tensor} is not finite on the calibration images, so it has no range. A net whose "
                "activations overflow float32 gives no meaningful scores either: train it again with a lower rate"
            )
    return {layer: _round_up(largest[tensor], RANGE_DIGITS) for layer, tensor in zip(layers, tensors, strict=True)}


def _round_up(value: float, digits: int) -> float:
    """Round a number >= 0 up to some significant digits."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return float(f"{math.ceil(value / unit) * unit:.{digits}g}")


def int8_net(checkpoint: Checkpoint, ranges: Mapping[str, float], seed: int | None = None) -> PreluNet:
    """Return the net whose layers compute as in an int8 file, in float64: weights and inputs are rounded to int8.

    ranges: of all layers; seed: of errors as large as those of float32, added before rounding; None for none.
    """
    net = network_from_checkpoint(checkpoint).double()
    parameters = net.state_dict()
    for layer in ranges:
        numbers, scales = quantize_weight(checkpoint.tensors[f"{layer}.weight"], 0)
        shape = (-1,) + (1,) * (numbers.ndim - 1)
        parameters[f"{layer}.weight"] = torch.from_numpy(numbers * scales.astype(np.float64).reshape(shape))
    net.load_state_dict(parameters, assign=True)
    generator = None if seed is None else torch.Generator().manual_seed(seed)

    def rounded(layer: str, values: Tensor) -> Tensor:
        scale = float(activation_scale(ranges[layer]))
        levels = values / scale
        if generator is not None:
            levels += FLOAT32_ERROR * torch.randn(levels.shape, generator=generator, dtype=levels.dtype)
        return levels.round().clamp(-LEVELS - 1, LEVELS) * scale  # the ranges of QuantizeLinear, ties to even

    net.input_hook = rounded
    return net


@dataclass(frozen=True)
class Int8Golden:
    """The golden images of an int8 file.

    windows: of the net whose weights and inputs are rounded, as `dense_windows` returns them; tolerance: of the means
    of windows, which `prelunet verify` compares; window_tolerance: of single windows; cost: see `Calibration`.
    """

    windows: list[WindowArrays]
    tolerance: Tolerance
    window_tolerance: Tolerance
    cost: Tolerance


def int8_golden(checkpoint: Checkpoint, ranges: Mapping[str, float], exact: Sequence[WindowArrays]) -> Int8Golden:
    """Compute the golden images of an int8 file in float64, and how far a correct runtime may be off.

    exact: the windows of the unrounded net.

    Runtimes differ by float32 rounding, about 1e-5 levels of an activation. That changes nothing, except where a sum
    lies so close to the middle of two levels that it decides the level: of 100,000 activations, for one or two. In a
    deep net each of these can change many others. How much that matters depends on the net, so it is measured: the net
    is computed ROUNDINGS times more, each time with other errors of that size before rounding, as another runtime is.
    MARGIN times the largest deviation of these is allowed.

    In a small net a few draws may meet no such case, but a runtime may. So FEW_ROUNDINGS of the cost is allowed at
    least: the cost is the sum of the rounding errors of all N activations, uniform from −1/2 to 1/2 level. A changed
    level is sqrt(12) times as large as their standard deviation, so n of them, independent as the errors are, give
    about sqrt(12·n/N) of the cost. A quarter is n = N/200, far more than float32 changes. A wrong scale, slope or bin
    moves scores by as much as int8 itself, or more.
    """
    reference = _golden_windows(int8_net(checkpoint, ranges), checkpoint)
    spread = np.zeros(3)
    for seed in range(ROUNDINGS):
        spread = np.maximum(
            spread, _deviations(_golden_windows(int8_net(checkpoint, ranges, seed), checkpoint), reference)
        )
    cost = _deviations(reference, exact)
    floor = TOLERANCES["fp32"]
    least = np.array([floor.scores, floor.logits, floor.scores])
    allowed = np.maximum(least, np.maximum(MARGIN * spread, FEW_ROUNDINGS * cost))
    scores, logits, window_scores = (_round_up(float(value), 2) for value in allowed)
    tolerance, of_windows = Tolerance(scores, logits), Tolerance(window_scores, logits)
    return Int8Golden(reference, tolerance, of_windows, Tolerance(*(_round_up(float(value), 2) for value in cost[:2])))


def _golden_windows(net: PreluNet, checkpoint: Checkpoint) -> list[WindowArrays]:
    sizes = golden_sizes(checkpoint.architecture.crop)
    return [dense_windows(net, golden_image(*size), checkpoint.mean) for size in sizes]


def _deviations(found: Sequence[WindowArrays], expected: Sequence[WindowArrays]) -> Float64Array:
    """Return the largest deviations of a mean score, of a mean logit relative to the largest, of a window's score."""
    worst = np.zeros(3)
    for one, other in zip(found, expected, strict=True):
        scores, logits = (a.mean(axis=(0, 1)) - b.mean(axis=(0, 1)) for a, b in zip(one, other, strict=True))
        largest = max(np.abs(other[1].mean(axis=(0, 1))).max(), SMALL_LOGIT)
        here = np.abs(scores).max(), np.abs(logits).max() / largest, np.abs(one[0] - other[0]).max()
        worst = np.maximum(worst, here)
    return worst


def calibration_of(images: CalibrationImages, tolerance: Tolerance, cost: Tolerance) -> Calibration:
    return Calibration(images.fingerprint, len(images.dataset.samples), images.protocol.name, RULE, tolerance, cost)


@dataclass(frozen=True)
class Int8Cost:
    """What int8 costs on the held-out images, compared with float32.

    labeled: whether all images have labels; lost, gained: images that only float32, or only int8, classified right;
    changed: images with another first answer.
    """

    images: int
    labeled: bool
    lost: int
    gained: int
    changed: int

    @property
    def loss(self) -> float:
        """Return the points of top-1 error that int8 adds; without labels, at most: those of other first answers."""
        return 100 * (self.lost - self.gained if self.labeled else self.changed) / self.images

    def __str__(self) -> str:
        change = (
            f"top-1 error {self.loss:+.2f} points ({self.lost} lost, {self.gained} gained), " if self.labeled else ""
        )
        return f"{change}{self.changed} other first answers on {self.images} held-out images"


def measure_cost(exact: Session, int8: Session, images: CalibrationImages) -> Int8Cost:
    """Compare the answers of two sessions on the held-out images."""
    lost = gained = changed = 0
    labeled = all(sample.label != UNLABELLED for sample in images.held_out)
    for sample, image in images.decode(images.held_out, "comparing int8 with fp32"):
        before, after = (classify_images(session, [image], images.protocol)[0] for session in (exact, int8))
        changed += before.top(1)[0][0] != after.top(1)[0][0]
        if labeled:
            right_before, right_after = (answer.rank(*sample.labels) == 1 for answer in (before, after))
            lost, gained = lost + (right_before and not right_after), gained + (right_after and not right_before)
    return Int8Cost(len(images.held_out), labeled, lost, gained, changed)
