"""int8 files: their numbers, their scores on each runtime, what int8 costs, and the inputs that are refused."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from PIL import Image
from torch.nn import functional as F

import prelunet.export.dense.quantization
from prelunet.evaluator.architectures import architecture
from prelunet.evaluator.cli import run
from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.datasets import DatasetSpec
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.memory import batch_bytes, require_loadable
from prelunet.evaluator.engine.runtimes import openvino
from prelunet.evaluator.errors import CheckFailed, ContractError, DatasetError, EnvironmentFault, UsageError
from prelunet.evaluator.imaging.views import make_views
from prelunet.evaluator.machine import supports_int8
from prelunet.evaluator.protocols import build_protocol
from prelunet.export.dense.build import build_contract
from prelunet.export.dense.export import ExportResult, export_checkpoint
from prelunet.training.net.checkpoints import Checkpoint, write_checkpoint
from tests.helpers.discriminating_nets import discriminating_checkpoint, noise, with_tensors
from tests.helpers.tiny_nets import TINY, mean_image, tiny_checkpoint

pytestmark = pytest.mark.processor

LAYERS = ["conv1", "conv2", "fc1", "fc2", "fc3"]
INT8, FLOAT = onnx.TensorProto.INT8, onnx.TensorProto.FLOAT
needs_int8 = pytest.mark.skipif(not supports_int8(), reason="this processor has neither VNNI nor AMX")
DEVICES = ["cpu", pytest.param("openvino", marks=needs_int8)]


def write_pictures(folder: Path, names: list[str]) -> Path:
    """Write an image of noise under each name, in sizes of their own."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(30 + number % 5, 40 - number % 3, seed=number)).save(path)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a flat folder of twelve images."""
    return write_pictures(tmp_path_factory.mktemp("pictures"), [f"{number:02}.png" for number in range(12)])


