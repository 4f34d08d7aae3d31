"""Of part `sweep`: model files with one thing changed in the graph, which leaves every score as it is."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

CONCAT_INPUTS = 32  # up to as many onnxruntime hands their addresses to the kernel; more are uploaded from the host


def with_padded_conv1(path: Path, channels: int) -> Path:
    """Write a copy of a file in which zeros are appended to the image's channels and to conv1's weight."""
    model = onnx.load(str(path))
    graph = model.graph
    place, conv = next((index, node) for index, node in enumerate(graph.node) if node.op_type == "Conv")
    weight = next(tensor for tensor in graph.initializer if tensor.name == conv.input[1])
    values = numpy_helper.to_array(weight)
    more = channels - values.shape[1]
    weight.CopyFrom(numpy_helper.from_array(np.pad(values, ((0, 0), (0, more), (0, 0), (0, 0))), weight.name))
    pads = numpy_helper.from_array(np.array([0, 0, 0, 0, 0, more, 0, 0], np.int64), "conv1.pads")
    graph.initializer.append(pads)
    graph.node.insert(place, helper.make_node("Pad", [conv.input[0], pads.name], ["conv1.padded"], name="conv1.padded"))
    conv.input[0] = "conv1.padded"
    return _saved(model, path, f"conv1-{channels}")


def with_split_concats(path: Path, most: int = CONCAT_INPUTS) -> Path:
    """Write a copy of a file in which no Concat has more than `most` inputs: larger ones are made of several.

    A larger one uploads a table of addresses from the host in every run, whose place a CUDA graph would keep.
    """
    model = onnx.load(str(path))
    nodes = []
    for node in model.graph.node:
        if node.op_type == "Concat" and len(node.input) > most:
            inputs, parts = list(node.input), []
            for number, start in enumerate(range(0, len(inputs), most)):
                part = f"{node.name}.part{number}"
                copied = helper.make_node("Concat", inputs[start : start + most], [part], name=part)
                copied.attribute.extend(node.attribute)
                nodes.append(copied)
                parts.append(part)
            node.ClearField("input")
            node.input.extend(parts)
        nodes.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    model.graph.ClearField("node")
    model.graph.node.extend(copies)
    return _saved(model, path, "concats")


def _saved(model: Any, path: Path, kind: str) -> Path:
    new = path.with_name(f"{path.stem}-{kind}.onnx")
    onnx.save(model, str(new))
    return new
