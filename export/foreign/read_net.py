"""Reads a foreign ONNX classifier with its external data, and finds its image input and its output of scores."""

import hashlib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, TensorProto, external_data_helper, helper
from onnx.helper import tensor_dtype_to_np_dtype

from ...evaluator.engine.runtimes.onnx_metadata import is_model_file
from ...evaluator.errors import ContractError, UsageError, from_os_error
from ...evaluator.files import read_regular
from ...training.importing.preprocessing import Layout

# Protobuf's limit for one file, less a margin for the nodes we add.
MAX_BYTES = 2**31 - 2**24
OLDEST_OPSET = 7  # the first whose elementwise operators broadcast, and the oldest supported by onnxruntime
MAX_CROP = 4096  # pixels per side, as for the nets of `prelunet init`
_INPUT_TYPES = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8}
_FLOATS = {"DOUBLE", "BFLOAT16"}  # types that can be converted to an allowed one
_OUTPUT_TYPES = {TensorProto.FLOAT, TensorProto.FLOAT16}
_CHANNELS = (3, 1)  # of color and gray images
_INTEGERS = {TensorProto.INT32, TensorProto.INT64}

Dimension = int | None  # of a shape; None if the file does not fix it


@dataclass(frozen=True)
class NetInterface:
    """The input and output of a net.

    input, output: names; input_type, output_type: of onnx (`TensorProto.FLOAT`, ...); channels: 3, or 1 of a gray net;
    batch: fixed batch size, None if dynamic; crop: side of its images in pixels; any_size: whether the file leaves
    height and width open; one_score: whether its output is only the score of the second of two classes, as after a
    sigmoid.
    """

    input: str
    input_type: int
    layout: Layout
    channels: int
    batch: int | None
    crop: int
    output: str
    output_type: int
    any_size: bool
    one_score: bool = False

    def shape(self, images: int) -> tuple[int, int, int, int]:
        """Return the shape of an input batch of `images` images."""
        if self.layout == "NCHW":
            return (images, self.channels, self.crop, self.crop)
        return (images, self.crop, self.crop, self.channels)

    def feed(self, preprocessed: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the net's input for one image, (H, W, 3) in its channel order, repeated to a full batch."""
        image = preprocessed[:, :, : self.channels]
        image = image.transpose(2, 0, 1) if self.layout == "NCHW" else image
        batch = np.repeat(image[None], self.batch or 1, axis=0)
        with np.errstate(over="ignore"):  # infinities in half precision show up in the net's output
            return np.ascontiguousarray(batch.astype(tensor_dtype_to_np_dtype(self.input_type)))

    @property
    def takes_bytes(self) -> bool:
        """Return whether the net takes raw uint8 pixels."""
        return self.input_type == TensorProto.UINT8

    @property
    def half(self) -> bool:
        return self.output_type == TensorProto.FLOAT16


def read_net(path: Path) -> ModelProto:
    """Read an ONNX file with all its external data.

    Raises UsageError if the net cannot be read, ContractError if it is not an ONNX model, a data file is missing, it is
    too large for one file, or its opset is too old for runtimes.
    """
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise from_os_error(error) from error
    try:
        model = onnx.load_model_from_string(data, format="protobuf")
    except Exception as error:  # protobuf's exception class has no public name
        raise ContractError(f"{path}: not an ONNX model. Give an ONNX file") from error
    if not model.graph.node or not model.opset_import:
        raise ContractError(f"{path}: not an ONNX model, or one without a graph. Give an ONNX file of a net")
    if is_model_file(path):
        raise UsageError(f"{path}: already a model file of prelunet. Use it as it is, or adopt the original ONNX file")
    opset = opset_of(model)
    if opset < OLDEST_OPSET:
        raise ContractError(
            f"{path}: opset {opset}, but the oldest opset supported by runtimes is {OLDEST_OPSET}. "
            "Convert it with onnx.version_converter, or export the net again"
        )
    fixed = {name for node in model.graph.node for name in node.output} - image_tensors(model)
    if any(
        node.op_type == "BatchNormalization"
        and (len(node.output) > 1 or any(each.name == "training_mode" and each.i for each in node.attribute))
        and node.output[0] not in fixed  # else it standardizes weights
        for node in all_nodes(model)
    ):
        raise ContractError(
            f"{path}: in training mode: it normalizes with the statistics of each batch. Call eval() on the net and "
            "export it again"
        )
    size = sum(_bytes_of(path, tensor) for tensor in model.graph.initializer)
    if size > MAX_BYTES:
        raise ContractError(
            f"{path}: {size / 1e9:.2f} GB of weights, but one ONNX file can hold less than {MAX_BYTES / 1e9:.2f} GB. "
            "Convert the net to half precision first"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # about unknown keys that we do not need
            external_data_helper.load_external_data_for_model(model, str(path.parent))
    except Exception as error:  # several classes of onnx, and OSError
        reason = " ".join(str(error).split())[:200]
        linked = "link" in str(error)  # as in Hugging Face's cache; onnx refuses to follow any
        fix = "Copy the folder without links: cp -rL" if linked else "Put them in the same folder"
        raise ContractError(
            f"{path}: its weights are in other files, which cannot be read ({reason}). {fix}"
        ) from error
    return model


def digest_of(net: ModelProto, *stated: object) -> str:
    """Return the sha256 of a net with its weights, wherever they are stored, and of what is stated about it."""
    for tensor in net.graph.initializer:
        tensor.ClearField("data_location")  # the default, but stated where the weights were in another file
    digest = hashlib.sha256(net.SerializeToString(deterministic=True))
    digest.update(repr(stated).encode())
    return digest.hexdigest()


def opset_of(model: ModelProto) -> int:
    return max((entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"}), default=0)


def image_tensors(model: ModelProto) -> set[str]:
    """Return the names of a net's tensors that depend on its input. All others are constant."""
    weights = {tensor.name for tensor in model.graph.initializer}
    found = {value.name for value in model.graph.input} - weights
    for node in model.graph.node:
        if any(found.intersection(each.input) for each in _with_inner([node])):
            found.update(node.output)
    return found


def all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Yield every node of a net, including those of its branches, loops and functions."""
    return _with_inner([*model.graph.node, *(node for function in model.functions for node in function.node)])


def _with_inner(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield nodes with those of their branches and loops."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                pending.extend(graph.node)


def _bytes_of(path: Path, tensor: TensorProto) -> int:
    try:
        itemsize = tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError as error:
        raise ContractError(
            f"{path}: weights '{tensor.name}' have an unknown type ({tensor.data_type}). Export the net again"
        ) from error
    return int(np.prod(tensor.dims, dtype=object)) * itemsize


def find_interface(
    path: Path, model: ModelProto, *, crop: int | None, layout: Layout | None, output: str | None
) -> NetInterface:
    """Determine the input and output of a classifier from its declarations.

    crop, layout: options of the user, required if the file does not fix them; output: name, if there are several.
    Raises ContractError if the net is not a classifier of one color image, UsageError if options are missing or
    contradict the file.
    """
    constant = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constant]
    if len(inputs) != 1:
        raise ContractError(
            f"{path}: inputs {_names(inputs)}, but a classifier takes one, the pixels. Export the net with one input"
        )
    (pixels,) = inputs
    input_type, shape = _tensor_of(path, pixels, "input", _INPUT_TYPES)
    if shape is None or len(shape) != 4:
        actual = "no declared shape" if shape is None else f"rank {len(shape)}"
        raise ContractError(
            f"{path}: input '{pixels.name}' has {actual}, but a batch of images has rank 4. "
            "Export the net with such an input"
        )
    actual_layout, channels = _layout(path, shape, layout)
    sides = shape[2:] if actual_layout == "NCHW" else shape[1:3]
    side = _crop(path, sides, crop)
    scores = _chosen_output(path, model, output)
    output_type, _ = _tensor_of(path, scores, "output", _OUTPUT_TYPES)
    return NetInterface(
        input=pixels.name,
        input_type=input_type,
        layout=actual_layout,
        channels=channels,
        batch=shape[0],
        crop=side,
        output=scores.name,
        output_type=output_type,
        any_size=sides == [None, None],
    )


def _names(values: Sequence[Any]) -> str:
    return ", ".join(f"'{value.name}'" for value in values) or "none"


def _chosen_output(path: Path, model: ModelProto, requested: str | None) -> Any:
    """Return the declared output with the scores: the requested one, or the only one."""
    outputs = list(model.graph.output)
    if requested is None and len(outputs) == 1:
        return outputs[0]
    for value in outputs:
        if value.name == requested:
            return value
    if requested is None:
        raise UsageError(
            f"{path}: several outputs: {_names(outputs)}. Select the one with the scores: --net-output NAME"
        )
    raise UsageError(f"{path}: no output '{requested}'. The outputs are: {_names(outputs)}")


def _tensor_of(path: Path, value: Any, role: str, allowed: Collection[int]) -> tuple[int, list[Dimension] | None]:
    """Return type and shape of an input or output. Raises ContractError unless it is a tensor of an allowed type."""
    if value.type.WhichOneof("value") != "tensor_type":
        kind = (value.type.WhichOneof("value") or "unknown").removesuffix("_type").replace("_", " ")
        raise ContractError(f"{path}: {role} '{value.name}' is a {kind}, not a tensor. Export the net without it")
    tensor = value.type.tensor_type
    if tensor.elem_type not in allowed:
        words = " or ".join(sorted(TensorProto.DataType.Name(kind) for kind in allowed))
        known = tensor.elem_type in TensorProto.DataType.values()
        kind = TensorProto.DataType.Name(tensor.elem_type) if known else f"of an unknown type ({tensor.elem_type})"
        fix = "Convert the net to single or half precision" if kind in _FLOATS else "Export the net with one of these"
        if role == "output" and tensor.elem_type in _INTEGERS:
            fix = "It is probably the index of the best class (argmax): export the net with its scores"
        raise ContractError(f"{path}: {role} '{value.name}' is {kind}, not {words}. {fix}")
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    return tensor.elem_type, [dim.dim_value if dim.dim_value > 0 else None for dim in tensor.shape.dim]


def _layout(path: Path, shape: Sequence[Dimension], requested: Layout | None) -> tuple[Layout, int]:
    """Find the channel axis by its size, 3 or 1; return both. Raises UsageError if ambiguous, or not as requested."""
    channels_of: dict[Layout, Dimension] = {"NCHW": shape[1], "NHWC": shape[3]}
    if requested is not None:
        if (channels := channels_of[requested] or 3) not in _CHANNELS:
            raise UsageError(f"{path}: --layout {requested} would give {channels} channels, not 3 or 1. Omit --layout")
        return requested, channels
    matching = [(layout, channels) for layout, channels in channels_of.items() if channels in _CHANNELS]
    if len(matching) == 1:
        return matching[0]
    if not matching and None not in channels_of.values():
        raise ContractError(
            f"{path}: an input of shape {_shape_text(shape)} has no axis of 3 or 1 channels; prelunet classifies "
            "color and gray images"
        )
    raise UsageError(
        f"{path}: an input of shape {_shape_text(shape)}: specify its channel axis with --layout NCHW or --layout NHWC"
    )


def _crop(path: Path, sides: Sequence[Dimension], requested: int | None) -> int:
    """Return the side of the net's images. Raises UsageError if it is not fixed or contradicts the option."""
    fixed = {side for side in sides if side is not None}
    if len(fixed) > 1:
        raise ContractError(
            f"{path}: takes images of {sides[0]}x{sides[1]} pixels, but crops are square. Export it for a square input"
        )
    side = fixed.pop() if fixed else requested
    if side is None:
        raise UsageError(f"{path}: takes images of any size. Specify the size used in training: --crop PIXELS")
    if requested not in {None, side}:
        raise UsageError(
            f"{path}: --crop {requested}, given or from the files beside it, but it takes images of {side}x{side} "
            f"pixels. Use --crop {side}, with the --scale of its training"
        )
    if side > MAX_CROP:
        raise ContractError(
            f"{path}: crops of {side}x{side} pixels, but the maximum is {MAX_CROP}. Export it for smaller images"
        )
    return side


def _shape_text(shape: Sequence[Dimension]) -> str:
    return "x".join("?" if side is None else str(side) for side in shape)


# Counting multiply-adds of a foreign net.


# Operators whose multiply-adds do not follow from their input and output shapes, or that call another graph.
_UNCOUNTED = {
    *("ConvTranspose", "ConvInteger", "QLinearConv", "DeformConv", "MatMulInteger", "QLinearMatMul", "Einsum"),
    *("LSTM", "GRU", "RNN", "Attention", "If", "Loop", "Scan"),
}


def count_multiply_adds(model: ModelProto, interface: NetInterface) -> int | None:
    """Count the multiply-adds per image in Conv, Gemm and MatMul, from the shapes that onnx infers.

    None if they cannot be counted: a shape is unknown, another operator multiplies, or there are none.
    Replaces the declared shapes of the model by those of one batch.
    """
    nodes = model.graph.node
    if any(node.domain not in {"", "ai.onnx"} or node.op_type in _UNCOUNTED for node in nodes):
        return None
    shapes = inferred_shapes(model, interface)
    total = 0
    for node in nodes:
        if node.op_type in {"Conv", "Gemm", "MatMul"}:
            terms = _terms(node, shapes)
            if terms is None or node.output[0] not in shapes:
                return None
            total += terms * int(np.prod(shapes[node.output[0]]))
    return total // (interface.batch or 1) or None


def inferred_shapes(model: ModelProto, interface: NetInterface) -> dict[str, list[int]]:
    """Return the shapes that onnx infers for one batch, by the name of the tensor; those it cannot infer are missing.

    Replaces the declared shapes of the model by those of one batch.
    """
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    for value in model.graph.input:
        if value.name == interface.input:
            tensor = helper.make_tensor_type_proto(interface.input_type, interface.shape(interface.batch or 1))
            value.type.CopyFrom(tensor)
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except Exception:  # onnx has several exception classes; a caller may do without
        return shapes
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        kind = value.type.tensor_type
        if kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim):
            shapes.setdefault(value.name, [dim.dim_value for dim in kind.shape.dim])
    return shapes


def _terms(node: Any, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Return the number of products summed per element of a node's output."""
    operand = shapes.get(node.input[1 if node.op_type == "Conv" else 0])
    if not operand:
        return None
    if node.op_type == "Conv":  # weights are (out, in / group, kernel...)
        return int(np.prod(operand[1:]))
    transposed = any(a.name == "transA" and helper.get_attribute_value(a) for a in node.attribute)
    return operand[0] if transposed else operand[-1]