def int8_file(
    folder: Path, checkpoint: Checkpoint, data: Path, images: int = 12, **options: Any
) -> tuple[Path, ExportResult]:
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder / "net.safetensors", checkpoint)
    spec = DatasetSpec(data, no_labels=True, limit=images)
    path = folder / "int8.onnx"
    return path, export_checkpoint(folder / "net.safetensors", path, "exact", "int8", spec, **options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    return int8_file(tmp_path_factory.mktemp("tiny"), tiny_checkpoint(mean=mean_image()), pictures)[0]


def initializers(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


class SlowNet:
    """TINY in float64, layer by layer and window by window. inputs: of each layer, of every image so far.

    scales: layer → what its input is rounded to multiples of, with int8's limits; {} for no rounding.
    """

    def __init__(self, checkpoint: Checkpoint, scales: dict[str, float]) -> None:
        self.tensors = {
            name: torch.from_numpy(tensor.astype(np.float64)) for name, tensor in checkpoint.tensors.items()
        }
        self.mean, self.scales = checkpoint.mean, scales
        self.inputs: dict[str, list[torch.Tensor]] = {layer: [] for layer in LAYERS}

    def layer(self, name: str, values: torch.Tensor) -> torch.Tensor:
        self.inputs[name].append(values)
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        if name in self.scales:
            values = (values / self.scales[name]).round().clamp(-128, 127) * self.scales[name]
            step = weight.abs().flatten(1).amax(dim=1).reshape(-1, *[1] * (weight.ndim - 1)) / 127
            weight = (weight / step).round() * step
        if name.startswith("fc"):
            values = values @ weight.T + bias
        else:
            conv = next(conv for conv in TINY.convs if conv.name == name)
            values = F.conv2d(values, weight, bias, stride=conv.stride, padding=conv.pad)
        return values if name == "fc3" else F.prelu(values, self.tensors[f"{name}.slope"])

    def window_logits(self, image: np.ndarray) -> np.ndarray:
        """Return the logits of each window, (rows, columns, K)."""
        mean = torch.from_numpy(self.mean.astype(np.float64)).permute(2, 0, 1)[None]
        mean = F.interpolate(mean, size=image.shape[:2], mode="bilinear", align_corners=False)
        values = self.layer("conv1", torch.from_numpy(image.copy()).double().permute(2, 0, 1)[None] - mean)
        values = self.layer("conv2", F.max_pool2d(values, 2))
        rows, columns = (side - 7 + 1 for side in values.shape[2:])
        windows = [values[:, :, r : r + 7, c : c + 7] for r in range(rows) for c in range(columns)]
        pooled = [torch.cat([F.adaptive_max_pool2d(w, n).flatten(1) for n in (3, 1, 2)], dim=1) for w in windows]
        for name in ("fc1", "fc2", "fc3"):
            pooled = [self.layer(name, features) for features in pooled]
        return torch.cat(pooled).reshape(rows, columns, -1).numpy()


def test_ranges_are_the_largest_values_that_every_second_image_gives_in_all_its_views(
    tiny: Path, pictures: Path
) -> None:
    net = SlowNet(tiny_checkpoint(mean=mean_image()), {})
    protocol = build_protocol("multi-scale", open_session(tiny, "cpu").contract)
    for path in sorted(pictures.iterdir())[::2]:
        for view in make_views(np.asarray(Image.open(path)), protocol):
            net.window_logits(view.image)
    found = initializers(tiny)
    for layer in LAYERS:
        largest = max(values.abs().max().item() for values in net.inputs[layer])
        # Rounded up to four digits. A pool may drop the largest value of an activation, but not the grid of this net.
        assert largest <= 127 * found[f"{layer}.input.scale"] * (1 + 1e-6)
        assert 127 * found[f"{layer}.input.scale"] <= largest * 1.002 or layer in {"conv2", "fc1"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(24, 24), (29, 41), (40, 27)])
def test_scores_are_those_of_a_net_whose_weights_and_inputs_are_rounded(
    tiny: Path, device: str, size: tuple[int, int]
) -> None:
    stored = initializers(tiny)
    scales = {layer: float(stored[f"{layer}.input.scale"]) for layer in LAYERS}
    for seed in range(77, 177):  # the first image whose inputs float32 rounds to the same levels as float64
        net, image = SlowNet(tiny_checkpoint(mean=mean_image()), scales), noise(*size, seed)
        expected = net.window_logits(image)
        levels = np.concatenate([torch.cat(net.inputs[layer]).numpy().ravel() / scales[layer] for layer in LAYERS])
        if np.abs(np.abs(levels - np.floor(levels)) - 0.5).min() > 2e-5:
            break
    else:
        raise AssertionError("all images have a value between two levels")
    outputs = open_session(tiny, device).run(image[None], np.array([size]))  # type: ignore[arg-type]
    np.testing.assert_allclose(outputs.logits[0], expected.mean(axis=(0, 1)), rtol=0, atol=1e-4)  # float32's sums
    scores = torch.from_numpy(expected).softmax(-1).numpy()
    np.testing.assert_allclose(outputs.window_scores[0], scores, rtol=0, atol=1e-5)
    exact = SlowNet(tiny_checkpoint(mean=mean_image()), {}).window_logits(image)
    assert np.abs(exact - expected).max() > 1e-2, "without rounding the net would pass too"


def test_weights_pools_and_bins_are_int8_and_mean_biases_and_averages_are_not(tiny: Path) -> None:
    model = onnx.shape_inference.infer_shapes(onnx.load(tiny), strict_mode=True)
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    types |= {value.name: value.type.tensor_type.elem_type for value in (*model.graph.value_info, *model.graph.output)}
    stored = initializers(tiny)
    for layer in LAYERS:
        weight = stored[f"{layer}.weight.int8"]
        assert (weight.dtype, np.abs(weight.astype(int)).max()) == (np.int8, 127)
        assert stored[f"{layer}.weight.scale"].shape == (weight.shape[0 if layer.startswith("conv") else 1],)
    assert {types[name] for name in ("pool1", "pool_3x3", "pool_7x7", "bin_0", "pyramid", "fc1.input.int8")} == {INT8}
    float32 = ("images.centred", "conv2", "conv2.bias", "conv2.slope", "fc1.product", "fc3", "softmax", "window_scores")
    assert {types[name] for name in float32} == {FLOAT}
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert len(quantizers) == len(LAYERS), "one before each layer, and so one for all bins"
    assert {node.input[2] for node in quantizers} == {"int8_zero"}
    assert (stored["int8_zero"].dtype, stored["int8_zero"].item()) == (np.int8, 0)
    assert ([opset.version for opset in model.opset_import], model.ir_version <= 10) == ([18], True)


@pytest.mark.parametrize("device", DEVICES)
def test_fc1_in_parts_has_the_numbers_of_the_whole_one(
    tiny: Path, tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, device: Any
) -> None:
    monkeypatch.setattr("prelunet.export.dense.build.MAX_TERMS", 5 * 4)  # five of the 14 bins, of 4 channels
    parts, _ = int8_file(tmp_path, tiny_checkpoint(mean=mean_image()), pictures)
    whole, stored = initializers(tiny), initializers(parts)
    rows = [stored[f"fc1.weight.part_{number}.int8"] for number in range(3)]
    np.testing.assert_array_equal(np.concatenate(rows), whole["fc1.weight.int8"])
    np.testing.assert_array_equal(stored["fc1.weight.scale"], whole["fc1.weight.scale"])
    image, sizes = noise(29, 41, seed=5)[None], np.array([[29, 41]])
    one, other = (open_session(path, device).run(image, sizes).logits for path in (tiny, parts))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)  # float32's sums


