"""Load and run model files with OpenVINO, on the CPU. Only this module imports openvino.

OpenVINO fuses PReLU into convolutions, and on CPUs with bfloat16 instructions (AVX512_BF16, AMX) bf16 is about twice as
fast. The compiled model shows whether bf16 is in use: on other CPUs OpenVINO silently computes in float32. It also
shows whether the layers of an int8 file run in int8, and not in float32 on dequantized numbers.

In bf16 it also rounds a mean image, which nothing in its interface prevents. In a thin model A the scores were then no
further off than with a channel mean: the convolution behind it rounds its input to as few bits.
"""

import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from ...architectures import Conv, Pool
from ...arrays import Float32Array, Int64Array, UInt8Array
from ...contract import OUTPUTS, contract_from_metadata, golden_image, golden_sizes
from ...errors import ContractError, EnvironmentFault, install_hint
from ...machine import supports_int8
from .base import Runtime, load_error
from .onnx_metadata import read_precision

PROVIDER = "OpenVINO"
FEATURE_MAP = "feature_map"
CpuPrecision = Literal["fp32", "bf16", "int8"]

HINTS: Mapping[CpuPrecision, str] = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}  # int8: of what is not quantized
# Types that OpenVINO reports for the layers of each precision. In int8 it chooses the sign by the processor.
_REPORTED: Mapping[CpuPrecision, set[str]] = {"fp32": {"f32"}, "bf16": {"bf16"}, "int8": {"i8", "u8"}}
# By default OpenVINO caches compiled code for up to 5,000 shapes of each kind of layer: about 1 MB per shape, 1.8 GB in
# total for 2,000 small images. Recompiling takes 0.6 ms per batch of the demo, and 1 % of model A on small views.
_NO_CACHE: Mapping[str, str] = {"CPU_RUNTIME_CACHE_CAPACITY": "0"}
# Layers that define the model's precision; a MatMul that is not FullyConnected belongs to a mean image.
_ARITHMETIC = ("Convolution", "FullyConnected")


class OpenVinoModel:
    """A model file compiled for this CPU; see `LoadedModel`."""

    def __init__(self, runtime: ModuleType, model: Any, compiled: Any):
        self.provider: str = PROVIDER
        # OpenVINO stores the metadata of the ONNX file under `framework`.
        metadata = model.get_rt_info(["framework"]).astype(dict) if model.has_rt_info(["framework"]) else {}
        self.metadata: Mapping[str, str] = {key: value.value for key, value in metadata.items()}
        self.inputs: tuple[str, ...] = tuple(value.get_any_name() for value in model.inputs)
        self.outputs: tuple[str, ...] = tuple(value.get_any_name() for value in model.outputs)
        self.image_shape: Sequence[Any] = _lengths(model.inputs[0])
        self.scores_shape: Sequence[Any] = _lengths(model.outputs[0])
        self.prepared_shapes = 1
        self.packages: Mapping[str, str] = {"openvino": str(runtime.__version__).partition("-")[0]}
        self._request = compiled.create_infer_request()

    def stage(self, images: UInt8Array, sizes: Int64Array) -> dict[str, Any]:
        """Return the batch unchanged: it is on the device already."""
        return {"images": np.ascontiguousarray(images), "sizes": sizes}

    def compute(self, staged: Mapping[str, Any]) -> list[Any]:
        """Run a batch; see `LoadedModel.compute`."""
        outputs = self._request.infer(staged, share_inputs=True)
        *small, window_scores = (outputs[name] for name in OUTPUTS)
        return [*small, lambda: window_scores]


def load(path: Path, precision: CpuPrecision = "fp32", *, threads: int = 0, masks: bool = True) -> OpenVinoModel:
    """Compile a model file for this CPU; precision: int8 for an int8 file; threads: 0 for one per core.

    masks: False leaves out the products that hide what is outside the images, for images that fill their canvas.
    Raises EnvironmentFault when openvino is missing or this CPU does not compute in that precision, ContractError when
    the file is not a valid model.
    """
    runtime = _import()
    check_processor(precision)
    with _errors(path):
        model = _read(path)
        if not masks:
            _bypass_masks(model)
        compiled = _compile(model, precision, threads)
    check_precision(compiled, precision)
    return OpenVinoModel(runtime, model, compiled)


