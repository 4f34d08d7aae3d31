"""A loaded model on any device: the rest of the program reaches a runtime only through this module.

A session states what really runs it. An unavailable device or precision is an error; nothing falls back silently.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NoReturn

import numpy as np
from msgspec import Struct

from ..arrays import Float32Array, Int64Array, UInt8Array
from ..cli_option import option
from ..contract import ModelContract
from ..errors import DeviceLost, OutOfMemory, UsageError
from ..machine import parse_memory
from .batching import BatchRules
from .runtimes import RUNTIMES, Device
from .runtimes.base import LoadedModel, Precision, error_summary, is_device_lost, is_out_of_memory

log = logging.getLogger(__name__)
_GPU_PROVIDERS = {runtime.provider for runtime in RUNTIMES.values() if runtime.gpu}


class Outputs(Struct, frozen=True, dict=True):
    """Outputs of the graph for N canvases (docs/formats.md).

    scores, logits: float32 (N, K); windows: int64 (N, 2), the valid grid of each image;
    fetch_window_scores: copies the window scores from the device.
    """

    scores: Float32Array
    logits: Float32Array
    windows: Int64Array
    fetch_window_scores: Callable[[], Float32Array]

    @cached_property
    def window_scores(self) -> Float32Array:
        """Return each window's scores, float32 (N, rows, columns, K), 0 outside the valid grid."""
        return self.fetch_window_scores()


@dataclass(frozen=True)
class Circumstances:
    """How a result was computed. provider: the runtime's name for it; versions: package → version."""

    provider: str
    precision: str
    versions: Mapping[str, str]

    @property
    def on_gpu(self) -> bool:
        return self.provider in _GPU_PROVIDERS

    def to_json(self) -> dict[str, Any]:
        return {"provider": self.provider, "precision": self.precision, "versions": dict(sorted(self.versions.items()))}

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.provider}, {self.precision} ({versions})"


@dataclass(frozen=True)
class Placement:
    """Where and how a model runs.

    gpu: index, from 0; memory: limit of the process's main memory in bytes, see `evaluator.engine.memory`, None for the
    fastest setting; gpu_memory: limit of the runtime's arenas on each GPU in bytes, None for the fastest setting that
    free memory allows; prepared_shapes: on a GPU, the most shapes of batches that may alternate without a change, each
    with a copy of the weights; spinning: whether onnxruntime's threads on a CPU wait for each other without sleeping,
    which is faster unless other processes compute on the same cores.
    """

    HELP_GROUP: ClassVar[str] = "Device"
    device: Device = option(
        "auto",
        "Device that runs the model: cpu (onnxruntime), openvino or ncnn (also the CPU, faster for large nets), "
        "cuda, or auto: cuda if available, else openvino or cpu by a fixed rule (docs/performance.md).",
    )
    precision: Precision | None = option(
        None,
        "Precision of the computation: bf16 (openvino), tf32 (cuda), fp32; or fp16 (cuda) and int8 (openvino), for "
        "files exported in it.",
        default="the file's if the device supports it, else fp32",
    )
    threads: int = option(
        0, "CPU threads for the model, and in validate and bench for decoding; 0 uses one per core.", min=0, max=1024
    )
    gpu: int = 0
    memory: int | None = option(
        None,
        "Limit of main memory, e.g. 4G or 900M; a single very large image may exceed it.",
        flag="memory-limit",
        metavar="SIZE",
        default="no limit, tuned for speed",
        kind=str | None,
        parse=parse_memory,
    )
    gpu_memory: int | None = option(
        None,
        "With cuda: limit of the memory for weights and batches on each GPU, e.g. 6G.",
        flag="gpu-memory-limit",
        metavar="SIZE",
        default="the free memory, tuned for speed",
        kind=str | None,
        parse=partial(parse_memory, option="--gpu-memory-limit"),
    )
    prepared_shapes: int = 1
    spinning: bool = True