def test_a_file_is_a_quarter_as_large_states_its_calibration_and_is_the_same_when_written_again(
    tmp_path: Path, pictures: Path
) -> None:
    checkpoint = discriminating_checkpoint("demo")
    path, _ = int8_file(tmp_path / "first", checkpoint, pictures, images=4)
    again, _ = int8_file(tmp_path / "second", checkpoint, pictures, images=4)
    assert path.read_bytes() == again.read_bytes()
    export_checkpoint(tmp_path / "first/net.safetensors", tmp_path / "fp32.onnx", "exact")
    assert (
        0.25 < path.stat().st_size / (tmp_path / "fp32.onnx").stat().st_size < 0.3
    )  # metadata and biases are as large
    calibration = open_session(path, "cpu").contract.calibration
    assert calibration is not None
    assert (calibration.images, calibration.protocol) == (4, "multi-scale")
    metadata = {entry.key: json.loads(entry.value) for entry in onnx.load(path).metadata_props}
    assert metadata["prelunet.contract_version"] == 2, "so that earlier versions ask for a newer prelunet"
    assert metadata["prelunet.precision"] == "int8"
    assert sorted(p.name for p in (tmp_path / "first").iterdir()) == ["int8.onnx", "net.safetensors"], (
        "and nothing is left"
    )


@needs_int8
def test_openvino_computes_in_int8_onnxruntime_in_fp32_and_verify_certifies_both(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for device, precision in (("openvino", "int8"), ("cpu", "fp32")):
        assert run(["verify", str(tiny), "--device", device, "--json"]) == 0
        output = json.loads(capsys.readouterr().out)
        assert output["circumstances"]["precision"] == precision
        assert {row["precision"] for row in output["deviations"]} == {"int8"}
        calibration = open_session(tiny, "cpu").contract.calibration
        assert calibration is not None
        assert output["tolerance"] == calibration.to_json()["tolerance"]
    assert open_session(tiny, "auto").circumstances.precision == "int8"
    assert open_session(tiny, "auto", precision="fp32").circumstances.provider == "CPUExecutionProvider"
    assert run(["verify", str(tiny), "--device", "cpu"]) == 0
    assert "int8 itself moves the scores of these images by up to" in capsys.readouterr().out


@needs_int8
def test_plain_runtimes_run_the_file(tiny: Path) -> None:
    import onnxruntime
    from openvino import Core

    feeds = {"images": golden_image(29, 41)[None], "sizes": np.array([[29, 41]])}
    expected = open_session(tiny, "cpu").run(**feeds).scores
    atol = 0.02  # they may replace nodes by others that round differently
    found = onnxruntime.InferenceSession(str(tiny)).run(["scores"], feeds)[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    np.testing.assert_allclose(Core().compile_model(tiny, "CPU")(feeds)["scores"], expected, rtol=0, atol=atol)


def with_metadata(path: Path, target: Path, **changes: Any) -> Path:
    model = onnx.load(path)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    metadata |= {f"prelunet.{key}": json.dumps(value) for key, value in changes.items()}
    onnx.helper.set_model_props(model, metadata)
    onnx.save(model, target)
    return target


@needs_int8
def test_a_graph_in_float_that_states_int8_is_refused_by_openvino(tiny: Path, tmp_path: Path) -> None:
    export_checkpoint(tiny.parent / "net.safetensors", tmp_path / "fp32.onnx", "exact")
    contract = open_session(tiny, "cpu").contract
    assert contract.calibration is not None
    stated = {"precision": "int8", "calibration": contract.calibration.to_json()}
    path = with_metadata(tmp_path / "fp32.onnx", tmp_path / "false.onnx", **stated)
    with pytest.raises(EnvironmentFault, match="--precision int8: on this CPU OpenVINO computes in f32 instead"):
        open_session(path, "openvino")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"precision": "fp32"}, "an int8 file, and no other, should state its calibration"),
        ({"canvas": "ragged"}, "an int8 file should have an exact canvas"),
        ({"calibration": {}}, "missing required field `dataset_fingerprint`"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tiny: Path, tmp_path: Path, changes: Any, fault: str) -> None:
    with pytest.raises(ContractError, match=fault):
        open_session(with_metadata(tiny, tmp_path / "m.onnx", **changes), "cpu")


