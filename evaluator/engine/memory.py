"""How much main memory a run takes, told from the model file's metadata alone, and batches that stay within a limit.

What takes memory, for model A in float32 and one view of 480x1920 pixels as an example:

    base       Python and its libraries, the runtime                                                0.1 GB
    weights    the file's, as the runtime keeps them; while it loads them, twice the file            1.0 to 1.5 GB
    batch      maps of the trunk, or every window's pooled features (129 kB each, 1,819 windows)     0.6 GB
    packed     the pixels of batches that are computed or wait for it                               25 MB
    images     views of the portion of a chunk that is computed, and of the one that is prepared     0.8 GB
    decoding   pixels as they were before they were resized (`evaluator.imaging.decode_memory`)               0.3 GB
    results    scores of views until they are averaged and written                                  15 MB
    list       the images' names and labels, and in the end the lines of the run                     0.5 kB an image

Only the last depends on the number of images. The estimates are upper bounds, but for one thing: an image that alone
takes more than the room for decoding is decoded all the same, by itself (`MAX_DECODE_BYTES`). docs/performance.md
compares them with what was measured.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal

from prelunet.evaluator.architectures import TrunkLayer, multiply_adds
from prelunet.evaluator.contract import PREFIX, ModelContract, rewrite_hint
from prelunet.evaluator.engine.batching import MAX_PIXELS, MAX_RULE_VALUE, MAX_WINDOWS, BatchRules
from prelunet.evaluator.errors import ContractError, UsageError
from prelunet.evaluator.imaging.decode_memory import DECODE_BYTES, GPU_DECODE_BYTES
from prelunet.evaluator.imaging.resize import resized_size
from prelunet.evaluator.json_checks import require_choice, require_int, require_list, require_object
from prelunet.evaluator.protocols import EvaluationProtocol

Runtime = Literal["cpu", "openvino", "cuda"]  # cpu: onnxruntime's own

# How much a runtime keeps, in sizes of what the graph needs at once. OpenVINO lays windows out anew for its products,
# and on CUDA the arena grows by powers of two (not measured here).
BUFFER_COPIES: Mapping[Runtime, int] = {"cpu": 1, "openvino": 2, "cuda": 2}
WORKSPACE_BYTES = 2**25  # bytes, whatever the batch: buffers of the runtime's threads
# An adopted net says nothing of its layers. VGG-16, the widest of the usual ones, has 64 channels at every pixel of its
# first layers; of three such maps at once.
ADOPTED_BYTES_PER_PIXEL = 3 * 64 * 4
INPUT_BYTES_PER_PIXEL = 2 * 3 + 4 * 3 * 4  # uint8 as it came and channels first; float32, mean, centred, masked


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
        canvas = max(INPUT_BYTES_PER_PIXEL * height * width, maps, head)
    else:
        canvas = ADOPTED_BYTES_PER_PIXEL * height * width
    return WORKSPACE_BYTES + BUFFER_COPIES[runtime] * rows * canvas


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
        if layer.is_convolution:
            total += (layer.size.kernel**2 * before + 2) * layer.channels  # with biases and slopes
        before = layer.channels
    bins = before * sum(level * level for level in contract.spp_levels)
    hidden, classes = _hidden(contract), len(contract.classes)
    total += (bins + 2) * hidden + (hidden + 2) * hidden + (hidden + 1) * classes
    return total * (2 if contract.precision == "fp16" else 4)


def batch_bytes_bound(
    contract: ModelContract, pixels: int, windows: int, value_bytes: int = 4, runtime: Runtime = "cpu"
) -> int:
    """Return what no batch of so many pixels and windows exceeds.

    The maps of n pixels in a row are largest in proportion just where a stride begins, or else in a row without end.
    """
    batch = float(ADOPTED_BYTES_PER_PIXEL * pixels)
    if _has_trunk(contract):
        sides = [*range(contract.crop, contract.crop + contract.trunk_stride), 2**20]
        maps, pools = (
            max(of(contract, side, side) / side**2 for side in sides) * value_bytes * pixels
            for of in (_largest_maps, _pooled_maps)
        )
        batch = max(INPUT_BYTES_PER_PIXEL * pixels, maps, pools + windows * window_bytes(contract, value_bytes))
    return WORKSPACE_BYTES + ceil(BUFFER_COPIES[runtime] * batch)


def flops_per_pixel(contract: ModelContract) -> float:
    """Return multiplications and additions for each pixel of a 3:4 view at the middle scale; infinite if unknown."""
    height, width = resized_size(3, 4, contract.default_scales[len(contract.default_scales) // 2])
    with _architecture_errors():
        if _has_trunk(contract):
            return 2 * multiply_adds(contract.architecture, height, width, len(contract.classes)) / (height * width)
        stated = contract.architecture.get("multiply_adds")
        return inf if stated is None else 2 * require_int(stated, "multiply_adds", 1) / contract.crop**2


@dataclass(frozen=True)
class _Layer:
    """One layer of a trunk with what a contract's `trunk` leaves out. channels: of its output."""

    size: TrunkLayer
    is_convolution: bool
    channels: int


