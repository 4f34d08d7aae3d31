"""An upper bound of the main memory of a run, and batches that stay within a limit.

    total = max(loading, base + weights + batches + images + decoding + results)

Each part counts the copies that can exist at once. With model A in float32 and one view of 480x1920 pixels:

    base      Python, its libraries and the runtime                                                    0.1 GB
    loading   the weights of the file, of the parsed graph, and those being reordered (`loading_copies`)   1.8 GB
    weights   those that a runtime keeps (`weight_copies`)                                             1.1 to 1.8 GB
    batches   three of the trunk's largest maps, or the pooled features of every window                0.7 to 1.3 GB
              pixels of batches that are being computed or wait for it                                 50 MB
    images    views of the portion of a chunk being computed, and of the one being prepared            0.8 GB
    decoding  pixels before resizing (`evaluator.imaging.decode_memory`)                               0.3 GB
    results   scores of views until they are averaged and written                                      15 MB
              names and labels of the images, and finally the lines of the run                         0.5 kB an image

Only the last line depends on the number of images. One image that alone exceeds the capacity for decoding is decoded
by itself, beyond the bound (`decode.max_decode_bytes`). benchmarks/README.md compares the bound with measurements.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..architectures import Conv, OpaqueNet
from ..contract import ModelContract
from ..errors import UsageError
from ..imaging.decode_memory import DECODE_BYTES, GPU_DECODE_BYTES
from ..imaging.resize import resized_size
from ..machine import format_bytes
from ..protocols import EvaluationProtocol
from .batching import MAX_PIXELS, MAX_RULE_VALUE, MAX_WINDOWS, BatchRules
from .runtimes import RUNTIMES
from .runtimes.cuda import GPU_WEIGHT_COPIES

if TYPE_CHECKING:
    from .session import Session

BASE_BYTES, GPU_BASE_BYTES = 2**27, 2**31  # on a GPU with the libraries of CUDA and cuDNN (an assumption)
WORKSPACE_BYTES = 2**25  # buffers of the runtime's threads, whatever the batch
VALUE_BYTES: Mapping[str, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "int8": 1}  # of a number in a map
INPUT_BYTES_PER_PIXEL = 2 * 3 + 4 * 3 * 4  # uint8 as received and channels first; float32, mean, centered, masked
LIVE_MAPS = 3  # at one layer: its input, the masked input, its output
# The layers of an adopted net are unknown. VGG-16, the widest of the usual nets, has 64 channels at every pixel, and
# layers of 4,096 numbers in its head.
ADOPTED_CHANNELS, ADOPTED_HIDDEN = 64, 4096

PORTION_BYTES = 3 * 2**27  # views of one portion, if every image were as elongated as the protocol allows
# On a GPU, with the 1,024 images of a chunk in one portion, canvases change four times less often.
GPU_PORTION_BYTES = 6 * 2**30
PORTION_SHARE = 16  # a portion takes at most a sixteenth of a limit
PACKED_BATCHES = 8  # in main memory: on a GPU three page-locked ones, of up to twice the size, and two packed ones
RESULT_PORTIONS = 3  # portions whose results are kept until they are averaged
LISTED_BYTES_PER_IMAGE = 1024  # for names of 40 characters; each view adds 32

# Of a GPU: assumptions, unless a measurement is named.
GPU_BATCH_BYTES = 6 * 2**30  # unless a limit is lower: about 10 Mpixel of net C, far more than fill a GPU
# To plan all convolutions anew: net A in fp16 on an H100 (benchmarks/results/gpu-options.md).
GPU_SWITCH_SECONDS = 0.036
# Operations/s over a whole net; fp16 of net A on an H100 (benchmarks/gpu).
GPU_FLOPS: Mapping[str, float] = {"fp16": 340e12, "tf32": 200e12, "fp32": 45e12}
GPU_CANVAS_CELLS = 2  # step in cells of the feature map: 32 px for A, B, C, so 256, 384, 480 fit exactly


def batch_bytes(
    contract: ModelContract, pixels: int, windows: int, precision: str = "fp32", device: str = "cpu"
) -> int:
    """Return an upper bound of the bytes of a batch, without the weights.

    pixels, windows: of all its canvases together; precision: to compute in.
    Either the trunk's maps are alive or the head's pools and windows.
    """
    net, value = contract.architecture, VALUE_BYTES[precision]
    if isinstance(net, OpaqueNet):
        window = LIVE_MAPS * ADOPTED_HIDDEN * value + LIVE_MAPS * 2 * 4 * len(contract.classes)
        graph = LIVE_MAPS * ADOPTED_CHANNELS * value * float(pixels) + (0 if contract.fixed_size else window * windows)
    else:
        densities, channels, scale, extra = [], 3, 1, 0.0
        for layer in net.trunk:
            # A map's side is at most side / scale + extra, of an image's side that is at least the crop.
            scale *= layer.stride
            extra = (extra + 2 * layer.pad - layer.kernel) / layer.stride + 1
            channels = layer.channels if isinstance(layer, Conv) else channels
            densities.append(channels * (1 / scale + max(0.0, extra) / net.crop) ** 2)  # values per pixel
        # One pool for each shape of a bin, the feature map, and an intermediate pool; stored channels first and last.
        # Bins of a level have one or two lengths along each side (floor of the begin, ceiling of the end).
        pools = 4
        for level in net.spp_levels:
            edges = [(i * net.window // level, -(-(i + 1) * net.window // level)) for i in range(level)]
            pools += 2 * len({end - begin for begin, end in edges}) ** 2
        features, (fc1, fc2), classes = net.bins * net.channels, net.widths, len(contract.classes)
        # A window's features, cut out and then concatenated, or a layer behind them: its input, the product and the
        # sum with the bias. Scores are float32, and copied.
        layers = max(features + 2 * fc1, fc1 + 2 * fc2, 2 * fc2 + 2 * classes)
        window = max(2 * features, layers) * value + 2 * 4 * classes
        graph = max(
            INPUT_BYTES_PER_PIXEL * pixels,
            LIVE_MAPS * max(densities) * value * pixels,
            pools * densities[-1] * value * pixels + window * windows,
        )
    return WORKSPACE_BYTES + math.ceil(RUNTIMES[device].batch_copies * graph)


def fit_rules(
    contract: ModelContract, budget: float, unlimited: BatchRules, precision: str = "fp32", device: str = "cpu"
) -> BatchRules:
    """Return rules whose batches take at most `budget` bytes.

    unlimited: rules for unlimited memory, whose two limits shrink by the same factor. An image that alone exceeds the
    rules still forms a batch; see `require_fits`.
    """
    needed = batch_bytes(contract, unlimited.max_pixels, unlimited.max_windows, precision, device)
    share = (budget - WORKSPACE_BYTES) / (needed - WORKSPACE_BYTES)
    if share >= 1:
        return unlimited
    windows, pixels = (max(1, int(share * limit)) for limit in (unlimited.max_windows, unlimited.max_pixels))
    return replace(unlimited, max_windows=windows, max_pixels=pixels)


def cpu_rules(
    contract: ModelContract, memory: int | None, file_bytes: int, *, device: str = "cpu", precision: str = "fp32"
) -> BatchRules:
    """Return the rules of a CPU: exact shapes, or shared canvases if OpenVINO's changes of shape cost more than these.

    memory: limit of the process in bytes, or None; file_bytes: of the model file; device: any but
    `cuda`; precision: to compute in. Batches get half of what base, weights and decoding leave; the portions get the
    other.
    """
    unlimited = BatchRules()
    if contract.canvas == "ragged" and (switch := switch_pixels(contract, device, precision)):
        unlimited = BatchRules(contract.trunk_stride, switch_pixels=switch)
    if memory is None:
        return unlimited
    weights = RUNTIMES[device].weight_copies * _weights_bytes(file_bytes, contract.precision, device)
    return fit_rules(contract, (memory - BASE_BYTES - weights - DECODE_BYTES) / 2, unlimited, precision, device)


def switch_pixels(contract: ModelContract, device: str, precision: str) -> int:
    """Return what a change of shape costs on a CPU, in pixels; 0 for nets so large that it does not matter."""
    runtime = RUNTIMES[device]
    if not runtime.switch_seconds:
        return 0
    switch = runtime.switch_seconds * runtime.flops[precision] / flops_per_pixel(contract)
    return min(int(switch), MAX_RULE_VALUE) if switch > contract.crop**2 / 4 else 0


def gpu_rules(
    contract: ModelContract, memory: int | None, file_bytes: int = 0, *, precision: str | None = None
) -> BatchRules:
    """Return the rules of a GPU.

    memory: limit of the runtime's arena in bytes, or None; file_bytes: of the model file; precision: to compute in,
    None for the file's own. Canvases of an exact file are never larger than their images, but blank ones can still save
    a change of shape.
    """
    precision = precision or contract.precision
    step = 1 if contract.canvas == "exact" else GPU_CANVAS_CELLS * contract.trunk_stride
    switch = int(GPU_SWITCH_SECONDS * GPU_FLOPS[precision] / flops_per_pixel(contract))
    budget = GPU_BATCH_BYTES if memory is None else min(GPU_BATCH_BYTES, memory - GPU_WEIGHT_COPIES * file_bytes)
    unlimited = BatchRules(step, 16 * MAX_WINDOWS, 16 * MAX_PIXELS, min(switch, MAX_RULE_VALUE))
    return fit_rules(contract, budget, unlimited, precision, "cuda")


def flops_per_pixel(contract: ModelContract) -> float:
    """Return multiplications plus additions per pixel; infinite if unknown.

    Of a 3:4 view at the middle scale, or of the crop if the model takes nothing else.
    """
    height, width = contract.crop, contract.crop
    if not contract.fixed_size:
        height, width = resized_size(3, 4, contract.default_scales[len(contract.default_scales) // 2])
    count = contract.multiply_adds(height, width)
    return math.inf if count is None else 2 * count / (height * width)


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


@dataclass(frozen=True)
class MemoryEstimate:
    """Upper bounds of a process's main memory in bytes.

    parts: what is there at once, by name; loading: all that is there while a file is loaded, before most of them.
    """

    parts: Mapping[str, int]
    loading: int

    @property
    def total(self) -> int:
        return max(self.loading, sum(self.parts.values()))

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(value)}" for name, value in self.parts.items())
        return f"{format_bytes(self.total)} ({parts}; {format_bytes(self.loading)} while loading the weights)"


def estimate_memory(
    session: "Session",
    protocol: EvaluationProtocol,
    chunk: int,
    memory: int | None,
    *,
    sessions: int = 1,
    images: int = 0,
    encoded: int = 0,
) -> MemoryEstimate:
    """Return upper bounds of the main memory that evaluating chunks of images takes.

    memory: the limit for which batches and portions are planned, or None; sessions: number of sessions like this one;
    images: in the dataset; encoded: bytes of all files that are read at a time.
    """
    contract, device = session.contract, session.placement.device
    gpu = RUNTIMES[device].gpu
    rules = session.rules
    if not gpu:
        precision = session.circumstances.precision
        rules = cpu_rules(contract, memory, session.model_bytes, device=device, precision=precision)
    portion = portion_size(protocol, chunk, memory, gpu=gpu)
    scores = 4 * len(contract.classes) * (2 * len(protocol.views) + RESULT_PORTIONS)  # of an image and all its views
    loading, weights = weights_bytes(session)
    base, scored = base_bytes(device), RESULT_PORTIONS * portion + chunk  # images whose scores are kept
    parts = {
        "base": base,
        "weights": sessions * weights,
        "batches": largest_batch_bytes(session, protocol, rules, pipelines=sessions),
        "images": sessions * 2 * portion * image_bytes(protocol),
        "decoding": (GPU_DECODE_BYTES if gpu else DECODE_BYTES) + encoded,
        "results": sessions * scores * scored + (LISTED_BYTES_PER_IMAGE + 32 * len(protocol.views)) * images,
    }
    return MemoryEstimate(parts, base + loading + (sessions - 1) * weights)


def base_bytes(device: str) -> int:
    """Return what a process takes before it loads a model."""
    return GPU_BASE_BYTES if RUNTIMES[device].gpu else BASE_BYTES


def weights_bytes(session: "Session", *, lanes: bool = False) -> tuple[int, int]:
    """Return the bytes of a session's weights: the most while its file is loaded, and afterwards.

    lanes: whether it has them, see `add_lanes`.
    """
    device, precision = session.placement.device, session.contract.precision
    copy = math.ceil(RUNTIMES[device].weight_copies * _weights_bytes(session.model_bytes, precision, device))
    of_lanes = copy if lanes else 0
    return loading_bytes(session.model_bytes, precision, device) + of_lanes, copy + of_lanes


def largest_batch_bytes(
    session: "Session",
    protocol: EvaluationProtocol,
    rules: BatchRules,
    *,
    view: int = 0,
    pipelines: int = 1,
    lanes: bool = False,
) -> int:
    """Return the bytes of the largest batch of a protocol's views, and of the pixels that each pipeline packs ahead.

    view: if given, batches of any other protocol count too, and its views, of up to this many pixels; lanes: whether
    the session has them.
    """
    contract, device, precision = session.contract, session.placement.device, session.circumstances.precision
    batches = [_largest_batch(contract, protocol, rules)]
    if view:
        side = math.isqrt(view)  # of a square, which has the most windows
        batches += [(rules.max_pixels, rules.max_windows), (view, math.prod(contract.window_grid(side, side)))]
    maps = WORKSPACE_BYTES
    if not RUNTIMES[device].gpu:
        of_runtimes = 2 if lanes else 1  # each keeps the memory of its largest batch
        maps = of_runtimes * max(batch_bytes(contract, *batch, precision, device) for batch in batches)
    return maps + pipelines * PACKED_BATCHES * 3 * max(pixels for pixels, _ in batches)


def loading_bytes(file_bytes: int, precision: str, device: str) -> int:
    """Return an upper bound of the bytes that loading a model file takes. precision: of the file."""
    return math.ceil(RUNTIMES[device].loading_copies * _weights_bytes(file_bytes, precision, device))


def require_loadable(file_bytes: int, precision: str, memory: int, device: str) -> None:
    """Refuse a model file before it is loaded if loading alone would exceed the limit.

    precision: of the file; memory: bytes. Raises UsageError with the required memory.
    """
    need = base_bytes(device) + loading_bytes(file_bytes, precision, device)
    if need > memory:
        raise UsageError(
            f"loading the model alone takes up to {format_bytes(need)}, but this process may take "
            f"{format_bytes(memory)}. Raise --memory-limit"
        )


def require_fits(
    session: "Session", protocol: EvaluationProtocol, chunk: int, memory: int, **workload: int
) -> MemoryEstimate:
    """Return the memory estimate of a run if it stays within the limit; workload: see `estimate_memory`.

    Raises UsageError that states how much memory is needed, for what, and what to change.
    """
    need = estimate_memory(session, protocol, chunk, memory, **workload)
    if need.total <= memory:
        return need
    enough = sufficient_limit(lambda limit: estimate_memory(session, protocol, chunk, limit, **workload).total, memory)
    loading = need.total == need.loading
    of_views = need.parts["batches"] + need.parts["images"] > need.total // 2
    if loading or not of_views or protocol.crop is not None or session.circumstances.on_gpu:
        why, fix = "Loading the model needs most of it. " if loading else "", ""
    else:
        scale, longest = max(protocol.scales), protocol.long_side_cap
        why = f"A view of an image of 1:{longest} has {scale}x{scale * longest} pixels and cannot be split. "
        fix = ", or use smaller scales (--scales)"
    raise UsageError(
        f"--memory-limit {format_bytes(memory)}: protocol {protocol.name} takes up to {need}. "
        f"{why}Give {format_bytes(enough)} or more{fix}"
    )


def sufficient_limit(total: Callable[[int], int], memory: int) -> int:
    """Return a limit of at least `memory` bytes that is enough for the total within it, which grows more slowly."""
    while (need := total(memory)) > memory:
        memory = need
    return memory


def require_view_fits(session: "Session", protocol: EvaluationProtocol, image: tuple[int, int], available: int) -> None:
    """Refuse an image if a single view of it takes more memory than is available.

    image: height and width in pixels; available: bytes, see `evaluator.machine`. Raises UsageError with the required
    memory.
    """
    if protocol.crop is not None:
        return
    height, width = resized_size(*image, max(protocol.scales), protocol.long_side_cap, protocol.preparation)
    windows = math.prod(session.contract.window_grid(height, width))
    precision, device = session.circumstances.precision, session.placement.device
    need = batch_bytes(session.contract, height * width, windows, precision, device)
    if need > available:
        raise UsageError(
            f"a view of {height}x{width} pixels takes up to {format_bytes(need)} of memory, and this machine has "
            f"{format_bytes(available)}. Use a smaller scale"
        )


def _weights_bytes(file_bytes: int, precision: str, device: str) -> int:
    """Return the bytes of one copy of a file's weights.

    A GPU and OpenVINO's int8 keep the file's precision; all other CPU computation is in float32 (or bf16, from it).
    """
    if RUNTIMES[device].gpu or (precision, device) == ("int8", "openvino"):
        return file_bytes
    return {"fp32": 1, "fp16": 2, "int8": 4}[precision] * file_bytes


def _largest_batch(contract: ModelContract, protocol: EvaluationProtocol, rules: BatchRules) -> tuple[int, int]:
    """Return bounds of the pixels and the windows of any batch of a protocol's views.

    A view has the more windows per pixel, the larger it is: many small views reach the limit of pixels, and many large
    ones that of windows. The largest, of the longest image that is not capped, may exceed both, alone.
    """
    crop, cap, spare = protocol.crop, 1, 0
    if crop is None:  # the trunk rounds down: a side can grow by up to `spare` pixels without another window
        cap, spare = protocol.long_side_cap, contract.trunk_stride - 1
    sides = protocol.scales if crop is None else (crop,)
    pixels_per_window, windows_per_pixel = 0.0, 0.0
    for side in sides:
        square, longest = (math.prod(contract.window_grid(side, length)) for length in (side, cap * side))
        pixels_per_window = max(pixels_per_window, side * (side + spare) / square)
        windows_per_pixel = max(windows_per_pixel, longest / (side * max(side, cap * side - spare)))
    largest = max(sides)
    return (
        max(cap * largest**2, min(rules.max_pixels, math.ceil(rules.max_windows * pixels_per_window))),
        max(
            math.prod(contract.window_grid(largest, cap * largest)),
            min(rules.max_windows, math.ceil(rules.max_pixels * windows_per_pixel)),
        ),
    )
