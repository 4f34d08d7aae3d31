"""Half precision: whether a net fits into float16, which ends at 65504 and thins out below 6e-5.

Parameters are looked at as they are. How large the numbers between the layers become is measured in the finished file:
with probes behind every layer it runs on images that drive convolutions far. It must be measured, because neither the
scores nor a CPU tell: NaN does not survive every runtime's max pooling, and onnxruntime's CPU provider, which computes
in float32, leaves out roundings between layers, and with them what overflows there.
"""

import tempfile
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, TensorProto, helper

from prelunet.evaluator.architectures import Architecture
from prelunet.evaluator.arrays import Float16Array, Float32Array, UInt8Array
from prelunet.evaluator.contract import ModelContract, golden_image, golden_sizes
from prelunet.evaluator.engine.runtimes.onnx import RawOnnxModel
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.imaging.canvas import pack

FLOAT16_MAX = 65504.0  # the largest float16
HEADROOM = 8.0  # a net that comes nearer to FLOAT16_MAX is warned of: other images, and sums on their way, go further
# Rounding to 11 bits moves a tensor by 2e-4 of its size; what is subnormal in float16 moves more, and zeros by all.
MAX_ROUNDING_LOSS = 1e-3
_BLOCK = 2**22  # numbers that are looked at together: fc1 of model C takes 1.8 GB in float64


def round_to_half(tensors: Mapping[str, Float32Array]) -> dict[str, Float16Array]:
    """Round a checkpoint's tensors to float16; UsageError names one that has numbers beyond it."""
    return {name: _rounded(name, tensor) for name, tensor in tensors.items()}


def _rounded(name: str, tensor: Float32Array) -> Float16Array:
    with np.errstate(over="ignore"):
        half = tensor.astype(np.float16)
    if beyond := int(np.isinf(half).sum()):
        raise UsageError(
            f"--precision fp16: {beyond} of the {tensor.size:,} numbers of {name} lie beyond {FLOAT16_MAX:g}, where "
            f"float16 ends; the largest is {np.abs(tensor).max():.3g}. Export this net with --precision fp32"
        )
    return half


def rounding_losses(tensors: Mapping[str, Float32Array]) -> dict[str, float]:
    """Return by what share of its size (root mean square) rounding moves each tensor; about 2e-4 where nothing is lost.

    Raises UsageError as `round_to_half` does.
    """
    losses = {}
    for name, tensor in tensors.items():
        moved = size = 0.0
        for rounded, exact in _blocks(_rounded(name, tensor), tensor):
            moved += float(np.square(rounded - exact).sum())
            size += float(np.square(exact).sum())
        losses[name] = (moved / size) ** 0.5 if size else 0.0
    return losses


def _blocks(*tensors: npt.NDArray[np.floating]) -> Iterator[tuple[npt.NDArray[np.float64], ...]]:
    """Give equal parts of tensors of equal shape, flat and in float64."""
    for start in range(0, tensors[0].size, _BLOCK):
        yield tuple(tensor.reshape(-1)[start : start + _BLOCK].astype(np.float64) for tensor in tensors)


