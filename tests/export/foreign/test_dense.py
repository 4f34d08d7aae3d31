"""A dense adopted net scores every window as the net itself scores that window of its feature map."""

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from prelunet.evaluator.cli import run
from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.heatmap import draw_heat_maps
from prelunet.evaluator.engine.verify import TOLERANCES, verify
from prelunet.evaluator.errors import ContractError
from prelunet.evaluator.protocols import build_protocol, default_protocol_name
from prelunet.export.foreign.dense import find_head
from prelunet.export.foreign.read_net import find_interface
from tests.export.foreign import foreign_nets
from tests.export.foreign.dense_nets import CROP, KINDS, Convnet, Exporter, convnet, export
from tests.export.foreign.foreign_nets import CLASSES, RGB, NetBuilder, adopted, photo, write_classes

EXPORTERS: tuple[Exporter, ...] = ("torchscript", "dynamo")
# float32 in both trunks, and 1e-7 for each of some thousand additions; a window shifted by one cell is 1e-2 off.
TOLERANCE = 1e-5


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_window_has_the_scores_of_the_net_on_its_part_of_the_feature_map(
    tmp_path: Path, kind: str, exporter: Exporter
) -> None:
    net = convnet(kind)
    session, result = adopted(tmp_path, export(net, tmp_path / "net.onnx", exporter), crop=CROP, dense=True)
    assert (result.contract.window, result.contract.trunk_stride) == (6, 8)
    for height, width in ((CROP, CROP), (61, 83), (97, 52), (64, 80)):
        pixels = golden_image(height, width)
        expected = net.windows(pixels, RGB)
        outputs = session.run(pixels[None], np.array([[height, width]], np.int64))
        assert outputs.windows.tolist() == [list(expected.shape[:2])]
        np.testing.assert_allclose(outputs.window_scores[0], softmax(expected), atol=TOLERANCE)
        np.testing.assert_allclose(outputs.scores[0], softmax(expected).mean((0, 1)), atol=TOLERANCE)
        scale = np.abs(expected).max()  # logits are sums of larger terms, to which rounding errors are relative
        np.testing.assert_allclose(outputs.logits[0] / scale, expected.mean((0, 1)) / scale, atol=3 * TOLERANCE)
    assert np.ptp(softmax(expected), axis=(0, 1)).max() > 0.01  # windows that differ, or an average would prove nothing


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(
    ("kind", "dimensions"),
    [
        ("resnet", {0: "N", 2: "H", 3: "W"}),
        ("convnext", {0: "N"}),  # its head takes the batch size from the image
        ("convnext", {0: "N", 2: "H", 3: "W"}),
        ("shufflenet", {0: "N", 2: "H", 3: "W"}),
    ],
)
def test_a_net_exported_for_any_batch_or_size_becomes_dense(
    tmp_path: Path, kind: str, dimensions: dict[int, str], exporter: Exporter
) -> None:
    net = convnet(kind)
    if exporter == "dynamo":
        free: dict[str, Any] = {"dynamic_shapes": (dict.fromkeys(dimensions, torch.export.Dim.DYNAMIC),)}
    else:
        opset = 13 if kind == "resnet" else 18  # also one in which ReduceMean has another form
        free = {"dynamic_axes": {"x": dimensions, "y": {0: "N"}}, "opset_version": opset}
    path = export(net, tmp_path / "net.onnx", exporter, images=2, **free)
    session, _ = adopted(tmp_path, path, crop=CROP, dense=True)
    pixels = np.stack([golden_image(66, 71), 255 - golden_image(66, 71)])
    outputs = session.run(pixels, np.array([[66, 71]] * 2, np.int64))
    for row in range(2):
        expected = softmax(net.windows(pixels[row], RGB))
        np.testing.assert_allclose(outputs.window_scores[row], expected, atol=TOLERANCE)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_net_whose_channels_come_last_before_its_head_becomes_dense(pooled: bool, tmp_path: Path) -> None:
    """As TensorFlow's nets. Its windows are crops eight pixels apart, since its trunk pads nothing."""

    def build(n: NetBuilder, x: str) -> str:
        x = n.add("Transpose", x, perm=[0, 3, 1, 2])
        x = n.add("Relu", n.add("Conv", x, n.weights(6, 3, 8, 8, low=-0.1, high=0.1), strides=[8, 8]))
        x = n.add("Transpose", x, perm=[0, 2, 3, 1])
        if pooled:
            x = n.add("ReduceMean", x, n.constant(np.array([1, 2], np.int64)), keepdims=0)
        else:
            x = n.add("Reshape", x, n.constant(np.array([-1, 5 * 5 * 6], np.int64)))
        return n.add("MatMul", x, n.weights(6 if pooled else 150, CLASSES))

    path = foreign_nets.net(tmp_path, build, layout="NHWC")
    session, result = adopted(tmp_path, path, dense=True)
    assert (result.contract.window, result.contract.trunk_stride) == (5, 8)
    image, plain = golden_image(61, 83), foreign_nets.ReferenceNet(path, nhwc=True)
    outputs = session.run(image[None], np.array([[61, 83]], np.int64))
    assert outputs.windows.tolist() == [[3, 6]]
    expected = [plain.scores(image[8 * row :, 8 * column :][:40, :40]) for row, column in np.ndindex(3, 6)]
    np.testing.assert_allclose(outputs.window_scores[0].reshape(18, -1), expected, rtol=0, atol=TOLERANCE)
    assert np.ptp(expected, axis=0).max() > 0.01