def _bypass_masks(model: Any) -> None:
    for operation in model.get_ops():
        if operation.get_friendly_name().endswith(".masked"):  # a product of the map and its mask
            for user in operation.output(0).get_target_inputs():
                user.replace_source_output(operation.input_value(0))


@dataclass(frozen=True)
class ModelAroundTrunk:
    """A model without its trunk, which another runtime computes.

    front: compiled, from the model's inputs to the input of the first convolution; model, compiled: from the inputs and
    FEATURE_MAP, the trunk's output, to the model's outputs; constants: float32, `LAYER.weight`, `.bias` and `.slope`
    (of one value, or one per channel; 0 for a ReLU) of each convolution.
    """

    runtime: ModuleType
    front: Any
    model: Any
    compiled: Any
    constants: Mapping[str, Float32Array]


def load_around_trunk(path: Path, trunk: Sequence[Conv | Pool], *, threads: int = 0) -> ModelAroundTrunk:
    """Compile what surrounds the trunk of a float32 file; see `load` for threads and errors."""
    runtime = _import()
    with _errors(path):
        model = _read(path)
        operations = {operation.get_friendly_name(): operation for operation in model.get_ops()}
        constants: dict[str, Float32Array] = {}
        convolutions = [layer for layer in trunk if isinstance(layer, Conv)]
        for layer in convolutions:
            activation = operations[f"{layer.name}.activation"]
            slope = np.zeros(1) if activation.get_type_name() == "Relu" else _constant(activation)
            constants[f"{layer.name}.slope"] = np.ascontiguousarray(slope, np.float32)
            for kind in ("weight", "bias"):
                constants[f"{layer.name}.{kind}"] = operations[f"{layer.name}.{kind}"].data
        first = operations["images.masked" if "images.masked" in operations else "images.centred"]
        front = _compile(runtime.Model([first.output(0)], model.get_parameters()), "fp32", threads)
        last = trunk[-1].name if isinstance(trunk[-1], Pool) else f"{trunk[-1].name}.activation"
        feature_map = runtime.opset13.parameter([-1, convolutions[-1].channels, -1, -1], np.float32, name=FEATURE_MAP)
        feature_map.output(0).set_names({FEATURE_MAP})
        for user in operations[last].output(0).get_target_inputs():
            user.replace_source_output(feature_map.output(0))
        model.add_parameters([feature_map])
        return ModelAroundTrunk(runtime, front, model, _compile(model, "fp32", threads), constants)


def _constant(activation: Any) -> Float32Array:
    """Return the slopes of a PRelu, which may be behind a change of their shape."""
    node = activation.input_value(1).get_node()
    while node.get_type_name() != "Constant":
        node = node.input_value(0).get_node()
    slopes: Float32Array = node.data.ravel()
    return slopes


def _read(path: Path) -> Any:
    model = _core().read_model(os.fspath(path))
    if not all(value.get_names() for value in (*model.inputs, *model.outputs)):  # whose names a session compares
        raise ContractError(f"{path}: an input or output has no name, so this is not a model file of prelunet")
    return model


def _compile(model: Any, precision: CpuPrecision, threads: int) -> Any:
    settings: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": HINTS[precision],
        "PERFORMANCE_HINT": "LATENCY",
        **_NO_CACHE,
    }
    if threads:
        settings["INFERENCE_NUM_THREADS"] = threads
    return _core().compile_model(model, "CPU", settings)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, UnicodeDecodeError, KeyError) as error:  # damaged names: in a message, of a trunk's layer
        raise load_error(error, path, faulty="read_model" in str(error) or "onnx" in str(error)) from error


@cache
def _core() -> Any:
    """Return OpenVINO's core, which is never freed.

    Its CPU plugin gives the thread that creates it another stack for signal handlers. If a second thread freed it, as a
    garbage collector may, that memory would be released, and the next Ctrl-C would cause a segmentation fault.
    """
    return _import().Core()


def _import() -> ModuleType:
    try:
        import openvino
    except ImportError as error:
        raise EnvironmentFault(
            f"--device openvino: openvino cannot be imported ({error}). Install it: {install_hint('openvino')}"
        ) from error
    module: ModuleType = openvino
    return module


def _lengths(value: Any) -> list[Any]:
    return [length.get_length() if length.is_static else None for length in value.get_partial_shape()]


