"""Half precision: checks whether a net fits into float16, whose maximum is 65504.

Parameters are checked directly. The range of the activations is measured by running the finished file, with a probe
after every layer, on images that produce large activations. Scores on a CPU would not reveal an overflow: some
runtimes' max pooling drops NaN, and onnxruntime's CPU provider computes in float32 and skips roundings between layers.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np

from ...evaluator.architectures import Architecture
from ...evaluator.arrays import Float16Array, Float32Array, Int64Array, UInt8Array
from ...evaluator.contract import ModelContract, golden_image, golden_sizes
from ...evaluator.errors import UsageError
from ...evaluator.imaging.views import pack
from .probes import largest_values

FLOAT16_MAX = 65504.0  # the largest float16
HEADROOM = 8.0  # warn above FLOAT16_MAX / HEADROOM: other images and intermediate sums reach further


def round_to_half(name: str, tensor: Float32Array) -> Float16Array:
    """Round a checkpoint's tensor to float16. Raises UsageError if it exceeds the range. name: for the error."""
    with np.errstate(over="ignore"):
        half = tensor.astype(np.float16)
    if beyond := int(np.isinf(half).sum()):
        raise UsageError(
            f"--precision fp16: {beyond} of the {tensor.size:,} numbers in {name} exceed {FLOAT16_MAX:g}, the float16 "
            f"maximum; the largest is {np.abs(tensor).max():.3g}. Export this net with --precision fp32"
        )
    return half


def range_images(crop: int) -> list[UInt8Array]:
    """Return images of one crop, uint8 (crop, crop, 3), that produce large activations.

    Extreme in brightness and contrast: black, white, checkerboards and noise of 0 and 255, fine and coarse. In two
    nets trained on the demo's data, 1,000 of its pictures exceeded these activations by at most a quarter in any
    layer, and reached 1.6 times these logits, which is well within HEADROOM.
    """
    position = np.arange(crop)
    sides = [2**power for power in range(7) if 2**power < crop]
    images = [np.full((crop, crop, 3), value, np.uint8) for value in (0, 255)]
    for side in sides:
        checks = (position[:, None] // side + position // side) % 2 * 255
        images.append(np.repeat(checks[..., None], 3, axis=2).astype(np.uint8))
    for side in sides:
        count = -(-crop // side)
        coarse = np.random.default_rng(side).integers(0, 2, (count, count, 3)) * 255
        images.append(coarse.repeat(side, 0).repeat(side, 1)[:crop, :crop].astype(np.uint8))
    return images


def range_canvases(contract: ModelContract) -> Iterator[tuple[UInt8Array, Int64Array]]:
    """Yield the golden images and `range_images` one by one, as canvases and sizes.

    For a ragged file each image has white padding, and the first one also entire windows of padding. Activations next
    to an image can exceed all inside it (a convolution there sees part of its neighborhood), and infinity times a mask
    of 0 would be NaN.
    """
    golden = [golden_image(*size) for size in golden_sizes(contract.crop)]
    margin = contract.trunk_stride + 3
    for image in [*golden, *range_images(contract.crop)]:
        height, width = image.shape[:2]
        ragged = contract.canvas == "ragged"
        yield pack([image], height + margin, width + margin, fill=255) if ragged else pack([image], height, width)
    if contract.canvas == "ragged":
        side = 2 * contract.crop + margin
        yield pack(golden[:1], side, side, fill=255)


def probed_tensors(architecture: Architecture) -> dict[str, list[str]]:
    """Return layer → its tensors that are rounded to float16 and can exceed their inputs (pools cannot)."""
    layers = [*(conv.name for conv in architecture.convs), "fc1", "fc2"]
    probed = {name: [f"{name}.product", name, f"{name}.activation"] for name in layers}
    return {**probed, "fc3": ["fc3.product", "fc3"]}


def measure_magnitudes(path: Path, architecture: Architecture, contract: ModelContract) -> dict[str, float]:
    """Run a half file with probes; return layer → its largest absolute value over `range_canvases`.

    Infinite or NaN if float16 overflowed.
    """
    probed = probed_tensors(architecture)
    largest = largest_values(path, [*chain.from_iterable(probed.values())], range_canvases(contract))
    return {layer: float(np.max([largest[name] for name in names])) for layer, names in probed.items()}


def check_magnitudes(magnitudes: Mapping[str, float]) -> None:
    """Raise UsageError for the first layer whose activations exceed float16."""
    for layer, largest in magnitudes.items():
        if not largest <= FLOAT16_MAX:
            raise UsageError(
                f"--precision fp16: on test images {layer} exceeds {FLOAT16_MAX:g}, the float16 maximum. "
                "Export this net with --precision fp32"
            )


def magnitude_warnings(magnitudes: Mapping[str, float]) -> list[str]:
    """Return warnings about layers that come close to the float16 maximum."""
    return [
        f"{layer}: reaches {largest:.3g} on test images, within a factor of {HEADROOM:g} of {FLOAT16_MAX:g}, "
        "the float16 maximum; other images may exceed it"
        for layer, largest in magnitudes.items()
        if largest > FLOAT16_MAX / HEADROOM
    ]
