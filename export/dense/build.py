"""The ONNX graph of a checkpoint, node by node: front, trunk, dense head (docs/formats.md, "Model file").

Ragged batches. Every image has a 0/1 vector of its valid rows and one of its valid columns, sliced from a constant
arange to the shape of the canvas. A layer of kernel k, stride s and pad p maps a vector m to m[(k−1−2p)::s]: output j
is valid if the last pixel it would read in the image alone is. Every input of a *padded* convolution is multiplied by
the outer product of its vectors, so that each image sees the zero padding that it would see alone. Pools need no mask:
a valid output of an unpadded layer reads valid inputs only.

The graph avoids Range, GridSample, If, and Shape of anything but `images`: they leave the GPU or copy to the host.

Half precision (fp16). Trunk and head compute in float16, with parameters rounded by `export.dense.half_precision`. The
front up to the first mask stays in float32, to subtract the mean and mask the canvas exactly. So do softmax, window
masks and averages: a sum of hundreds of float16 values would lose precision.

int8. The products of trunk and head compute in int8 (`export.dense.quantization`); the mean, biases, activations,
softmax and averages stay in float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from onnx import ModelProto, TensorProto, helper

from ...evaluator.architectures import LRELU_SLOPE, Activation, Architecture, Conv, Pool
from ...evaluator.arrays import Float32Array, FloatArray
from ...evaluator.contract import (
    Canvas,
    ClassEntry,
    FilePrecision,
    MeanKind,
    ModelContract,
    center_scale,
    default_scales,
)
from ...evaluator.protocols import LONG_SIDE_CAP
from ..onnx_graph import IR_VERSION, OPSET, GraphBuilder, add_value_info, build_file, contract_graph
from .half_precision import round_to_half
from .pyramid import plan_pools, pyramid_bins
from .quantization import LayerBuilder

# Pixels; larger where `multi-scale` needs it. The graph slices its masks from a constant of this length.
MAX_CANVAS_SIDE = 4096
_BLOCK_ROWS = 64  # rows transposed at a time; transposing a 500 MB fc1 at once takes six times as long
# Terms of one product of fc1; longer sums are split. In a longer one oneDNN reads the weights again for every block of
# windows: with AMX model A's fc1, 32,256 terms, took 459 ms whole and 298 in nine parts (bf16, two views of 480x640).
# With AVX-512 alone it makes no difference: benchmarks/README.md.
MAX_TERMS = 3584


@dataclass(frozen=True)
class ValidCells:
    """The 0/1 vectors after a layer, float (N, rows) and (N, columns), that mark each image's cells.

    half: the masked tensors are float16; the vectors themselves are always float32.
    """

    layer: str
    half: bool = False

    @property
    def rows(self) -> str:
        return f"{self.layer}.valid_rows"

    @property
    def columns(self) -> str:
        return f"{self.layer}.valid_columns"


def build_contract(
    architecture: Architecture,
    classes: Sequence[ClassEntry],
    canvas: Canvas = "ragged",
    precision: FilePrecision = "fp32",
    *,
    mean_kind: MeanKind = "channel",
    trained_scales: tuple[int, int] | None = None,
    checkpoint_sha256: str,
) -> ModelContract:
    """Build the contract of a net's model file, without `training` and golden images.

    trained_scales: range of the shorter sides in training, if known.
    Raises ValueError for classes that a contract does not allow.
    """
    scales = default_scales(architecture.crop, trained_scales)
    return ModelContract(
        architecture=architecture,
        classes=tuple(classes),
        mean_kind=mean_kind,
        trunk=architecture.layers,
        window=architecture.window,
        spp_levels=architecture.spp_levels,
        crop=architecture.crop,
        default_scales=scales,
        center_scale=None if trained_scales is None else center_scale(architecture.crop, trained_scales),
        max_side=max(MAX_CANVAS_SIDE, LONG_SIDE_CAP * max(scales)),
        canvas=canvas,
        precision=precision,
        checkpoint_sha256=checkpoint_sha256,
    )


def build_model(
    architecture: Architecture,
    tensors: Mapping[str, Float32Array],
    mean: Float32Array,
    contract: ModelContract,
    version: str,
    ranges: Mapping[str, float] | None = None,
) -> ModelProto:
    """Build the model from a checkpoint's tensors. mean: (3,) or (crop, crop, 3); version: of prelunet.

    ranges: layer → largest absolute value of its input, for the layers that compute in int8.
    Raises UsageError if the contract is fp16 and a tensor exceeds its range.
    """
    graph = LayerBuilder(ranges or {})
    masked, half = contract.canvas == "ragged", contract.precision == "fp16"
    image, valid = _front(graph, mean, contract.max_side, masked=masked)
    parameters: Mapping[str, FloatArray] = tensors
    if half:
        parameters = {name: round_to_half(name, tensor) for name, tensor in tensors.items()}
        image = graph.node("Cast", [image], "images.fp16", to=TensorProto.FLOAT16)
        valid = replace(valid, half=True)
    feature_map, valid = _trunk(graph, architecture, parameters, image, valid, masked=masked)
    logits = _head(graph, architecture, parameters, feature_map, half=half)
    if half:
        logits = graph.node("Cast", [logits], "fc3.fp32", to=TensorProto.FLOAT)
    # A window is valid if all its cells are inside the image.
    _averages(graph, logits, _valid_after(graph, valid, "window", architecture.window, 1, 0))
    finished = contract_graph(graph, len(contract.classes), canvas=("H", "W"), grid=("Gh", "Gw"))
    opsets = [helper.make_opsetid("", OPSET)]
    model = build_file(finished, contract.to_metadata(), version, opsets, ir_version=IR_VERSION)
    add_value_info(model)
    return model


def _front(graph: GraphBuilder, mean: Float32Array, max_side: int, *, masked: bool) -> tuple[str, ValidCells]:
    """Add cast, mean and the first mask: images → float (N, 3, H, W), zero outside each image."""
    graph.constant("arange", np.arange(max_side, dtype=np.int64))
    valid = ValidCells("images")
    positions, sides = {}, {}
    for index, axis in enumerate(("rows", "columns")):
        length = graph.node("Shape", ["images"], f"canvas.{axis}", start=index + 1, end=index + 2)
        positions[axis] = graph.node("Slice", ["arange", graph.integers(0), length], f"position.{axis}")
        sides[axis] = graph.slice("sizes", f"side.{axis}", axis=1, start=index, end=index + 1)
        inside = graph.node("Less", [positions[axis], sides[axis]], f"inside.{axis}")
        graph.node("Cast", [inside], getattr(valid, axis), to=TensorProto.FLOAT)
    channels_first = graph.node("Transpose", ["images"], "images.channels_first", perm=[0, 3, 1, 2])
    image = graph.node("Cast", [channels_first], "images.float", to=TensorProto.FLOAT)
    if mean.ndim == 1:
        warped = graph.constant("mean", mean.reshape(1, 3, 1, 1))
    else:
        warped = _warped_mean(graph, mean, positions, sides)
    image = graph.node("Sub", [image, warped], "images.centred")
    return (_mask(graph, image, valid, "images.masked") if masked else image), valid


def _warped_mean(graph: GraphBuilder, mean: Float32Array, positions: dict[str, str], sides: dict[str, str]) -> str:
    """Add the mean image warped to the size of each image: R · M · Cᵀ, float (N, 3, H, W).

    SPP-net, Appendix A, "Mean Subtraction". R (N, H, S) and C (N, W, S) hold the weights of bilinear interpolation
    with half-pixel centers: max(0, 1 − |clip((y + ½)·S/h − ½, 0, S − 1) − j|). There is no antialiasing, so the result
    is exact for images no smaller than the mean, which `min_side` guarantees.
    """
    side = mean.shape[0]
    planes = graph.constant("mean", mean.transpose(2, 0, 1)[None])
    half = graph.constant("half", np.array([0.5], np.float32))
    one = graph.constant("one", np.array([1], np.float32))
    zero = graph.constant("zero", np.array([0], np.float32))
    last = graph.constant("mean.last", np.array([side - 1], np.float32))
    length = graph.constant("mean.side", np.array([side], np.float32))
    cells = graph.constant("mean.cells", np.arange(side, dtype=np.float32))
    weights = {}
    for axis in ("rows", "columns"):
        position = graph.node("Cast", [positions[axis]], f"mean.{axis}.position", to=TensorProto.FLOAT)
        center = graph.node("Add", [position, half], f"mean.{axis}.centre")
        side_length = graph.node("Cast", [sides[axis]], f"mean.{axis}.own_side", to=TensorProto.FLOAT)
        ratio = graph.node("Div", [length, side_length], f"mean.{axis}.ratio")  # (N, 1)
        scaled = graph.node("Mul", [center, ratio], f"mean.{axis}.scaled")  # (N, H)
        shifted = graph.node("Sub", [scaled, half], f"mean.{axis}.shifted")
        clipped = graph.node("Clip", [shifted, zero, last], f"mean.{axis}.clipped")
        column = graph.unsqueeze(clipped, f"mean.{axis}.source", 2)
        distance = graph.node(
            "Abs", [graph.node("Sub", [column, cells], f"mean.{axis}.offset")], f"mean.{axis}.distance"
        )
        weight = graph.node("Sub", [one, distance], f"mean.{axis}.weight")
        weights[axis] = graph.unsqueeze(graph.node("Relu", [weight], f"mean.{axis}.tent"), f"mean.{axis}.matrix", 1)
    by_rows = graph.node("MatMul", [weights["rows"], planes], "mean.by_rows")
    by_columns = graph.node("Transpose", [weights["columns"]], "mean.columns.transposed", perm=[0, 1, 3, 2])
    return graph.node("MatMul", [by_rows, by_columns], "mean.warped")


def _mask(graph: GraphBuilder, value: str, valid: ValidCells, output: str) -> str:
    """Multiply (N, C, rows, columns) by 1 inside each image and 0 outside."""
    mask = f"{valid.layer}.mask"
    if not graph.has(mask):  # shared by layers of equal size
        rows = graph.unsqueeze(valid.rows, f"{valid.rows}.4d", 1, 3)
        columns = graph.unsqueeze(valid.columns, f"{valid.columns}.4d", 1, 2)
        graph.node("Mul", [rows, columns], mask)
    if valid.half:
        if not graph.has(f"{mask}.fp16"):
            graph.node("Cast", [mask], f"{mask}.fp16", to=TensorProto.FLOAT16)
        mask = f"{mask}.fp16"
    return graph.node("Mul", [value, mask], output)


def _trunk(
    graph: LayerBuilder,
    architecture: Architecture,
    tensors: Mapping[str, FloatArray],
    value: str,
    valid: ValidCells,
    *,
    masked: bool,
) -> tuple[str, ValidCells]:
    """Add the convolutions and poolings; return the feature map and its valid cells."""
    weighted = [*(conv.name for conv in architecture.convs), "fc1"]
    following = dict(pairwise(weighted))
    value = graph.quantize(value, weighted[0])
    for index, layer in enumerate(architecture.trunk):
        if isinstance(layer, Pool):
            sides = [layer.kernel] * 2
            value = graph.node("MaxPool", [value], layer.name, kernel_shape=sides, strides=[layer.stride] * 2)
        else:
            if masked and layer.pad and index > 0:  # the front has already masked the image
                value = _mask(graph, value, valid, f"{layer.name}.masked")
            value = _convolution(graph, layer, tensors, value, half=valid.half)
            value = _activation(graph, architecture.activation, tensors, layer.name, value, slope_shape=(-1, 1, 1))
            value = graph.quantize(value, following[layer.name])
        valid = _valid_after(graph, valid, layer.name, layer.kernel, layer.stride, layer.pad)
    return value, valid


def _convolution(graph: LayerBuilder, layer: Conv, tensors: Mapping[str, FloatArray], value: str, *, half: bool) -> str:
    """Add a convolution. half: with the bias in a node of its own (`cuda.DISABLED_OPTIMIZERS`); CPUs join the two."""
    weight = graph.weight(layer.name, tensors[f"{layer.name}.weight"], channel_axis=0)
    numbers = tensors[f"{layer.name}.bias"]
    bias = graph.constant(f"{layer.name}.bias", numbers.reshape(-1, 1, 1) if half else numbers)
    value = graph.node(
        "Conv",
        [graph.dequantize(value, layer.name), weight, *(() if half else (bias,))],
        f"{layer.name}.product" if half else layer.name,
        kernel_shape=[layer.kernel] * 2,
        strides=[layer.stride] * 2,
        pads=[layer.pad] * 4,  # symmetric: asymmetric padding is slow in cuDNN
    )
    return graph.node("Add", [value, bias], layer.name) if half else value


def _activation(
    graph: GraphBuilder,
    kind: Activation,
    tensors: Mapping[str, FloatArray],
    layer: str,
    value: str,
    *,
    slope_shape: tuple[int, ...],
) -> str:
    """Add a layer's activation. slope_shape: shape of per-channel slopes, aligned with the channel axis."""
    output = f"{layer}.activation"
    if kind == "relu":
        return graph.node("Relu", [value], output)
    if kind == "lrelu":
        return graph.node("LeakyRelu", [value], output, alpha=LRELU_SLOPE)
    slope = tensors[f"{layer}.slope"]
    if kind == "prelu-shared":  # one slope: runtimes fuse LeakyRelu into the convolution
        return graph.node("LeakyRelu", [value], output, alpha=float(slope[0]))
    return graph.node("PRelu", [value, graph.constant(f"{layer}.slope", slope.reshape(slope_shape))], output)