@needs_int8
def test_a_runtime_that_crashes_is_an_error_with_its_version_and_not_the_end_of_this_process(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "openvino"  # found first by the trial process; this one has imported the real one
    fake.mkdir()
    (fake / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    openvino.check_processor("int8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(EnvironmentFault, match=r"OpenVINO 20\d\d\.\S+ crashed on this processor .*\(SIGSEGV\)"):
        open_session(tiny, "openvino")


@needs_int8
def test_signals_to_the_process_group_and_files_in_the_current_folder_do_not_reach_the_trial_process(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "openvino.py"
    fake.write_text(f"import os, pathlib; pathlib.Path({str(tmp_path / 'group')!r}).write_text(str(os.getpgrp()))")
    monkeypatch.chdir(tmp_path)
    open_session(tiny, "openvino")
    assert not (tmp_path / "group").exists(), "a file in the current folder was imported"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    open_session(tiny, "openvino")
    assert int((tmp_path / "group").read_text()) != os.getpgrp()


def test_int8_runs_on_cpus_only_and_a_request_for_it_names_the_export(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--device cuda: .* stores int8\. Export it with --precision fp32, or use --device openvino"
    ):
        open_session(tiny, "cuda")
    with pytest.raises(UsageError, match=r"stores int8\. Export it with --precision fp32$"):
        open_session(tiny, "ncnn", precision="fp32")  # which OpenVINO does not have for it either
    with pytest.raises(UsageError, match=r"bf16 needs --device openvino and another file: .* --precision fp32$"):
        open_session(tiny, "cpu", precision="bf16")
    export_checkpoint(tiny.parent / "net.safetensors", tmp_path / "fp32.onnx")
    with pytest.raises(
        UsageError, match="int8 needs --device openvino and another file: prelunet export --precision int8"
    ):
        open_session(tmp_path / "fp32.onnx", "openvino", precision="int8")


def test_the_memory_estimate_counts_float_weights_in_onnxruntime_and_int8_ones_in_openvino() -> None:
    size, limit = 2**30, 2**32
    require_loadable(size, "int8", limit, "openvino")
    with pytest.raises(UsageError, match="loading the model alone takes up to 10"):
        require_loadable(size, "int8", limit, "cpu")
    contract = build_contract(
        architecture("A"), discriminating_checkpoint("demo").classes, "exact", checkpoint_sha256="0" * 64
    )
    fp32, int8 = (batch_bytes(contract, 2**20, 100, precision, "openvino") for precision in ("fp32", "int8"))
    assert int8 < fp32 / 2, "maps of int8 are smaller; the images in float32 before them are not"


# Mistakes in the graph, and nets that int8 does not suit


def reversed_scales(tensor: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    scales = np.abs(tensor).max(axis=tuple(a for a in range(tensor.ndim) if a != axis)) / 127
    shape = [-1 if a == axis else 1 for a in range(tensor.ndim)]
    return np.rint(tensor / scales.reshape(shape)).astype(np.int8), scales[::-1].astype(np.float32)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "scales of other channels": lambda patch: patch.setattr(
        prelunet.export.dense.quantization, "quantize_weight", reversed_scales
    ),
    "a range of half the size": lambda patch: patch.setattr(
        prelunet.export.dense.quantization, "activation_scale", lambda largest: np.array(largest / 254, np.float32)
    ),
    "fc1 in another order": lambda patch: patch.setattr(
        "prelunet.export.dense.build.fc1_channel_last", lambda weight, _architecture: weight.T
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_graph_leaves_no_file(
    tmp_path: Path, pictures: Path, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(CheckFailed, match=r"not written, because its scores differ(?s:.*)int8 may be too coarse"):
        int8_file(tmp_path, discriminating_checkpoint("demo"), pictures, images=4)
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]


def unbalanced_checkpoint() -> Checkpoint:
    """Return a net with the scores of TINY, of which one channel of conv1 is 5,000 times as large as the others.

    PReLU is homogeneous in each channel, so conv2 can undo it. One range for all channels leaves nothing of the others.
    """
    checkpoint = tiny_checkpoint(mean=mean_image())
    tensors = {name: tensor.copy() for name, tensor in checkpoint.tensors.items()}
    for name in ("conv1.weight", "conv1.bias"):
        tensors[name][1] *= 5000
    tensors["conv2.weight"][:, 1] /= 5000
    return replace(checkpoint, tensors=tensors)


def test_a_net_that_loses_too_much_is_warned_about(
    tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "net", unbalanced_checkpoint())
    command = ["export", str(tmp_path / "net"), "-o", str(tmp_path / "m.onnx"), "--precision", "int8", "--no-labels"]
    assert run([*command, "--calibrate", str(pictures), "--images", "12"]) == 0
    printed = capsys.readouterr()
    assert "agree with the PyTorch net with the same rounding to int8, " in printed.out
    assert "int8 beside fp32: " in printed.out
    assert "other first answers on 6 held-out images" in printed.out
    assert "warning: int8 costs this net more than 1 point" in printed.err


def test_with_labels_the_cost_counts_the_right_answers_that_are_lost(tmp_path: Path, pictures: Path) -> None:
    checkpoint = unbalanced_checkpoint()
    _, unlabeled = int8_file(tmp_path / "unlabeled", checkpoint, pictures)
    export_checkpoint(tmp_path / "unlabeled/net.safetensors", tmp_path / "fp32.onnx", "exact")
    session = open_session(tmp_path / "fp32.onnx", "cpu")
    protocol = build_protocol("multi-scale", session.contract)
    from prelunet.evaluator.engine.classify import classify_images

    data = tmp_path / "data"
    for path in sorted(pictures.iterdir()):  # labeled as float32 answers, so that every other answer is a loss
        answer = classify_images(session, [np.asarray(Image.open(path))], protocol)[0].top(1)[0][0]
        (data / checkpoint.classes[answer].wnid).mkdir(parents=True, exist_ok=True)
        (data / checkpoint.classes[answer].wnid / path.name).write_bytes(path.read_bytes())
    spec = DatasetSpec(data, limit=12)
    result = export_checkpoint(tmp_path / "unlabeled/net.safetensors", tmp_path / "m.onnx", "exact", "int8", spec)
    cost = result.cost
    assert cost is not None
    assert unlabeled.cost is not None
    assert (cost.labeled, unlabeled.cost.labeled) == (True, False)
    assert cost.lost == cost.changed > 0
    assert (cost.gained, unlabeled.cost.lost) == (0, 0)
    assert cost.loss == pytest.approx(100 * cost.lost / 6)


# Bad input


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--precision", "int8"], "add --calibrate DATA"),
        (["--calibrate", "{data}"], "--calibrate is for --precision int8, not for fp32"),
        (["--precision", "int8", "--calibrate", "{data}", "--no-labels", "--canvas", "ragged"], "no masks"),
        (["--precision", "int8", "--calibrate", "{data}", "--no-labels", "--images", "13"], "there are only 12"),
        (["--precision", "int8", "--calibrate", "{data}", "--no-labels"], "300 images are needed"),
        (["--precision", "int8", "--calibrate", "{empty}", "--no-labels"], "there are only 0. Use a larger dataset"),
        (["--images", "10"], "--images is for the images of --calibrate"),
        (["--no-labels"], "--no-labels is for the images of --calibrate"),
    ],
)
def test_options_and_data_that_make_no_calibration_are_refused_and_leave_nothing(
    tmp_path: Path, pictures: Path, words: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "net", tiny_checkpoint())
    (tmp_path / "empty").mkdir()
    words = [word.format(data=pictures, empty=tmp_path / "empty") for word in words]
    assert run(["export", str(tmp_path / "net"), "-o", str(tmp_path / "m.onnx"), *words]) == 2
    assert fault in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "net"]


def test_an_unreadable_image_and_a_single_one_are_refused(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "data", ["a.png"])
    with pytest.raises(DatasetError, match=r"2 images are needed, but there are only 1\. Use a larger dataset$"):
        int8_file(tmp_path / "single", tiny_checkpoint(), data, images=1)
    (data / "b.png").write_bytes(b"no image")
    with pytest.raises(DatasetError, match=r"b\.png cannot be used for calibration"):
        int8_file(tmp_path / "unreadable", tiny_checkpoint(), data, images=2)


def test_a_net_whose_activations_overflow_is_refused_with_the_layer(tmp_path: Path, pictures: Path) -> None:
    checkpoint = tiny_checkpoint()
    huge = with_tensors(checkpoint, fc1__weight=checkpoint.tensors["fc1.weight"] * np.float32(1e38))
    with pytest.raises(UsageError, match=r"fc1\.activation is not finite on the calibration images"):
        int8_file(tmp_path, huge, pictures)
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]


def evaluate_tiny(tiny: Path, folder: Path, *options: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return run.json, report.json and report.html of an evaluation."""
    wnids = [entry.wnid for entry in tiny_checkpoint().classes]
    data = write_pictures(folder / "data", [f"{wnid}/{number}.png" for number, wnid in enumerate(wnids)])
    assert run(["validate", "--model", str(tiny), "--data", str(data), "--run", str(folder / "run"), *options]) == 0
    assert run(["report", str(folder / "run")]) == 0
    files = (folder / "run" / name for name in ("run.json", "report/report.json", "report/report.html"))
    stored, report, page = (file.read_text() for file in files)
    return json.loads(stored), json.loads(report), page


@pytest.mark.parametrize("device", DEVICES)
def test_the_calibration_reaches_inspect_the_run_and_its_report(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    assert run(["inspect", str(tiny)]) == 0
    assert "every second image" in " ".join(capsys.readouterr().out.split())
    assert run(["inspect", str(tiny), "--json"]) == 0
    calibration = json.loads(capsys.readouterr().out)["calibration"]
    stored, report, page = evaluate_tiny(tiny, tmp_path, "--device", device)
    precision = {"cpu": "fp32", "openvino": "int8"}[device]
    assert f", {precision} (" in capsys.readouterr().err
    assert stored["circumstances"]["precision"] == precision
    assert stored["model"]["calibration"] == report["model"]["calibration"] == calibration
    assert f"{calibration['rule']} of 12 from" in page
    assert ("fp32 (the file stores int8)" in page) == (device == "cpu")


# Processors


@pytest.mark.parametrize(
    ("allowed", "supported"),
    [
        ("avx2", False),
        ("AVX512_CORE", False),  # adds two products in 16 bits, as AVX2 does
        ("AVX2_VNNI", True),
        ("AVX512_CORE_VNNI", True),
        ("AVX512_CORE_BF16", True),
        ("AVX512_CORE_AMX", True),
        ("", True),
    ],
)
def test_int8_is_supported_where_the_processor_has_vnni_or_amx_and_onednn_may_use_it(
    allowed: str, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "avx2 avx512f avx_vnni avx512_vnni amx_int8"
    monkeypatch.setattr("prelunet.evaluator.machine.cpuinfo_value", lambda *_: flags)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", allowed)
    assert supports_int8() == supported
    monkeypatch.setattr("prelunet.evaluator.machine.cpuinfo_value", lambda *_: "avx2 avx512f")
    assert not supports_int8()


def test_a_processor_whose_int8_sums_overflow_computes_the_file_in_fp32_and_says_so_everywhere(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    stored, report, page = evaluate_tiny(tiny, tmp_path)
    reason = "in fp32, because this processor has neither VNNI nor AMX"
    assert f"device auto: computing the int8 file {tiny} {reason}" in caplog.text
    for circumstances in (stored["circumstances"], report["circumstances"]):
        assert (circumstances["provider"], circumstances["precision"]) == ("CPUExecutionProvider", "fp32")
    assert "fp32 (the file stores int8)" in page
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "openvino" else object())
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    if supports_int8():
        open_session(tiny)
        assert "in fp32, because openvino is not installed" in caplog.text


@pytest.mark.parametrize(
    "options", [["--device", "openvino"], ["--precision", "int8"], ["--device", "openvino", "--precision", "int8"]]
)
def test_int8_is_refused_on_a_processor_whose_int8_sums_overflow(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert run(["verify", str(tiny), *options]) == 5
    assert "neither VNNI nor AMX, so OpenVINO's sums of 8-bit products would overflow" in capsys.readouterr().err
