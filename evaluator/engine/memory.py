"""Estimate the main memory of a run from the model file's metadata alone, and plan batches that stay within a limit.

Uses of memory, with model A in float32 and one view of 480x1920 pixels as an example:

    base       Python and its libraries, the runtime                                                0.1 GB
    weights    the file's, as the runtime stores them; twice the file while it loads them           1.0 to 1.5 GB
    batch      maps of the trunk, or every window's pooled features (129 kB each, 1,819 windows)     0.6 GB
    packed     pixels of batches that are being computed or wait for it                             25 MB
    images     views of the portion of a chunk being computed, and of the one being prepared         0.8 GB
    decoding   pixels before resizing (`evaluator.imaging.decode_memory`)                            0.3 GB
    results    scores of views until they are averaged and written                                  15 MB
    list       names and labels of the images, and finally the lines of the run                     0.5 kB an image

Only the last depends on the number of images. The estimates are upper bounds, with one exception: an image that alone
exceeds the capacity for decoding is still decoded, by itself (`MAX_DECODE_BYTES`). docs/performance.md compares the
estimates with measurements.
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

# Memory that a runtime holds, as a multiple of what the graph needs at once. OpenVINO reorders windows for its matrix
# products, and on CUDA the arena grows by powers of two (not measured here).
BUFFER_COPIES: Mapping[Runtime, int] = {"cpu": 1, "openvino": 2, "cuda": 2}
WORKSPACE_BYTES = 2**25  # buffers of the runtime's threads, whatever the batch
# The layers of an adopted net are unknown. VGG-16, the widest of the usual nets, has 64 channels at every pixel of its
# first layers; assume three such maps at once.
ADOPTED_BYTES_PER_PIXEL = 3 * 64 * 4
INPUT_BYTES_PER_PIXEL = 2 * 3 + 4 * 3 * 4  # uint8 as received and channels first; float32, mean, centered, masked


def batch_bytes(
    contract: ModelContract, rows: int, height: int, width: int, value_bytes: int = 4, runtime: Runtime = "cpu"
) -> int:
    """Return the most bytes that a batch takes, without the weights.

    height, width: of its canvas; value_bytes: of a number in a map.
    The result is the largest sum of live maps at one layer, or the windows' features, times the copies that the runtime
    keeps. Raises ContractError for a malformed architecture.
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
    """Return the bytes of one window of our own nets: its bins, cut out and then concatenated, and its scores.

    The fully connected layers come later and take less, unless they are wider than the pyramid. The scores are always
    float32, and the runtime returns a copy of them.
    """
    bins = _layers(contract)[-1].channels * sum(level * level for level in contract.spp_levels)
    hidden, classes = _hidden(contract), len(contract.classes)
    return 2 * 4 * classes + max(2 * bins, bins + 2 * hidden, 2 * hidden + 2 * classes) * value_bytes


def weights_bytes(contract: ModelContract) -> int:
    """Return the bytes of a file's weights; 0 for an adopted net, whose layers are unknown."""
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
    """Return an upper bound of the bytes of any batch with at most `pixels` pixels and `windows` windows.

    Maps are largest relative to their input where a stride has just begun, or for an infinitely long row.
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
    """Return multiplications plus additions per pixel of a 3:4 view at the middle scale; infinite if unknown."""
    height, width = resized_size(3, 4, contract.default_scales[len(contract.default_scales) // 2])
    with _architecture_errors():
        if _has_trunk(contract):
            return 2 * multiply_adds(contract.architecture, height, width, len(contract.classes)) / (height * width)
        stated = contract.architecture.get("multiply_adds")
        return inf if stated is None else 2 * require_int(stated, "multiply_adds", 1) / contract.crop**2


@dataclass(frozen=True)
class _Layer:
    """A layer of a trunk, including what a contract's `trunk` omits. channels: of its output."""

    size: TrunkLayer
    is_convolution: bool
    channels: int


def _has_trunk(contract: ModelContract) -> bool:
    return "trunk" in contract.architecture