def test_a_net_in_half_precision_between_single_precision_ends_becomes_dense(tmp_path: Path) -> None:
    def build(n: NetBuilder, x: str) -> str:
        x = n.add("Cast", x, to=TensorProto.FLOAT16)
        x = n.add("Relu", n.add("Conv", x, n.weights(8, 3, 8, 8, low=-0.1, high=0.1), strides=[8, 8]))
        x = n.add("Flatten", n.add("GlobalAveragePool", x))
        return n.add("Cast", n.add("Gemm", x, n.weights(CLASSES, 8), transB=1), to=TensorProto.FLOAT)

    path = foreign_nets.net(tmp_path, build, dtype=np.float16)
    session, _ = adopted(tmp_path, path, dense=True)
    crop = golden_image(40, 40)
    scores = session.run(crop[None], np.array([[40, 40]], np.int64)).scores[0]
    np.testing.assert_allclose(scores, foreign_nets.ReferenceNet(path).scores(crop), atol=1e-2)  # half precision
    assert session.run(golden_image(61, 83)[None], np.array([[61, 83]], np.int64)).windows.tolist() == [[3, 6]]


def test_a_net_with_large_logits_is_held_to_their_rounding_errors(tmp_path: Path) -> None:
    net = convnet("resnet")
    last = net.head[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight += 1000  # of all classes: no score changes, but each logit gets a rounding error of its own
    session, result = adopted(tmp_path, export(net, tmp_path / "net.onnx", "torchscript"), crop=CROP, dense=True)
    largest = max(abs(logit) for golden in session.contract.golden for logit in golden.logits)
    worst = max(each.scores for each in result.deviations)
    assert TOLERANCES["fp32"].scores < worst < largest * 1e-6  # float32 rounds at 6e-8
    assert all(found.passed for found in verify(session))


@pytest.mark.parametrize("opset", [13, 18])
def test_a_net_that_standardizes_its_weights_is_adopted(tmp_path: Path, opset: int) -> None:
    torch.manual_seed(3)
    trunk = nn.Sequential(StandardizedConv(3, 8, 3, 4, 1), nn.ReLU(), StandardizedConv(8, 12, 2, 2), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, CLASSES))
    net = Convnet(trunk, head, 6).eval()
    path = export(net, tmp_path / "net.onnx", "torchscript", opset_version=opset)
    assert any(len(node.output) > 1 for node in onnx.load(path).graph.node), "a BatchNormalization in training form"
    session, _ = adopted(tmp_path, path, crop=CROP, dense=True)
    pixels = golden_image(61, 83)
    outputs = session.run(pixels[None], np.array([pixels.shape[:2]], np.int64))
    np.testing.assert_allclose(outputs.window_scores[0], softmax(net.windows(pixels, RGB)), atol=TOLERANCE)


