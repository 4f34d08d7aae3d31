"""Small foreign ONNX classifiers, and their scores computed with only Pillow, numpy and onnxruntime."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from prelunet.evaluator.datasets.labels.class_file import read_class_list
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.session import Session
from prelunet.export.foreign.adopt import AdoptOptions, AdoptResult, adopt
from prelunet.export.foreign.sidecars import ClassList
from prelunet.training.importing.preprocessing import Preprocessing

CROP = 40
CLASSES = 7
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

Build = Callable[["NetBuilder", str], str]


class NetBuilder:
    """Collects a graph with random parameters, which differ between channels."""

    def __init__(self, seed: int = 4, dtype: type = np.float32) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Any, name: str = "") -> str:
        name = name or f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weights(self, *shape: int, low: float = -1.0, high: float = 1.0) -> str:
        return self.constant(self.rng.uniform(low, high, shape).astype(self.dtype))

    def add(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output


def features(n: NetBuilder, x: str, flatten: Build | None = None, **of_gemm: Any) -> str:
    """Add a small residual net: (N, 3, H, W) → logits (N, CLASSES).

    flatten: what stands in front of the last layer, whose further attributes are of_gemm.
    """

    def block(x: str, into: int, out: int, stride: int) -> str:
        weight = n.weights(out, into, 3, 3, low=-0.25, high=0.25)
        x = n.add("Conv", x, weight, kernel_shape=[3, 3], strides=[stride] * 2, pads=[1] * 4)
        scale, bias, mean = (n.weights(out, low=low, high=1) for low in (0.5, -1, -1))
        return n.add("BatchNormalization", x, scale, bias, mean, n.weights(out, low=0.5, high=2))

    x = n.add("Relu", block(x, 3, 8, 2))
    x = n.add("Relu", n.add("Add", x, block(x, 8, 8, 1)))
    x = n.add("Relu", block(x, 8, 12, 2))
    x = n.add("GlobalAveragePool", x)
    x = flatten(n, x) if flatten else n.add("Flatten", x, axis=1)
    return n.add("Gemm", x, n.weights(CLASSES, 12, low=-0.7, high=0.7), n.weights(CLASSES), transB=1, **of_gemm)


def of_gray(n: NetBuilder, x: str) -> str:
    """Take (N, 1, H, W): a convolution of its own makes three channels of it."""
    return features(n, n.add("Conv", x, n.weights(3, 1, 3, 3), kernel_shape=[3, 3], pads=[1] * 4))


def net(
    folder: Path,
    build: Build = features,
    *,
    name: str = "net",
    batch: int | str = "N",
    layout: str = "NCHW",
    input_type: int = TensorProto.FLOAT,
    output_type: int = TensorProto.FLOAT,
    opset: int = 18,
    input_name: str = "x",
    side: int | str = CROP,
    dtype: type = np.float32,
    shape: Sequence[int | str] | None = None,
    output_shape: Sequence[int | str] | None = None,
) -> Path:
    """Write a net; `build` adds its nodes and returns the name of its output."""
    nodes = NetBuilder(dtype=dtype)
    output = build(nodes, input_name)
    axes = [batch, 3, side, side] if layout == "NCHW" else [batch, side, side, 3]
    graph = helper.make_graph(
        nodes.nodes,
        "foreign",
        [helper.make_tensor_value_info(input_name, input_type, list(axes if shape is None else shape))],
        [helper.make_tensor_value_info(output, output_type, output_shape)],
        nodes.constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    return path


RGB = Preprocessing(MEAN, STD)
BYTES: dict[str, Any] = {"input_type": TensorProto.UINT8}
HALF: dict[str, Any] = {"input_type": TensorProto.FLOAT16, "output_type": TensorProto.FLOAT16, "dtype": np.float16}


def softmax_end(n: NetBuilder, x: str) -> str:
    return n.add("Softmax", features(n, x), axis=1)


def never_negative(n: NetBuilder, x: str) -> str:
    return n.add("Relu", features(n, x))


def certain(n: NetBuilder, x: str) -> str:
    """End in a softmax of logits so far apart that some probabilities are 0."""
    return n.add("Softmax", n.add("Mul", features(n, x), n.constant(np.array(300, n.dtype))), axis=1)


def transposed(n: NetBuilder, x: str) -> str:
    """End in a Gemm whose first operand is transposed, (features, N)."""

    def upright(n: NetBuilder, x: str) -> str:
        return n.add("Transpose", n.add("Flatten", x, axis=1), perm=[1, 0])

    return features(n, x, upright, transA=1)


def channels_last(n: NetBuilder, x: str) -> str:
    return features(n, n.add("Transpose", x, perm=[0, 3, 1, 2]))


def of_one(n: NetBuilder, x: str) -> str:
    """Flatten as old exporters do, with the batch size of the export as a constant."""
    return features(n, x, lambda n, x: n.add("Reshape", x, n.constant(np.array([1, 12], np.int64))))


def of_two(n: NetBuilder, x: str) -> str:
    return features(n, x, lambda n, x: n.add("Reshape", x, n.constant(np.array([2, 12], np.int64))))


def spatial(n: NetBuilder, x: str) -> str:
    """End in (N, K, 1, 1), as fully convolutional nets do."""
    return n.add("Reshape", features(n, x), n.constant(np.array([-1, CLASSES, 1, 1], np.int64)))


def from_bytes(n: NetBuilder, x: str) -> str:
    value = n.add("Div", n.add("Cast", x, to=TensorProto.FLOAT), n.constant(np.array(255, np.float32)))
    return features(n, value)


def mixing(n: NetBuilder, x: str) -> str:
    """Subtract the mean over the batch, like a net exported in training mode."""
    mean = n.add("ReduceMean", x, n.constant(np.array([0], np.int64)), keepdims=1)
    return features(n, n.add("Sub", x, n.add("Mul", mean, n.constant(np.array(0.5, np.float32)))))


def ours(n: NetBuilder, x: str) -> str:
    """Use our tensor names, and a branch that reads weights from the outer graph."""
    n.add("Identity", features(n, x), output="logits")
    factor = n.constant(np.array(-0.7, np.float32), "sizes")
    branches = {}
    for key, op in (("then_branch", "Mul"), ("else_branch", "Add")):
        node = helper.make_node(op, ["logits", factor], [f"windows_{op}"])
        result = helper.make_tensor_value_info(f"windows_{op}", TensorProto.FLOAT, None)
        branches[key] = helper.make_graph([node], key, [], [result])
    return n.add("If", n.constant(np.array(True), "grid"), output="scores", **branches)


def write_classes(folder: Path, count: int = CLASSES) -> Path:
    path = folder / "classes.txt"
    path.write_text("".join(f"n{index:08}\tthing {index}\n" for index in range(count)))
    return path


def class_list(folder: Path, count: int = CLASSES) -> ClassList:
    path = write_classes(folder, count)
    return ClassList(read_class_list(path), str(path))


@dataclass(frozen=True)
class ReferenceNet:
    """Scores of a net without prelunet, from Pillow, numpy and onnxruntime."""

    path: Path
    mean: Sequence[float] = MEAN
    std: Sequence[float] = STD
    pixel_range: int = 1
    bgr: bool = False
    nhwc: bool = False
    resample: Image.Resampling = Image.Resampling.BILINEAR
    batch: int = 1
    dtype: type = np.float32
    probabilities: bool = False
    output: str | None = None
    sessions: list[Any] = field(default_factory=list)

    def scores(self, pixels: np.ndarray) -> np.ndarray:
        """Return float64 (CLASSES,) of uint8 (CROP, CROP, 3) RGB, run alone."""
        if not self.sessions:
            self.sessions.append(onnxruntime.InferenceSession(str(self.path), providers=["CPUExecutionProvider"]))
        x = pixels[..., [2, 1, 0]] if self.bgr else pixels
        if self.dtype is not np.uint8:
            x = x.astype(np.float32)
            if self.pixel_range == 1:
                x = x / np.float32(255)
            x = (x - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        x = x if self.nhwc else x.transpose(2, 0, 1)
        (session,) = self.sessions
        name = session.get_inputs()[0].name
        wanted = [self.output] if self.output else None
        raw = session.run(wanted, {name: np.stack([x] * self.batch).astype(self.dtype)})[0][0]
        raw = raw.astype(np.float64).reshape(-1)
        return raw if self.probabilities else np.exp(raw - raw.max()) / np.exp(raw - raw.max()).sum()

    def resized(self, data: bytes, scale: int) -> np.ndarray:
        """Resize as torchvision's Resize does."""
        image = Image.open(io.BytesIO(data)).convert("RGB")
        short = min(image.size)
        return np.asarray(image.resize([int(scale * side / short) for side in image.size], self.resample))

    def center(self, data: bytes, scale: int = 46, crop: int = CROP) -> np.ndarray:
        """Return the scores of torchvision's CenterCrop; 46 = 40 · 256/224, rounded."""
        image = self.resized(data, scale)
        top, left = (round((side - crop) / 2.0) for side in image.shape[:2])
        return self.scores(image[top : top + crop, left : left + crop])

    def ten_crop(self, data: bytes, scale: int = 46, crop: int = CROP) -> np.ndarray:
        """Return the mean scores of the four corners and the center, plain and mirrored."""
        image = self.resized(data, scale)
        bottom, right = image.shape[0] - crop, image.shape[1] - crop
        middle = round(bottom / 2.0), round(right / 2.0)
        places = [(0, 0), (0, right), (bottom, 0), (bottom, right), middle]
        crops = [image[top : top + crop, left : left + crop] for top, left in places]
        return np.mean([self.scores(c) for crop in crops for c in (crop, crop[:, ::-1])], axis=0)


def photo(height: int, width: int, encoding: str, seed: int = 0) -> bytes:
    """Return an encoded image of gradients and noise without any symmetry; each seed has a different color."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    slopes = np.stack([2 * rows + columns, 90 - 2 * columns + rows, 40 + 2 * rows - columns], axis=-1)
    noise = rng.integers(-60, 60, slopes.shape) + rng.integers(-50, 130, 3)
    pixels = np.clip(slopes + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, encoding)
    return buffer.getvalue()


def adopted(
    folder: Path, path: Path, preprocessing: Preprocessing = RGB, **options: Any
) -> tuple[Session, AdoptResult]:
    output = folder / "adopted.onnx"
    result = adopt(path, output, class_list(folder), AdoptOptions(preprocessing, **{"crop": CROP, **options}))
    onnx.checker.check_model(output, full_check=True)
    return open_session(output, "cpu"), result