def _layers(contract: ModelContract) -> list[_Layer]:
    """Return the layers of the trunk; ContractError for a malformed architecture."""
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
    """Return the largest number of values alive at one layer of the trunk.

    For a convolution: its input, once more masked in a ragged file, and its output. For an activation or a pool: its
    input and output.
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
    """Return the number of values in the feature map and its pyramid's pools, each stored channels first and last.

    The bins of a level have one or two lengths along each side; one intermediate pool may be needed.
    """
    sizes: set[tuple[int, int]] = {(1, 1), (0, 0)}
    for level in contract.spp_levels:
        edges = [(i * contract.window // level, -(-(i + 1) * contract.window // level)) for i in range(level)]
        lengths = {end - start for start, end in edges}
        sizes |= {(rows, columns) for rows in lengths for columns in lengths}
    cells = max(0, contract.feature_map_side(height)) * max(0, contract.feature_map_side(width))
    return 2 * len(sizes) * _layers(contract)[-1].channels * cells


# Measured on models A and C (712 and 1,323 MB) and on A in float16, with onnxruntime 1.31.1 and OpenVINO 2026.4.1, on
# Linux. Factors are relative to the weights in float32, to which these runtimes convert those of a float16 file.
# Peak while loading, by the file's precision: 1.94 to 2.13, 1.96 to 2.43.
LOADING_FACTOR: Mapping[str, float] = {"fp32": 2.2, "fp16": 2.6}
# After the first call, in which OpenVINO reorders its weights: 1.09 to 1.38, 2.06 to 2.27, 1.93 to 2.03.
RESIDENT_FACTOR: Mapping[tuple[Runtime, str], float] = {
    ("cpu", "fp32"): 1.4,
    ("openvino", "fp32"): 2.3,
    ("openvino", "bf16"): 2.2,
}
BASE_BYTES = 2**27  # 60 to 75 MB of Python and libraries, 46 to 57 MB more with a runtime
PORTION_BYTES = 3 * 2**27  # views of one portion, if every image were as elongated as the protocol allows
# On a GPU, with the 1,024 images of a chunk in one portion, canvases change four times less often.
GPU_PORTION_BYTES = 6 * 2**30
PORTION_SHARE = 16  # a portion takes at most a sixteenth of a limit
PACKED_BATCHES = 4  # batches of pixels in memory: one computing, two ready, one being packed
RESULT_PORTIONS = 3  # portions whose results are kept until they are averaged
# 280 in the dataset's list and 130 in the lines of the run, for names of 40 characters
LISTING_BYTES_PER_IMAGE = 512
# Images of a dataset and of a chunk, for which rules reserve memory before either is known.
TYPICAL_DATASET_IMAGES, TYPICAL_CHUNK_IMAGES = 50_000, 64

# Assumptions about a GPU, not measured here.
GPU_BASE_BYTES = 2**31  # main memory: the libraries of CUDA and cuDNN
GPU_RESIDENT_FACTOR = 2.2  # weights on the GPU, relative to the file
GPU_HOST_RESIDENT_FACTOR = 1.1  # the same in main memory once they are on the GPU
GPU_PACKED_BATCHES = 8  # batches in main memory: three page-locked, of up to twice the size, and two packed
GPU_BATCH_BYTES = 6 * 2**30  # unless a limit is lower: about 10 Mpixel of net C, far more than fill a GPU
GPU_SWITCH_SECONDS = 0.020  # time in which the CUDA provider rebuilds the plans of about 20 convolutions
GPU_FLOPS: Mapping[str, float] = {"fp16": 400e12, "tf32": 200e12, "fp32": 45e12}  # operations/s over a whole net
GPU_CANVAS_CELLS = 2  # step in cells of the feature map: 32 px for A, B, C, so 256, 384, 480 fit exactly

_VALUE_BYTES: Mapping[str, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # of a number in a map
MAX_MEMORY = 2**60
_UNITS = "MGT"
_AMOUNT = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,6})?)(?P<unit>[MGTmgt])(?:iB|(?P<decimal>B))?", re.ASCII)


@dataclass(frozen=True)
class MemoryEstimate:
    """Upper bounds, in bytes, of the main memory of a process; the module's docstring explains each.

    loading: while the file loads, when there are no batches and images yet.
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
        """Return the peak over the whole run."""
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
    """How one process runs a model, and on how much data.

    precision: to compute in; file_bytes: of the model file, 0 to derive them from its architecture; gpu_rules: of the
    sessions on GPUs, which do not depend on main memory; sessions: their number; pipelines: per session; images: in the
    dataset; encoded: bytes of all files that are read at a time.
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
    """Return rules whose batches take at most `budget` bytes.

    unlimited: rules for unlimited memory, whose two limits shrink by the same factor; packed: number of batches of
    pixels in memory besides the one being computed. An image that alone exceeds the rules still forms a batch; see
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
    """Return the rules of a CPU: the default ones, or smaller ones within a memory limit.

    memory: limit of the process in bytes, or None; file_bytes: of the model file, 0 to derive them from its
    architecture;
    runtime: `cpu` (onnxruntime) or `openvino`; precision: to compute in.
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

    memory: limit of the runtime's arena in bytes, or None; file_bytes: see `cpu_rules`; precision: to compute in, None
    for the file's own. Canvases of an exact file are never larger than their images, but blank ones can still save a
    change of shape.
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
    """Return how many images of a chunk are prepared and computed at a time: one portion of it.

    memory: limit of the process's main memory in bytes, or None; gpu: whether a GPU computes.

    Depends on nothing but these arguments: which images share a batch can change the last bit of a score, so a chunk
    must be cut the same way wherever and whenever it is evaluated.
    """
    limit = GPU_PORTION_BYTES if gpu else PORTION_BYTES
    if memory is not None:
        limit = min(limit, memory // PORTION_SHARE)
    portions = -(-chunk // max(1, limit // image_bytes(protocol)))
    return -(-chunk // portions)


def image_bytes(protocol: EvaluationProtocol) -> int:
    """Return the bytes of all views of one image that is as elongated as the protocol allows."""
    if protocol.crop is not None:
        return 3 * len(protocol.views) * protocol.crop**2
    # Mirrored views share the memory of the plain ones.
    return 3 * sum(scale * scale * protocol.long_side_cap for scale in protocol.scales)


def estimate_memory(
    contract: ModelContract,
    protocol: EvaluationProtocol,
    chunk: int,
    memory: int | None,
    workload: Workload = Workload(),
) -> MemoryEstimate:
    """Return upper bounds of the main memory that evaluating chunks of images takes.

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
    """Return the bytes of the largest batch of a protocol's views, up to the longest image that is not capped.

    Lengths are tried in steps of one cell of the feature map.
    """
    largest = 0
    for height, width in _view_sizes(contract, protocol):
        rows, columns = contract.window_grid(height, width)
        limits = rules.max_windows // max(1, rows * columns), rules.max_pixels // (height * width)
        needed = batch_bytes(contract, max(1, min(limits)), height, width, _VALUE_BYTES[precision], runtime)
        largest = max(largest, needed)
    return largest


