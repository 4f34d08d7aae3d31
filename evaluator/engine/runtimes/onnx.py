"""Load and run model files with onnxruntime, on the CPU and on CUDA. Only this module imports onnxruntime."""

import contextlib
import importlib.metadata
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy.typing as npt

from ...arrays import Int64Array, UInt8Array
from ...contract import OUTPUTS
from ...errors import ContractError, EnvironmentFault, install_hint
from ...machine import onnxruntime_supports_int8
from .base import Runtime, error_summary, is_out_of_memory, load_error
from .cuda import DISABLED_OPTIMIZERS, CudaBinding, CudaRuntime, GpuPrecision, cuda_options, sessions_in
from .onnx_metadata import read_precision

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
FOLDED_BYTES = 2**26  # of a constant that is computed when a file is loaded, besides four times the file's size
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")  # three distributions, one import package


class OnnxRuntimeModel:
    """A model file loaded on exactly one provider; see `LoadedModel`.

    On CUDA, packages also holds the name of the GPU. sessions: on CUDA, one for each prepared shape; cuda: its GPU.
    """

    def __init__(self, runtime: ModuleType, sessions: Sequence[Any], provider: str, cuda: CudaRuntime | None = None):
        session = sessions[0]
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
        self.prepared_shapes: int = len(sessions)
        self._session = session
        self._binding = CudaBinding(runtime, sessions, cuda, self.scores_shape[-1]) if cuda else None

    def stage(self, images: UInt8Array, sizes: Int64Array) -> Any:
        return self._binding.stage(images, sizes) if self._binding else {"images": images, "sizes": sizes}

    def compute(self, staged: Any) -> Sequence[Any]:
        """Run a staged batch; see `LoadedModel.compute`."""
        if self._binding:
            return self._binding.compute(staged)
        *outputs, window_scores = self._session.run(OUTPUTS, staged)
        return [*outputs, lambda: window_scores]


def has_cuda_provider() -> bool:
    """Return whether onnxruntime is installed and supports CUDA. Only loading a model shows if a GPU is available."""
    if not _installed_runtimes():  # OpenVINO alone
        return False
    runtime = import_runtime()
    _preload(runtime)  # which may register the provider if it comes as a plugin
    return CUDA in runtime.get_available_providers()


def load_on_cpu(path: Path, *, threads: int = 0, quantized: bool = False, spinning: bool = True) -> OnnxRuntimeModel:
    """Load a model file on the CPU provider. Raises as `open_session` does.

    threads: 0 for one per core; quantized: compute quantized layers in int8, with the runtime's kernels for them;
    spinning: see `Placement`.
    """
    runtime = import_runtime()
    options = _options(runtime)
    options.intra_op_num_threads = threads
    _choose_kernels(options, quantized=quantized)
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    # Threads spin between the operators of a batch, where waking them takes longer than many an operator, but not
    # between batches, where they would take cores from decoding and gRPC: benchmarks/README.md.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    _bound_folding(options, path)
    return OnnxRuntimeModel(runtime, [_create_session(runtime, path, options, CPU)], CPU)


