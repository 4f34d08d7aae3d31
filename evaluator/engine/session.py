"""A model that can be run, on whichever device: the only way in which the rest of the program meets a runtime.

A session says what really runs it: asking for a device or a precision that does not come up is an error, never a
quiet run of something else.
"""

import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.contract import INPUTS, OUTPUTS, ModelContract, contract_from_metadata, how_to_write
from prelunet.evaluator.engine import onnx_runtime, openvino_runtime
from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.footprint import Runtime
from prelunet.evaluator.engine.memory import cpu_rules, gpu_rules, require_loading
from prelunet.evaluator.engine.model_metadata import stated_precision
from prelunet.evaluator.engine.runtime import LoadedModel, is_lost, lacks_memory, reason_of
from prelunet.evaluator.engine.trial import check_it_runs, run_largest
from prelunet.evaluator.errors import ContractError, DeviceLost, EnvironmentFault, OutOfMemory, UsageError
from prelunet.evaluator.files import sha256_of

Device = Literal["auto", "cpu", "openvino", "cuda"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
FloatArray = npt.NDArray[np.float32]

log = logging.getLogger(__name__)

# What a file of a precision can be computed in on a device; the first is the default.
_PRECISIONS: Mapping[tuple[str, str], tuple[Precision, ...]] = {
    ("cpu", "fp32"): ("fp32",),
    ("cpu", "fp16"): ("fp32",),  # of rounded weights: this provider drops the casts between layers
    ("openvino", "fp32"): ("fp32", "bf16"),
    ("openvino", "fp16"): ("fp32", "bf16"),
    ("cuda", "fp32"): ("fp32", "tf32"),
    ("cuda", "fp16"): ("fp16",),
}


@dataclass(frozen=True)
class Outputs:
    """What the graph gives for N canvases (docs/contract.md).

    scores, logits: float32 (N, K); windows: int64 (N, 2), the valid grid of each image;
    take_window_scores: brings the window scores from the device.
    """

    scores: FloatArray
    logits: FloatArray
    windows: npt.NDArray[np.int64]
    take_window_scores: Callable[[], FloatArray]

    @cached_property
    def window_scores(self) -> FloatArray:
        """Return each window's scores, float32 (N, rows, columns, K), 0 outside the valid grid."""
        return self.take_window_scores()


@dataclass(frozen=True)
class Circumstances:
    """Where a result comes from. provider: the runtime's own name of what runs; versions: package → version."""

    provider: str
    precision: str
    versions: Mapping[str, str]

    @property
    def on_gpu(self) -> bool:
        """Say whether a GPU computes."""
        return self.provider == onnx_runtime.CUDA

    def to_json(self) -> dict[str, Any]:
        """Return plain data for run.json and the wire."""
        return {"provider": self.provider, "precision": self.precision, "versions": dict(sorted(self.versions.items()))}

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.provider}, {self.precision} ({versions})"


@dataclass(frozen=True)
class Placement:
    """Where a model runs, and how.

    device: `cpu` (onnxruntime), `openvino` (the CPU too), `cuda`, or `auto` (CUDA where it comes up, else `cpu`).
    precision: what it computes in; None is the file's own. threads: on a CPU; 0 is one per core. gpu: which, from 0.
    memory: most bytes of main memory that the process takes, see `evaluator.engine.memory`; None is what is fastest.
    gpu_memory: most bytes of the runtime's arena on each GPU; None is what is fastest, as far as they are free.
    """

    device: Device = "auto"
    precision: Precision | None = None
    threads: int = 0
    gpu: int = 0
    memory: int | None = None
    gpu_memory: int | None = None