def _view_sizes(contract: ModelContract, protocol: EvaluationProtocol) -> list[tuple[int, int]]:
    """Return height and width of the views of square to long images; upright ones take the same memory."""
    if protocol.crop is not None:
        return [(protocol.crop, protocol.crop)]
    longest = protocol.long_side_cap
    return [
        (scale, min(width, longest * scale))
        for scale in protocol.scales
        for width in range(scale, longest * scale + contract.trunk_stride, contract.trunk_stride)
    ]


def require_loadable(file_bytes: int, precision: str, memory: int, runtime: Runtime = "cpu") -> None:
    """Refuse a model file before it is loaded if loading alone would exceed the limit.

    precision: of the file; memory: bytes. Raises UsageError with the required memory.
    """
    base = GPU_BASE_BYTES if runtime == "cuda" else BASE_BYTES
    need = base + math.ceil(LOADING_FACTOR[precision] * _expanded_bytes(file_bytes, precision, runtime))
    if need > memory:
        raise UsageError(
            f"--memory-limit {format_bytes(memory)}: loading the model alone takes up to {format_bytes(need)}. "
            "Raise the limit"
        )


def require_fits(
    contract: ModelContract, protocol: EvaluationProtocol, chunk: int, memory: int, workload: Workload = Workload()
) -> MemoryEstimate:
    """Return the memory estimate of a run (see `estimate_memory`) if it stays within the limit.

    Raises UsageError that states how much memory is needed, for what, and what to change.
    """
    need = enough = estimate_memory(contract, protocol, chunk, memory, workload)
    if need.total <= memory:
        return need
    sufficient = memory
    while enough.total > sufficient:  # ends, because portions grow by only an eighth of a larger limit
        sufficient = enough.total
        enough = estimate_memory(contract, protocol, chunk, sufficient, workload)
    loading = need.total == need.base + need.loading
    of_views = need.batch + need.packed + need.images > need.total // 2
    if loading or not of_views or protocol.crop is not None or workload.runtime == "cuda":
        why, fix = "Loading the model needs most of it. " if loading else "", ""
    else:
        scale, longest = max(protocol.scales), protocol.long_side_cap
        why = f"A view of an image of 1:{longest} has {scale}x{scale * longest} pixels and cannot be split. "
        fix = ", or use smaller scales (--scales)"
    raise UsageError(
        f"--memory-limit {format_bytes(memory)}: protocol {protocol.name} takes up to {need}. "
        f"{why}Give {format_bytes(sufficient)} or more{fix}"
    )


