"""Model files in half precision: their float16 tensors, their scores, and the nets that are refused.

onnxruntime's CPU provider computes these files in float32 and leaves out most roundings between layers; what a GPU's
rounding after every operation costs is in the reasons for the tolerances (`evaluator.engine.verify.TOLERANCES`).
"""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from msgspec import structs
from torch.nn import functional as F

from prelunet.evaluator.architectures import Activation, Architecture, Conv, architecture, parameter_shapes
from prelunet.evaluator.cli import run
from prelunet.evaluator.contract import Canvas, FilePrecision
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.runtimes.onnx import RawOnnxModel
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.engine.verify import TOLERANCES, Deviation, garbage_canvas, tolerance_precision, verify
from prelunet.evaluator.errors import CheckFailed, UsageError
from prelunet.evaluator.imaging.views import pack
from prelunet.export.dense.export import ExportResult, export_checkpoint
from prelunet.export.dense.half_precision import (
    check_magnitudes,
    magnitude_warnings,
    measure_magnitudes,
    probed_tensors,
    range_canvases,
    range_images,
)
from prelunet.export.dense.probes import add_probes
from prelunet.training.net.checkpoints import Checkpoint, write_checkpoint
from prelunet.training.net.dense_reference import dense_windows
from prelunet.training.net.network import network_from_checkpoint
from tests.helpers import reference
from tests.helpers.discriminating_nets import asymmetric_mean, discriminating_checkpoint, noise, with_tensors
from tests.helpers.tiny_nets import tiny_checkpoint

pytestmark = pytest.mark.processor

# Measured: scores deviate by up to 1e-3, logits by 1e-3 of the largest, from rounded parameters and the few remaining
# roundings between layers. A mistake in a graph gives more than 2e-2 of the largest logit.
SCORE_TOLERANCE = 3e-3
LOGIT_TOLERANCE = 3e-3
HALF, SINGLE = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT

ORACLES = {"A": "A", "B": "C", "E": "E", "demo": "demo"}  # with few channels, B and C are the same net


def thin(name: str, mean: str = "image", activation: Activation = "prelu") -> Checkpoint:
    """Create a checkpoint of an architecture with 8 channels per layer, and logits with standard deviation 3."""
    full = architecture(name, activation=activation)
    trunk = tuple(structs.replace(layer, channels=8) if isinstance(layer, Conv) else layer for layer in full.trunk)
    net = structs.replace(full, trunk=trunk, hidden=16)
    rng, tensors = np.random.default_rng(7), {}
    for key, shape in parameter_shapes(net, 11).items():
        spread = {"weight": np.sqrt(2 / np.prod(shape[1:])), "bias": 1.0, "slope": 0.3}[key.partition(".")[2]]
        tensors[key] = rng.normal(0, spread, shape).astype(np.float32)
    classes = discriminating_checkpoint("demo", classes=11).classes
    values = np.array([123.68, 116.78, 103.94], np.float32) if mean == "channel" else asymmetric_mean(net)
    checkpoint = Checkpoint(net, classes, values, tensors)
    logits = dense_windows(network_from_checkpoint(checkpoint), noise(net.crop, net.crop, seed=1), values)[1]
    tensors["fc3.weight"] *= np.float32(3 / logits.std())
    return checkpoint


def half_file(
    folder: Path, checkpoint: Checkpoint, canvas: Canvas = "ragged", precision: FilePrecision = "fp16"
) -> tuple[Path, ExportResult]:
    """Export a checkpoint; return the file and the result."""
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder / "net.safetensors", checkpoint)
    path = folder / f"{canvas}-{precision}.onnx"
    return path, export_checkpoint(folder / "net.safetensors", path, canvas, precision)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return files of the discriminating demo net, each created once: `demo("exact", "fp32")`."""
    folder, made = tmp_path_factory.mktemp("half"), {}

    def path(canvas: Canvas = "ragged", precision: FilePrecision = "fp16") -> Path:
        key = (canvas, precision)
        if key not in made:
            made[key] = half_file(folder, discriminating_checkpoint("demo", mean="image"), canvas, precision)[0]
        return made[key]

    return path


def session_on(path: Path) -> Session:
    return open_session(path, "cpu")


def types_in(path: Path) -> dict[str, int]:
    """Return name → element type of every initializer and every tensor between the nodes."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True)
    values = (*model.graph.value_info, *model.graph.output)
    return {
        **{tensor.name: tensor.data_type for tensor in model.graph.initializer},
        **{value.name: value.type.tensor_type.elem_type for value in values},
    }


