"""A thin builder of ONNX graphs with named nodes; the same calls give the same bytes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
    shape_inference,
)

OPSET = 18  # the newest that all our runtimes support; later opsets add nothing that we need
IR_VERSION = 8  # matches opset 18; initializers need not be inputs (since 4), functions exist (since 8)

_UP_TO_THE_END = np.iinfo(np.int64).max


class GraphBuilder:
    """Collects nodes and constants. Methods that add a node return the name of its output."""

    def __init__(self) -> None:
        self._nodes: list[NodeProto] = []
        self._constants: list[TensorProto] = []
        self._names: set[str] = set()  # of nodes and constants

    def constant(self, name: str, value: npt.NDArray[Any]) -> str:
        """Add an initializer and return its name, which must be new."""
        assert name not in self._names, name
        self._names.add(name)
        self._constants.append(numpy_helper.from_array(value, name))
        return name

    def integers(self, *values: int) -> str:
        """Return the name of an int64 vector; equal vectors are stored once."""
        name = "int64_" + "_".join(str(v) if v >= 0 else f"m{-v}" for v in values)
        return name if name in self._names else self.constant(name, np.array(values, np.int64))

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Add a node that is named after its output."""
        assert output not in self._names, output
        self._names.add(output)
        self._nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))
        return output

    def has(self, output: str) -> bool:
        return output in self._names

    def embed(self, net: GraphProto) -> None:
        """Add the nodes and initializers of another graph, except sparse ones."""
        self._nodes.extend(net.node)
        self._constants.extend(net.initializer)

    def slice(self, value: str, output: str, *, axis: int, start: int, end: int | None = None, step: int = 1) -> str:
        """Add a Slice along one axis. end: None for all that follow; negative counts from the end."""
        last = self.integers(_UP_TO_THE_END if end is None else end)
        inputs = [value, self.integers(start), last, self.integers(axis), self.integers(step)]
        return self.node("Slice", inputs, output)

    def window_slice(self, value: str, output: str, *, axes: tuple[int, int], starts: tuple[int, int],
                     trims: tuple[int, int]) -> str:  # fmt: skip
        """Add a Slice along two axes that drops the first `starts` and the last `trims` cells."""
        ends = self.integers(*(_UP_TO_THE_END if trim == 0 else -trim for trim in trims))
        return self.node("Slice", [value, self.integers(*starts), ends, self.integers(*axes)], output)

    def unsqueeze(self, value: str, output: str, *axes: int) -> str:
        return self.node("Unsqueeze", [value, self.integers(*axes)], output)

    def graph(self, name: str, inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]) -> GraphProto:
        return helper.make_graph(self._nodes, name, list(inputs), list(outputs), self._constants)


def contract_graph(
    graph: GraphBuilder, classes: int, *, canvas: tuple[str | int, str | int], grid: tuple[str | int, str | int]
) -> GraphProto:
    """Return a finished graph with the inputs and outputs of the contract.

    canvas: height and width of the images; grid: rows and columns of windows; each a number or the name of a variable.
    """
    info = helper.make_tensor_value_info
    inputs = [
        info("images", TensorProto.UINT8, ["N", *canvas, 3], "RGB images, 0 to 255, each in the top left of a canvas"),
        info("sizes", TensorProto.INT64, ["N", 2], "height and width of each image in pixels"),
    ]
    outputs = [
        info("scores", TensorProto.FLOAT, ["N", classes], "softmax probabilities, averaged over the image's windows"),
        info("logits", TensorProto.FLOAT, ["N", classes], "logits, averaged over the image's windows"),
        info("windows", TensorProto.INT64, ["N", 2], "rows and columns of the image's grid of windows"),
        info("window_scores", TensorProto.FLOAT, ["N", *grid, classes], "probabilities of each window; 0 outside"),
    ]
    return graph.graph("prelunet", inputs, outputs)


def add_value_info(model: ModelProto) -> None:
    """Add type and shape of every value between inputs and outputs, for people who look into the file.

    Inferred from the shapes of the weights alone, because a copy of the largest net's weights takes 1.3 GB.
    """
    graph, small = model.graph, [tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.INT64]
    weights = [
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in graph.initializer
        if tensor.data_type != TensorProto.INT64  # integers are sides, axes and bounds, on which shapes depend
    ]
    light = helper.make_graph(graph.node, graph.name, [*graph.input, *weights], graph.output, small)
    inferred = shape_inference.infer_shapes(
        helper.make_model(light, opset_imports=model.opset_import, ir_version=model.ir_version), data_prop=True
    )
    graph.value_info.extend(inferred.graph.value_info)


def build_file(
    graph: GraphProto, metadata: dict[str, str], version: str, opsets: Sequence[OperatorSetIdProto], **rest: Any
) -> ModelProto:
    """Return the model of a graph. version: of prelunet; rest: further arguments of `onnx.helper.make_model`."""
    model = helper.make_model(
        graph, opset_imports=list(opsets), producer_name="prelunet", producer_version=version, **rest
    )
    helper.set_model_props(model, metadata)
    return model
