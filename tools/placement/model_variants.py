"""The models of the placement check: every kind that prelunet writes, and two graphs with a fault.

Weights do not affect placement, so they are one number repeated. The trunk has its real widths.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
from msgspec import structs
from onnx import ModelProto, TensorProto, helper, numpy_helper

from prelunet.evaluator.architectures import architecture, parameter_shapes
from prelunet.evaluator.contract import Canvas, ClassEntry, FilePrecision, MeanKind
from prelunet.evaluator.datasets.labels.class_file import IMAGENET_1K, read_class_list
from prelunet.export.dense.build import build_contract, build_model
from prelunet.export.foreign.adopt import AdoptOptions, adopt
from prelunet.export.foreign.sidecars import ClassList
from prelunet.export.onnx_graph import IR_VERSION, OPSET
from prelunet.training.importing.preprocessing import PRESETS

CLASSES = 1000
NARROW = 64  # neurons of fc1 and fc2, which make up most of a file but only change the size of a product
WEIGHT = np.float32(0.01)


@dataclass(frozen=True)
class Variant:
    """One kind of model file."""

    net: str
    precision: FilePrecision
    canvas: Canvas
    mean_kind: MeanKind

    def __str__(self) -> str:
        return f"{self.net} {self.precision} {self.canvas}, {self.mean_kind} mean"


def variants(nets: str) -> Iterator[Variant]:
    """Yield every variant of each net: precision, canvas and mean."""
    choices = product(nets, ("fp32", "fp16"), get_args(Canvas), get_args(MeanKind))
    return (Variant(*choice) for choice in choices)


def build(variant: Variant, *, whole: bool = False) -> ModelProto:
    """Build the model of a variant with `export.dense.build.build_model`.

    whole: with all neurons of fc1 and fc2; C then takes 1.3 GB of disk and 6 GB of memory on the way.
    """
    net = architecture(variant.net)
    if not whole:
        net = structs.replace(net, hidden=NARROW)
    shapes = parameter_shapes(net, CLASSES)
    mean = np.zeros(3 if variant.mean_kind == "channel" else (net.crop, net.crop, 3), np.float32)
    classes = [ClassEntry(f"n{index:08}", f"class {index}") for index in range(CLASSES)]
    contract = build_contract(
        net, classes, variant.canvas, variant.precision, mean_kind=variant.mean_kind, checkpoint_sha256="0" * 64
    )
    return build_model(net, {name: np.broadcast_to(WEIGHT, shapes[name]) for name in shapes}, mean, contract, "0")


def adopted_dense() -> ModelProto:
    """Build the model of a small third-party net by `prelunet adopt --dense`."""
    weights = {"kernels": (8, 3, 3, 3), "matrix": (CLASSES, 8)}
    constants = [numpy_helper.from_array(np.full(shape, WEIGHT), name) for name, shape in weights.items()]
    nodes = [
        helper.make_node("Conv", ["x", "kernels"], ["cells"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["cells"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["features"]),
        helper.make_node("Gemm", ["features", "matrix"], ["y"], transB=1),
    ]
    images = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 224, 224])
    logits = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", CLASSES])
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "net.onnx", Path(folder) / "dense.onnx"
        onnx.save(_model(nodes, [images], [logits], constants), source)
        adopt(
            source,
            output,
            ClassList(read_class_list(Path(IMAGENET_1K)), IMAGENET_1K),
            AdoptOptions(PRESETS["torchvision"], dense=True),
        )
        return onnx.load(output)


def without_kernel() -> ModelProto:
    """Build a graph with a node for which CUDA has no kernel: a session on CUDA alone must refuse it."""
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", 3, "H", "W"])
    pooled = helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["N", 3, "P", "Q"])
    return _model([helper.make_node("LpPool", ["images"], ["pooled"], kernel_shape=[2, 2])], [images], [pooled])


def with_copies() -> ModelProto:
    """Build a graph that CUDA takes whole but must fetch a number for from the GPU: its copies must be counted."""
    values = helper.make_tensor_value_info("values", TensorProto.INT64, ["N"])
    ranks = helper.make_tensor_value_info("ranks", TensorProto.INT64, ["M"])
    constants = [helper.make_tensor(name, TensorProto.INT64, [], [value]) for name, value in (("zero", 0), ("one", 1))]
    nodes = [
        helper.make_node("ReduceMax", ["values"], ["largest"], keepdims=0),
        helper.make_node("Range", ["zero", "largest", "one"], ["ranks"]),
    ]
    return _model(nodes, [values], [ranks], constants)


def _model(nodes, inputs, outputs, constants=()) -> ModelProto:
    graph = helper.make_graph(nodes, "control", inputs, outputs, list(constants))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
