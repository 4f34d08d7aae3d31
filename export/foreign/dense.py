"""Makes a classifier dense: its head scores every window of a larger feature map, as it scores that of one crop.

The feature map is the last tensor with rows and columns. Its reader takes in all of it: a global average pool, or the
first fully connected layer after a flattening. In the dense graph the reader becomes an average pool of one window with
stride 1 (ResNet, He et al. 2016, section 3.4), or a convolution with the layer's weights (VGG, Simonyan & Zisserman
2015, section 3.2). All later layers stay as they are and get one row per window.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ...evaluator.architectures import TrunkLayer
from ...evaluator.engine.runtimes.onnx import RawOnnxModel
from ...evaluator.errors import ContractError
from .read_net import NetInterface, image_tensors, inferred_shapes

WINDOWS = "dense.windows"  # what the reader returns for each window, (N, rows, columns, channels)
MULTI_SCALE = (256, 288, 320)  # for a crop of 224; nets with global pooling often get worse beyond 1.3 times their crop

_GLOBAL_POOLS = ("GlobalAveragePool", "AveragePool", "ReduceMean")
_LOCAL = ("Conv", "MaxPool", "AveragePool", "LpPool")
_COPIES = ("Identity", "Dropout")

Shapes = Mapping[str, Sequence[int]]
Constants = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Head:
    """Where the head of a net begins.

    feature_map: name of the map, (N, channels, window, window) for one crop; reader: the node that takes in all of it;
    skipped: nodes between them, which only reshape; channels_last: these move the channels of the map behind its
    columns, as in TensorFlow's nets; rows: shape of what the reader returns for one image; trunk: one layer whose maps
    have the sides of the feature map; shapes: of the net's tensors for one crop.
    """

    feature_map: str
    channels: int
    window: int
    reader: NodeProto
    skipped: tuple[NodeProto, ...]
    channels_last: bool
    rows: tuple[int, ...]
    trunk: TrunkLayer
    shapes: Shapes


class _Net:
    """The nodes of a net, by the tensors that they produce, with the shapes for one crop."""

    def __init__(self, path: Path, net: ModelProto, interface: NetInterface) -> None:
        self.path, self.input, self.crop, self.images = path, interface.input, interface.crop, interface.batch or 1
        self.any_size = interface.any_size
        self.nodes = list(net.graph.node)
        self.producers = {name: node for node in self.nodes for name in node.output}
        self.constants: Constants = _constants(net)
        self.varying = image_tensors(net)
        self.shapes: Shapes = inferred_shapes(net, interface)
        if unknown := [name for name in self.producers if name and name not in self.shapes]:
            self.shapes = {**self.shapes, **self._measured_shapes(net, interface, unknown)}

    def _measured_shapes(self, net: ModelProto, interface: NetInterface, names: Sequence[str]) -> Shapes:
        """Return shapes that onnx cannot infer, because the net computes them, by running the net on one batch."""
        measuring = ModelProto()
        measuring.CopyFrom(net)
        parts = []
        for name in names:
            shape, rank = f"dense.{name}.shape", f"dense.{name}.rank"
            measuring.graph.node.append(helper.make_node("Shape", [name], [shape]))
            measuring.graph.node.append(helper.make_node("Shape", [shape], [rank]))
            parts += [rank, shape]
        measuring.graph.node.append(helper.make_node("Concat", parts, ["dense.shapes"], axis=0))
        measuring.graph.output.append(ValueInfoProto(name="dense.shapes"))
        zeros = np.zeros(interface.shape(interface.batch or 1), helper.tensor_dtype_to_np_dtype(interface.input_type))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "shapes.onnx"
            file.write_bytes(measuring.SerializeToString())
            try:
                numbers = iter(RawOnnxModel(file).run({interface.input: zeros}, "dense.shapes").tolist())
            except ContractError as error:
                raise self.refusal("the shapes of its tensors cannot be determined") from error
        return {name: list(islice(numbers, next(numbers))) for name in names}

    def source(self, node: NodeProto) -> str:
        """Return the input that carries the image: the largest that depends on it. A gate has few values."""
        variable = [name for name in node.input if name in self.varying]
        sizes = [int(np.prod(self.shapes[name])) if name in self.shapes else 0 for name in variable]
        if not variable:
            raise self.refusal(f"its output does not depend on its input, at {_name(node)}")
        return variable[sizes.index(max(sizes))]

    def path_to_input(self, name: str) -> Iterator[tuple[str, NodeProto]]:
        """Yield (tensor, its node) from a tensor towards the net's input."""
        while name != self.input:
            node = self.producers.get(name)
            if node is None:
                raise self.refusal(f"tensor '{name}' comes from nowhere")
            yield name, node
            name = self.source(node)

    def refusal(self, reason: str, fix: str = "Adopt") -> ContractError:
        return ContractError(f"{self.path}: cannot become dense: {reason}. {fix} it without --dense")