def require_view_fits(
    contract: ModelContract, protocol: EvaluationProtocol, image: tuple[int, int], available: int
) -> None:
    """Refuse an image if a single view of it takes more memory than is available.

    image: height and width in pixels; available: bytes, see `evaluator.machine`. Raises UsageError with the required
    memory.
    """
    if protocol.crop is not None:
        return
    height, width = resized_size(*image, max(protocol.scales), protocol.long_side_cap)
    need = batch_bytes(contract, 1, height, width, runtime="openvino")  # the larger of both runtimes
    if need > available:
        raise UsageError(
            f"a view of {height}x{width} pixels takes up to {format_bytes(need)} of memory, and this machine has "
            f"{format_bytes(available)}. Use a smaller scale"
        )


def parse_memory(text: str | None, option: str = "--memory-limit") -> int | None:
    """Parse an amount of memory to bytes: 900M, 6G or 1.5GiB in powers of 1024, 6GB in powers of 1000; None for None.

    Raises UsageError for anything else, so that 6 or 6Gb is not misread. option: named in the error.
    """
    if text is None:
        return None
    match = _AMOUNT.fullmatch(text)
    value = 0
    if match:
        power = _UNITS.index(match["unit"].upper()) + 2
        value = int(float(match["number"]) * (1000 if match["decimal"] else 1024) ** power)
    if not match or not 1 <= value <= MAX_MEMORY:
        raise UsageError(
            f"{option} {text}: not an amount of memory. Write it with its unit: 900M, 6G or 1.5GiB in powers of "
            "1024, 6GB in powers of 1000"
        )
    return value


def format_bytes(value: int) -> str:
    """Format an amount of memory to three digits, rounded up, in the units that `parse_memory` reads: 1.17G."""
    for power, unit in reversed(list(enumerate(_UNITS, 2))):
        if value >= 1024**power or power == 2:
            amount = value / 1024**power
            digits = 2 if amount <= 9.99 else 1 if amount <= 99.9 else 0
            return f"{math.ceil(amount * 10**digits) / 10**digits:.{digits}f}{unit}"
    raise AssertionError("unreachable: the smallest unit always applies")


def _weights_in_memory(contract: ModelContract, file_bytes: int, runtime: Runtime) -> int:
    """Return the bytes of one copy of the weights; file_bytes: 0 to derive them from the architecture."""
    return _expanded_bytes(file_bytes or weights_bytes(contract), contract.precision, runtime)


def _expanded_bytes(file_bytes: int, precision: str, runtime: Runtime) -> int:
    """Return the bytes of one copy of a file's weights: float32 on a CPU, the file's own precision on a GPU."""
    return (2 if precision == "fp16" and runtime != "cuda" else 1) * file_bytes


def _results_bytes(views: int, classes: int, portion: int, chunk: int, streams: int = 1) -> int:
    """Return the bytes of scores: of each view with its logits until averaged, then of each image until written."""
    return streams * 4 * classes * (2 * views * (RESULT_PORTIONS * portion + chunk) + RESULT_PORTIONS * chunk)


def _non_batch_bytes(contract: ModelContract, memory: int) -> int:
    """Return the bytes of everything but batches and weights within a limit, for the usual views and images."""
    views = 2 * len(contract.default_scales)
    results = _results_bytes(views, len(contract.classes), TYPICAL_CHUNK_IMAGES, TYPICAL_CHUNK_IMAGES)
    return (
        2 * min(PORTION_BYTES, memory // PORTION_SHARE)
        + DECODE_BYTES
        + results
        + LISTING_BYTES_PER_IMAGE * TYPICAL_DATASET_IMAGES
    )