class Session:
    """A loaded model. Threads may share it; it computes for one at a time, except in lanes.

    placement: as requested, with the device that was chosen; rules: how batches are planned; model_bytes: of the file;
    lanes: number of batches that it can compute side by side, see `add_lanes`; prepared_shapes: see `LoadedModel`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        contract: ModelContract,
        sha256: str,
        circumstances: Circumstances,
        placement: Placement,
        *,
        rules: BatchRules,
        model_bytes: int = 0,
    ):
        self._loaded = loaded
        self._computing = threading.Lock()
        self.placement = placement
        self.contract = contract
        self.model_sha256 = sha256
        self.circumstances = circumstances
        self.rules = rules
        self.model_bytes = model_bytes
        self.lanes = 1
        self.prepared_shapes = loaded.prepared_shapes
        self._one_thread: LoadedModel | None = None

    def add_lanes(self, loaded: LoadedModel, lanes: int) -> None:
        """Allow batches side by side. loaded: the same file on a runtime that uses no thread but the caller's."""
        self._one_thread, self.lanes = loaded, lanes

    def run(self, images: UInt8Array, sizes: Int64Array, *, in_lane: bool = False) -> Outputs:
        """Stage and compute N canvases in one call, for callers that have nothing else to do meanwhile."""
        return self.compute(self.stage(images, sizes), in_lane=in_lane)

    def stage(self, images: UInt8Array, sizes: Int64Array) -> Any:
        """Copy N canvases, uint8 (N, H, W, 3) RGB, to the device, for `compute`. Any thread may call this.

        Image i fills the first sizes[i] = (height, width) pixels of its canvas. Pixels outside it are ignored.
        Raises UsageError for shapes that would give meaningless scores: an image below `min_side`, a canvas beyond
        `max_side`, sizes larger than the canvas, or (in a file exported with --canvas exact) sizes that do not fill it.
        """
        check_canvas(self.contract, images, sizes)
        try:
            return self._loaded.stage(images, sizes)
        except Exception as error:
            self._raise_device_error(error)

    def compute(self, staged: Any, *, in_lane: bool = False) -> Outputs:
        """Run staged canvases, after those of other threads; in a lane at the same time, on this thread alone.

        Raises OutOfMemory when the device has too little memory, DeviceLost when this process can no longer use it.
        """
        try:
            if in_lane:
                assert self._one_thread is not None, "no lanes were added"
                scores, logits, windows, fetch = self._one_thread.compute(staged)
            else:
                with self._computing:
                    scores, logits, windows, fetch = self._loaded.compute(staged)
        except Exception as error:
            self._raise_device_error(error)
        return Outputs(scores, logits, windows, partial(self._fetched, fetch))

    def _fetched(self, fetch: Callable[[], Float32Array]) -> Float32Array:
        try:
            return fetch()
        except Exception as error:
            self._raise_device_error(error)

    def _raise_device_error(self, error: Exception) -> NoReturn:
        """Raise an error of the device; any other one, which may be a bug, as it is."""
        if is_device_lost(error):  # errors of the runtime's own classes, and ours for CUDA calls
            raise DeviceLost(
                f"{self.circumstances.provider} failed and returns only errors from now on ({error_summary(error)}). "
                "Restart the program. If this happens again, check the device with nvidia-smi and dmesg"
            ) from error
        if is_out_of_memory(error):
            option = "--gpu-memory-limit" if self.circumstances.on_gpu else "--memory-limit"
            raise OutOfMemory(
                f"{self.circumstances.provider} has too little memory for a batch ({error_summary(error)}). "
                f"Use smaller scales, stop other programs, or make batches smaller with {option} of validate and bench"
            ) from error
        raise error


def check_canvas(contract: ModelContract, images: UInt8Array, sizes: Int64Array) -> None:
    """Check the shapes that the graph cannot check itself; see `Session.stage`."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape:
        raise UsageError(f"images should be uint8 (N, H, W, 3), not {images.dtype} {images.shape}")
    if sizes.dtype != np.int64 or sizes.shape != (len(images), 2):
        raise UsageError(f"sizes should be int64 ({len(images)}, 2), not {sizes.dtype} {sizes.shape}")
    height, width = images.shape[1:3]
    if max(height, width) > contract.max_side:
        raise UsageError(f"a canvas of {height}x{width} is larger than this model's {contract.max_side} pixels")
    different = set(map(tuple, sizes.tolist()))  # faster than numpy for the few of a batch
    if (least := min(map(min, different))) < contract.min_side:
        raise UsageError(f"an image side of {least} is below this model's crop of {contract.min_side} pixels")
    if any(rows > height or columns > width for rows, columns in different):
        raise UsageError(f"sizes up to {sizes.max(axis=0).tolist()} exceed the canvas of {height}x{width}")
    if contract.canvas == "exact" and different != {(height, width)}:
        raise UsageError(
            "this file was exported with --canvas exact, or runs without masks, as in ncnn, and in OpenVINO if the net "
            "is large: every image must fill its canvas. "
            "For images of different sizes, export with --canvas ragged and use another --device"
        )