def find_head(path: Path, net: ModelProto, interface: NetInterface) -> Head:
    """Find the feature map of a net and what reads it.

    Raises ContractError, with the node that stands in the way, if the net has neither a global average pool nor a
    flattened feature map before its last layers, or if its feature map does not grow with the image.
    """
    graph = _Net(path, net, interface)
    after: list[tuple[str, NodeProto]] = []  # what the walk has passed, latest last
    for name, node in graph.path_to_input(interface.output):
        source = graph.source(node)
        shape, result = graph.shapes.get(source), graph.shapes.get(name)
        if shape is not None and result is not None and len(shape) == 4 and shape[0] == graph.images:
            feature_map, moving = _channels_first(graph, source)
            _, channels, *sides = graph.shapes[feature_map]
            if node.op_type in _GLOBAL_POOLS and 1 < channels == np.prod(result[1:]):
                return _head(graph, feature_map, node, moving, tuple(result[1:]))
            if len(result) == 2 and result[1] == np.prod(shape[1:]) and max(sides) > 1:
                reader, skipped = _fully_connected(graph, [node, *(passed for _, passed in reversed(after))])
                rows = tuple(graph.shapes[reader.output[0]][1:])
                return replace(_head(graph, feature_map, reader, (*moving, *skipped), rows), channels_last=bool(moving))
        after.append((name, node))
    raise graph.refusal("no global average pool and no flattened feature map comes before its last layers")


def _channels_first(graph: _Net, name: str) -> tuple[str, tuple[NodeProto, ...]]:
    """Return the map, (N, channels, rows, columns), behind a tensor, and the node that moved its channels if any."""
    node = graph.producers.get(name)
    if node is not None and node.op_type == "Transpose":
        for attribute in node.attribute:
            if attribute.name == "perm" and list(attribute.ints) == [0, 2, 3, 1]:
                return node.input[0], (node,)
    return name, ()


def _fully_connected(graph: _Net, nodes: Sequence[NodeProto]) -> tuple[NodeProto, tuple[NodeProto, ...]]:
    """Return the first fully connected layer of a path that begins with a flattening, and the nodes before it."""
    for place, node in enumerate(nodes):
        if place and node.op_type not in _COPIES:
            attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
            plain = not attributes.get("transA") and attributes.get("alpha", 1) == attributes.get("beta", 1) == 1
            if node.op_type in {"Gemm", "MatMul"} and plain and node.input[1] in graph.constants:
                return node, tuple(nodes[:place])
            raise graph.refusal(f"its flattened feature map is read by {_name(node)}, not by a fully connected layer")
    raise graph.refusal("its flattened feature map is its output")


def _head(
    graph: _Net, feature_map: str, reader: NodeProto, skipped: tuple[NodeProto, ...], rows: tuple[int, ...]
) -> Head:
    if not graph.any_size:
        _check_padding(graph)
    _, channels, height, width = graph.shapes[feature_map]
    stride, offset = 1, 0  # a side of the map is (side + offset) // stride
    layers = [node for _, node in graph.path_to_input(feature_map) if node.op_type in {*_LOCAL, "Pad"}]
    for node in reversed(layers):
        own_stride, own_offset = _geometry(graph, node)
        stride, offset = stride * own_stride, offset + own_offset * stride
    if not height == width == (graph.crop + offset) // stride:
        raise graph.refusal(
            f"its feature map '{feature_map}' has {height}x{width} cells, which its convolutions and pools on "
            f"{graph.crop}x{graph.crop} pixels do not explain"
        )
    pad = max(0, offset - stride + 1)
    trunk = TrunkLayer(stride + 2 * pad - offset, stride, pad)
    return Head(
        feature_map, channels, height, reader, skipped, channels_last=False, rows=rows, trunk=trunk, shapes=graph.shapes
    )