def _valid_after(graph: GraphBuilder, valid: ValidCells, layer: str, kernel: int, stride: int, pad: int) -> ValidCells:
    """Add the valid vectors after a layer: m[(k−1−2p)::s], preceded by copies of m[0] if the slice starts below 0."""
    start = kernel - 1 - 2 * pad
    if start == 0 and stride == 1:
        return valid
    after = replace(valid, layer=layer)
    for vector, output in ((valid.rows, after.rows), (valid.columns, after.columns)):
        source = vector
        if start < 0:
            first = graph.slice(vector, f"{output}.first", axis=1, start=0, end=1)
            source = output if stride == 1 else f"{output}.longer"
            graph.node("Concat", [first] * -start + [vector], source, axis=1)
        if source != output:
            graph.slice(source, output, axis=1, start=max(0, start), step=stride)
    return after


def fc1_channel_last(weight: FloatArray, architecture: Architecture) -> FloatArray:
    """Convert fc1.weight of a checkpoint to the matrix of the file.

    weight: (hidden, bins·C), levels in order, each flattened (channel, row, column).
    Returns (bins·C, hidden), levels in order, each (row, column, channel).
    """
    hidden, channels = weight.shape[0], architecture.channels
    matrix, start = np.empty(weight.T.shape, weight.dtype), 0
    for level in architecture.spp_levels:
        size = channels * level * level
        rows = matrix[start : start + size].reshape(level, level, channels, hidden)
        for first in range(0, hidden, _BLOCK_ROWS):
            block_rows = slice(first, first + _BLOCK_ROWS)
            block = weight[block_rows, start : start + size].reshape(-1, channels, level, level)
            rows[..., block_rows] = block.transpose(2, 3, 1, 0)
        start += size
    return matrix


