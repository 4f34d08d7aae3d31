"""The contract's graph around a foreign net: preprocessing before its input, the four outputs after its output.

The added operators have the same meaning in every opset from 7, so that the net keeps its opset and operators. All
names of the net get a prefix, because its tensors may also be called `images` or `logits`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from prelunet.evaluator.contract import ModelContract
from prelunet.export.foreign.read_net import NetInterface
from prelunet.training.importing.preprocessing import Preprocessing

PREFIX = "net/"
OLDEST_IR = 8  # initializers need not be inputs (since 4), functions exist (since 8)


def prepare_net(net: ModelProto) -> None:
    """Prefix all names in a net's graph and remove fields that may hold paths and stack traces. Modifies the net."""
    _prepare_graph(net.graph)
    for function in net.functions:
        function.doc_string = ""
        del function.metadata_props[:]
        for node in function.node:
            _strip(node)


def _prepare_graph(graph: GraphProto) -> None:
    # Every name in every subgraph gets the same prefix, so that all references stay intact.
    del graph.value_info[:]  # holds the shapes of the batch used at export
    del graph.metadata_props[:]
    for tensor in graph.initializer:
        tensor.name = _prefixed(tensor.name)
        tensor.doc_string = ""
    for sparse in graph.sparse_initializer:
        sparse.values.name = _prefixed(sparse.values.name)
        sparse.indices.name = _prefixed(sparse.indices.name)
    for value in (*graph.input, *graph.output):
        value.name = _prefixed(value.name)
    del graph.quantization_annotation[:]  # no runtime needs it: quantized nets use operators
    for node in graph.node:
        _strip(node)
        node.name = _prefixed(node.name)
        node.input[:] = [_prefixed(name) for name in node.input]
        node.output[:] = [_prefixed(name) for name in node.output]
        for attribute in node.attribute:
            for inner in _graphs_of(attribute):
                _prepare_graph(inner)


def _prefixed(name: str) -> str:
    return PREFIX + name if name else ""  # an omitted input or output has an empty name


def _strip(node: NodeProto) -> None:
    """Remove the notes of exporters: lines and paths of the program that built the node."""
    node.doc_string = ""
    del node.metadata_props[:]


def _graphs_of(attribute: AttributeProto) -> Sequence[GraphProto]:
    return [attribute.g] if attribute.HasField("g") else list(attribute.graphs)


class _Nodes:
    """Collects nodes and constants of one graph; each node is named after its output."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def constant(self, name: str, value: Any) -> str:
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def add(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))
        return output


def wrap_net(
    net: ModelProto,
    interface: NetInterface,
    preprocessing: Preprocessing,
    contract: ModelContract,
    *,
    probabilities: bool,
    one_by_one: bool,
    version: str,
) -> ModelProto:
    """Build the model file of a net from `prepare_net`.

    interface: with the names before the prefix; probabilities: the net's output follows a softmax; one_by_one: run the
    images of a batch through the net one at a time, in a Scan; version: of prelunet.
    """
    classes = len(contract.classes)
    outer = _Nodes()
    pixels = _front(outer, interface, preprocessing)
    if one_by_one:
        raw = _add_scan(outer, net.graph, interface, pixels, classes)
    else:
        outer.add("Identity", [pixels], _prefixed(interface.input))
        _embed(outer, net.graph)
        raw = _prefixed(interface.output)
    _back(outer, raw, interface, classes, probabilities=probabilities)
    graph = helper.make_graph(outer.nodes, "prelunet", *_interface(contract), outer.constants)
    if not one_by_one:
        graph.sparse_initializer.extend(net.graph.sparse_initializer)
    model = helper.make_model(
        graph,
        opset_imports=list(net.opset_import),
        functions=list(net.functions),
        ir_version=max(net.ir_version, OLDEST_IR),
        producer_name="prelunet",
        producer_version=version,
    )
    helper.set_model_props(model, contract.to_metadata())
    return model


def _interface(contract: ModelContract) -> tuple[list[Any], list[Any]]:
    """Return the inputs and outputs of the contract, with canvases of one crop."""
    info, crop, classes = helper.make_tensor_value_info, contract.crop, len(contract.classes)
    inputs = [info("images", TensorProto.UINT8, ["N", crop, crop, 3]), info("sizes", TensorProto.INT64, ["N", 2])]
    outputs = [
        info("scores", TensorProto.FLOAT, ["N", classes]),
        info("logits", TensorProto.FLOAT, ["N", classes]),
        info("windows", TensorProto.INT64, ["N", 2]),
        info("window_scores", TensorProto.FLOAT, ["N", 1, 1, classes]),
    ]
    return inputs, outputs


def _front(outer: _Nodes, interface: NetInterface, preprocessing: Preprocessing) -> str:
    """Add the preprocessing from `images` to the net's input, in the order of operations of `Preprocessing.apply`."""
    value = "images"
    if preprocessing.channels == "bgr":
        order = outer.constant("bgr", np.array([2, 1, 0], np.int64))
        value = outer.add("Gather", [value, order], "images.bgr", axis=3)
    shape = (1, 1, 1, 3)
    if interface.layout == "NCHW":
        shape = (1, 3, 1, 1)
        value = outer.add("Transpose", [value], "images.channels_first", perm=[0, 3, 1, 2])
    if preprocessing.mean is None or preprocessing.std is None:
        return value
    value = outer.add("Cast", [value], "images.float", to=TensorProto.FLOAT)
    if preprocessing.pixel_range == 1:
        value = outer.add("Div", [value, outer.constant("white", np.array(255, np.float32))], "images.scaled")
    mean = outer.constant("mean", np.array(preprocessing.mean, np.float32).reshape(shape))
    std = outer.constant("std", np.array(preprocessing.std, np.float32).reshape(shape))
    value = outer.add("Div", [outer.add("Sub", [value, mean], "images.centred"), std], "images.normalised")
    if interface.input_type != TensorProto.FLOAT:
        value = outer.add("Cast", [value], "images.cast", to=interface.input_type)
    return value


