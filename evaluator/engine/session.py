"""The model in a runtime. Only this module imports onnxruntime.

A session says what really runs it: asking for CUDA where CUDA does not come up is an error, never a CPU run.
"""

import importlib.metadata
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from evaluator.contract import INPUTS, OUTPUTS, ModelContract, contract_from_metadata, how_to_write
from evaluator.errors import ContractError, EnvironmentFault, UsageError, how_to_install
from evaluator.files import sha256_of

Device = Literal["auto", "cpu", "cuda"]
FloatArray = npt.NDArray[np.float32]

log = logging.getLogger(__name__)

_RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")  # three distributions, one import package

# HEURISTIC: the other searches rebuild every convolution's plan for 100-300 ms at each change of shape. NHWC is the
# layout of the tensor cores, and bias fusion works in it only. TF32 off: fp32 is the reference precision.
_CUDA_OPTIONS = {
    "cudnn_conv_algo_search": "HEURISTIC",
    "prefer_nhwc": "1",
    "fuse_conv_bias": "1",
    "use_tf32": "0",
    "arena_extend_strategy": "kNextPowerOfTwo",
}


_LONGEST_REASON, _REASON_HEAD = 400, 120  # characters of what the runtime says; the cause stands at its end
# `/path/file.cc:91 type name(arguments) const`, where parentheses may stand inside of parentheses.
_SOURCE_PLACE = re.compile(
    r"[\w./+-]*\.(?:cc|h|cpp|hpp|cu|cuh):\d+ "
    r"(?:[\w:<>,&*~ ]*::[\w<>~]+(?:\(\))?\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])?|\w+)"
)


@dataclass(frozen=True)
class Outputs:
    """What the graph gives for N canvases (docs/contract.md).

    scores, logits: float32 (N, K); windows: int64 (N, 2), the valid grid of each image;
    window_scores: float32 (N, rows, columns, K), 0 outside the valid grid.
    """

    scores: FloatArray
    logits: FloatArray
    windows: npt.NDArray[np.int64]
    window_scores: FloatArray


@dataclass(frozen=True)
class Circumstances:
    """Where a result comes from. provider: the runtime's own name of what runs; versions: package → version."""

    provider: str
    precision: str
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for run.json and the wire."""
        return {"provider": self.provider, "precision": self.precision, "versions": dict(sorted(self.versions.items()))}

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.provider}, {self.precision} ({versions})"


class Session:
    """An exported model, loaded. One thread runs it at a time."""

    def __init__(self, runtime_session: Any, contract: ModelContract, sha256: str, circumstances: Circumstances):
        self._session = runtime_session
        self.contract = contract
        self.model_sha256 = sha256
        self.circumstances = circumstances

    def run(self, images: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> Outputs:
        """Run N canvases, uint8 (N, H, W, 3) RGB, of which image i fills the first sizes[i] = (height, width) pixels.

        What lies outside `sizes` is ignored. Raises UsageError for shapes that the graph would answer with nonsense:
        an image below `min_side`, a canvas beyond `max_side`, sizes that leave the canvas, or (in a file exported
        with --canvas exact) sizes that do not fill it.
        """
        check_canvas(self.contract, images, sizes)
        return Outputs(*self._session.run(OUTPUTS, {"images": images, "sizes": sizes}))


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


def open_session(path: Path, device: Device = "auto", *, threads: int = 0) -> Session:
    """Load a model file on a device.

    device: `cpu`, `cuda`, or `auto` (CUDA where it comes up, else the CPU; `circumstances` says which).
    threads: of the CPU provider; 0 is one per core.
    Raises ContractError when the file is not ours or too new, EnvironmentFault when the device does not come up,
    UsageError when the file cannot be read.
    """
    if device not in get_args(Device):
        raise UsageError(f"no device '{device}'. There are: {', '.join(get_args(Device))}")
    runtime = _import_runtime()
    digest = sha256_of(path)
    if device != "cpu" and "CUDAExecutionProvider" in runtime.get_available_providers():
        try:
            return _open(runtime, path, digest, "CUDAExecutionProvider", threads)
        except EnvironmentFault as error:
            if device == "cuda":
                raise
            log.warning("device auto: running on the CPU, because CUDA did not come up: %s", error)
    elif device == "cuda":
        raise EnvironmentFault(
            f"--device cuda: this environment has an onnxruntime that knows no CUDA. "
            f"In a fresh environment: {how_to_install('gpu')}"
        )
    return _open(runtime, path, digest, "CPUExecutionProvider", threads)


def _open(runtime: ModuleType, path: Path, digest: str, provider: str, threads: int) -> Session:
    """Create the runtime's session on exactly this provider and read the contract."""
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # the runtime's own lines would only repeat what our error says
    cuda = provider == "CUDAExecutionProvider"
    if cuda:
        options.intra_op_num_threads = 1
        options.enable_mem_pattern = False  # one plan per shape would be kept for ever
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if hasattr(runtime, "preload_dlls"):
            runtime.preload_dlls()
    else:
        options.intra_op_num_threads = threads
    try:
        session = runtime.InferenceSession(
            os.fspath(path), options, providers=[(provider, _CUDA_OPTIONS)] if cuda else [provider]
        )
        session.disable_fallback()
    except Exception as error:
        raise _load_error(error, path, cuda=cuda) from error
    if session.get_providers()[0] != provider:
        raise EnvironmentFault(
            f"--device {'cuda' if cuda else 'cpu'}: {provider} did not come up; the runtime offers "
            f"{session.get_providers()[0]} instead. Check the driver and the CUDA libraries (prelunet needs CUDA 13)"
        )
    contract = contract_from_metadata(session.get_modelmeta().custom_metadata_map, str(path))
    _check_interface(session, contract, path)
    precision = contract.precision
    return Session(session, contract, digest, Circumstances(provider, precision, _versions(runtime)))


