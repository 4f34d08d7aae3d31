"""The contract's graph around a foreign net: preprocessing before its input, the four outputs after its output.

The added operators exist in every opset from 7, so that the net keeps its opset and operators. All names of the net
get a prefix, because its tensors may also be called `images` or `logits`.
"""

from collections.abc import Mapping

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from ...evaluator.contract import ModelContract
from ...training.importing.preprocessing import LUMA, LUMA_UNIT, Preprocessing
from ..onnx_graph import IR_VERSION, GraphBuilder, build_file, contract_graph
from .dense import WINDOWS, Head
from .read_net import NetInterface, opset_of

PREFIX = "net/"


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
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                _prepare_graph(inner)


def _prefixed(name: str) -> str:
    return PREFIX + name if name else ""  # an omitted input or output has an empty name


def _strip(node: NodeProto) -> None:
    """Remove the notes of exporters: lines and paths of the program that built the node."""
    node.doc_string = ""
    del node.metadata_props[:]


def wrap_net(
    net: ModelProto,
    interface: NetInterface,
    preprocessing: Preprocessing,
    contract: ModelContract,
    *,
    probabilities: bool,
    one_by_one: bool,
    version: str,
    head: Head | None = None,
) -> ModelProto:
    """Build the model file of a net from `prepare_net`.

    interface: with the names before the prefix; probabilities: the net's output follows a softmax; one_by_one: run the
    images of a batch through the net one at a time, in a Scan; version: of prelunet; head: of a net made dense.
    """
    classes = len(contract.classes)
    outputs = 1 if interface.one_score else classes
    outer = GraphBuilder()
    pixels = _front(outer, interface, preprocessing)
    if one_by_one:
        raw = _add_scan(outer, net.graph, interface, pixels, outputs)
    else:
        outer.node("Identity", [pixels], _prefixed(interface.input))
        outer.embed(net.graph)
        raw = _prefixed(interface.output)
    rows = _score_rows(outer, raw, interface, outputs, probabilities=probabilities)
    if head is None:
        _one_window(outer, rows, interface.crop, classes)
        graph = contract_graph(outer, classes, canvas=(contract.crop, contract.crop), grid=(1, 1))
    else:
        _averages(outer, rows, head, classes, opset_of(net))
        graph = contract_graph(outer, classes, canvas=("H", "W"), grid=("Gh", "Gw"))
    if not one_by_one:
        graph.sparse_initializer.extend(net.graph.sparse_initializer)
    ir_version = max(net.ir_version, IR_VERSION)
    functions = list(net.functions)
    return build_file(
        graph, contract.to_metadata(), version, net.opset_import, functions=functions, ir_version=ir_version
    )


def _front(outer: GraphBuilder, interface: NetInterface, preprocessing: Preprocessing) -> str:
    """Add the preprocessing from `images` to the net's input, in the order of operations of `Preprocessing.apply`."""
    value = "images"
    if preprocessing.channels == "gray":
        value = _luma(outer, interface.channels)
    if preprocessing.channels == "bgr":
        order = outer.constant("bgr", np.array([2, 1, 0], np.int64))
        value = outer.node("Gather", [value, order], "images.bgr", axis=3)
    shape = (1, 1, 1, interface.channels)
    if interface.layout == "NCHW":
        shape = (1, interface.channels, 1, 1)
        value = outer.node("Transpose", [value], "images.channels_first", perm=[0, 3, 1, 2])
    if preprocessing.mean is None or preprocessing.std is None:
        return value
    value = outer.node("Cast", [value], "images.float", to=TensorProto.FLOAT)
    if preprocessing.pixel_range == 1:
        value = outer.node("Div", [value, outer.constant("white", np.array(255, np.float32))], "images.scaled")
    numbers = [np.array(each[: interface.channels], np.float32) for each in (preprocessing.mean, preprocessing.std)]
    mean, std = (outer.constant(name, each.reshape(shape)) for name, each in zip(("mean", "std"), numbers, strict=True))
    value = outer.node("Div", [outer.node("Sub", [value, mean], "images.centred"), std], "images.normalised")
    if interface.input_type != TensorProto.FLOAT:
        value = outer.node("Cast", [value], "images.cast", to=interface.input_type)
    return value