class StandardizedConv(nn.Conv2d):
    """A convolution that normalizes its weights to mean 0 and deviation 1, as those of NF-RegNet and BiT do."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        rows = nn.functional.batch_norm(rows, None, None, training=True, momentum=0, eps=1e-6)
        return nn.functional.conv2d(x, 0.2 * rows.reshape_as(self.weight), self.bias, self.stride, self.padding)


def test_padding_that_the_net_computes_from_constants_counts_for_its_feature_map(tmp_path: Path) -> None:
    def build(n: NetBuilder, x: str) -> str:
        before, after = n.constant(np.array([0, 0, 3, 3], np.int64)), n.constant(np.array([0, 0, 5, 5], np.int64))
        x = n.add("Pad", x, n.add("Concat", before, after, axis=0))
        x = n.add("Conv", x, n.weights(8, 3, 8, 8, low=-0.1, high=0.1), strides=[8, 8])
        return n.add("Gemm", n.add("Flatten", n.add("GlobalAveragePool", x)), n.weights(CLASSES, 8), transB=1)

    session, _ = adopted(tmp_path, foreign_nets.net(tmp_path, build), dense=True)  # windows of 6 cells
    for height, width, grid in ((40, 40, (1, 1)), (47, 48, (1, 2)), (64, 79, (4, 5))):
        outputs = session.run(golden_image(height, width)[None], np.array([[height, width]], np.int64))
        assert outputs.windows.tolist() == [list(grid)]


def test_the_protocols_average_windows_mirrors_and_scales(tmp_path: Path) -> None:
    net = convnet("resnet")
    session, result = adopted(tmp_path, export(net, tmp_path / "net.onnx", "torchscript"), crop=CROP, dense=True)
    contract = result.contract
    assert default_protocol_name(contract) == "multi-scale"
    assert contract.default_scales == (55, 62, 69)  # 48 times 256, 288 and 320, by 224, rounded
    protocol = build_protocol("dense-64", contract)
    pixels = golden_image(64, 75)  # as it is at this scale: no resampling
    (classified,) = classify_images(session, [pixels], protocol, keep_windows=True)
    both = [softmax(net.windows(each, RGB)).mean((0, 1)) for each in (pixels, np.ascontiguousarray(pixels[:, ::-1]))]
    np.testing.assert_allclose(classified.scores, np.mean(both, axis=0), atol=TOLERANCE)
    drawn = draw_heat_maps(pixels, (64, 75), classified, contract, protocol)
    assert drawn.shape[1] > 75
    assert len(verify(session)) == 3
    assert all(found.passed for found in verify(session))


def test_the_command_line_adopts_evaluates_and_describes_a_dense_net(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = export(convnet("vgg"), tmp_path / "vgg.onnx", "torchscript"), tmp_path / "dense.onnx"
    classes, data = write_classes(tmp_path), tmp_path / "val"
    options = ["--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225"]
    assert run(["adopt", str(source), "--classes", str(classes), *options, "--dense", "-o", str(output)]) == 0
    assert run(["inspect", str(output)]) == 0
    assert "6x6 cells of its feature map, stride 8 px" in capsys.readouterr().out
    for index in range(CLASSES):
        folder = data / f"n{index:08}"
        folder.mkdir(parents=True)
        for number in range(2):
            (folder / f"{number}.png").write_bytes(photo(52 + index, 70, "PNG", seed=number))
    validate = ["validate", "--model", str(output), "--data", str(data), "--run", str(tmp_path / "run")]
    assert run([*validate, "--heatmaps", "1"]) == 0
    (maps,) = map(json.loads, (tmp_path / "run" / "heatmaps.jsonl").read_text().splitlines())
    assert len(set(base64.b64decode(maps["maps"][0]))) > 2, "windows differ"
    assert run(["report", str(tmp_path / "run")]) == 0
    report = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
    assert (report["protocol"]["scales"], report["evaluated"]) == ([55, 62, 69], 2 * CLASSES)


ANY_SIZE: dict[str, Any] = {"dynamic_axes": {"x": {0: "N", 2: "H", 3: "W"}}}
LAYERS: dict[str, list[nn.Module]] = {
    "a pool that rounds up": [nn.Conv2d(3, 4, 3, 2), nn.MaxPool2d(3, 2, ceil_mode=True)],
    "a dilated layer": [nn.Conv2d(3, 4, 3, 2, 1, dilation=2), nn.AvgPool2d(2)],
    "an even kernel": [nn.Conv2d(3, 4, 4, 3, 1), nn.Conv2d(4, 4, 2, 2)],
    "padding on two sides": [nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 4, 3, 2, 1)],
    "more padding than stride": [nn.Conv2d(3, 4, 3, 1, 2), nn.Conv2d(4, 4, 3, 2, 2)],
}


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_the_feature_map_has_the_sides_that_its_layers_give_for_every_image(
    tmp_path: Path, layers: list[nn.Module]
) -> None:
    trunk = nn.Sequential(*layers)
    window = trunk(torch.zeros(1, 3, CROP, CROP)).shape[2]
    net = Convnet(trunk, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)), window).eval()
    path = export(net, tmp_path / "net.onnx", "torchscript", **ANY_SIZE)
    model = onnx.load(path)
    head = find_head(path, model, find_interface(path, model, crop=CROP, layout=None, output=None))
    assert head.window == window
    for side in range(CROP, 2 * CROP):
        assert head.trunk.output_side(side) == trunk(torch.zeros(1, 3, side, CROP)).shape[2]


class Squeezing(Convnet):
    """As makers write it who try their net on one image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