def test_parameters_trunk_and_head_are_half_and_front_softmax_and_averages_are_not(demo: Callable[..., Path]) -> None:
    types = types_in(demo())
    parameters = parameter_shapes(architecture("demo"), 23)
    assert {types[name] for name in parameters} == {HALF}
    trunk_and_head = ["conv1_1", "conv1_1.activation", "conv2_1.masked", "pool2", "conv3_2.activation", "pool_3x3"]
    trunk_and_head += ["pyramid", "fc1.product", "fc1", "fc1.activation", "fc2", "fc3.product", "fc3"]
    assert {types[name] for name in trunk_and_head} == {HALF}
    exact = ["mean", "mean.warped", "images.float", "images.centred", "images.masked", "images.mask", "softmax", "grid"]
    exact += ["windows.count", "window_logits", "window_scores", "scores.sum", "logits.sum", "scores", "logits"]
    assert {types[name] for name in exact} == {SINGLE}


def test_the_numbers_of_a_half_file_are_the_checkpoints_rounded_once(demo: Callable[..., Path]) -> None:
    tensors = discriminating_checkpoint("demo", mean="image").tensors
    found = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(demo()).graph.initializer}
    np.testing.assert_array_equal(found["conv2_1.weight"], tensors["conv2_1.weight"].astype(np.float16))
    np.testing.assert_array_equal(found["fc2.weight"], tensors["fc2.weight"].T.astype(np.float16))
    np.testing.assert_array_equal(found["fc1.slope"].ravel(), tensors["fc1.slope"].astype(np.float16))


def test_a_mask_is_cast_once_per_level_and_shared(demo: Callable[..., Path]) -> None:
    nodes = {node.name: node for node in onnx.load(demo()).graph.node}
    to_half = [name for name, node in nodes.items() if node.op_type == "Cast" and node.attribute[0].i == HALF]
    assert to_half == ["images.fp16", "images.mask.fp16", "pool1.mask.fp16", "pool2.mask.fp16"]
    for layer, level in (("conv1_2", "images"), ("conv2_1", "pool1"), ("conv2_2", "pool1"), ("conv3_2", "pool2")):
        assert nodes[f"{layer}.masked"].input[1] == f"{level}.mask.fp16"
    assert nodes["images.masked"].input[1] == "images.mask"
    assert nodes["images.fp16"].input[0] == "images.masked"
    exact = [node for node in onnx.load(demo("exact")).graph.node if "mask" in node.name]
    assert exact == []


def test_a_half_file_differs_from_a_single_one_in_precision_alone(demo: Callable[..., Path]) -> None:
    half, single = onnx.load(demo()), onnx.load(demo("ragged", "fp32"))
    assert (half.graph.input, half.graph.output) == (single.graph.input, single.graph.output)
    half_metadata, single_metadata = ({p.key: p.value for p in model.metadata_props} for model in (half, single))
    assert half_metadata == {**single_metadata, "prelunet.precision": '"fp16"'}
    added = {node.name for node in half.graph.node} - {node.name for node in single.graph.node}
    masks = {f"{level}.mask.fp16" for level in ("images", "pool1", "pool2")}
    convolutions = {f"{conv.name}.product" for conv in architecture("demo").convs}  # whose biases are added afterwards
    assert added == {"images.fp16", *masks, *convolutions, "fc3.fp32"}
    assert {node.name for node in single.graph.node} < {node.name for node in half.graph.node}
    ratio = demo().stat().st_size / demo("ragged", "fp32").stat().st_size
    assert 0.5 < ratio < 0.52  # parameters are half as large; metadata and the constant arange are unchanged