def _luma(outer: GraphBuilder, channels: int) -> str:
    """Add the gray values of `images`, uint8, in whole numbers as `Preprocessing.apply` computes them."""
    pixels = outer.node("Cast", ["images"], "images.whole", to=TensorProto.INT32)
    weights = outer.constant("luma", np.array(LUMA, np.int32))
    weighted = outer.node("Mul", [pixels, weights], "images.weighted")
    value = outer.constant("luma.half", np.array(LUMA_UNIT // 2, np.int32))
    for channel in range(3):  # no sum over an axis: its axes were an attribute before opset 13
        index = outer.constant(f"luma.{channel}", np.array([channel], np.int64))
        part = outer.node("Gather", [weighted, index], f"images.weighted.{channel}", axis=3)
        value = outer.node("Add", [part, value], f"images.sum.{channel}")
    unit = outer.constant("luma.unit", np.array(LUMA_UNIT, np.int32))
    luma = outer.node("Cast", [outer.node("Div", [value, unit], "images.luma")], "images.gray", to=TensorProto.UINT8)
    return luma if channels == 1 else outer.node("Concat", [luma] * channels, "images.grays", axis=3)


def _add_scan(outer: GraphBuilder, net: GraphProto, interface: NetInterface, pixels: str, outputs: int) -> str:
    """Add a Scan that runs the net on one image at a time; return the name of its output (N, outputs).

    A net with a fixed batch size B gets each image B times, and only the first row of its output is used.
    """
    batch, one = interface.batch or 1, interface.shape(1)
    body = GraphBuilder()
    shape = outer.constant("one.shape", np.array(one, np.int64))
    image = body.node("Reshape", ["one.image", shape], "one.batch")
    target = _prefixed(interface.input)
    if batch == 1:
        body.node("Identity", [image], target)
    else:
        body.node("Concat", [image] * batch, target, axis=0)
    body.embed(net)
    rows = outer.constant("one.rows", np.array([batch, outputs], np.int64))
    first = outer.constant("one.first", np.array(0, np.int64))
    table = body.node("Reshape", [_prefixed(interface.output), rows], "one.table")
    body.node("Gather", [table, first], "one.scores", axis=0)
    image_info = helper.make_tensor_value_info("one.image", interface.input_type, one[1:])
    scores_info = helper.make_tensor_value_info("one.scores", interface.output_type, [outputs])
    graph = body.graph("one_image", [image_info], [scores_info])
    graph.sparse_initializer.extend(net.sparse_initializer)
    return outer.node("Scan", [pixels], "net.scores", body=graph, num_scan_inputs=1)


def _score_rows(
    outer: GraphBuilder, raw: str, interface: NetInterface, outputs: int, *, probabilities: bool
) -> dict[str, str]:
    """Add float32 scores and logits after the net's output, `outputs` numbers for each row; return their names.

    One score s becomes 1 - s and s, one logit z becomes 0 and z, whose softmax is the sigmoid of z.
    """
    value = outer.node("Reshape", [raw, outer.constant("table", np.array([-1, outputs], np.int64))], "net.table")
    value = outer.node("Cast", [value], "net.float", to=TensorProto.FLOAT)
    if interface.one_score:
        whole = outer.constant("one", np.array(1, np.float32)) if probabilities else value
        other = outer.node("Sub", [whole, value], "net.other")
        value = outer.node("Concat", [other, value], "net.both", axis=1)
    if probabilities:
        floor = outer.constant("floor", np.array(probability_floor(interface), np.float32))
        logits = outer.node("Log", [outer.node("Add", [value, floor], "net.positive")], "net.logits")
        return {"scores": value, "logits": logits}
    # for 2-D input, Softmax is the same before and since opset 13
    return {"scores": outer.node("Softmax", [value], "net.softmax", axis=1), "logits": value}


def _one_window(outer: GraphBuilder, rows: Mapping[str, str], crop: int, classes: int) -> None:
    """Add the four outputs of a net whose rows are images."""
    for name, values in rows.items():
        outer.node("Identity", [values], name)
    grid = outer.constant("grid", np.array([-1, 1, 1, classes], np.int64))
    outer.node("Reshape", ["scores", grid], "window_scores")
    # floor(side / crop) windows, as in the contract's trunk of one layer: one per image.
    outer.node("Div", ["sizes", outer.constant("crop", np.array(crop, np.int64))], "windows")


def _averages(outer: GraphBuilder, rows: Mapping[str, str], head: Head, classes: int, opset: int) -> None:
    """Add the four outputs of a net whose rows are windows."""
    axes = np.array([1, 2], np.int64)  # of the grid; an input since opset 18
    inputs, attributes = ([outer.constant("axes", axes)], {}) if opset >= 18 else ([], {"axes": axes.tolist()})
    # The shape (N, rows, columns, K) is taken from a tensor that has it: computed as numbers, it would leave the GPU.
    cell = outer.node("Gather", [_prefixed(WINDOWS), outer.constant("cell", np.array([0], np.int64))], "cells", axis=3)
    repeats = outer.constant("repeats", np.array([1, 1, 1, classes], np.int64))
    grid = outer.node("Shape", [outer.node("Tile", [cell, repeats], "cells.tiled")], "grid")
    for name, values in rows.items():
        windows = outer.node("Reshape", [values, grid], "window_scores" if name == "scores" else "window_logits")
        outer.node("ReduceMean", [windows, *inputs], name, keepdims=0, **attributes)
    layer = head.trunk
    offset = 2 * layer.pad - layer.kernel + layer.stride * (2 - head.window)
    shifted = outer.node("Add", ["sizes", outer.constant("offset", np.array(offset, np.int64))], "sizes.shifted")
    outer.node("Div", [shifted, outer.constant("stride", np.array(layer.stride, np.int64))], "windows")


def probability_floor(interface: NetInterface) -> float:
    """Return the constant added to a probability to keep its logarithm finite.

    It is the smallest positive number in the net's precision (for float32, the smallest normal one).
    """
    return 2.0**-24 if interface.half else float(np.finfo(np.float32).tiny)