def _head(
    graph: LayerBuilder, architecture: Architecture, tensors: Mapping[str, FloatArray], feature_map: str, *, half: bool
) -> str:
    """Add pyramid and fully connected layers over all windows; return the logits (N, Gh, Gw, K)."""
    bins = _bins(graph, architecture, feature_map)
    value = ""
    for name in ("fc1", "fc2", "fc3"):
        weight = tensors[f"{name}.weight"]
        if name == "fc1":
            matrix = fc1_channel_last(weight, architecture)
            # A half file is for GPUs, which gain nothing, and each sum would be rounded once more.
            product = _product_of_bins(graph, matrix, bins, len(bins) if half else MAX_TERMS // architecture.channels)
        else:
            inputs = [graph.dequantize(value, name), graph.weight(name, weight.T, channel_axis=1)]
            product = graph.node("MatMul", inputs, f"{name}.product")
        value = graph.node("Add", [product, graph.constant(f"{name}.bias", tensors[f"{name}.bias"])], name)
        if name != "fc3":
            # Of full rank because the channel is last: some runtimes apply a 1-D slope to axis 1.
            value = _activation(graph, architecture.activation, tensors, name, value, slope_shape=(1, 1, 1, -1))
            value = graph.quantize(value, "fc2" if name == "fc1" else "fc3")
    return value


def _product_of_bins(graph: LayerBuilder, matrix: FloatArray, bins: Sequence[str], together: int) -> str:
    """Add fc1's product with the bins of every window, `together` of them at a time, and the sum of these products.

    matrix: (bins·C, hidden).
    """
    together = min(max(1, together), len(bins))
    if together == len(bins):
        pyramid = graph.dequantize(graph.node("Concat", bins, "pyramid", axis=3), "fc1")
        return graph.node("MatMul", [pyramid, graph.weight("fc1", matrix, channel_axis=1)], "fc1.product")
    rows, total = len(matrix) // len(bins), ""
    firsts = range(0, len(bins), together)
    parts = {f"part_{first // together}": slice(first * rows, (first + together) * rows) for first in firsts}
    for first, part, weight in zip(firsts, parts, graph.weight_parts("fc1", matrix, parts), strict=True):
        pyramid = graph.node("Concat", bins[first : first + together], f"pyramid.{part}", axis=3)
        product = graph.node("MatMul", [graph.dequantize(pyramid, "fc1", part), weight], f"fc1.product.{part}")
        total = graph.node("Add", [total, product], f"fc1.sum.{part}") if total else product
    return total


def _bins(graph: GraphBuilder, architecture: Architecture, feature_map: str) -> list[str]:
    """Add the pools and the bins of every window: (N, C, rows, columns) → for each bin (N, Gh, Gw, C).

    The pool of a bin's size, sliced from the bin's offset, holds that bin for all windows. The pool has `window − size`
    more rows than the grid, which determines how many to drop at the end.
    """
    window = architecture.window
    bins = pyramid_bins(window, architecture.spp_levels)
    pools = {(1, 1): feature_map}
    for step in plan_pools({(b.height, b.width) for b in bins}):
        height, width = step.size
        pools[step.size] = graph.node(
            "MaxPool",
            [pools[step.base]],
            f"pool_{height}x{width}",
            kernel_shape=list(step.kernel),
            strides=[1, 1],
        )
    channel_last: dict[tuple[int, int], str] = {}
    parts = []
    for index, bin_ in enumerate(bins):
        size = (bin_.height, bin_.width)
        if size not in channel_last:
            output = f"pool_{size[0]}x{size[1]}.channel_last"
            channel_last[size] = graph.node("Transpose", [pools[size]], output, perm=[0, 2, 3, 1])
        trims = (window - bin_.height - bin_.row, window - bin_.width - bin_.column)
        parts.append(
            graph.window_slice(
                channel_last[size], f"bin_{index}", axes=(1, 2), starts=(bin_.row, bin_.column), trims=trims
            )
        )
    return parts


def _averages(graph: GraphBuilder, logits: str, grid: ValidCells) -> None:
    """Add softmax per window and the means over each image's windows: the four outputs."""
    rows = graph.unsqueeze(grid.rows, "window.valid_rows.4d", 2, 3)  # with a window of one cell, `grid` is a layer's
    columns = graph.unsqueeze(grid.columns, "window.valid_columns.4d", 1, 3)
    mask = graph.node("Mul", [rows, columns], "grid")  # (N, Gh, Gw, 1)
    counts = []
    for axis, vector in (("rows", grid.rows), ("columns", grid.columns)):
        counts.append(graph.node("ReduceSum", [vector, graph.integers(1)], f"windows.{axis}", keepdims=1))
    count = graph.node("Mul", counts, "windows.count")  # (N, 1)
    graph.node("Cast", [graph.node("Concat", counts, "windows.float", axis=1)], "windows", to=TensorProto.INT64)
    softmax = graph.node("Softmax", [logits], "softmax", axis=-1)
    graph.node("Mul", [softmax, mask], "window_scores")
    valid_logits = graph.node("Mul", [logits, mask], "window_logits")
    for name, value in (("scores", "window_scores"), ("logits", valid_logits)):
        total = graph.node("ReduceSum", [value, graph.integers(1, 2)], f"{name}.sum", keepdims=0)
        graph.node("Div", [total, count], name)
