"""Run the trunk of a model file with ncnn, on the CPU in float32, and the rest of it with OpenVINO. Only this module
imports ncnn.

ncnn computes 3x3 convolutions by Winograd's method, which needs a fraction of the multiplications; onnxruntime,
OpenVINO and torch do not. Its float32 is as close to the oracle as theirs. It takes one image at a time and knows no
masks, so images have to fill their canvas, as they do on CPUs.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ...architectures import Conv, OpaqueNet, Pool
from ...arrays import Float32Array
from ...contract import INPUTS, contract_from_metadata
from ...errors import ContractError, EnvironmentFault, UsageError, install_hint
from ...machine import cores
from . import openvino
from .base import Runtime
from .onnx_metadata import read_metadata

PROVIDER = "ncnn"
_PARAMETER_FORMAT = 7767517  # first line of ncnn's text format
_FLOAT32_WEIGHTS = bytes(4)  # precedes the weights of a convolution


class NcnnModel(openvino.OpenVinoModel):
    """A model file whose trunk runs in ncnn; see `LoadedModel`."""

    def __init__(self, rest: openvino.ModelAroundTrunk, trunk: Any, output: str, version: str):
        super().__init__(rest.runtime, rest.model, rest.compiled)
        self.provider = PROVIDER
        self.inputs = INPUTS  # without the feature map
        self.packages = {PROVIDER: version, **self.packages}
        self._front, self._trunk, self._output = rest.front.create_infer_request(), trunk, output

    def compute(self, staged: Mapping[str, Any]) -> list[Any]:
        images = self._front.infer(staged, share_inputs=True)[0]
        return super().compute({**staged, openvino.FEATURE_MAP: np.stack([self._feature_map(row) for row in images])})

    def _feature_map(self, image: Float32Array) -> Float32Array:
        """Return the trunk's output (C, rows, columns) for an image (3, H, W) without its mean."""
        extractor = self._trunk.create_extractor()
        extractor.input(INPUTS[0], _import().Mat(image))
        status, feature_map = extractor.extract(self._output)
        if status != 0:
            raise MemoryError("ncnn cannot allocate memory for a feature map")
        return np.array(feature_map)


def load(path: Path, *, threads: int = 0) -> NcnnModel:
    """Load a model file; threads: 0 for one per core.

    Raises EnvironmentFault when ncnn or openvino is missing, UsageError for an adopted net, whose layers are unknown,
    ContractError when the file is not a valid model.
    """
    runtime = _import()
    contract = contract_from_metadata(read_metadata(path), str(path))
    if isinstance(contract.architecture, OpaqueNet):
        raise UsageError(f"--device ncnn: {path} is an adopted net. Only files of prelunet export run in ncnn")
    trunk = contract.architecture.trunk
    rest = openvino.load_around_trunk(path, trunk, threads=threads)
    layers = list(_layers(trunk, rest.constants))
    net = runtime.Net()
    net.opt.num_threads = threads or cores()
    for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_packed", "use_bf16_storage"):
        setattr(net.opt, option, False)
    text = "\n".join([str(_PARAMETER_FORMAT), f"{len(layers)} {len(layers)}", *(line for line, _ in layers), ""])
    with tempfile.NamedTemporaryFile(prefix="prelunet-ncnn-") as weights:  # it reads weights from a file only
        weights.writelines(block for _, blocks in layers for block in blocks)
        weights.flush()
        if net.load_param_mem(text) or net.load_model(weights.name):
            raise ContractError(f"{path}: ncnn cannot load its trunk")
    return NcnnModel(rest, net, layers[-1][0].split()[5], str(runtime.__version__))


def _layers(trunk: Sequence[Conv | Pool], constants: Mapping[str, Float32Array]) -> Iterator[tuple[str, list[bytes]]]:
    """Yield a line of ncnn's text format and the weights of each layer: type, name, counts, input, output, options."""
    name = INPUTS[0]
    yield f"Input {name} 0 1 {name}", []
    for layer in trunk:
        before, name = name, layer.name
        if isinstance(layer, Conv):
            weight, bias, slope = (constants[f"{name}.{kind}"] for kind in ("weight", "bias", "slope"))
            shape = f"0={layer.channels} 1={layer.kernel} 3={layer.stride} 4={layer.pad} 5=1 6={weight.size}"
            yield (
                f"Convolution {name} 1 1 {before} {name} {shape}",
                [_FLOAT32_WEIGHTS, weight.tobytes(), bias.tobytes()],
            )
            before, name = name, f"{name}.activation"
            yield f"PReLU {name} 1 1 {before} {name} 0={slope.size}", [slope.tobytes()]
        else:  # the largest of each cell, rounded down
            yield f"Pooling {name} 1 1 {before} {name} 0=0 1={layer.kernel} 2={layer.stride} 5=1", []


def _import() -> ModuleType:
    # Read when its library loads. Otherwise its OpenMP threads spin while they wait for each other, which takes far
    # longer than the computation where other programs are busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import ncnn
    except ImportError as error:
        raise EnvironmentFault(
            f"--device ncnn: ncnn cannot be imported ({error}). Install it: {install_hint('ncnn')}"
        ) from error
    module: ModuleType = ncnn
    return module


RUNTIME = Runtime(
    PROVIDER,
    lambda path, *, threads, **_: (load(path, threads=threads), None),
    {"fp32": ("fp32",)},
    loading_copies=3,  # it triples the trunk's weights for Winograd's method
    weight_copies=3,
    batch_copies=2,
    distribution="ncnn",
    benefit="faster in fp32 for large nets",
    ragged=False,
)