def test_a_net_that_squeezes_its_scores_becomes_dense(tmp_path: Path) -> None:
    net = Squeezing(nn.Conv2d(3, 8, 4, 4), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 7)), 12)
    session, _ = adopted(tmp_path, export(net.eval(), tmp_path / "net.onnx", "dynamo"), crop=CROP, dense=True)
    outputs = session.run(golden_image(61, 83)[None], np.array([[61, 83]], np.int64))
    expected = softmax(net.windows(golden_image(61, 83), RGB))
    np.testing.assert_allclose(outputs.window_scores[0], expected, atol=TOLERANCE)


class SameConv(nn.Conv2d):
    """A convolution with TensorFlow's padding "same", in torch: its cells follow from the sides of the image."""

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for side in x.shape[:1:-1]:
            cells = max(0, (math.ceil(side / self.stride[0]) - 1) * self.stride[0] + self.kernel_size[0] - side)
            pads += [cells // 2, cells - cells // 2]
        return super().forward(nn.functional.pad(x, pads))


def with_head(*layers: nn.Module) -> Convnet:
    torch.manual_seed(5)
    return Convnet(nn.Sequential(*layers), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 7)), 12)


def test_padding_that_was_same_before_its_export_is_refused(tmp_path: Path) -> None:
    net = with_head(SameConv(3, 4, 3, 2), SameConv(4, 8, 5, 2)).eval()
    path = export(net, tmp_path / "net.onnx", "dynamo")
    with pytest.raises(ContractError, match=r'Conv node.*as padding "same".*dynamic height and width, or adopt it w'):
        adopted(tmp_path, path, crop=CROP, dense=True)
    session, _ = adopted(tmp_path, path, crop=CROP)  # crops, which are what it was exported for
    crop = golden_image(CROP, CROP)
    scores = session.run(crop[None], np.array([[CROP, CROP]], np.int64)).scores[0]
    np.testing.assert_allclose(scores, softmax(net.windows(crop, RGB))[0, 0], atol=TOLERANCE)


