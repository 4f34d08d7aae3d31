"""The runtimes that compute model files. To add one: a module, its name in `Device`, and its line in `RUNTIMES`.

CONTRIBUTING.md says what to change outside the code. `auto` takes it only where `load.choose_cpu_device` says so; the
rules that plan batches for GPUs (`memory.gpu_rules`) are CUDA's.
"""

from collections.abc import Mapping
from typing import Literal

from . import ncnn, onnx, openvino
from .base import Runtime

Device = Literal["auto", "cpu", "openvino", "ncnn", "cuda"]
RUNTIMES: Mapping[str, Runtime] = {
    "cpu": onnx.ON_CPU,
    "openvino": openvino.RUNTIME,
    "ncnn": ncnn.RUNTIME,
    "cuda": onnx.ON_CUDA,
}