def load_on_cuda(
    path: Path, *, gpu: int = 0, tf32: bool = False, memory: int | None = None, prepared_shapes: int = 1
) -> tuple[OnnxRuntimeModel, int]:
    """Load a model file on the CUDA provider of one GPU; nothing of it may run on the CPU.

    tf32: let float32 convolutions and products round their inputs to TF32; memory: limit of the provider's arenas in
    bytes, also bounded by the free memory of the GPU; prepared_shapes: see `Placement`. Returns the model and the limit
    of the arena in which a batch is computed.
    Raises EnvironmentFault when CUDA is unavailable, otherwise as `open_session` does.
    """
    runtime = import_runtime()
    missing = _preload(runtime)
    if CUDA not in runtime.get_available_providers():
        raise EnvironmentFault(
            f"--device cuda: the onnxruntime of this environment has no CUDA support. "
            f"In a fresh environment: {install_hint('gpu')}"
        )
    options = _options(runtime)
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        cuda = CudaRuntime(runtime, gpu)
        arena = cuda.arena_bytes(memory)
        count = sessions_in(arena, prepared_shapes, path.stat().st_size)
        # fp32, the most careful choice, if the file does not state it
        precision: GpuPrecision = "tf32" if tf32 else "fp16" if read_precision(path) == "fp16" else "fp32"
        settings = cuda_options(gpu, precision=precision, memory=arena // count)
        sessions = [_create_session(runtime, path, options, CUDA, settings) for _ in range(count)]
        return OnnxRuntimeModel(runtime, sessions, CUDA, cuda), arena // count
    except EnvironmentFault as error:
        raise EnvironmentFault(f"{error}. {missing}" if missing else str(error)) from error


def _preload(runtime: ModuleType) -> str:
    """Load the CUDA libraries from installed Python packages; return the runtime's messages about missing ones."""
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):  # it prints its messages
        runtime.preload_dlls()
    return " ".join(captured.getvalue().split())


def _options(runtime: ModuleType) -> Any:
    runtime.set_default_logger_severity(4)  # it logs warnings to stderr on its own
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # our errors already contain the runtime's messages
    options.enable_mem_pattern = False  # it would keep a plan for every shape for ever, besides the memory to create it
    return options


def _choose_kernels(options: Any, *, quantized: bool) -> None:
    """Compute layers between QuantizeLinear and DequantizeLinear in int8, or in float32 on the rounded numbers.

    Our own int8 files are computed in float32: this provider has no int8 convolution with a PReLU, and its mixture of
    float32 convolutions, int8 products and weights dequantized in every run was slower on model A.
    """
    options.add_session_config_entry("session.disable_quant_qdq", "0" if quantized else "1")
    if not onnxruntime_supports_int8():
        # There sums of products of bytes and signed weights overflow in 16 bits, without a word. This makes the weights
        # unsigned, whose sums are exact: slower, and bit for bit those of VNNI.
        options.add_session_config_entry("session.x64quantprecision", "1")


def _bound_folding(options: Any, path: Path) -> None:
    """Bound the constants that are computed when a file is loaded, and kept beside all estimates of its memory.

    Weights in half precision and int8 are widened then, to up to four times the file's size; but a file of a few kB can
    compute gigabytes. What is not folded is computed in each run, one after another.
    """
    largest = FOLDED_BYTES + 4 * path.stat().st_size
    options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", str(largest))


def _create_session(
    runtime: ModuleType, path: Path, options: Any, provider: str, settings: Mapping[str, str] | None = None
) -> Any:
    """Create the runtime's session on exactly this provider."""
    cuda = provider == CUDA
    try:
        # With fallback enabled it would print, and report a later failure instead of the first.
        session = runtime.InferenceSession(
            os.fspath(path),
            options,
            providers=[(provider, dict(settings))] if settings else [provider],
            enable_fallback=0,
            disabled_optimizers=DISABLED_OPTIMIZERS if cuda else None,
        )
    except Exception as error:
        # The runtime names its exception classes after its status codes.
        faulty = type(error).__name__ in {
            "InvalidProtobuf", "InvalidGraph", "NoModel", "InvalidArgument", "NotImplemented"
        }  # fmt: skip
        if faulty or not cuda:
            raise load_error(error, path, faulty=faulty) from error
        cause = ": too little memory is left or allowed there" if is_out_of_memory(error) else ""
        raise EnvironmentFault(
            f"--device cuda: {path} could not be loaded on the GPU{cause} ({error_summary(error)})"
        ) from error
    if session.get_providers()[0] != provider:
        raise EnvironmentFault(
            f"--device {'cuda' if cuda else 'cpu'}: {provider} is unavailable; the runtime offers "
            f"{session.get_providers()[0]} instead. Check the driver and the CUDA libraries (prelunet needs CUDA 13)"
        )
    return session