def check_processor(precision: CpuPrecision) -> None:
    """Refuse a precision for which this CPU has no instructions, before a model of gigabytes is compiled.

    `check_precision` shows whether the model really runs in it, but not whether its int8 sums are right.
    Raises EnvironmentFault.
    """
    if precision == "int8" and not supports_int8():
        raise EnvironmentFault(
            "--device openvino --precision int8: this processor has neither VNNI nor AMX, so OpenVINO's sums of 8-bit "
            "products would overflow and give wrong scores. Use --device cpu, which computes int8 files in fp32"
        )
    if precision == "bf16" and "BF16" not in _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise _unsupported_precision(precision, "f32")


def check_precision(compiled: Any, precision: CpuPrecision) -> None:
    """Check that every convolution and fully connected layer was compiled for the requested precision."""
    facts = [layer.get_rt_info() for layer in compiled.get_runtime_model().get_ordered_ops()]
    actual = {_text(fact["runtimePrecision"]) for fact in facts if _text(fact["layerType"]) in _ARITHMETIC}
    if not actual or actual - _REPORTED[precision]:
        raise _unsupported_precision(precision, ", ".join(sorted(actual)))


def _unsupported_precision(precision: CpuPrecision, actual: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"--device openvino --precision {precision}: on this CPU OpenVINO computes in {actual} instead. "
        "bf16 needs a CPU with AVX512_BF16 or AMX, int8 a file of prelunet export --precision int8. For fp32, use an "
        "fp32 file, and omit --precision. For a net that was adopted in int8, use --device cpu"
    )


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


# OpenVINO 2026.1 to 2026.3 crashed on CPUs with AMX when an int8 model with dynamic shapes received a small input
# (openvino issue 37577). Nothing shows beforehand whether a processor and a version are affected.
_FIRST_RUN = f"import sys; from {__name__} import first_run; first_run(sys.argv[1], int(sys.argv[2]))"


def try_first_run(path: Path, threads: int) -> None:
    """Run an int8 file for the first time in a child process, so that a crash of the runtime ends the child.

    Raises EnvironmentFault if a signal ends the child. Any other error is left to this process, which will meet it too.
    """
    # -P: modules in the current folder must not shadow installed ones. A session of its own: a signal to this process's
    # group, such as Ctrl-C, would look like a crash.
    command = [sys.executable, "-P", "-c", _FIRST_RUN, str(path), str(threads)]
    quiet = subprocess.DEVNULL
    status = subprocess.run(  # noqa: S603
        command, stdin=quiet, stdout=quiet, stderr=quiet, check=False, start_new_session=True
    ).returncode
    if status < 0:
        name = signal.Signals(-status).name
        memory = ", perhaps for lack of memory" if name == "SIGKILL" else ""
        raise EnvironmentFault(
            f"{path}: OpenVINO {importlib.metadata.version('openvino')} crashed on this processor when a trial process "
            f"ran this int8 file ({name}{memory}). Install another version of openvino, or use --device cpu, or a file "
            "of prelunet export --precision fp32"
        )


def first_run(path: str, threads: int) -> None:
    """Load an int8 file, and run it on one and two images of each golden size: what the child process does."""
    with suppress(Exception):
        loaded = load(Path(path), "int8", threads=threads)
        for size in golden_sizes(contract_from_metadata(loaded.metadata, path).crop):
            for rows in (1, 2):
                images = np.stack([golden_image(*size)] * rows)
                loaded.compute(loaded.stage(images, np.array([size] * rows)))


def _load_tried(
    path: Path, *, precision: str | None, threads: int, masks: bool, **_: object
) -> tuple[OpenVinoModel, None]:
    kind: CpuPrecision = "bf16" if precision == "bf16" else "fp32"
    if read_precision(path) == "int8":
        kind = "int8"
        check_processor(kind)
        try_first_run(path, threads)
    return load(path, kind, threads=threads, masks=masks), None


RUNTIME = Runtime(
    PROVIDER,
    _load_tried,
    {"fp32": ("fp32", "bf16"), "fp16": ("fp32", "bf16"), "int8": ("int8",)},
    loading_copies=2.5,
    weight_copies=2.5,  # it reorders weights and windows for its matrix products
    batch_copies=2,
    distribution="openvino",
    benefit="faster on a CPU",
    switch_seconds=0.005,  # measured: 1.5 ms with AVX-512, 13 ms with AMX (benchmarks/README.md)
    flops={"fp32": 200e9, "bf16": 400e9},
)