def range_images(crop: int) -> list[UInt8Array]:
    """Return images of one crop, uint8 (crop, crop, 3), that drive convolutions far: all brightness, all contrast.

    Black, white, checks, and noise of only 0 and 255 in each channel, the last two fine and coarse. In two nets trained
    on the demo's data 1,000 of its pictures drove no layer more than a quarter further, and the logits 1.6 times as
    far: well within HEADROOM.
    """
    place = np.arange(crop)
    sides = [2**power for power in range(7) if 2**power < crop]
    images = [np.full((crop, crop, 3), value, np.uint8) for value in (0, 255)]
    for side in sides:
        checks = (place[:, None] // side + place // side) % 2 * 255
        images.append(np.repeat(checks[..., None], 3, axis=2).astype(np.uint8))
    for side in sides:
        count = -(-crop // side)
        coarse = np.random.default_rng(side).integers(0, 2, (count, count, 3)) * 255
        images.append(coarse.repeat(side, 0).repeat(side, 1)[:crop, :crop].astype(np.uint8))
    return images


def range_canvases(contract: ModelContract) -> Iterator[tuple[UInt8Array, npt.NDArray[np.int64]]]:
    """Give the golden images and `range_images` one by one, as canvases and sizes.

    In a ragged file each stands beside white padding, and the first once more beside whole windows of it: what lies
    next to an image can be larger than all inside it (a convolution there sees a part of its neighbourhood), and its
    infinity times a mask of 0 would be NaN.
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


def add_probes(model: ModelProto, architecture: Architecture) -> None:
    """Add the output `magnitudes` to a half model: float32 (tensors, 1, 1, 1), in the order of `_probed_tensors`.

    Each entry is the largest absolute value of one tensor between the layers. Nothing else changes.
    """
    graph, largest = model.graph, []
    for name in chain.from_iterable(_probed_tensors(architecture).values()):
        single, size, most = (f"probe.{name}.{what}" for what in ("single", "size", "largest"))
        graph.node.append(helper.make_node("Cast", [name], [single], to=TensorProto.FLOAT))
        graph.node.append(helper.make_node("Abs", [single], [size]))
        graph.node.append(helper.make_node("ReduceMax", [size], [most]))
        largest.append(most)
    graph.node.append(helper.make_node("Concat", largest, ["magnitudes"], axis=0))
    graph.output.append(helper.make_tensor_value_info("magnitudes", TensorProto.FLOAT, [len(largest), 1, 1, 1]))


def _probed_tensors(architecture: Architecture) -> dict[str, list[str]]:
    """Return layer → its tensors that are rounded to float16 and can be larger than what went in (pools cannot)."""
    probed = {conv.name: [conv.name, f"{conv.name}.activation"] for conv in architecture.convs}
    for name in ("fc1", "fc2"):
        probed[name] = [f"{name}.product", name, f"{name}.activation"]
    return {**probed, "fc3": ["fc3.product", "fc3"]}


def measure_magnitudes(path: Path, architecture: Architecture, contract: ModelContract) -> dict[str, float]:
    """Run a half file with probes; return layer → its largest |number| over `range_canvases`.

    Infinite, or NaN, where float16 overflowed on the way. What runs is a copy that lies beside the file meanwhile.
    """
    model = onnx.load(path)
    add_probes(model, architecture)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".probed-", suffix=".onnx") as file:
        onnx.save(model, file.name)
        net = RawOnnxModel(Path(file.name))
    found = [
        net.run({"images": images, "sizes": sizes}, "magnitudes").reshape(-1)
        for images, sizes in range_canvases(contract)
    ]
    largest = iter(np.max(found, axis=0).tolist())  # NaN stays NaN
    return {
        layer: float(np.max([next(largest) for _ in names])) for layer, names in _probed_tensors(architecture).items()
    }


def check_magnitudes(magnitudes: Mapping[str, float]) -> None:
    """Refuse a net whose numbers between the layers do not stay within float16; UsageError names the first layer."""
    for layer, largest in magnitudes.items():
        if not largest <= FLOAT16_MAX:
            raise UsageError(
                f"--precision fp16: on test images {layer} goes beyond {FLOAT16_MAX:g}, where float16 ends. "
                "Export this net with --precision fp32"
            )


def precision_warnings(losses: Mapping[str, float], magnitudes: Mapping[str, float]) -> list[str]:
    """Say which tensors suffer from rounding and which layers come near the end of float16."""
    told = [
        f"{name}: rounding to float16 moves it by {loss:.1e} of its size; its numbers are too small for float16"
        for name, loss in losses.items()
        if loss > MAX_ROUNDING_LOSS
    ]
    told += [
        f"{layer}: reaches {largest:.3g} on test images, within a factor of {HEADROOM:g} of {FLOAT16_MAX:g}, "
        "the float16 maximum; other images may exceed it"
        for layer, largest in magnitudes.items()
        if largest > FLOAT16_MAX / HEADROOM
    ]
    return told


def largest_magnitude(magnitudes: Mapping[str, float]) -> tuple[str, float]:
    """Return the layer with the largest number, and that."""
    layer = max(magnitudes, key=lambda name: magnitudes[name])
    return layer, magnitudes[layer]