def _has_trunk(contract: ModelContract) -> bool:
    return "trunk" in contract.architecture


def _layers(contract: ModelContract) -> list[_Layer]:
    """Return the trunk; ContractError for a malformed architecture."""
    with _architecture_errors():
        described = [
            require_object(layer, "a layer") for layer in require_list(contract.architecture["trunk"], "trunk")
        ]
        layers, channels = [], 3
        for layer, size in zip(described, contract.trunk, strict=True):
            is_convolution = require_choice(layer.get("kind"), "kind of a layer", ("conv", "pool")) == "conv"
            channels = require_int(layer.get("channels"), "channels of a layer", 1) if is_convolution else channels
            layers.append(_Layer(size, is_convolution, channels))
        return layers


def _hidden(contract: ModelContract) -> int:
    with _architecture_errors():
        return require_int(contract.architecture.get("hidden"), "hidden", 1)


@contextmanager
def _architecture_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ContractError(
            f"'{PREFIX}architecture' of this model file is malformed ({error}). {rewrite_hint('MODEL.onnx')}"
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
        largest = max(largest, (1 + masked) * before + after, 2 * after if layer.is_convolution else 0)
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


# Measured on models A and C (712 and 1,323 MB) and on A in float16, with onnxruntime 1.31.1 and OpenVINO 2026.4.1, on
# Linux; in sizes of the weights in float32, which is what these runtimes turn those of a float16 file into.
LOADING_FACTOR: Mapping[str, float] = {
    "fp32": 2.2,
    "fp16": 2.6,
}  # peak, by the file's precision: 1.94 to 2.13, 1.96 to 2.43
# After the first call, at which OpenVINO lays its weights out anew: 1.09 to 1.38, 2.06 to 2.27, 1.93 to 2.03.
RESIDENT_FACTOR: Mapping[tuple[Runtime, str], float] = {
    ("cpu", "fp32"): 1.4,
    ("openvino", "fp32"): 2.3,
    ("openvino", "bf16"): 2.2,
}
BASE_BYTES = 2**27  # bytes: 60 to 75 MB of Python and libraries, 46 to 57 MB more when a runtime is there
PORTION_BYTES = 3 * 2**27  # of the views of one portion, if every image were as elongated as the protocol lets it be
# For a GPU: the 1,024 images of a chunk in one portion change its canvases four times less often.
GPU_PORTION_BYTES = 6 * 2**30
PORTION_SHARE = 16  # a portion takes at most a sixteenth of a limit
PACKED_BATCHES = 4  # batches whose pixels are kept: one is computed, two are ready, one is being packed
RESULT_PORTIONS = 3  # portions whose results are kept until they are averaged
LISTING_BYTES_PER_IMAGE = (
    512  # bytes an image: 280 in the dataset's list and 130 in the lines of the run, with names of 40 characters
)
# Images of a dataset and of a chunk, for which rules leave room before either is known.
TYPICAL_DATASET_IMAGES, TYPICAL_CHUNK_IMAGES = 50_000, 64

# Assumptions about a GPU, not measured here.
GPU_BASE_BYTES = 2**31  # bytes of main memory: the libraries of CUDA and cuDNN
GPU_RESIDENT_FACTOR = 2.2  # what the weights take there, in sizes of the file
GPU_HOST_RESIDENT_FACTOR = 1.1  # and in main memory once they are on the GPU
GPU_PACKED_BATCHES = 8  # of batches in main memory: three page-locked, of up to twice the size, and two that are packed
GPU_BATCH_BYTES = 6 * 2**30  # of a batch unless a limit is lower: some 10 Mpixel of net C, far more than fill a GPU
GPU_SWITCH_SECONDS = 0.020  # in which the CUDA provider rebuilds the plans of about 20 convolutions
GPU_FLOPS: Mapping[str, float] = {"fp16": 400e12, "tf32": 200e12, "fp32": 45e12}  # operations per second of a whole net
GPU_CANVAS_CELLS = 2  # a canvas grows in cells of the feature map: 32 px for A, B, C; 256, 384 and 480 need no rounding

_VALUE_BYTES: Mapping[str, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # of a number in a map
MAX_MEMORY = 2**60
_UNITS = "MGT"
_AMOUNT = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,6})?)(?P<unit>[MGTmgt])(?:iB|(?P<decimal>B))?", re.ASCII)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of main memory that a process takes at most; what each is, see above.

    loading: while the file is loaded, when there are no batches and images yet.
    """

    base: int
    loading: int
    weights: int
    batch: int
    packed: int
    images: int
    decoding: int
    results: int
    listed: int

    @property
    def total(self) -> int:
        """Return the most that is taken at any time."""
        steady = self.weights + self.batch + self.packed + self.images + self.decoding + self.results + self.listed
        return self.base + max(self.loading, steady)

    def __str__(self) -> str:
        parts = {
            "base": self.base,
            "weights": self.weights,
            "batches": self.batch + self.packed,
            "images": self.images,
            "decoding": self.decoding,
            "results": self.results + self.listed,
        }
        listed = ", ".join(f"{key} {format_bytes(value)}" for key, value in parts.items())
        return f"{format_bytes(self.total)} ({listed}; {format_bytes(self.loading)} while loading the weights)"


@dataclass(frozen=True)
class Workload:
    """How a model is run in one process, and on how much.

    precision: what is computed in; file_bytes: of the model file, 0 for what its architecture tells; gpu_rules: of the
    sessions on GPUs, which do not depend on main memory; sessions: how many; pipelines: that each of them serves;
    images: in the dataset; encoded: bytes of all files that are read at a time.
    """

    runtime: Runtime = "cpu"
    precision: str = "fp32"
    file_bytes: int = 0
    gpu_rules: BatchRules | None = None
    sessions: int = 1
    pipelines: int = 1
    images: int = 0
    encoded: int = 0


def fit_rules(
    contract: ModelContract,
    budget: int,
    unlimited: BatchRules,
    value_bytes: int = 4,
    runtime: Runtime = "cpu",
    *,
    packed: int = 0,
) -> BatchRules:
    """Return rules whose batches take no more than `budget` bytes.

    most: rules for when memory is no matter, of which both limits shrink alike; packed: how many batches of pixels come
    on top, besides what is being computed. An image that alone exceeds them is a batch all the same, see
    `require_fits`.
    """
    needed = batch_bytes_bound(contract, unlimited.max_pixels, unlimited.max_windows, value_bytes, runtime)
    share = (budget - WORKSPACE_BYTES) / (needed - WORKSPACE_BYTES + packed * 3 * unlimited.max_pixels)
    if share >= 1:
        return unlimited
    windows, pixels = (max(1, int(share * limit)) for limit in (unlimited.max_windows, unlimited.max_pixels))
    return replace(unlimited, max_windows=windows, max_pixels=pixels)


def cpu_rules(
    contract: ModelContract,
    memory: int | None,
    *,
    file_bytes: int = 0,
    runtime: Runtime = "cpu",
    precision: str = "fp32",
) -> BatchRules:
    """Return the rules of a CPU: those that are usual, or smaller ones.

    memory: most bytes of the process, or None; file_bytes: of the model file, 0 for what its architecture tells;
    runtime: `cpu` (onnxruntime) or `openvino`; precision: what is computed in.
    """
    if memory is None:
        return BatchRules()
    resident = math.ceil(RESIDENT_FACTOR[runtime, precision] * _weights_in_memory(contract, file_bytes, runtime))
    budget = memory - BASE_BYTES - resident - _non_batch_bytes(contract, memory)
    return fit_rules(contract, budget, BatchRules(), _VALUE_BYTES[precision], runtime, packed=PACKED_BATCHES)


def gpu_rules(
    contract: ModelContract, memory: int | None, *, file_bytes: int = 0, precision: str | None = None
) -> BatchRules:
    """Return the rules of a GPU.

    memory: most bytes of the runtime's arena there, or None; file_bytes: see `cpu_rules`; precision: what is computed
    in, None for the file's own. Canvases of an exact file are never larger than their images, but there too blank ones
    can save a change of shape.
    """
    precision = precision or contract.precision
    step = 1 if contract.canvas == "exact" else GPU_CANVAS_CELLS * contract.trunk_stride
    switch = int(GPU_SWITCH_SECONDS * GPU_FLOPS[precision] / flops_per_pixel(contract))
    budget = GPU_BATCH_BYTES
    if memory is not None:
        budget = min(budget, memory - math.ceil(GPU_RESIDENT_FACTOR * (file_bytes or weights_bytes(contract))))
    unlimited = BatchRules(step, 16 * MAX_WINDOWS, 16 * MAX_PIXELS, min(switch, MAX_RULE_VALUE))
    return fit_rules(contract, budget, unlimited, _VALUE_BYTES[precision], "cuda")


def portion_size(protocol: EvaluationProtocol, chunk: int, memory: int | None, *, gpu: bool = False) -> int:
    """Return how many images of a chunk are prepared and computed at a time: a portion of it.

    memory: most bytes of main memory of the process, or None; gpu: whether a GPU computes.

    A function of what is named here and of nothing else: in which company an image is computed can move the
    last bit of its scores, so that a chunk must be cut alike wherever and whenever it is evaluated.
    """
    limit = GPU_PORTION_BYTES if gpu else PORTION_BYTES
    if memory is not None:
        limit = min(limit, memory // PORTION_SHARE)
    portions = -(-chunk // max(1, limit // image_bytes(protocol)))
    return -(-chunk // portions)


def image_bytes(protocol: EvaluationProtocol) -> int:
    """Return the bytes of all views of one image that is as elongated as the protocol lets it be."""
    if protocol.crop is not None:
        return 3 * len(protocol.views) * protocol.crop**2
    return 3 * sum(scale * scale * protocol.long_side_cap for scale in protocol.scales)  # mirrored ones share them


def estimate_memory(
    contract: ModelContract,
    protocol: EvaluationProtocol,
    chunk: int,
    memory: int | None,
    workload: Workload = Workload(),
) -> MemoryEstimate:
    """Return what evaluating chunks of images takes of the main memory at most.

    memory: the limit for which batches and portions are planned, or None.
    """
    gpu, runtime, precision = workload.runtime == "cuda", workload.runtime, workload.precision
    file_bytes, streams = workload.file_bytes, workload.sessions * workload.pipelines
    weights = _weights_in_memory(contract, file_bytes, runtime)
    resident = math.ceil((GPU_HOST_RESIDENT_FACTOR if gpu else RESIDENT_FACTOR[runtime, precision]) * weights)
    rules = workload.gpu_rules or cpu_rules(
        contract, memory, file_bytes=file_bytes, runtime=runtime, precision=precision
    )
    largest_view = max(height * width for height, width in _view_sizes(contract, protocol))
    portion = portion_size(protocol, chunk, memory, gpu=gpu)
    return MemoryEstimate(
        base=GPU_BASE_BYTES if gpu else BASE_BYTES,
        loading=math.ceil(LOADING_FACTOR[contract.precision] * weights) + (workload.sessions - 1) * resident,
        weights=workload.sessions * resident,
        batch=WORKSPACE_BYTES if gpu else largest_batch_bytes(contract, protocol, rules, runtime, precision),
        packed=streams * (GPU_PACKED_BATCHES if gpu else PACKED_BATCHES) * 3 * max(rules.max_pixels, largest_view),
        images=streams * 2 * portion * image_bytes(protocol),
        decoding=(GPU_DECODE_BYTES if gpu else DECODE_BYTES) + workload.encoded,
        results=_results_bytes(len(protocol.views), len(contract.classes), portion, chunk, streams),
        listed=LISTING_BYTES_PER_IMAGE * workload.images,
    )


def largest_batch_bytes(
    contract: ModelContract, protocol: EvaluationProtocol, rules: BatchRules, runtime: Runtime, precision: str = "fp32"
) -> int:
    """Return what the largest batch of a protocol's views takes, up to the longest image that is not capped.

    Lengths are tried in steps of a cell of the feature map.
    """
    found = 0
    for height, width in _view_sizes(contract, protocol):
        rows, columns = contract.window_grid(height, width)
        limits = rules.max_windows // max(1, rows * columns), rules.max_pixels // (height * width)
        found = max(found, batch_bytes(contract, max(1, min(limits)), height, width, _VALUE_BYTES[precision], runtime))
    return found


def _view_sizes(contract: ModelContract, protocol: EvaluationProtocol) -> list[tuple[int, int]]:
    """Return height and width of the views of square to long images, upright ones left out: they take the same."""
    if protocol.crop is not None:
        return [(protocol.crop, protocol.crop)]
    longest = protocol.long_side_cap
    return [
        (scale, min(width, longest * scale))
        for scale in protocol.scales
        for width in range(scale, longest * scale + contract.trunk_stride, contract.trunk_stride)
    ]


def require_loadable(file_bytes: int, precision: str, memory: int, runtime: Runtime = "cpu") -> None:
    """Refuse a model file of which loading alone takes more than a limit, before it is loaded.

    precision: that the file holds; memory: bytes. Raises UsageError that says how much is needed.
    """
    base = GPU_BASE_BYTES if runtime == "cuda" else BASE_BYTES
    need = base + math.ceil(LOADING_FACTOR[precision] * _expanded_bytes(file_bytes, precision, runtime))
    if need > memory:
        raise UsageError(
            f"--memory-limit {format_bytes(memory)}: loading the model alone takes up to {format_bytes(need)}. "
            "Give more"
        )


def require_fits(
    contract: ModelContract, protocol: EvaluationProtocol, chunk: int, memory: int, workload: Workload = Workload()
) -> MemoryEstimate:
    """Return what a run takes within a limit (see `estimate_memory`), if that can be kept.

    Raises UsageError that says how much is needed, for what, and what to change.
    """
    need = enough = estimate_memory(contract, protocol, chunk, memory, workload)
    if need.total <= memory:
        return need
    given = memory
    while enough.total > given:  # a larger limit lets portions grow by an eighth of it, so this ends
        given = enough.total
        enough = estimate_memory(contract, protocol, chunk, given, workload)
    loading = need.total == need.base + need.loading
    of_views = need.batch + need.packed + need.images > need.total // 2
    if loading or not of_views or protocol.crop is not None or workload.runtime == "cuda":
        why, fix = "Loading the model takes the most of it. " if loading else "", ""
    else:
        scale, longest = max(protocol.scales), protocol.long_side_cap
        why = f"A view of an image of 1:{longest} has {scale}x{scale * longest} pixels and cannot be divided. "
        fix = ", or take smaller scales (--scales)"
    raise UsageError(
        f"--memory-limit {format_bytes(memory)}: protocol {protocol.name} takes up to {need}. "
        f"{why}Give {format_bytes(given)} or more{fix}"
    )


def require_view_fits(
    contract: ModelContract, protocol: EvaluationProtocol, image: tuple[int, int], available: int
) -> None:
    """Refuse an image of which one view alone takes more than there is.

    image: height and width in pixels; available: bytes, see `evaluator.machine`. Raises UsageError that says how much.
    """
    if protocol.crop is not None:
        return
    height, width = resized_size(*image, max(protocol.scales), protocol.long_side_cap)
    need = batch_bytes(contract, 1, height, width, runtime="openvino")  # the larger of both runtimes
    if need > available:
        raise UsageError(
            f"a view of {height}x{width} pixels takes up to {format_bytes(need)} of memory, and this machine has "
            f"{format_bytes(available)}. Take a smaller scale"
        )


def parse_memory(text: str | None, option: str = "--memory-limit") -> int | None:
    """Read an amount of memory as bytes: 900M, 6G or 1.5GiB in powers of 1024, 6GB in powers of 1000; None for None.

    Raises UsageError for anything else, so that 6 or 6Gb is not taken for something that was not meant.
    option: for its text.
    """
    if text is None:
        return None
    found = _AMOUNT.fullmatch(text)
    value = 0
    if found:
        power = _UNITS.index(found["unit"].upper()) + 2
        value = int(float(found["number"]) * (1000 if found["decimal"] else 1024) ** power)
    if not found or not 1 <= value <= MAX_MEMORY:
        raise UsageError(
            f"{option} {text}: not an amount of memory. Write it with its unit: 900M, 6G or 1.5GiB in powers of "
            "1024, 6GB in powers of 1000"
        )
    return value


def format_bytes(value: int) -> str:
    """Return an amount of memory to three digits, in the units that `parse_memory` reads: 1.17G. Rounded up."""
    for power, unit in reversed(list(enumerate(_UNITS, 2))):
        if value >= 1024**power or power == 2:
            amount = value / 1024**power
            digits = 2 if amount <= 9.99 else 1 if amount <= 99.9 else 0
            return f"{math.ceil(amount * 10**digits) / 10**digits:.{digits}f}{unit}"
    raise AssertionError("there is a unit for everything")


def _weights_in_memory(contract: ModelContract, file_bytes: int, runtime: Runtime) -> int:
    """Return what the weights would take once; file_bytes: 0 for what the architecture tells."""
    return _expanded_bytes(file_bytes or weights_bytes(contract), contract.precision, runtime)


def _expanded_bytes(file_bytes: int, precision: str, runtime: Runtime) -> int:
    """Return what a file's weights take once: in float32 on a CPU, as the file has them on a GPU."""
    return (2 if precision == "fp16" and runtime != "cuda" else 1) * file_bytes


def _results_bytes(views: int, classes: int, portion: int, chunk: int, streams: int = 1) -> int:
    """Return what scores take: of each view with its logits until it is averaged, then of each image until written."""
    return streams * 4 * classes * (2 * views * (RESULT_PORTIONS * portion + chunk) + RESULT_PORTIONS * chunk)


def _non_batch_bytes(contract: ModelContract, memory: int) -> int:
    """Return what everything but batches takes beside the weights within a limit, for the usual views and images."""
    views = 2 * len(contract.default_scales)
    results = _results_bytes(views, len(contract.classes), TYPICAL_CHUNK_IMAGES, TYPICAL_CHUNK_IMAGES)
    return (
        2 * min(PORTION_BYTES, memory // PORTION_SHARE)
        + DECODE_BYTES
        + results
        + LISTING_BYTES_PER_IMAGE * TYPICAL_DATASET_IMAGES
    )