def _check_padding(graph: _Net) -> None:
    """Refuse a file for one size if a layer may pad larger images otherwise than its crop.

    TensorFlow's padding "same" depends on the side: with stride 2, an even one gets one cell less than an odd one. Some
    exporters make its cells constant, and it looks like fixed padding. It is suspected where a strided layer pads
    unequally, by what "same" gives at the crop. Equal padding counts as fixed, although "same" pads equally, too, where
    all sides are odd. A file for any size says itself how it pads.
    """
    for node in graph.nodes:
        if node.op_type not in _LOCAL or len(graph.shapes[node.input[0]]) != 4:
            continue
        source, outer = node.input[0], [0] * 8
        pad = graph.producers.get(source)
        if pad is not None and pad.op_type == "Pad":
            source, outer = pad.input[0], _pad_cells(graph, pad) or outer
        for axis, (extent, stride, *inner) in enumerate(_layer_sides(graph, node), 2):
            before, after, side = inner[0] + outer[axis], inner[1] + outer[axis + 4], graph.shapes[source][axis]
            same = max(0, (-(-side // stride) - 1) * stride + extent - side)
            if stride > 1 and before != after and (before, after) == (same // 2, same - same // 2):
                raise graph.refusal(
                    f'{_name(node)} pads {side} cells by {before} and {after}, as padding "same" does, which pads '
                    "other sizes otherwise. A file for one size does not tell if this padding is fixed",
                    "Export the net with dynamic height and width, or adopt",
                )


def _geometry(graph: _Net, node: NodeProto) -> tuple[int, int]:
    """Return (stride, offset) of a layer: its map's side is (side + offset) // stride."""
    if node.op_type == "Pad":
        pads = _pad_cells(graph, node)
        if pads is None:  # computed from the image, as for TensorFlow's padding "same", or only of some axes
            raise graph.refusal(f"{_name(node)} does not pad all images by the same constant number of cells")
        sides = [(1, pads[axis] + pads[axis + 4]) for axis in (2, 3)]
    else:
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        same, up = attributes.get("auto_pad", b"").startswith(b"SAME"), bool(attributes.get("ceil_mode"))
        sides = [
            (stride, stride - 1) if same else (stride, begin + end - extent + stride + up * (stride - 1))
            for extent, stride, begin, end in _layer_sides(graph, node)
        ]
    if sides[0] != sides[1]:
        raise graph.refusal(f"{_name(node)} treats rows and columns differently")
    return sides[0]


def _layer_sides(graph: _Net, node: NodeProto) -> list[tuple[int, int, int, int]]:
    """Return (extent of the kernel, stride, padding before, padding after) of a layer for rows and for columns."""
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    kernel = attributes.get("kernel_shape") or graph.shapes[node.input[1]][2:]
    strides, dilations = attributes.get("strides") or [1, 1], attributes.get("dilations") or [1, 1]
    pads = attributes.get("pads") or [0] * 4
    return [
        (dilation * (side - 1) + 1, stride, pads[axis], pads[axis + 2])
        for axis, (side, stride, dilation) in enumerate(zip(kernel, strides, dilations, strict=True))
    ]


def _pad_cells(graph: _Net, node: NodeProto) -> list[int] | None:
    """Return the constant begins and ends of a Pad node for four axes, None if it has no such."""
    stated = next((list(each.ints) for each in node.attribute if each.name == "pads"), None)
    pads: list[int] = stated or graph.constants.get(node.input[1], np.zeros(0)).tolist()
    return pads if len(pads) == 8 else None


def _constants(net: ModelProto, shapes: Shapes | None = None) -> Constants:
    """Return the values of a net's constants by name, also of those that it computes from others.

    shapes: if given, what the net computes from the shapes of its tensors is constant, too.
    """
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in net.graph.initializer}
    opsets = {entry.domain: entry.version for entry in net.opset_import}
    for node in net.graph.node:
        inputs = [name for name in node.input if name]
        if node.op_type == "Shape" and shapes is not None:
            constants[node.output[0]] = _shape(node, shapes)
        elif node.op_type not in {"If", "Loop", "Scan"} and all(name in constants for name in inputs):
            # As torch's older exporter computes the sides of a Pad. A loop may be endless.
            with suppress(Exception):  # an operator unknown to the evaluator: its result counts as variable
                found = ReferenceEvaluator(node, opsets=opsets).run(None, {name: constants[name] for name in inputs})
                constants |= {name: np.asarray(value) for name, value in zip(node.output, found, strict=True)}
    return constants


def _shape(node: NodeProto, shapes: Shapes) -> npt.NDArray[np.int64]:
    places = {each.name: each.i for each in node.attribute}
    return np.array(shapes[node.input[0]][places.get("start", 0) : places.get("end")], np.int64)


def _name(node: NodeProto) -> str:
    return f"its {node.op_type} node{' ' + node.name if node.name else ''}"


def make_dense(net: ModelProto, head: Head) -> None:
    """Let a net score each window: its output gets a row per window instead of one per image. Modifies the net.

    The rows are in the order of `WINDOWS`, (N, rows, columns, channels), which the net gets as a further tensor.
    """
    shapes, constants, side = head.shapes, _constants(net, head.shapes), [head.window] * 2
    result = head.reader.output[0]

    def constant(name: str, value: npt.NDArray[Any]) -> str:
        net.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    if head.reader.op_type in _GLOBAL_POOLS:
        read = helper.make_node("AveragePool", [head.feature_map], ["dense.read"], kernel_shape=side, strides=[1, 1])
    else:
        kernels = _kernels(head, constants[head.reader.input[1]])
        inputs = [head.feature_map, constant("dense.kernels", kernels), *list(head.reader.input)[2:]]
        read = helper.make_node("Conv", inputs, ["dense.read"], kernel_shape=side)
    rows = constant("dense.rows", np.array([-1, *head.rows], np.int64))
    reading = [
        read,
        helper.make_node("Transpose", ["dense.read"], [WINDOWS], perm=[0, 2, 3, 1]),
        helper.make_node("Reshape", [WINDOWS, rows], [result]),
    ]
    nodes, behind = [], {result}
    for node in net.graph.node:
        if node == head.reader:
            nodes += reading
            continue
        if node in head.skipped:
            continue
        if behind.intersection(node.input):
            behind.update(node.output)
            shape = shapes.get(node.output[0])
            if shape is not None and (node.op_type == "Reshape" or _copies_all(node, constants, shapes)):
                # It may state the batch used at export.
                stated = constant(f"dense.{node.output[0]}.shape", np.array([-1, *shape[1:]], np.int64))
                nodes.append(helper.make_node("Reshape", [node.input[0], stated], [node.output[0]], name=node.name))
                continue
        nodes.append(node)
    del net.graph.node[:]
    net.graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input}
    for tensor in list(net.graph.initializer):
        if tensor.name in head.reader.input and tensor.name not in used:  # hundreds of MB, now in the kernels
            net.graph.initializer.remove(tensor)


def _kernels(head: Head, weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the weights of a fully connected reader as those of a convolution."""
    if not any(each.name == "transB" and each.i for each in head.reader.attribute):
        weights = weights.T
    side = head.window
    if head.channels_last:
        return weights.reshape(-1, side, side, head.channels).transpose(0, 3, 1, 2)
    return weights.reshape(-1, head.channels, side, side)


def _copies_all(node: NodeProto, constants: Constants, shapes: Shapes) -> bool:
    """Return whether a node gathers all numbers of a flat tensor in their order, as torch's exporter copies strides."""
    indices = constants.get(node.input[1]) if node.op_type == "Gather" else None
    flat = shapes.get(node.input[0])
    return indices is not None and flat == [indices.size] and np.array_equal(indices.ravel(), np.arange(indices.size))


def part_of(net: ModelProto, start: tuple[str, int], end: str, shapes: Shapes | None = None) -> ModelProto:
    """Return the part of a net between two tensors, for inputs of any shape, or only for those with the given shapes.

    start: name and onnx type; end: name; shapes: of the net's tensors.
    """
    needed, nodes, stated = {end}, [], []
    for node in reversed(net.graph.node):
        if not needed.intersection(node.output) or start[0] in node.output:
            continue
        if node.op_type == "Shape" and shapes is not None:  # often of the net's input, which is not in this part
            stated.append(numpy_helper.from_array(_shape(node, shapes), node.output[0]))
            continue
        nodes.append(node)
        needed.update(node.input)
    inputs, outputs = [helper.make_tensor_value_info(*start, None)], [ValueInfoProto(name=end)]
    constants = [tensor for tensor in net.graph.initializer if tensor.name in needed] + stated
    graph = helper.make_graph(nodes[::-1], "part", inputs, outputs, constants)
    functions = list(net.functions)
    return helper.make_model(graph, opset_imports=net.opset_import, functions=functions, ir_version=net.ir_version)