class PlainNet:
    """Any ONNX file on the CPU just as it stands, without our contract: what an adopted net is compared with.

    Raises ContractError with the runtime's words when it cannot be loaded or run, EnvironmentFault when memory lacks.
    """

    def __init__(self, path: Path) -> None:
        runtime = _import_runtime()
        self._path = path
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # as in `_open`
        with self._errors("load"):
            self._session = runtime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])

    def run(self, feeds: Mapping[str, npt.NDArray[Any]], output: str) -> npt.NDArray[Any]:
        """Return one output for these inputs, by name."""
        with self._errors("run"):
            (found,) = self._session.run([output], dict(feeds))
        result: npt.NDArray[Any] = found
        return result

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the runtime's own classes have no common base
            text = reason_of(error)
            if _lacks_memory(error, text):
                raise EnvironmentFault(f"{self._path}: too little memory left to {what} this net ({text})") from error
            raise ContractError(f"{self._path}: onnxruntime cannot {what} this net ({text})") from error


def reason_of(error: Exception) -> str:
    """Return the runtime's words for a failure in one line, without the place in its own source; the end is kept."""
    text = " ".join(_SOURCE_PLACE.sub(" ", " ".join(str(error).split())).split())
    if len(text) > _LONGEST_REASON:
        text = f"{text[:_REASON_HEAD]} … {text[_REASON_HEAD - _LONGEST_REASON :]}"
    return text or type(error).__name__


def _load_error(error: Exception, path: Path, *, cuda: bool) -> ContractError | EnvironmentFault:
    """Say whose fault a failed load is. The runtime's exception classes are named after its status codes."""
    kind, text = type(error).__name__, reason_of(error)
    if kind in {"InvalidProtobuf", "InvalidGraph", "NoModel", "InvalidArgument", "NotImplemented"}:
        return ContractError(
            f"{path}: not an ONNX model that can be loaded ({text}). "
            "Write one with: prelunet export CHECKPOINT -o FILE (from a classifier of another origin: prelunet adopt)"
        )
    if _lacks_memory(error, text):
        return EnvironmentFault(f"{path}: this machine has too little memory left to load it ({text})")
    if cuda:
        return EnvironmentFault(f"--device cuda: {path} could not be loaded on the GPU ({text})")
    return ContractError(f"{path}: could not be loaded ({kind}: {text}). {how_to_write(str(path))}")


def _lacks_memory(error: Exception, text: str) -> bool:
    return isinstance(error, MemoryError) or "bad_alloc" in text or "allocate memory" in text


def _check_interface(session: Any, contract: ModelContract, path: Path) -> None:
    """Refuse a file whose inputs or outputs are not those of the contract, or whose classes are not the graph's."""
    mend = how_to_write(str(path))
    inputs = tuple(value.name for value in session.get_inputs())
    outputs = tuple(value.name for value in session.get_outputs())
    if inputs != INPUTS or outputs != OUTPUTS:
        raise ContractError(
            f"{path}: inputs {inputs} and outputs {outputs}, but the contract has {INPUTS} and {OUTPUTS}. {mend}"
        )
    # An adopted net states its crop in the graph too; one of ours leaves height and width open.
    sides = [side for side in session.get_inputs()[0].shape[1:3] if isinstance(side, int)]
    if sides and {*sides, contract.crop, contract.max_side} != {contract.crop}:
        raise ContractError(
            f"{path}: its graph takes images of {'x'.join(map(str, sides))} pixels and nothing else, but it states a "
            f"crop of {contract.crop} and sides up to {contract.max_side}. {mend}"
        )
    classes = session.get_outputs()[0].shape[-1]
    if classes != len(contract.classes):
        raise ContractError(f"{path}: {len(contract.classes)} classes are listed, but the graph has {classes}. {mend}")


def _import_runtime() -> ModuleType:
    """Import onnxruntime, with one clear message for each way in which it can be missing or broken."""
    installed = _installed_runtimes()
    if len(installed) > 1:
        raise EnvironmentFault(
            f"{' and '.join(installed)} are both installed and overwrite each other's files. "
            f"Keep one: pip uninstall all of them, then {how_to_install('cpu')} (or gpu)"
        )
    # Since 1.31 it keeps a device id and events in the user's home and uploads them, unless this is set before the
    # import. Who wants that sets the variable to 0.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise EnvironmentFault(
            f"onnxruntime cannot be imported ({error}). Bring it: {how_to_install('cpu')} (or gpu, or openvino)"
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise EnvironmentFault(
            "onnxruntime is damaged (two of its distributions overwrote each other). Uninstall all of "
            f"{', '.join(_RUNTIMES)} and install one"
        )
    module: ModuleType = onnxruntime
    return module


def _installed_runtimes() -> list[str]:
    """Return which of the onnxruntime distributions are installed."""
    found = []
    for name in _RUNTIMES:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found


def _versions(runtime: ModuleType) -> dict[str, str]:
    """Return the versions that can change a score."""
    return {
        "prelunet": importlib.metadata.version("prelunet"),
        (_installed_runtimes() or ["onnxruntime"])[0]: runtime.__version__,
        "numpy": np.__version__,
        "pillow": importlib.metadata.version("pillow"),
        "python": ".".join(map(str, sys.version_info[:3])),
    }
