"""How much memory a run takes, told from the model file's metadata alone, and batches that stay within a limit.

What takes memory, for model A in float32 and one view of 480x1920 pixels as an example:

    base       Python and its libraries, the runtime                                                0.1 GB
    weights    the file's, as the runtime keeps them; while it loads them, twice the file            1.0 to 1.5 GB
    batch      maps of the trunk, or every window's pooled features (129 kB each, 1,819 windows)     0.6 GB
    images     views of the part of a chunk that is computed, and of the part that is prepared      0.8 GB

Nothing here depends on the number of images. The estimates are upper bounds: docs/performance.md compares them with
what was measured.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from evaluator.contract import ModelContract
from evaluator.engine.batching import MAX_PIXELS, MAX_WINDOWS, MOST, BatchRules
from evaluator.engine.footprint import WORKSPACE, Runtime, batch_bytes, bytes_at, operations_a_pixel, weights_bytes
from evaluator.errors import UsageError
from evaluator.imaging.resize import resized_size
from evaluator.protocols import Protocol

# Measured on models A and C (712 and 1,323 MB) with onnxruntime 1.31.1 and OpenVINO 2026.4.1, on Linux.
LOADING = 2.2  # peak while a file is loaded, in sizes of the file: 2.04 to 2.13
SETTLED: Mapping[Runtime, float] = {"cpu": 1.4, "openvino": 2.2, "cuda": 2.2}  # afterwards: 1.30 to 1.38, 2.02 to 2.10
BASE = 2**27  # bytes: 60 to 75 MB of Python and libraries, 46 to 57 MB more when a runtime is there
PART_BYTES = 3 * 2**27  # of the views of one part, if every image were as elongated as the protocol lets it be
# Of the host, for a GPU: the 1,024 images of a chunk in one part change its canvases four times less often.
GPU_PART_BYTES = 6 * 2**30
PART_SHARE = 16  # a part takes at most this part of a limit
DECODING = 2**27  # bytes of images while they are decoded: 45 Mpixel; one of the largest that are allowed has 64

# Assumptions about a GPU, not measured here.
GPU_BATCH_BYTES = 6 * 2**30  # of a batch unless a limit is lower: some 10 Mpixel of net C, far more than fill a GPU
GPU_SWITCH_SECONDS = 0.020  # in which the CUDA provider rebuilds the plans of about 20 convolutions
GPU_RATE: Mapping[str, float] = {"fp16": 400e12, "tf32": 200e12, "fp32": 45e12}  # operations per second of a whole net
GPU_CANVAS_CELLS = 2  # a canvas grows in cells of the feature map: 32 px for A, B, C; 256, 384 and 480 need no rounding

MOST_MEMORY = 2**60
_UNITS = "MGT"
_AMOUNT = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,6})?)(?P<unit>[MGT])(?:iB|(?P<decimal>B))?", re.ASCII)


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a process takes at most.

    loading: while the file is loaded, when there are no batches and images yet; weights: afterwards.
    """

    base: int
    loading: int
    weights: int
    batch: int
    images: int

    @property
    def total(self) -> int:
        """Return the most that is taken at any time."""
        return self.base + max(self.loading, self.weights + self.batch + self.images)

    def __str__(self) -> str:
        parts = {key: in_bytes(getattr(self, key)) for key in ("base", "weights", "batch", "images")}
        listed = ", ".join(f"{key} {text}" for key, text in parts.items())
        return f"{in_bytes(self.total)} ({listed}; {in_bytes(self.loading)} while loading the weights)"


def rules_within(
    contract: ModelContract, budget: int, most: BatchRules, value_bytes: int = 4, runtime: Runtime = "cpu"
) -> BatchRules:
    """Return rules whose batches take no more than `budget` bytes.

    most: rules for when memory is no matter, of which both limits shrink alike. An image that alone exceeds them is a
    batch all the same: see `require_fits`.
    """
    needed = bytes_at(contract, most.max_pixels, most.max_windows, value_bytes, runtime)
    share = (budget - WORKSPACE) / (needed - WORKSPACE)
    if share >= 1:
        return most
    windows, pixels = (max(1, int(share * limit)) for limit in (most.max_windows, most.max_pixels))
    return replace(most, max_windows=windows, max_pixels=pixels)