class RawOnnxModel:
    """Any ONNX file on the CPU, without our contract; adopted nets are compared with it.

    content: the net instead of the file's; threads: 0 for one per core; quantized: as for `load_on_cpu`; optimized:
    where to write the graph that really runs.
    Raises ContractError with the runtime's message when the file cannot be loaded or run, EnvironmentFault when memory
    is insufficient.
    """

    def __init__(
        self,
        path: Path,
        content: bytes | None = None,
        *,
        threads: int = 0,
        quantized: bool = False,
        optimized: Path | None = None,
    ) -> None:
        self._runtime = import_runtime()
        self._path = path
        options = _options(self._runtime)
        options.intra_op_num_threads = threads
        _choose_kernels(options, quantized=quantized)
        _bound_folding(options, path)
        if optimized is not None:
            options.optimized_model_filepath = os.fspath(optimized)
        with self._errors("load"):
            self._session = self._runtime.InferenceSession(content or os.fspath(path), options, providers=[CPU])

    def run(self, feeds: Mapping[str, npt.NDArray[Any]], output: str) -> npt.NDArray[Any]:
        """Return one output, by name, for these inputs."""
        options = self._runtime.RunOptions()
        options.log_severity_level = 4
        with self._errors("run"):
            result: npt.NDArray[Any] = self._session.run([output], dict(feeds), options)[0]
        return result

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the runtime's own classes have no common base
            text = error_summary(error)
            if is_out_of_memory(error):
                raise EnvironmentFault(f"{self._path}: too little memory left to {action} this net ({text})") from error
            raise ContractError(f"{self._path}: onnxruntime cannot {action} this net ({text})") from error


def import_runtime() -> ModuleType:
    """Import onnxruntime, with a clear message for each way in which it can be missing or broken."""
    installed = _installed_runtimes()
    if len(installed) > 1:
        raise EnvironmentFault(
            f"{' and '.join(installed)} are both installed and overwrite each other's files. "
            f"Run: pip uninstall {' '.join(installed)}. Then install one: {install_hint('cpu')} (or gpu)"
        )
    # Since 1.31 it stores a device id and events in the user's home and uploads them, unless this is set before the
    # import. To enable telemetry, set the variable to 0.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise EnvironmentFault(
            f"onnxruntime cannot be imported ({error}). Install it: {install_hint('cpu')} (or gpu, or openvino)"
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise EnvironmentFault(
            "onnxruntime is damaged (two of its distributions overwrote each other). Uninstall all of "
            f"{', '.join(_RUNTIMES)}, then install one"
        )
    module: ModuleType = onnxruntime
    return module


def _installed_runtimes() -> list[str]:
    return [name for name in _RUNTIMES if any(importlib.metadata.distributions(name=name))]


ON_CPU = Runtime(
    CPU,
    lambda path, *, threads, precision, spinning=True, **_: (
        load_on_cpu(path, threads=threads, quantized=precision == "int8", spinning=spinning),
        None,
    ),
    {
        "fp32": ("fp32",),
        "fp16": ("fp32",),  # with rounded weights: this provider drops the casts between layers
        "int8": ("fp32",),  # on the quantized numbers: see `_choose_kernels`; adopted nets: `load.precisions_of`
    },
    loading_copies=2.5,
    weight_copies=1.5,
    batch_copies=1,
)
ON_CUDA = Runtime(
    CUDA,
    lambda path, *, gpu, precision, gpu_memory, prepared_shapes, **_: load_on_cuda(
        path, gpu=gpu, tf32=precision == "tf32", memory=gpu_memory, prepared_shapes=prepared_shapes
    ),
    {"fp32": ("fp32", "tf32"), "fp16": ("fp16",)},
    loading_copies=2.5,
    weight_copies=1.5,
    batch_copies=2,  # not measured: the arena grows by powers of two
    gpu=True,
)
