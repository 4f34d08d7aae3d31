"""Model files in onnxruntime, on the CPU and on CUDA. Only this module imports onnxruntime."""

import contextlib
import importlib.metadata
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.contract import OUTPUTS
from prelunet.evaluator.engine.runtimes.base import Array, error_summary, is_out_of_memory, load_error
from prelunet.evaluator.engine.runtimes.cuda import CudaBinding, CudaRuntime, GpuPrecision, cuda_options
from prelunet.evaluator.engine.runtimes.onnx_metadata import read_precision
from prelunet.evaluator.errors import ContractError, EnvironmentFault, install_hint

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

_RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")  # three distributions, one import package


class OnnxRuntimeModel:
    """A model file, loaded on one provider and no other.

    metadata: of the file; inputs, outputs: their names; image_shape, scores_shape: as the graph states them, numbers
    where it fixes a length; packages: name → version of what can change a score, on CUDA with the GPU's name.
    cuda: of its GPU, where the provider is CUDA.
    """

    def __init__(self, runtime: ModuleType, session: Any, provider: str, cuda: CudaRuntime | None = None):
        self.provider: str = provider
        self.metadata: Mapping[str, str] = session.get_modelmeta().custom_metadata_map
        self.inputs: tuple[str, ...] = tuple(value.name for value in session.get_inputs())
        self.outputs: tuple[str, ...] = tuple(value.name for value in session.get_outputs())
        self.image_shape: Sequence[Any] = session.get_inputs()[0].shape
        self.scores_shape: Sequence[Any] = session.get_outputs()[0].shape
        package = (_installed_runtimes() or ["onnxruntime"])[0]
        self.packages: Mapping[str, str] = {
            package: str(runtime.__version__), **({"gpu": cuda.name()} if cuda else {})
        }  # fmt: skip
        self._session = session
        self._binding = CudaBinding(runtime, session, cuda, self.scores_shape[-1]) if cuda else None

    def stage(self, images: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> Any:
        """Bring a batch to the device; any thread may, also while another batch is computed."""
        return self._binding.stage(images, sizes) if self._binding else {"images": images, "sizes": sizes}

    def compute(self, staged: Any) -> Sequence[Array | Any]:
        """Run a staged batch; returns what `Outputs` takes. Only the thread that owns the session calls this."""
        if self._binding:
            return self._binding.compute(staged)
        *outputs, window_scores = self._session.run(OUTPUTS, staged)
        return [*outputs, lambda: window_scores]


def has_cuda_provider() -> bool:
    """Say whether this onnxruntime was built with CUDA; whether a GPU is there, only loading tells."""
    runtime = import_runtime()
    _preload(runtime)  # which may bring the provider, where it comes as a plugin
    return CUDA in runtime.get_available_providers()


def load_on_cpu(path: Path, *, threads: int = 0) -> OnnxRuntimeModel:
    """Load a model file on the CPU provider; threads: 0 is one per core. Raises as `open_session` does."""
    runtime = import_runtime()
    options = _options(runtime)
    options.intra_op_num_threads = threads
    # Threads that wait for work would else keep their cores busy, which decoding and gRPC need: docs/performance.md.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return OnnxRuntimeModel(runtime, _create_session(runtime, path, options, CPU), CPU)


def load_on_cuda(
    path: Path, *, gpu: int = 0, tf32: bool = False, memory: int | None = None
) -> tuple[OnnxRuntimeModel, int]:
    """Load a model file on the CUDA provider of one GPU; it runs wholly there or not at all.

    tf32: let float32 convolutions and products round their inputs to TF32; memory: most bytes of the provider's arena,
    which is also bounded by what is free on the GPU. Returns the bound too.
    Raises EnvironmentFault when CUDA does not come up, else as `open_session` does.
    """
    runtime = import_runtime()
    missing = _preload(runtime)
    if CUDA not in runtime.get_available_providers():
        raise EnvironmentFault(
            f"--device cuda: this environment has an onnxruntime that knows no CUDA. "
            f"In a fresh environment: {install_hint('gpu')}"
        )
    options = _options(runtime)
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        cuda = CudaRuntime(runtime, gpu)
        arena = cuda.arena_bytes(memory)
        # fp32, which takes most care, where a file says nothing of it
        precision: GpuPrecision = "tf32" if tf32 else "fp16" if read_precision(path) == "fp16" else "fp32"
        settings = cuda_options(gpu, precision=precision, memory=arena)
        session = _create_session(runtime, path, options, CUDA, settings)
        return OnnxRuntimeModel(runtime, session, CUDA, cuda), arena
    except EnvironmentFault as error:
        raise EnvironmentFault(f"{error}. {missing}" if missing else str(error)) from error


def _preload(runtime: ModuleType) -> str:
    """Load the CUDA libraries that came with Python packages; return what the runtime says of missing ones."""
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):  # it prints
        runtime.preload_dlls()
    return " ".join(captured.getvalue().split())


