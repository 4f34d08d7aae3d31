"""A quantized net is evaluated in int8 as onnxruntime runs it, or in fp32 on the same numbers, and says which."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
from onnx import TensorProto
from PIL import Image

from prelunet.evaluator.cli import run
from prelunet.evaluator.contract import Tolerance, contract_from_metadata, golden_image
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.load import add_lanes, open_session
from prelunet.evaluator.engine.runtimes import onnx as onnx_runtime
from prelunet.evaluator.engine.verify import verify
from prelunet.evaluator.errors import ContractError, EnvironmentFault, UsageError
from prelunet.evaluator.machine import onnxruntime_supports_int8, supports_int8
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.rpc.convert import report_from_message
from prelunet.evaluator.serving.api.prelunet import report_message
from prelunet.export.foreign.quantized import difference, int8_tolerance
from tests.export.foreign.foreign_nets import CLASSES, CROP, RGB, NetBuilder, ReferenceNet, adopted, net, write_classes

pytestmark = pytest.mark.processor

# Sums of integers are exact on every processor, so only float32's softmax and a rounding of the logits remain.
TOLERANCE = 1e-6
INPUT, CELLS, FEATURES, LOGITS = (0.02, 120), (0.05, 90), (0.02, 100), (0.1, 128)  # scale and zero point of each uint8
WEIGHT = 0.004  # scale of all weights

needs_vnni = pytest.mark.skipif(not onnxruntime_supports_int8(), reason="this processor has neither VNNI nor AMX")

rng = np.random.default_rng(7)
# Up to 127, where two products with large bytes exceed 16 bits.
KERNELS = rng.integers(-127, 128, (8, 3, 8, 8)).astype(np.int8)
MATRIX = rng.integers(-127, 128, (8, CLASSES)).astype(np.int8)


def rounded(n: NetBuilder, x: str, scale: float, zero: int) -> str:
    """Add a QuantizeLinear and a DequantizeLinear."""
    numbers = (n.constant(np.float32(scale)), n.constant(np.uint8(zero)))
    return n.add("DequantizeLinear", n.add("QuantizeLinear", x, *numbers), *numbers)


def weights(n: NetBuilder, numbers: np.ndarray) -> str:
    return n.add("DequantizeLinear", n.constant(numbers), n.constant(np.float32(WEIGHT)), n.constant(np.int8(0)))


def qdq(n: NetBuilder, x: str) -> str:
    x = rounded(n, n.add("Conv", rounded(n, x, *INPUT), weights(n, KERNELS), strides=[8, 8]), *CELLS)
    x = n.add("Flatten", rounded(n, n.add("GlobalAveragePool", x), *FEATURES))
    return rounded(n, n.add("MatMul", rounded(n, x, *FEATURES), weights(n, MATRIX)), *LOGITS)


def operators(n: NetBuilder, x: str) -> str:
    """Add the net of `qdq` with the operators of integers that quantizers also write, but for its pool."""

    def numbers(scale: float, zero: int) -> tuple[str, str]:
        return n.constant(np.float32(scale)), n.constant(np.uint8(zero))

    of_weights = n.constant(np.float32(WEIGHT)), n.constant(np.int8(0))
    x = n.add("QuantizeLinear", x, *numbers(*INPUT))
    kernels, matrix = n.constant(KERNELS), n.constant(MATRIX)
    x = n.add("QLinearConv", x, *numbers(*INPUT), kernels, *of_weights, *numbers(*CELLS), strides=[8, 8])
    x = n.add("GlobalAveragePool", n.add("DequantizeLinear", x, *numbers(*CELLS)))
    x = n.add("QuantizeLinear", n.add("Flatten", x), *numbers(*FEATURES))
    x = n.add("QLinearMatMul", x, *numbers(*FEATURES), matrix, *of_weights, *numbers(*LOGITS))
    return n.add("DequantizeLinear", x, *numbers(*LOGITS))


def oracle(pixels: np.ndarray, *, overflow: bool = False) -> np.ndarray:
    """Return the scores of `qdq` for uint8 (CROP, CROP, 3), from sums of integers, a layer and a cell at a time.

    overflow: add each two products in 16 bits, as x86 does without VNNI.
    """

    def levels(values: Any, scale: float, zero: int) -> Any:
        return np.clip(np.rint(np.asarray(values, np.float32) / np.float32(scale)) + zero, 0, 255).astype(np.int64)

    def total(inputs: np.ndarray, zero: int, numbers: np.ndarray) -> int:
        if not overflow:
            return int(((inputs - zero) * numbers.astype(np.int64)).sum())
        products = (inputs * numbers.astype(np.int64)).reshape(-1, 2).sum(axis=1)
        return int(products.clip(-(2**15), 2**15 - 1).sum() - zero * numbers.astype(np.int64).sum())

    x = levels(RGB.apply(pixels).transpose(2, 0, 1), *INPUT)
    side = CROP // 8
    cells = np.zeros((8, side, side), np.int64)
    for channel, row, column in np.ndindex(cells.shape):
        window = x[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        value = total(window.ravel(), INPUT[1], KERNELS[channel].ravel()) * INPUT[0] * WEIGHT
        cells[channel, row, column] = levels(value, *CELLS)
    pooled = levels((cells - CELLS[1]).mean(axis=(1, 2)) * CELLS[0], *FEATURES)
    sums = [total(pooled, FEATURES[1], MATRIX[:, k]) * FEATURES[0] * WEIGHT for k in range(CLASSES)]
    logits = (levels(sums, *LOGITS) - LOGITS[1]) * LOGITS[0]
    return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()


def processor(monkeypatch: pytest.MonkeyPatch, *, vnni: bool) -> None:
    """Let onnxruntime's processor count as one with or without VNNI."""
    monkeypatch.setattr("prelunet.evaluator.engine.load.onnxruntime_supports_int8", lambda: vnni)
    monkeypatch.setattr("prelunet.export.adoption.onnxruntime_supports_int8", lambda: vnni)
    monkeypatch.setattr("prelunet.evaluator.engine.runtimes.onnx.onnxruntime_supports_int8", lambda: vnni)