FIXED: dict[str, tuple[list[nn.Module], bool]] = {  # layers, and whether the file takes any size
    "unequal, in a file for any size": ([nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 8, 3, 2), nn.MaxPool2d(2)], True),
    'unequal, other than "same"': ([nn.ZeroPad2d((1, 2, 1, 2)), nn.Conv2d(3, 8, 4, 2), nn.MaxPool2d(2)], False),
    "unequal, without a stride": ([nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 8, 2), nn.MaxPool2d(4)], False),
    'equal, as "same" on an odd side': ([nn.Conv2d(3, 4, 4, 1, 1), nn.Conv2d(4, 8, 3, 2, 1), nn.MaxPool2d(2)], False),
}


@pytest.mark.parametrize(("layers", "any_size"), FIXED.values(), ids=FIXED)
def test_fixed_padding_becomes_dense_at_every_size(tmp_path: Path, layers: list[nn.Module], any_size: bool) -> None:
    net = with_head(*layers).eval()
    path = export(net, tmp_path / "net.onnx", "torchscript", **(ANY_SIZE if any_size else {}))
    session, _ = adopted(tmp_path, path, crop=CROP, dense=True)
    for size in ((61, 83), (60, 77)):
        outputs = session.run(golden_image(*size)[None], np.array([size], np.int64))
        np.testing.assert_allclose(
            outputs.window_scores[0], softmax(net.windows(golden_image(*size), RGB)), atol=TOLERANCE
        )