class Session:
    """An exported model, loaded. One thread computes on it at a time.

    placement: what was asked for, with the device that came up; rules: how batches are planned for it;
    model_bytes: of the file.
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
        self.placement = placement
        self.contract = contract
        self.model_sha256 = sha256
        self.circumstances = circumstances
        self.rules = rules
        self.model_bytes = model_bytes

    def run(self, images: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> Outputs:
        """Stage and compute N canvases at once; for callers that have nothing else to do meanwhile."""
        return self.compute(self.stage(images, sizes))

    def stage(self, images: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> Any:
        """Bring N canvases, uint8 (N, H, W, 3) RGB, to the device, for `compute`; any thread may.

        Image i fills the first sizes[i] = (height, width) pixels of its canvas. What lies outside is ignored.
        Raises UsageError for shapes that the graph would answer with nonsense: an image below `min_side`, a canvas
        beyond `max_side`, sizes that leave the canvas, or (in a file exported with --canvas exact) sizes that do not
        fill it.
        """
        check_canvas(self.contract, images, sizes)
        with self._device_errors():
            return self._loaded.stage(images, sizes)

    def compute(self, staged: Any) -> Outputs:
        """Run canvases that `stage` has brought; only the thread that owns the session may.

        Raises OutOfMemory when the device has too little memory, DeviceLost when it is gone for this process.
        """
        with self._device_errors():
            scores, logits, windows, take = self._loaded.compute(staged)

        def taken() -> FloatArray:
            with self._device_errors():  # what is brought later can fail as well
                found: FloatArray = take()
            return found

        return Outputs(scores, logits, windows, taken)

    @contextmanager
    def _device_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the runtime's own classes, and ours for calls of CUDA
            if is_lost(error):
                raise DeviceLost(
                    f"{self.circumstances.provider} gives nothing but errors from now on ({reason_of(error)}). "
                    "Start the program again; if it comes back, look at the device: nvidia-smi, dmesg"
                ) from error
            if not lacks_memory(error):
                raise
            option = "--gpu-memory-limit" if self.placement.device == "cuda" else "--memory-limit"
            raise OutOfMemory(
                f"{self.circumstances.provider} has too little memory for a batch ({reason_of(error)}). "
                f"Take smaller scales, end other programs, or make batches smaller: {option} of validate and bench"
            ) from error


def check_canvas(contract: ModelContract, images: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> None:
    """Check what the graph cannot: see `Session.run`."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape:
        raise UsageError(f"images should be uint8 (N, H, W, 3), not {images.dtype} {images.shape}")
    if sizes.dtype != np.int64 or sizes.shape != (len(images), 2):
        raise UsageError(f"sizes should be int64 ({len(images)}, 2), not {sizes.dtype} {sizes.shape}")
    height, width = images.shape[1:3]
    if max(height, width) > contract.max_side:
        raise UsageError(f"a canvas of {height}x{width} is larger than this model's {contract.max_side} pixels")
    if sizes.min() < contract.min_side:
        raise UsageError(f"an image side of {sizes.min()} is below this model's crop of {contract.min_side} pixels")
    if (sizes > (height, width)).any():
        raise UsageError(f"sizes {sizes.max(axis=0).tolist()} leave the canvas of {height}x{width}")
    if contract.canvas == "exact" and (sizes != (height, width)).any():
        raise UsageError(
            "this file was exported with --canvas exact: every image must fill its canvas. "
            "For images of different sizes export with: --canvas ragged"
        )


def open_session(
    path: Path, device: Device = "auto", *, precision: Precision | None = None, threads: int = 0
) -> Session:
    """Load a model file on a device; see `open_placed`."""
    return open_placed(path, Placement(device, precision, threads))


def open_placed(path: Path, placement: Placement, *, for_many: bool = False, digest: str | None = None) -> Session:
    """Load a model file where it is asked for; its `circumstances` say what came up.

    On a GPU it runs once before it counts as loaded, in float32 with its scores compared; where it does not run, `auto`
    goes on to the CPU with a warning. for_many: many images will follow, so that the largest batch is run too;
    digest: SHA-256 of the file, where the caller knows it.

    Raises ContractError when the file is not ours or too new, EnvironmentFault when the device does not come up or
    cannot compute in that precision, UsageError when the file cannot be read or no such device or precision exists.
    """
    for what, value, known in (
        ("device", placement.device, Device), ("precision", placement.precision or "fp32", Precision)
    ):  # fmt: skip
        if value not in get_args(known):
            raise UsageError(f"no {what} '{value}'. There are: {', '.join(get_args(known))}")
    digest = digest or sha256_of(path)
    if placement.device != "auto":
        return _open(path, placement, digest, for_many=for_many)
    if onnx_runtime.knows_cuda():
        try:
            return _open(path, replace(placement, device="cuda"), digest, for_many=for_many)
        except EnvironmentFault as error:
            log.warning("device auto: running on the CPU, because CUDA did not come up: %s", error)
    return _open(path, replace(placement, device="cpu"), digest, for_many=for_many)