def cpu_rules(
    contract: ModelContract, memory: int | None, *, file_bytes: int = 0, runtime: Runtime = "cpu"
) -> BatchRules:
    """Return the rules of a CPU: those that are usual, or smaller ones.

    memory: most bytes of the process, or None; file_bytes: of the model file, 0 for what its architecture tells;
    runtime: `cpu` (onnxruntime) or `openvino`.
    """
    if memory is None:
        return BatchRules()
    budget = memory - BASE - _settled(contract, file_bytes, runtime) - _images_bytes(memory)
    return rules_within(contract, budget, BatchRules(), runtime=runtime)


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
    switch = int(GPU_SWITCH_SECONDS * GPU_RATE[precision] / operations_a_pixel(contract))
    budget = GPU_BATCH_BYTES
    if memory is not None:
        budget = min(budget, memory - _settled(contract, file_bytes, "cuda"))
    most = BatchRules(step, 16 * MAX_WINDOWS, 16 * MAX_PIXELS, min(switch, MOST))
    return rules_within(contract, budget, most, 2 if precision == "fp16" else 4, "cuda")


def part_within(protocol: Protocol, chunk: int, memory: int | None, *, gpu: bool = False) -> int:
    """Return how many images of a chunk are prepared and computed at a time.

    memory: most bytes of the process, or None; with gpu the limit is the GPU's and does not matter here.

    A function of the protocol and the limit and of nothing else: in which company an image is computed can move the
    last bit of its scores, so that a chunk must be cut alike wherever and whenever it is evaluated.
    """
    most = GPU_PART_BYTES if gpu else PART_BYTES
    if memory is not None and not gpu:
        most = min(most, memory // PART_SHARE)
    parts = -(-chunk // max(1, most // image_bytes(protocol)))
    return -(-chunk // parts)


def image_bytes(protocol: Protocol) -> int:
    """Return the bytes of all views of one image that is as elongated as the protocol lets it be."""
    if protocol.crop is not None:
        return 3 * len(protocol.views) * protocol.crop**2
    return 3 * sum(scale * scale * protocol.long_side_cap for scale in protocol.scales)  # mirrored ones share them


def memory_need(
    contract: ModelContract,
    protocol: Protocol,
    chunk: int,
    memory: int | None,
    *,
    file_bytes: int = 0,
    runtime: Runtime = "cpu",
) -> MemoryNeed:
    """Return what evaluating chunks of images takes at most, on a CPU. Their number does not matter.

    memory: the limit for which batches and parts are planned, or None; file_bytes, runtime: see `cpu_rules`.
    """
    rules = cpu_rules(contract, memory, file_bytes=file_bytes, runtime=runtime)
    return MemoryNeed(
        base=BASE,
        loading=math.ceil(LOADING * (file_bytes or weights_bytes(contract))),
        weights=_settled(contract, file_bytes, runtime),
        batch=largest_batch_bytes(contract, protocol, rules, runtime),
        images=2 * part_within(protocol, chunk, memory) * image_bytes(protocol) + DECODING,
    )


def largest_batch_bytes(contract: ModelContract, protocol: Protocol, rules: BatchRules, runtime: Runtime) -> int:
    """Return what the largest batch of a protocol's views takes in float32, up to the longest image that is not capped.

    Lengths are tried in steps of a cell of the feature map.
    """
    found = 0
    for height, width in _view_sizes(contract, protocol):
        rows, columns = contract.window_grid(height, width)
        limits = rules.max_windows // max(1, rows * columns), rules.max_pixels // (height * width)
        found = max(found, batch_bytes(contract, max(1, min(limits)), height, width, runtime=runtime))
    return found


def _view_sizes(contract: ModelContract, protocol: Protocol) -> list[tuple[int, int]]:
    """Return height and width of the views of square to long images, upright ones left out: they take the same."""
    if protocol.crop is not None:
        return [(protocol.crop, protocol.crop)]
    longest = protocol.long_side_cap
    return [
        (scale, min(width, longest * scale))
        for scale in protocol.scales
        for width in range(scale, longest * scale + contract.trunk_stride, contract.trunk_stride)
    ]


def require_fits(
    contract: ModelContract,
    protocol: Protocol,
    chunk: int,
    memory: int,
    *,
    file_bytes: int = 0,
    runtime: Runtime = "cpu",
) -> MemoryNeed:
    """Return what a run takes within a limit (see `memory_need`), if that can be kept.

    Raises UsageError that says how much is needed, for what, and what to change.
    """
    need = enough = memory_need(contract, protocol, chunk, memory, file_bytes=file_bytes, runtime=runtime)
    if need.total <= memory:
        return need
    given = memory
    while enough.total > given:  # a larger limit lets parts grow by an eighth of it, so this ends
        given = enough.total
        enough = memory_need(contract, protocol, chunk, given, file_bytes=file_bytes, runtime=runtime)
    loading = need.total == need.base + need.loading
    if loading or protocol.crop is not None:
        why, mend = "Loading the model takes the most of it. " if loading else "", ""
    else:
        scale, longest = max(protocol.scales), protocol.long_side_cap
        why = f"A view of an image of 1:{longest} has {scale}x{scale * longest} pixels and cannot be divided. "
        mend = ", or take smaller scales (--scales)"
    raise UsageError(
        f"--memory-limit {in_bytes(memory)}: protocol {protocol.name} takes up to {need}. "
        f"{why}Give {in_bytes(given)} or more{mend}"
    )


def require_room(contract: ModelContract, protocol: Protocol, image: tuple[int, int], available: int) -> None:
    """Refuse an image of which one view alone takes more than there is.

    image: height and width in pixels; available: bytes, see `machine_memory`. Raises UsageError that says how much.
    """
    if protocol.crop is not None:
        return
    height, width = resized_size(*image, max(protocol.scales), protocol.long_side_cap)
    need = batch_bytes(contract, 1, height, width, runtime="openvino")  # the larger of both runtimes
    if need > available:
        raise UsageError(
            f"a view of {height}x{width} pixels takes up to {in_bytes(need)} of memory, and this machine has "
            f"{in_bytes(available)}. Take a smaller scale"
        )


def parse_memory(text: str | None) -> int | None:
    """Read an amount of memory as bytes: 900M, 6G or 1.5GiB in powers of 1024, 6GB in powers of 1000; None for None.

    Raises UsageError for anything else, so that 6 or 6Gb is not taken for something that was not meant.
    """
    if text is None:
        return None
    found = _AMOUNT.fullmatch(text)
    value = 0
    if found:
        power = _UNITS.index(found["unit"]) + 2
        value = int(float(found["number"]) * (1000 if found["decimal"] else 1024) ** power)
    if not found or not 1 <= value <= MOST_MEMORY:
        raise UsageError(
            f"--memory-limit {text}: not an amount of memory. Write it with its unit: 900M, 6G or 1.5GiB in powers of "
            "1024, 6GB in powers of 1000"
        )
    return value


def in_bytes(value: int) -> str:
    """Return an amount of memory to three digits, in the units that `parse_memory` reads: 1.17G. Rounded up."""
    for power, unit in reversed(list(enumerate(_UNITS, 2))):
        if value >= 1024**power or power == 2:
            amount = value / 1024**power
            digits = 2 if amount <= 9.99 else 1 if amount <= 99.9 else 0
            return f"{math.ceil(amount * 10**digits) / 10**digits:.{digits}f}{unit}"
    raise AssertionError("there is a unit for everything")


def machine_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can have: the machine's, or the limit of its control group when lower.

    root: where /proc and /sys are found. Groups of version 1 and 2 are read, and those above them, whose limits hold
    too; as seen in a container, the group's own folder may be the root of the tree.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [physical]
    for file in _limit_files(root):
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():  # else `max`: none
            limits.append(int(text))
    return min(limits)


def _limit_files(root: Path) -> list[Path]:
    """Return the files that can hold this process's limits."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        files += [base.joinpath(*parts[:depth], name) for depth in range(len(parts) + 1)]
    return files


def _settled(contract: ModelContract, file_bytes: int, runtime: Runtime) -> int:
    """Return what the weights take once they are loaded."""
    return math.ceil(SETTLED[runtime] * (file_bytes or weights_bytes(contract)))


def _images_bytes(memory: int) -> int:
    """Return what two parts of images and those in the decoders take within a limit."""
    return 2 * min(PART_BYTES, memory // PART_SHARE) + DECODING
