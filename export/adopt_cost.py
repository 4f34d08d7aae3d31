"""How many multiply-adds a foreign net takes, as far as its graph tells."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, helper

from prelunet.export.adopt_net import Interface

# What takes multiply-adds that the shapes of its inputs and outputs do not tell, or calls another graph.
_UNCOUNTED = {
    *("ConvTranspose", "ConvInteger", "QLinearConv", "DeformConv", "MatMulInteger", "QLinearMatMul", "Einsum"),
    *("LSTM", "GRU", "RNN", "Attention", "If", "Loop", "Scan"),
}


def multiply_adds(model: ModelProto, interface: Interface) -> int | None:
    """Count the multiply-adds of one image: those of Conv, Gemm and MatMul, from the shapes that onnx infers.

    None where they cannot be told: an unknown shape, another operator that multiplies, or none at all.
    Changes the declared shapes of the model to those of one batch.
    """
    nodes = model.graph.node
    if any(node.domain not in {"", "ai.onnx"} or node.op_type in _UNCOUNTED for node in nodes):
        return None
    _declare_shapes(model, interface)
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except Exception:  # onnx has several; the count is one of the extras, and what it lacks is left out
        return None
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        dims = value.type.tensor_type.shape.dim
        if all(dim.HasField("dim_value") for dim in dims):
            shapes.setdefault(value.name, [dim.dim_value for dim in dims])
    total = 0
    for node in nodes:
        if node.op_type in {"Conv", "Gemm", "MatMul"}:
            terms = _terms(node, shapes)
            if terms is None or node.output[0] not in shapes:
                return None
            total += terms * int(np.prod(shapes[node.output[0]]))
    return total // (interface.batch or 1) or None


def _terms(node: Any, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Return how many products one number of a node's output is the sum of."""
    operand = shapes.get(node.input[1 if node.op_type == "Conv" else 0])
    if not operand:
        return None
    if node.op_type == "Conv":  # weights are (out, in / group, kernel...)
        return int(np.prod(operand[1:]))
    transposed = any(a.name == "transA" and helper.get_attribute_value(a) for a in node.attribute)
    return operand[0] if transposed else operand[-1]


def _declare_shapes(model: ModelProto, interface: Interface) -> None:
    """Replace what a file says of its shapes by those of one whole batch."""
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    for value in model.graph.input:
        if value.name == interface.input:
            tensor = helper.make_tensor_type_proto(interface.input_type, interface.shape(interface.batch or 1))
            value.type.CopyFrom(tensor)