def _open(path: Path, placement: Placement, digest: str, *, for_many: bool) -> Session:
    """Load a model file on this very device and see that it runs there."""
    device, file_bytes = placement.device, path.stat().st_size
    if device != "cuda" and placement.gpu_memory is not None:
        raise UsageError(f"--gpu-memory-limit: the model runs on a CPU (--device {device}). See --memory-limit")
    runtime: Runtime = "openvino" if device == "openvino" else "cuda" if device == "cuda" else "cpu"
    if stated := stated_precision(path):  # then what cannot be is told before a gigabyte is loaded
        _running(device, stated, placement.precision, path)
        if placement.memory is not None:
            require_loading(file_bytes, stated, placement.memory, runtime)
    loaded, arena = _load(path, placement)
    contract = contract_from_metadata(loaded.metadata, str(path))
    _check_interface(loaded, contract, path)
    running = _running(device, contract.precision, placement.precision, path)
    circumstances = Circumstances(loaded.provider, running, _versions(loaded.packages))
    if device == "cuda":
        rules = gpu_rules(contract, arena, file_bytes=file_bytes, precision=running)
    else:
        rules = cpu_rules(contract, placement.memory, file_bytes=file_bytes, runtime=runtime, precision=running)
    session = Session(loaded, contract, digest, circumstances, placement, rules=rules, model_bytes=file_bytes)
    if device == "cuda" or for_many:
        check_it_runs(session, path.name)  # on a GPU, loading does not even tell whether cuDNN is there
    if device == "cuda" and for_many:
        run_largest(session, path.name)
    return session


def _load(path: Path, placement: Placement) -> tuple[LoadedModel, int | None]:
    """Load the file on this very device; returns on a GPU how many bytes its arena may have."""
    precision, threads = placement.precision, placement.threads
    if placement.device == "cuda":
        tf32 = precision == "tf32"
        return onnx_runtime.load_on_cuda(path, gpu=placement.gpu, tf32=tf32, memory=placement.gpu_memory)
    if placement.device == "openvino":
        return openvino_runtime.load(path, "bf16" if precision == "bf16" else "fp32", threads=threads), None
    return onnx_runtime.load_on_cpu(path, threads=threads), None


def _running(device: Device, held: str, asked: Precision | None, path: Path) -> Precision:
    """Return what the model computes in; UsageError when that is not what was asked for. held: what the file holds."""
    possible = _PRECISIONS[device, held]
    if asked is not None and asked not in possible:
        others = [f"--device {other}" for (other, file), known in _PRECISIONS.items()
                  if file == held and asked in known]  # fmt: skip
        needed = " or ".join(others) or "--device cuda and another file"
        export = "" if others else f": prelunet export --precision {'fp16' if asked == 'fp16' else 'fp32'}"
        mend = f"{asked} needs {needed}{export}"
        raise UsageError(
            f"--precision {asked}: {path} holds {held}, which --device {device} computes in "
            f"{' or '.join(possible)}. {mend}"
        )
    return asked or possible[0]


def _check_interface(loaded: LoadedModel, contract: ModelContract, path: Path) -> None:
    """Refuse a file whose inputs or outputs are not those of the contract, or whose classes are not the graph's."""
    mend = how_to_write(str(path))
    inputs, outputs = loaded.inputs, loaded.outputs
    if inputs != INPUTS or outputs != OUTPUTS:
        raise ContractError(
            f"{path}: inputs {inputs} and outputs {outputs}, but the contract has {INPUTS} and {OUTPUTS}. {mend}"
        )
    # An adopted net states its crop in the graph too; one of ours leaves height and width open.
    sides = [side for side in loaded.image_shape[1:3] if isinstance(side, int)]
    if sides and {*sides, contract.crop, contract.max_side} != {contract.crop}:
        raise ContractError(
            f"{path}: its graph takes images of {'x'.join(map(str, sides))} pixels and nothing else, but it states a "
            f"crop of {contract.crop} and sides up to {contract.max_side}. {mend}"
        )
    classes = loaded.scores_shape[-1]
    if classes != len(contract.classes):
        raise ContractError(f"{path}: {len(contract.classes)} classes are listed, but the graph has {classes}. {mend}")


def _versions(packages: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that can change a score."""
    try:
        own = importlib.metadata.version("prelunet")
    except importlib.metadata.PackageNotFoundError:  # the benchmarks run from a checkout on borrowed machines
        own = "not installed"
    return {
        "prelunet": own,
        **packages,
        "numpy": np.__version__,
        "pillow": importlib.metadata.version("pillow"),
        "python": ".".join(map(str, sys.version_info[:3])),
    }