class Attention(nn.Module):
    """A patch embedding with a learned vector for each place of a fixed grid."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Conv2d(3, 8, 8, 8), nn.Parameter(torch.rand(1, 8, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x) + self.places


def of_fixed_size(n: NetBuilder, x: str) -> str:
    """Reshape the feature map to the sides that it had at export, as traced nets do."""
    x = n.add("Conv", x, n.weights(8, 3, 8, 8, low=-0.1, high=0.1), strides=[8, 8])
    x = n.add("Reshape", x, n.constant(np.array([1, 8, 5, 5], np.int64)))
    x = n.add("Flatten", n.add("GlobalAveragePool", x), axis=1)
    return n.add("Gemm", x, n.weights(CLASSES, 8), n.weights(CLASSES), transB=1)


def of_maxima(n: NetBuilder, x: str) -> str:
    """Read the feature map by its global maximum."""
    x = n.add("Conv", x, n.weights(8, 3, 8, 8, low=-0.1, high=0.1), strides=[8, 8])
    return n.add("Gemm", n.add("Flatten", n.add("GlobalMaxPool", x)), n.weights(CLASSES, 8), transB=1)


def of_both(n: NetBuilder, x: str) -> str:
    """Read the feature map by its global mean and its global maximum."""
    x = n.add("Conv", x, n.weights(8, 3, 8, 8, low=-0.1, high=0.1), strides=[8, 8])
    both = n.add("Concat", n.add("GlobalAveragePool", x), n.add("GlobalMaxPool", x), axis=1)
    return n.add("Gemm", n.add("Flatten", both), n.weights(CLASSES, 16), transB=1)


def spread(n: NetBuilder, x: str) -> str:
    """Flatten the feature map and read it by something else than a fully connected layer."""
    x = n.add("Conv", x, n.weights(8, 3, 8, 8, low=-0.1, high=0.1), strides=[8, 8])
    return n.add("Gemm", n.add("Relu", n.add("Flatten", x)), n.weights(CLASSES, 200), transB=1)


def of_two_depths(n: NetBuilder, x: str) -> str:
    """Read the feature map, and an earlier one."""
    early = n.add("Conv", x, n.weights(4, 3, 4, 4, low=-0.1, high=0.1), strides=[4, 4])
    late = n.add("Conv", early, n.weights(8, 4, 2, 2, low=-0.1, high=0.1), strides=[2, 2])
    pooled = [n.add("Flatten", n.add("GlobalAveragePool", each)) for each in (late, early)]
    weights = n.weights(CLASSES, 8), n.weights(CLASSES, 4)
    return n.add("Add", *(n.add("Gemm", *each, transB=1) for each in zip(pooled, weights, strict=True)))


def same(n: NetBuilder, x: str) -> str:
    """Pad as far as the image requires."""
    sides = n.add("Mod", n.add("Shape", x), n.constant(np.array([1, 3, 7, 7], np.int64)))
    x = n.add("Pad", x, n.add("Concat", sides, n.constant(np.zeros(4, np.int64)), axis=0))
    x = n.add("Conv", x, n.weights(8, 3, 8, 8, low=-0.1, high=0.1), strides=[8, 8])
    return n.add("Gemm", n.add("Flatten", n.add("GlobalAveragePool", x)), n.weights(CLASSES, 8), transB=1)


def oblong(n: NetBuilder, x: str) -> str:
    x = n.add("Conv", x, n.weights(8, 3, 8, 8, low=-0.1, high=0.1), strides=[8, 8])
    x = n.add("MaxPool", x, kernel_shape=[1, 2], strides=[1, 2])
    return n.add("Gemm", n.add("Flatten", n.add("GlobalAveragePool", x)), n.weights(CLASSES, 8), transB=1)


REFUSED = {
    "a fixed grid": (of_fixed_size, "on an image of 45x61 pixels its Reshape node"),
    "maxima": (of_maxima, "no global average pool and no flattened feature map"),
    "mean and maxima": (of_both, "its Concat node"),
    "two depths": (of_two_depths, "not only through its feature map"),
    "padding by the image": (same, "its Pad node does not pad all images by the same"),
    "batch statistics": (foreign_nets.mixing, "run together differ"),
    "not fully connected": (spread, "read by its Relu node"),
    "rows unlike columns": (oblong, "its MaxPool node"),
}


@pytest.mark.parametrize(("build", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_net_whose_head_is_not_dense_is_refused_with_the_node_in_the_way(
    tmp_path: Path, build: Any, reason: str
) -> None:
    path = foreign_nets.net(tmp_path, build, batch=1)
    with pytest.raises(ContractError, match="cannot become dense") as caught:
        adopted(tmp_path, path, dense=True)
    assert reason in str(caught.value)
    assert not (tmp_path / "adopted.onnx").exists()


def test_learned_places_of_a_fixed_grid_are_refused(tmp_path: Path) -> None:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
    path = export(Convnet(Attention(), head, 6).eval(), tmp_path / "net.onnx", "torchscript")
    with pytest.raises(ContractError, match="its Add node"):
        adopted(tmp_path, path, crop=CROP, dense=True)


def test_a_net_left_in_training_mode_is_refused(tmp_path: Path) -> None:
    def training(n: NetBuilder, x: str) -> str:
        x = n.add("Conv", x, n.weights(8, 3, 3, 3))
        parts = [n.weights(8, low=0.5) for _ in range(4)]
        n.nodes.append(helper.make_node("BatchNormalization", [x, *parts], ["b", "m", "v"], training_mode=1))
        return n.add("Gemm", n.add("Flatten", n.add("GlobalAveragePool", "b")), n.weights(CLASSES, 8), transB=1)

    path = foreign_nets.net(tmp_path, training, input_type=TensorProto.FLOAT)
    with pytest.raises(ContractError, match=r"in training mode.*eval\(\)"):
        adopted(tmp_path, path)