def _options(runtime: ModuleType) -> Any:
    runtime.set_default_logger_severity(4)  # it warns of itself on stderr
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # the runtime's own lines would only repeat what our error says
    options.enable_mem_pattern = False  # a plan for each shape would be kept for ever, beside the memory of its making
    return options


def _create_session(
    runtime: ModuleType, path: Path, options: Any, provider: str, settings: Mapping[str, str] | None = None
) -> Any:
    """Create the runtime's session on exactly this provider."""
    cuda = provider == CUDA
    try:
        # Without enable_fallback it would print, and report another failure than the first.
        session = runtime.InferenceSession(
            os.fspath(path),
            options,
            providers=[(provider, dict(settings))] if settings else [provider],
            enable_fallback=0,
        )
    except Exception as error:
        raise _load_error(error, path, cuda=cuda) from error
    if session.get_providers()[0] != provider:
        raise EnvironmentFault(
            f"--device {'cuda' if cuda else 'cpu'}: {provider} did not come up; the runtime offers "
            f"{session.get_providers()[0]} instead. Check the driver and the CUDA libraries (prelunet needs CUDA 13)"
        )
    return session


class RawOnnxModel:
    """Any ONNX file on the CPU just as it stands, without our contract: what an adopted net is compared with.

    threads: 0 is one per core.
    Raises ContractError with the runtime's words when it cannot be loaded or run, EnvironmentFault when memory lacks.
    """

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        runtime = import_runtime()
        self._path = path
        options = _options(runtime)
        options.intra_op_num_threads = threads
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
            text = error_summary(error)
            if is_out_of_memory(error):
                raise EnvironmentFault(f"{self._path}: too little memory left to {what} this net ({text})") from error
            raise ContractError(f"{self._path}: onnxruntime cannot {what} this net ({text})") from error


def _load_error(error: Exception, path: Path, *, cuda: bool) -> ContractError | EnvironmentFault:
    """Say whose fault a failed load is. The runtime's exception classes are named after its status codes."""
    kind = type(error).__name__
    faulty = kind in {"InvalidProtobuf", "InvalidGraph", "NoModel", "InvalidArgument", "NotImplemented"}
    if cuda and not faulty:
        cause = ": too little memory is left there, or allowed" if is_out_of_memory(error) else ""
        return EnvironmentFault(f"--device cuda: {path} could not be loaded on the GPU{cause} ({error_summary(error)})")
    return load_error(error, path, faulty=faulty)


def import_runtime() -> ModuleType:
    """Import onnxruntime, with one clear message for each way in which it can be missing or broken."""
    installed = _installed_runtimes()
    if len(installed) > 1:
        raise EnvironmentFault(
            f"{' and '.join(installed)} are both installed and overwrite each other's files. "
            f"Keep one: pip uninstall all of them, then {install_hint('cpu')} (or gpu)"
        )
    # Since 1.31 it keeps a device id and events in the user's home and uploads them, unless this is set before the
    # import. Who wants that sets the variable to 0.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise EnvironmentFault(
            f"onnxruntime cannot be imported ({error}). Bring it: {install_hint('cpu')} (or gpu, or openvino)"
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
