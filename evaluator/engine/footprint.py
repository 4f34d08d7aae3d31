"""What a batch and the weights of a net take, told from its layers: numbers alive at once, in bytes.

Upper bounds. docs/performance.md compares them with what was measured.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from prelunet.evaluator.complexity import multiply_adds
from prelunet.evaluator.contract import PREFIX, ModelContract, TrunkLayer, how_to_write
from prelunet.evaluator.errors import ContractError
from prelunet.evaluator.imaging.resize import resized_size
from prelunet.evaluator.strict import a_list, an_object, one_of, whole

Runtime = Literal["cpu", "openvino", "cuda"]  # cpu: onnxruntime's own

# How much a runtime keeps, in sizes of what the graph needs at once. OpenVINO lays windows out anew for its products,
# and on CUDA the arena grows by powers of two (not measured here).
COPIES: Mapping[Runtime, int] = {"cpu": 1, "openvino": 2, "cuda": 2}
WORKSPACE = 2**25  # bytes, whatever the batch: buffers of the runtime's threads
# An adopted net says nothing of its layers. VGG-16, the widest of the usual ones, has 64 channels at every pixel of its
# first layers; of three such maps at once.
ADOPTED_BYTES_A_PIXEL = 3 * 64 * 4
FRONT_BYTES_A_PIXEL = 2 * 3 + 4 * 3 * 4  # uint8 as it came and channels first; float32, mean, centred, masked


def batch_bytes(
    contract: ModelContract, rows: int, height: int, width: int, value_bytes: int = 4, runtime: Runtime = "cpu"
) -> int:
    """Return how many bytes a batch takes at most; height, width: of its canvas; value_bytes: of a number in a map.

    Beyond the weights: the largest sum of maps that are alive at one layer, or the windows' features, as often as the
    runtime keeps them. Raises ContractError for a malformed architecture.
    """
    if _has_trunk(contract):
        maps, pools = (of(contract, height, width) * value_bytes for of in (_largest_maps, _pooled_maps))
        grid_rows, grid_columns = contract.window_grid(height, width)
        head = pools + max(0, grid_rows) * max(0, grid_columns) * window_bytes(contract, value_bytes)
        canvas = max(FRONT_BYTES_A_PIXEL * height * width, maps, head)
    else:
        canvas = ADOPTED_BYTES_A_PIXEL * height * width
    return WORKSPACE + COPIES[runtime] * rows * canvas


def window_bytes(contract: ModelContract, value_bytes: int = 4) -> int:
    """Return the bytes of one window of our own nets: its bins, cut out and then put together, and its scores.

    The fully connected layers come later and take less, unless they are wider than the pyramid. The scores are always
    float32, and leave the runtime as a copy.
    """
    bins = _layers(contract)[-1].channels * sum(level * level for level in contract.spp_levels)
    hidden, classes = _hidden(contract), len(contract.classes)
    return 2 * 4 * classes + max(2 * bins, bins + 2 * hidden, 2 * hidden + 2 * classes) * value_bytes


def weights_bytes(contract: ModelContract) -> int:
    """Return the bytes of a file's weights; 0 for an adopted net, whose layers are not known."""
    if not _has_trunk(contract):
        return 0
    total, before = 0, 3
    for layer in _layers(contract):
        if layer.convolves:
            total += (layer.size.kernel**2 * before + 2) * layer.channels  # with biases and slopes
        before = layer.channels
    bins = before * sum(level * level for level in contract.spp_levels)
    hidden, classes = _hidden(contract), len(contract.classes)
    total += (bins + 2) * hidden + (hidden + 2) * hidden + (hidden + 1) * classes
    return total * (2 if contract.precision == "fp16" else 4)


def bytes_at(contract: ModelContract, pixels: int, windows: int, value_bytes: int = 4, runtime: Runtime = "cpu") -> int:
    """Return what no batch of so many pixels and windows exceeds.

    The maps of n pixels in a row are largest in proportion just where a stride begins, or else in a row without end.
    """
    batch = float(ADOPTED_BYTES_A_PIXEL * pixels)
    if _has_trunk(contract):
        sides = [*range(contract.crop, contract.crop + contract.trunk_stride), 2**20]
        maps, pools = (
            max(of(contract, side, side) / side**2 for side in sides) * value_bytes * pixels
            for of in (_largest_maps, _pooled_maps)
        )
        batch = max(FRONT_BYTES_A_PIXEL * pixels, maps, pools + windows * window_bytes(contract, value_bytes))
    return WORKSPACE + ceil(COPIES[runtime] * batch)


def operations_a_pixel(contract: ModelContract) -> float:
    """Return multiplications and additions for each pixel of a 3:4 view at the middle scale; infinite if unknown."""
    height, width = resized_size(3, 4, contract.default_scales[len(contract.default_scales) // 2])
    with _malformed():
        if _has_trunk(contract):
            return 2 * multiply_adds(contract.architecture, height, width, len(contract.classes)) / (height * width)
        stated = contract.architecture.get("multiply_adds")
        return inf if stated is None else 2 * whole(stated, "multiply_adds", 1) / contract.crop**2


@dataclass(frozen=True)
class _Layer:
    """One layer of a trunk with what a contract's `trunk` leaves out. channels: of its output."""

    size: TrunkLayer
    convolves: bool
    channels: int


def _has_trunk(contract: ModelContract) -> bool:
    return "trunk" in contract.architecture


def _layers(contract: ModelContract) -> list[_Layer]:
    """Return the trunk; ContractError for a malformed architecture."""
    with _malformed():
        described = [an_object(layer, "a layer") for layer in a_list(contract.architecture["trunk"], "trunk")]
        layers, channels = [], 3
        for layer, size in zip(described, contract.trunk, strict=True):
            convolves = one_of(layer.get("kind"), "kind of a layer", ("conv", "pool")) == "conv"
            channels = whole(layer.get("channels"), "channels of a layer", 1) if convolves else channels
            layers.append(_Layer(size, convolves, channels))
        return layers


def _hidden(contract: ModelContract) -> int:
    with _malformed():
        return whole(contract.architecture.get("hidden"), "hidden", 1)


@contextmanager
def _malformed() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ContractError(
            f"'{PREFIX}architecture' of this model file is malformed ({error}). {how_to_write('MODEL.onnx')}"
        ) from error


def _largest_maps(contract: ModelContract, height: int, width: int) -> int:
    """Return how many numbers are alive at most at one layer of the trunk.

    Of a convolution its input, in a ragged file masked once more, and its output; of an activation its input and
    output; of a pool likewise.
    """
    largest = before = 3 * height * width
    for layer in _layers(contract):
        height, width = (max(0, layer.size.output_side(side)) for side in (height, width))
        after = layer.channels * height * width
        masked = layer.size.pad > 0 and contract.canvas == "ragged"
        largest = max(largest, (1 + masked) * before + after, 2 * after if layer.convolves else 0)
        before = after
    return largest


def _pooled_maps(contract: ModelContract, height: int, width: int) -> int:
    """Return how many numbers the feature map and the pools of its pyramid have, all of them channels first and last.

    A level has bins of one length or two along each side; one more pool may come between.
    """
    sizes: set[tuple[int, int]] = {(1, 1), (0, 0)}
    for level in contract.spp_levels:
        edges = [(i * contract.window // level, -(-(i + 1) * contract.window // level)) for i in range(level)]
        lengths = {end - start for start, end in edges}
        sizes |= {(rows, columns) for rows in lengths for columns in lengths}
    cells = max(0, contract.feature_map_side(height)) * max(0, contract.feature_map_side(width))
    return 2 * len(sizes) * _layers(contract)[-1].channels * cells