PICTURES = [golden_image(CROP, CROP), *np.random.default_rng(3).integers(0, 256, (4, CROP, CROP, 3), np.uint8)]


@pytest.mark.parametrize("build", [qdq, operators])
@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize("vnni", [pytest.param(True, marks=needs_vnni), False])
def test_a_quantized_net_gives_the_scores_of_sums_of_integers(
    build: Any, precision: Any, vnni: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor(monkeypatch, vnni=vnni)
    _, found = adopted(tmp_path, net(tmp_path, build))
    assert (found.form, found.contract.precision, found.sequential_reason) == (build.__name__, "int8", "")
    if (build, precision) == (operators, "fp32"):
        with pytest.raises(UsageError, match=r"stores int8, which --device cpu computes in int8\. Omit --precision"):
            open_session(tmp_path / "adopted.onnx", "cpu", precision=precision)
        return
    session = open_session(tmp_path / "adopted.onnx", "cpu", precision=precision)
    assert session.circumstances.precision == precision
    outputs = session.run(np.stack(PICTURES), np.full((len(PICTURES), 2), CROP, np.int64))
    expected = np.array([oracle(picture) for picture in PICTURES])
    np.testing.assert_allclose(outputs.scores, expected, rtol=0, atol=TOLERANCE)
    assert np.ptp(expected, axis=0).max() > 0.1
    wrong = np.array([oracle(picture, overflow=True) for picture in PICTURES])
    assert np.abs(wrong - expected).max() > 0.05, "sums that do not overflow would show nothing"


@pytest.mark.parametrize("vnni", [pytest.param(True, marks=needs_vnni), False])
def test_the_precision_is_int8_with_vnni_and_fp32_without_and_every_output_says_so(
    vnni: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    processor(monkeypatch, vnni=vnni)
    model, data = tmp_path / "model.onnx", tmp_path / "data"
    numbers = ["--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225"]
    command = ["adopt", str(net(tmp_path, qdq)), "--classes", str(write_classes(tmp_path)), *numbers, "-o", str(model)]
    assert run(command) == 0
    printed = capsys.readouterr().out
    where = "int8, as the original" if vnni else "fp32, on the rounded numbers, because this processor has neither VNNI"
    assert f"quantized to int8; on this processor onnxruntime computes it in {where}" in printed
    assert "36 runs agree with the original net" in printed, "nine pictures, alone and together, in both precisions"
    for index, picture in enumerate(PICTURES):
        (data / f"n{index:08}").mkdir(parents=True)
        Image.fromarray(picture).save(data / f"n{index:08}" / "picture.png")
    folder = tmp_path / "run"
    assert run(["validate", "--model", str(model), "--data", str(data), "--run", str(folder)]) == 0
    assert ("in fp32, because this processor has neither VNNI nor AMX" in caplog.text) != vnni
    assert run(["report", str(folder)]) == 0
    stored = json.loads((folder / "run.json").read_text())
    report = json.loads((folder / "report" / "report.json").read_text())
    for each in (stored, report):
        assert each["circumstances"]["precision"] == ("int8" if vnni else "fp32")
        assert each["circumstances"]["provider"] == "CPUExecutionProvider"
        assert each["model"]["calibration"]["tolerance"]["scores"] >= 0.01
        assert each["model"]["calibration"]["dataset_fingerprint"] is None
    jsonschema.validate(report, json.loads(Path("docs/report.schema.json").read_text()))
    assert report_from_message(report_message(report)) == report, "also over gRPC"
    page = (folder / "report" / "report.html").read_text()
    assert ("fp32 (the file stores int8)" in page) != vnni
    assert "ranges: those of the adopted net" in page
    assert run(["inspect", str(model)]) == 0
    assert run(["verify", str(model)]) == 0


def test_a_file_that_was_adopted_on_one_processor_is_the_same_on_the_other_and_passes_its_check_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for vnni in (True, False) if onnxruntime_supports_int8() else (False, False):
        processor(monkeypatch, vnni=vnni)
        adopted(tmp_path, net(tmp_path, qdq))
        files.append((tmp_path / "adopted.onnx").read_bytes())
    assert files[0] == files[1]
    processor(monkeypatch, vnni=False)
    assert open_session(tmp_path / "adopted.onnx", "cpu").circumstances.precision == "fp32"
    for precision in ("int8", "fp32"):
        session = open_session(tmp_path / "adopted.onnx", "cpu", precision=precision)  # type: ignore[arg-type]
        assert all(found.passed for found in verify(session))
        assert {found.precision for found in verify(session)} == {"int8"}, "the file's tolerance applies"


def test_a_session_in_int8_that_gives_other_scores_than_the_golden_ones_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "adopted.onnx"
    adopted(tmp_path, net(tmp_path, qdq))
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.INT8 and list(tensor.dims) == list(MATRIX.shape):
            tensor.raw_data = np.roll(MATRIX, 1, axis=1).tobytes()
    onnx.save(model, path)
    with pytest.raises(EnvironmentFault, match=r"in int8 on CPUExecutionProvider .* The file is damaged"):
        open_session(path, "cpu", precision="int8")


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_all_lanes_of_a_server_compute_in_the_sessions_precision(
    precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopted(tmp_path, net(tmp_path, qdq))
    session = open_session(tmp_path / "adopted.onnx", "cpu", precision=precision)
    loaded, asked = onnx_runtime.load_on_cpu, []
    monkeypatch.setattr("prelunet.evaluator.engine.load.cores", lambda: 2)
    monkeypatch.setattr(onnx_runtime, "load_on_cpu", lambda *a, **given: asked.append(given) or loaded(*a, **given))
    add_lanes(session, tmp_path / "adopted.onnx")
    assert asked == [{"threads": 1, "quantized": precision == "int8"}]


def dynamic(n: NetBuilder, x: str) -> str:
    """Take each range from the batch, as `quantize_dynamic` does."""
    flat = n.add("Flatten", n.add("AveragePool", x, kernel_shape=[20, 20], strides=[20, 20]))
    # Up to 63, so that two products fit in 16 bits: the oracle is plain onnxruntime.
    numbers = n.constant(rng.integers(-63, 64, (12, CLASSES)).astype(np.int8))
    levels, scale, zero = (f"dynamic.{part}" for part in ("levels", "scale", "zero"))
    n.nodes.append(onnx.helper.make_node("DynamicQuantizeLinear", [flat], [levels, scale, zero]))
    product = n.add("MatMulInteger", levels, numbers, zero, n.constant(np.int8(0)))
    value = n.add("Mul", n.add("Cast", product, to=TensorProto.FLOAT), scale)
    return n.add("Mul", value, n.constant(np.float32(0.03)))


def test_a_net_whose_ranges_come_from_the_batch_runs_one_image_at_a_time(tmp_path: Path) -> None:
    path = net(tmp_path, dynamic)
    session, found = adopted(tmp_path, path)
    assert (found.form, session.circumstances.precision) == ("operators", "int8")
    assert found.sequential_reason.startswith("together: scores of the same image run together differ")
    results = classify_images(session, PICTURES, replace(build_protocol("center", session.contract), scales=(CROP,)))
    plain = ReferenceNet(path)
    expected = [plain.scores(picture) for picture in PICTURES]
    np.testing.assert_allclose([result.scores for result in results], expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(UsageError, match=r"--device openvino: .* stores int8\. Use --device cpu"):
        open_session(tmp_path / "adopted.onnx", "openvino")


def test_a_net_of_which_only_the_weights_are_rounded_stays_a_net_in_fp32(tmp_path: Path) -> None:
    def build(n: NetBuilder, x: str) -> str:
        x = n.add("Flatten", n.add("GlobalAveragePool", n.add("Conv", x, weights(n, KERNELS), strides=[8, 8])))
        return n.add("MatMul", x, weights(n, MATRIX))

    path = net(tmp_path, build)
    session, found = adopted(tmp_path, path)
    assert (found.form, session.contract.precision, session.contract.calibration) == (None, "fp32", None)
    scores = session.run(PICTURES[0][None], np.full((1, 2), CROP, np.int64)).scores[0]
    np.testing.assert_allclose(scores, ReferenceNet(path).scores(PICTURES[0]), rtol=0, atol=TOLERANCE)


def test_a_quantized_net_with_a_global_pool_becomes_dense_and_one_of_integers_is_refused(tmp_path: Path) -> None:
    session, found = adopted(tmp_path, net(tmp_path, qdq), dense=True)
    assert found.contract.window == 5
    image = golden_image(61, 83)
    outputs = session.run(image[None], np.array([[61, 83]], np.int64))
    assert outputs.windows.tolist() == [[3, 6]]
    for row, column in ((0, 0), (2, 5), (1, 3)):  # not padded, so each window is a crop of its own
        expected = oracle(image[8 * row :, 8 * column :][:CROP, :CROP])
        np.testing.assert_allclose(outputs.window_scores[0, row, column], expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(ContractError, match=r"cannot become dense: it is quantized with operators of integers"):
        adopted(tmp_path, net(tmp_path, operators), dense=True)


def test_a_softmax_that_is_rounded_to_8_bits_is_named(tmp_path: Path) -> None:
    def build(n: NetBuilder, x: str) -> str:
        return rounded(n, n.add("Softmax", qdq(n, x), axis=1), 1 / 256, 0)

    with pytest.raises(
        UsageError, match=r"do not sum to 1 .* or a softmax that is rounded to 8 bits: quantize the net"
    ):
        adopted(tmp_path, net(tmp_path, build))


@pytest.mark.skipif(not supports_int8(), reason="this processor has neither VNNI nor AMX")
def test_openvino_computes_the_net_in_int8_and_auto_stays_with_onnxruntime(tmp_path: Path) -> None:
    adopted(tmp_path, net(tmp_path, qdq))
    path = tmp_path / "adopted.onnx"
    session = open_session(path, "openvino")
    assert (session.circumstances.provider, session.circumstances.precision) == ("OpenVINO", "int8")
    outputs = session.run(np.stack(PICTURES), np.full((len(PICTURES), 2), CROP, np.int64))
    # OpenVINO may round a sum between two levels to the other one, which moves a logit by its scale of 0.1.
    np.testing.assert_allclose(outputs.scores, [oracle(picture) for picture in PICTURES], rtol=0, atol=0.03)
    assert open_session(path).circumstances.provider == "CPUExecutionProvider"
    for device in ("cuda", "ncnn"):
        with pytest.raises(UsageError, match=rf"--device {device}: .* stores int8\. Use --device cpu"):
            open_session(path, device)  # type: ignore[arg-type]


@pytest.mark.skipif(not supports_int8(), reason="this processor has neither VNNI nor AMX")
def test_openvino_refuses_a_net_of_which_it_computes_a_layer_in_float(tmp_path: Path) -> None:
    def build(n: NetBuilder, x: str) -> str:
        x = n.add("Conv", x, n.weights(3, 3, 1, 1))  # as quantizers leave the first layer
        return qdq(n, x)

    session, found = adopted(tmp_path, net(tmp_path, build))
    assert (found.form, session.contract.precision) == ("qdq", "int8")
    with pytest.raises(EnvironmentFault, match=r"OpenVINO computes in f32, .*adopted in int8, use --device cpu"):
        open_session(tmp_path / "adopted.onnx", "openvino")


def test_the_tolerance_is_twice_what_int8_was_seen_to_move_and_at_least_that_of_few_levels() -> None:
    fp32 = np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[4.0, -2.0], [1.0, 0.5]])
    int8 = np.array([[0.52, 0.48], [0.9, 0.1]]), np.array([[4.0, -2.2], [1.1, 0.5]])
    moved = difference(fp32, int8)
    assert (moved.scores, moved.logits) == (pytest.approx(0.02), pytest.approx(0.1))  # 0.1 of 1.0, 0.05 of 4.0
    assert int8_tolerance(fp32[1], moved) == Tolerance(0.04, 0.2)
    assert int8_tolerance(fp32[1], Tolerance(0.0, 0.0)) == Tolerance(0.01, 0.01)


def test_a_net_whose_precisions_differ_much_is_adopted_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("prelunet.export.foreign.adopt.difference", lambda *_: Tolerance(0.3, 0.4))
    model = str(tmp_path / "model.onnx")
    options = ["--preset", "torchvision", "--classes", str(write_classes(tmp_path)), "-o", model]
    assert run(["adopt", str(net(tmp_path, qdq)), *options]) == 0
    printed = capsys.readouterr()
    assert "int8 and fp32 differ by up to 3.0e-01 in a score" in printed.out
    assert "runs on processors with and without VNNI cannot be compared" in printed.err
    calibration = open_session(Path(model), "cpu").contract.calibration
    assert calibration is not None
    assert calibration.tolerance == Tolerance(0.6, 0.8)


@pytest.mark.parametrize(
    ("architecture", "flags", "expected"),
    [
        ("x86_64", "avx2 avx512f", False),
        ("AMD64", "avx2 avx_vnni", True),
        ("x86_64", "avx512f avx512_vnni", True),
        ("aarch64", "", True),
    ],
)
def test_onnxruntimes_sums_are_exact_with_vnni_whatever_onednn_may_use(
    architecture: str, flags: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr("platform.machine", lambda: architecture)
    monkeypatch.setattr("prelunet.evaluator.machine.cpuinfo_value", lambda *_: flags)
    assert onnxruntime_supports_int8() == expected


def test_a_calibration_of_which_a_part_is_unknown_is_refused(tmp_path: Path) -> None:
    session, _ = adopted(tmp_path, net(tmp_path, qdq))
    metadata = session.contract.to_metadata()
    assert metadata["prelunet.contract_version"] == "3", "older readers expect a dataset"
    assert contract_from_metadata(metadata, "x") == session.contract
    stated = json.loads(metadata["prelunet.calibration"])
    changed = {**metadata, "prelunet.calibration": json.dumps({**stated, "images": 5})}
    with pytest.raises(ContractError, match=r"malformed"):
        contract_from_metadata(changed, "x")