def test_no_operator_of_a_half_file_leaves_the_gpu(demo: Callable[..., Path]) -> None:
    """Operators with CUDA kernels for float16 or integers; others have none, or copy to the host."""
    placed = {"Conv", "PRelu", "MaxPool", "Mul", "Slice", "Concat", "MatMul", "Add", "Transpose", "Cast", "Unsqueeze"}
    front = {"Sub", "Div", "Abs", "Relu", "Clip", "Less", "ReduceSum", "Softmax", "Shape"}
    for canvas in ("ragged", "exact"):
        nodes = onnx.load(demo(canvas)).graph.node
        assert {node.op_type for node in nodes} <= placed | front
        assert {tuple(node.input) for node in nodes if node.op_type == "Shape"} == {("images",)}


FORMS = [
    *(("demo", mean, activation, "ragged") for mean in ("channel", "image") for activation in ("prelu", "lrelu")),
    ("demo", "image", "prelu-shared", "exact"),
    ("demo", "channel", "relu", "exact"),
    *((name, "image", "prelu", "ragged") for name in ("A", "B", "E")),
    ("E", "channel", "relu", "exact"),
]


@pytest.mark.parametrize(("name", "mean", "activation", "canvas"), FORMS)
def test_scores_of_a_half_file_are_the_oracles_of_the_unrounded_checkpoint(
    tmp_path: Path, name: str, mean: str, activation: Activation, canvas: Canvas
) -> None:
    checkpoint = thin(name, mean, activation)
    session = session_on(half_file(tmp_path, checkpoint, canvas)[0])
    assert (session.contract.precision, session.contract.canvas) == ("fp16", canvas)
    crop = checkpoint.architecture.crop
    image = noise(crop + crop // 4, crop + crop // 7, seed=4)
    answer = reference.evaluate(ORACLES[name], checkpoint.tensors, checkpoint.mean, image, activation)
    assert np.ptp(answer.logits) > 2, "a net that says the same of all classes shows nothing"
    outputs = session.run(image[None], np.array([image.shape[:2]]))
    assert outputs.scores.dtype == outputs.logits.dtype == outputs.window_scores.dtype == np.float32
    np.testing.assert_allclose(outputs.scores[0], answer.scores, rtol=0, atol=SCORE_TOLERANCE)
    np.testing.assert_allclose(outputs.window_scores[0], answer.window_scores, rtol=0, atol=2 * SCORE_TOLERANCE)
    atol = LOGIT_TOLERANCE * np.abs(answer.logits).max()
    np.testing.assert_allclose(outputs.logits[0], answer.logits, rtol=0, atol=atol)


@pytest.mark.parametrize("rubbish", [0, 77, 255])
def test_images_of_several_sizes_get_the_half_scores_they_get_alone(demo: Callable[..., Path], rubbish: int) -> None:
    session = session_on(demo())
    images = [noise(h, w, seed=i) for i, (h, w) in enumerate([(28, 28), (31, 44), (50, 29), (29, 71)])]
    together = session.run(*garbage_canvas(session.contract, images, rubbish))
    for index, image in enumerate(images):
        alone = session.run(image[None], np.array([image.shape[:2]]))
        rows, columns = alone.windows[0]
        # Rounding to float16 is elementwise, so equal numbers stay equal: as exact as in float32.
        np.testing.assert_array_equal(together.window_scores[index, :rows, :columns], alone.window_scores[0])
        np.testing.assert_allclose(together.scores[index], alone.scores[0], rtol=0, atol=1e-6)


def test_a_half_file_without_masks_gives_the_scores_of_one_with_masks(demo: Callable[..., Path]) -> None:
    images, sizes = np.stack([noise(40, 33, seed=i) for i in range(2)]), np.array([[40, 33]] * 2)
    ragged, exact = (session_on(demo(canvas)).run(images, sizes) for canvas in ("ragged", "exact"))
    np.testing.assert_array_equal(exact.window_scores, ragged.window_scores)
    np.testing.assert_array_equal(exact.scores, ragged.scores)


@pytest.mark.parametrize("canvas", ["ragged", "exact"])
@pytest.mark.parametrize(("height", "width"), [(28, 28), (45, 31)])
def test_a_half_file_runs_in_openvino_also_with_a_single_window(
    demo: Callable[..., Path], canvas: str, height: int, width: int
) -> None:
    openvino = pytest.importorskip("openvino")
    core, checkpoint, image = (
        openvino.Core(),
        discriminating_checkpoint("demo", mean="image"),
        noise(height, width, seed=2),
    )
    compiled = core.compile_model(core.read_model(demo(canvas)), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = compiled({"images": image[None], "sizes": np.array([[height, width]])})
    answer = reference.evaluate("demo", checkpoint.tensors, checkpoint.mean, image)
    np.testing.assert_allclose(found["scores"][0], answer.scores, rtol=0, atol=SCORE_TOLERANCE)
    atol = LOGIT_TOLERANCE * np.abs(answer.logits).max()
    np.testing.assert_allclose(found["logits"][0], answer.logits, rtol=0, atol=atol)


def test_the_same_checkpoint_gives_the_same_half_file(demo: Callable[..., Path], tmp_path: Path) -> None:
    again, _ = half_file(tmp_path, discriminating_checkpoint("demo", mean="image"))
    assert again.read_bytes() == demo().read_bytes()


def test_the_finished_file_holds_no_probe(demo: Callable[..., Path]) -> None:
    model = onnx.load(demo())
    assert [value.name for value in model.graph.output] == ["scores", "logits", "windows", "window_scores"]
    assert not [node for node in model.graph.node if "probe" in str(node)]


@pytest.mark.parametrize("activation", ["prelu", "prelu-shared", "relu"])
def test_every_result_of_half_arithmetic_is_probed(tmp_path: Path, activation: Activation) -> None:
    checkpoint = tiny_checkpoint(activation)
    path, _ = half_file(tmp_path, checkpoint)
    types = types_in(path)
    kinds = {
        "Conv",
        "PRelu",
        "LeakyRelu",
        "Relu",
        "MatMul",
        "Add",
    }  # other operators on float16 only select, move or mask
    computed = {n.name for n in onnx.load(path).graph.node if n.op_type in kinds and types[n.name] == HALF}
    model = onnx.load(path)
    add_probes(model, [*chain.from_iterable(probed_tensors(checkpoint.architecture).values())])
    probed = {
        node.input[0] for node in model.graph.node if node.output[0].startswith("probe") and node.op_type == "Cast"
    }
    assert probed == computed
    assert len(computed) == 2 * 3 + 2 * 3 + 2


# Nets that do not fit into float16.


def test_a_parameter_beyond_half_is_refused_by_name_before_the_work_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "prelunet.export.dense.export.network_from_checkpoint", lambda _: pytest.fail("the work has begun")
    )
    checkpoint = tiny_checkpoint()
    weight = checkpoint.tensors["conv2.weight"].copy()
    weight[1, 2, 0, 1], weight[0, 0, 0, 0] = (
        -65520,
        65519,
    )  # the smallest that rounds to infinity, the largest that does not
    write_checkpoint(tmp_path / "net", with_tensors(checkpoint, conv2__weight=weight))
    assert run(["export", str(tmp_path / "net"), "-o", str(tmp_path / "m.onnx"), "--precision", "fp16"]) == 2
    output = capsys.readouterr().err
    assert "1 of the 80 numbers in conv2.weight exceed 65504" in output
    assert "--precision fp32" in output
    assert [path.name for path in tmp_path.iterdir()] == ["net"]


@pytest.mark.parametrize("activation", ["prelu", "relu"])
def test_a_net_whose_numbers_grow_beyond_half_between_the_layers_is_refused_naming_the_first_such_layer(
    tmp_path: Path, activation: Activation
) -> None:
    checkpoint = tiny_checkpoint(activation)
    tensors = checkpoint.tensors
    for scale, refused in ((1000, True), (1, False)):
        large = with_tensors(
            checkpoint,
            conv1__weight=tensors["conv1.weight"] * np.float32(scale),
            conv2__weight=tensors["conv2.weight"] / np.float32(scale),
        )
        half_file(tmp_path / "single", large, precision="fp32")  # fits into float32
        if refused:
            with pytest.raises(UsageError, match=r"conv1 exceeds 65504.*--precision fp32"):
                half_file(tmp_path / "half", large)
            assert [path.name for path in (tmp_path / "half").iterdir()] == ["net.safetensors"]
        else:
            assert half_file(tmp_path / "half", large)[1].warnings == []


def largest_in_torch(checkpoint: Checkpoint, image: np.ndarray) -> dict[str, float]:
    """Return layer → largest absolute value of its convolution or product, with and without bias, and activation."""
    net = network_from_checkpoint(checkpoint)
    mean = torch.from_numpy(checkpoint.mean)
    x, found = (torch.from_numpy(image.astype(np.float32)) - mean).permute(2, 0, 1)[None], {}
    with torch.no_grad():
        for layer in checkpoint.architecture.trunk:
            if not isinstance(layer, Conv):
                x = F.max_pool2d(x, layer.kernel, layer.stride)
                continue
            own = net.get_submodule(layer.name)
            x = F.conv2d(x, own.weight, own.bias, layer.stride, layer.pad)
            found[layer.name] = [x, F.prelu(x, own.slope)]
            x = found[layer.name][1]
        for name in ("fc1", "fc2", "fc3"):
            own = net.get_submodule(name)
            x = net.pyramid(x) if name == "fc1" else x
            product = F.linear(x, own.weight)
            found[name] = [product, product + own.bias]
            if name != "fc3":
                x = F.prelu(product + own.bias, own.slope)
                found[name].append(x)
    return {name: max(float(y.abs().max()) for y in values) for name, values in found.items()}


def test_the_reported_magnitudes_are_the_largest_numbers_of_each_layer(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    path, found = half_file(tmp_path, checkpoint, "exact")
    contract = session_on(path).contract
    images = [canvas[0] for canvas, _ in range_canvases(contract) if canvas.shape[1:3] == (24, 24)]
    assert len(images) == 1 + 2 + 5 + 5  # the golden image of one crop; black and white; grains of 1, 2, 4, 8, 16
    expected: dict[str, float] = {}
    for image in images:
        for layer, largest in largest_in_torch(checkpoint, image).items():
            expected[layer] = max(expected.get(layer, 0), largest)
    assert {d.precision for d in found.deviations} == {"fp16"}
    assert list(found.magnitudes) == ["conv1", "conv2", "fc1", "fc2", "fc3"]
    for layer, largest in found.magnitudes.items():
        assert largest >= expected[layer] * 0.998  # float16 rounds to 1e-3
        assert largest <= expected[layer] * 1.5  # two golden images are larger than one crop, and hold more windows
    assert found.magnitudes["conv1"] == pytest.approx(expected["conv1"], rel=2e-3)  # the largest come from hard edges


def test_the_padding_next_to_an_image_is_measured_too(tmp_path: Path) -> None:
    """Constant features k, and a convolution of (2, -1, 0) in its middle column: k inside, -k and k along the borders.

    In the first row below the image it meets the image's last row with its 2, and nothing else: 2k.
    """
    for features, beside, refused in ((10000, 20000, False), (40000, 80000, True)):
        checkpoint = ring_checkpoint(features)
        path, found = half_file(tmp_path / "exact", checkpoint, "exact")
        assert found.magnitudes["conv2"] == features
        assert session_on(path).run(np.zeros((1, 24, 30, 3), np.uint8), np.array([[24, 30]])).scores.min() >= 0
        if refused:
            with pytest.raises(UsageError, match="conv2 exceeds 65504"):
                half_file(tmp_path / "ragged", checkpoint)
        else:
            assert half_file(tmp_path / "ragged", checkpoint)[1].magnitudes["conv2"] == beside


def ring_checkpoint(features: float) -> Checkpoint:
    trunk = tuple(Conv(f"conv{number}", 1, kernel=3, pad=1) for number in (1, 2, 3))
    net = Architecture("ring", trunk, spp_levels=(1,), hidden=2, crop=24)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(net, 3).items()}
    tensors["conv1.bias"][:] = features
    tensors["conv2.weight"][0, 0, :, 1] = 2, -1, 0
    tensors["conv2.slope"][:] = 1
    return replace(tiny_checkpoint(), architecture=net, tensors=tensors)


def test_an_image_beside_white_padding_gets_its_scores_where_numbers_beside_it_are_larger_than_inside(
    tmp_path: Path,
) -> None:
    checkpoint = ring_checkpoint(30000)  # 60000 next to the image: close to the float16 maximum
    tensors = dict(checkpoint.tensors)
    tensors["conv3.weight"] = np.full_like(tensors["conv3.weight"], 1e-4)  # 27 inside, 36 if the row below leaked in
    tensors["fc1.weight"][0, 0] = tensors["fc2.weight"][0, 0] = 1
    tensors["fc3.weight"] = np.array([[0.1, 0], [0.05, 0], [-0.1, 0]], np.float32)
    session = session_on(half_file(tmp_path, replace(checkpoint, tensors=tensors))[0])
    image = noise(26, 25, seed=1)
    alone = session.run(image[None], np.array([[26, 25]]))
    np.testing.assert_allclose(alone.logits, [[2.7, 1.35, -2.7]], rtol=2e-3)  # 11 bits
    beside = session.run(*pack([image], 90, 70, fill=255))
    np.testing.assert_array_equal(beside.window_scores[0, :3, :2], alone.window_scores[0])
    np.testing.assert_allclose(beside.scores, alone.scores, rtol=0, atol=1e-6)


@pytest.mark.parametrize("largest", [65505.0, float("inf"), float("nan")])
def test_a_layer_beyond_half_is_refused_also_where_infinity_has_become_nan(largest: float) -> None:
    check_magnitudes({"conv1": 65504.0, "conv2": 1.0})
    with pytest.raises(UsageError, match="conv2 exceeds 65504"):
        check_magnitudes({"conv1": 65504.0, "conv2": largest, "conv3": float("nan")})


def test_a_layer_near_the_maximum_of_half_gives_a_warning_with_its_number() -> None:
    magnitudes = {"conv1": 8188.0, "conv2": 8188.5, "fc1": 65504.0}
    assert [text.split(":")[0] for text in magnitude_warnings(magnitudes)] == ["conv2", "fc1"]
    assert "8.19e+03" in magnitude_warnings(magnitudes)[0]


def test_range_images_hold_the_hardest_edges_in_all_channels_and_are_always_the_same() -> None:
    images = range_images(28)
    assert {image.shape for image in images} == {(28, 28, 3)}
    assert {int(value) for image in images for value in np.unique(image)} == {0, 255}
    assert len({image.tobytes() for image in images}) == len(images) == 2 + 5 + 5
    checks = [image for image in images if all(np.array_equal(np.roll(image, 1, axis), 255 - image) for axis in (0, 1))]
    assert len(checks) == 1  # every pixel differs from its neighbors; coarser grains do not
    colored = [image for image in images if (image[..., 0] != image[..., 1]).any()]
    assert len(colored) == 5
    assert all(np.array_equal(one, other) for one, other in zip(images, range_images(28), strict=True))


def test_range_canvases_of_a_ragged_file_have_white_beside_each_image(demo: Callable[..., Path]) -> None:
    contract = session_on(demo()).contract
    canvases = list(range_canvases(contract))
    for canvas, ((height, width),) in canvases:
        assert canvas.shape[1] > height
        assert (canvas[0, height:] == 255).all()
        assert (canvas[0, :, width:] == 255).all()
    rows = [contract.window_grid(*canvas.shape[1:3])[0] for canvas, _ in canvases]
    inside = [contract.window_grid(*size[0])[0] for _, size in canvases]
    assert rows[-1] - inside[-1] >= contract.window  # windows of padding only


# Which tolerance applies to a run.


@pytest.mark.parametrize(
    ("file", "running", "judged"),
    [
        ("fp32", "fp32", "fp32"),
        ("fp32", "tf32", "tf32"),
        ("fp32", "bf16", "bf16"),
        ("fp16", "fp16", "fp16"),
        ("fp16", "fp32", "fp16"),  # OpenVINO: the weights are rounded anyway
        ("fp16", "bf16", "bf16"),
    ],
)
def test_a_run_is_held_to_the_coarser_of_what_its_file_and_its_device_round_to(
    file: str, running: str, judged: str
) -> None:
    session = SimpleNamespace(
        contract=SimpleNamespace(precision=file), circumstances=SimpleNamespace(precision=running)
    )
    assert tolerance_precision(session) == judged


@pytest.mark.parametrize(
    ("precision", "score", "passed"),
    [
        ("fp32", 0.9e-5, True),
        ("fp32", 1.1e-5, False),
        ("tf32", 0.9e-2, True),
        ("fp16", 0.9e-2, True),
        ("fp16", 1.1e-2, False),
        ("bf16", 4e-2, True),
        ("bf16", 6e-2, False),
        ("bf16", float("nan"), False),
    ],
)
def test_each_precision_has_its_own_tolerance(precision: str, score: float, passed: bool) -> None:
    assert Deviation("alone", 28, 28, score, 0.0, precision, TOLERANCES[precision]).passed is passed
    logits = Deviation("alone", 28, 28, 0.0, score, precision, TOLERANCES[precision])
    assert logits.passed is (passed or precision == "fp32")
    assert TOLERANCES[precision].scores < 0.1


def test_verify_holds_a_half_file_to_the_tolerance_of_half_precision(
    demo: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    deviations = verify(session_on(demo()))
    assert {d.precision for d in deviations} == {"fp16"}
    assert all(d.passed for d in deviations)
    assert max(d.scores for d in deviations) > TOLERANCES["fp32"].scores
    assert run(["verify", str(demo()), "--device", "cpu", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["circumstances"]["precision"] == "fp32", "the provider drops the casts between layers"
    assert {row["precision"] for row in output["deviations"]} == {"fp16"}


def test_export_refuses_a_half_file_that_deviates_and_names_the_precision_to_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prelunet.export.dense.build.fc1_channel_last", lambda weight, _architecture: weight.T)
    with pytest.raises(CheckFailed, match=r"more than 0\.01:(?s:.*)--precision fp32"):
        half_file(tmp_path, thin("demo"))
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]


# The verb.


def test_the_verb_prints_precision_size_and_the_largest_activation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "net", tiny_checkpoint())
    output = tmp_path / "m.onnx"
    assert run(["export", str(tmp_path / "net"), "-o", str(output), "--precision", "fp16"]) == 0
    printed = capsys.readouterr()
    assert f"{output.stat().st_size / 1e6:.1f} MB, fp16, canvas ragged" in printed.out
    assert "the float16 maximum is 65504" in printed.out
    assert printed.err == ""
    assert run(["inspect", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["precision"] == "fp16"


def test_the_verb_prints_warnings_with_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "net", ring_checkpoint(10000))
    assert run(["export", str(tmp_path / "net"), "-o", str(tmp_path / "m.onnx"), "--precision", "fp16"]) == 0
    output = capsys.readouterr()
    assert "largest activation: 2e+04 (conv2)" in output.out
    assert "warning: conv2: reaches 2e+04" in output.err


def test_a_single_precision_file_does_not_mention_float16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "net", tiny_checkpoint())
    assert run(["export", str(tmp_path / "net"), "-o", str(tmp_path / "m.onnx")]) == 0
    assert "float16" not in capsys.readouterr().out
    assert run(["export", str(tmp_path / "net"), "-o", str(tmp_path / "n.onnx"), "--precision", "fp64"]) == 2
    assert not (tmp_path / "n.onnx").exists()


def test_probes_measure_a_model_without_changing_its_scores(demo: Callable[..., Path], tmp_path: Path) -> None:
    model, net = onnx.load(demo()), architecture("demo")
    add_probes(model, ["conv1_1", "pool2", "fc1.product"])
    onnx.save(model, tmp_path / "probed.onnx")
    image, sizes = noise(30, 41, seed=3)[None], np.array([[30, 41]])
    scores = RawOnnxModel(tmp_path / "probed.onnx").run({"images": image, "sizes": sizes}, "scores")
    np.testing.assert_allclose(scores, session_on(demo()).run(image, sizes).scores, rtol=0, atol=SCORE_TOLERANCE)
    measured = measure_magnitudes(demo(), net, session_on(demo()).contract)
    assert list(measured) == [*(conv.name for conv in net.convs), "fc1", "fc2", "fc3"]
    assert not list(demo().parent.glob(".probed*"))