def _embed(graph: _Nodes, net: GraphProto) -> None:
    graph.nodes.extend(net.node)
    graph.constants.extend(net.initializer)


def _add_scan(outer: _Nodes, net: GraphProto, interface: NetInterface, pixels: str, classes: int) -> str:
    """Add a Scan that runs the net on one image at a time; return the name of its output (N, K).

    A net with a fixed batch size B gets each image B times, and only the first row of its output is used.
    """
    batch, one = interface.batch or 1, interface.shape(1)
    body = _Nodes()
    shape = outer.constant("one.shape", np.array(one, np.int64))
    image = body.add("Reshape", ["one.image", shape], "one.batch")
    target = _prefixed(interface.input)
    if batch == 1:
        body.add("Identity", [image], target)
    else:
        body.add("Concat", [image] * batch, target, axis=0)
    _embed(body, net)
    rows = outer.constant("one.rows", np.array([batch, classes], np.int64))
    first = outer.constant("one.first", np.array(0, np.int64))
    table = body.add("Reshape", [_prefixed(interface.output), rows], "one.table")
    body.add("Gather", [table, first], "one.scores", axis=0)
    graph = helper.make_graph(
        body.nodes,
        "one_image",
        [helper.make_tensor_value_info("one.image", interface.input_type, one[1:])],
        [helper.make_tensor_value_info("one.scores", interface.output_type, [classes])],
        body.constants,
    )
    graph.sparse_initializer.extend(net.sparse_initializer)
    return outer.add("Scan", [pixels], "net.scores", body=graph, num_scan_inputs=1)


def _back(outer: _Nodes, raw: str, interface: NetInterface, classes: int, *, probabilities: bool) -> None:
    """Add the four outputs after the net's output, (N, K) or (N, K, 1, 1)."""
    value = outer.add("Reshape", [raw, outer.constant("table", np.array([-1, classes], np.int64))], "net.table")
    value = outer.add("Cast", [value], "net.float", to=TensorProto.FLOAT)
    if probabilities:
        outer.add("Identity", [value], "scores")
        floor = outer.constant("floor", np.array(probability_floor(interface), np.float32))
        outer.add("Log", [outer.add("Add", [value, floor], "net.positive")], "logits")
    else:
        outer.add("Identity", [value], "logits")
        outer.add("Softmax", [value], "scores", axis=1)  # for 2-D input, the same before and since opset 13
    grid = outer.constant("grid", np.array([-1, 1, 1, classes], np.int64))
    outer.add("Reshape", ["scores", grid], "window_scores")
    # floor(side / crop) windows, as in the contract's trunk of one layer: one per image.
    outer.add("Div", ["sizes", outer.constant("crop", np.array(interface.crop, np.int64))], "windows")


def probability_floor(interface: NetInterface) -> float:
    """Return the constant added to a probability to keep its logarithm finite.

    It is the smallest positive number in the net's precision (for float32, the smallest normal one).
    """
    return 2.0**-24 if interface.half else float(np.finfo(np.float32).tiny)
