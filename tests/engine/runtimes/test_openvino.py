"""OpenVINO as the device: the oracle's scores in float32, and bfloat16 only where it really runs."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from prelunet.evaluator.cli import run
from prelunet.evaluator.engine import load
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.runtimes import RUNTIMES
from prelunet.evaluator.engine.runtimes import openvino as openvino_runtime
from prelunet.evaluator.engine.verify import garbage_canvas
from prelunet.evaluator.errors import ContractError, EnvironmentFault, UsageError
from prelunet.evaluator.machine import supports_bf16
from tests.conftest import ExportedNet
from tests.engine.test_dense_scores import oracle_of
from tests.export.test_export import with_metadata
from tests.helpers.discriminating_nets import noise

pytest.importorskip("openvino")
pytestmark = pytest.mark.processor

# bfloat16 keeps 8 bits: each layer's outputs are off by up to 2**-9 of themselves, and a dozen layers add up.
BF16_TOLERANCE = 5e-2


@pytest.mark.parametrize("key", ["slimA-image", "slimE-image", "demo-image", "demo-exact"])
def test_scores_are_the_oracles_also_of_a_single_window(exported: dict[str, ExportedNet], key: str) -> None:
    session = open_session(exported[key].path, "openvino")
    assert (session.circumstances.provider, session.circumstances.precision) == ("OpenVINO", "fp32")
    assert "openvino" in session.circumstances.versions
    crop = session.contract.crop
    # One window alone is what convolutional heads got wrong there; a plain one and its mirror image come as a pair.
    for height, width in [(crop, crop), (crop + 9, crop + 31)]:
        image = noise(height, width, seed=2)
        outputs = session.run(np.stack([image, image[:, ::-1]]), np.array([[height, width]] * 2))
        for row, pixels in enumerate([image, image[:, ::-1]]):
            expected = oracle_of(exported[key], pixels)
            np.testing.assert_allclose(outputs.scores[row], expected.scores, rtol=0, atol=1e-4)  # docs/formats.md
            rows, columns = outputs.windows[row]
            assert (rows, columns) == expected.window_scores.shape[:2]
            np.testing.assert_allclose(
                outputs.window_scores[row, :rows, :columns], expected.window_scores, rtol=0, atol=1e-4
            )


MANY_SHAPES = """
import sys
from pathlib import Path
import numpy as np
from prelunet.evaluator.engine.load import open_session

def megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

session = open_session(Path(sys.argv[1]), "openvino")
for number in range(300):
    height, width = 30 + number % 20, 60 + number // 20
    session.run(np.zeros((2, height, width, 3), np.uint8), np.array([[height, width]] * 2))
    if number == 99:
        before = megabytes()
print(megabytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from Linux")
def test_memory_does_not_grow_with_the_number_of_shapes(exported: dict[str, ExportedNet]) -> None:
    command = [sys.executable, "-c", MANY_SHAPES, str(exported["demo-image"].path)]
    growth = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # 217 MB with the runtime's own cache of code; without it 15 to 43, for canvases that grow by a third.
    assert float(growth) < 100, f"200 further shapes took {growth} MB"


def test_images_of_different_sizes_share_a_canvas(exported: dict[str, ExportedNet]) -> None:
    session = open_session(exported["demo-image"].path, "openvino")
    images = [noise(31, 44, seed=1), noise(40, 29, seed=2), noise(28, 28, seed=3)]
    outputs = session.run(*garbage_canvas(session.contract, images))
    for row, image in enumerate(images):
        np.testing.assert_allclose(
            outputs.scores[row], oracle_of(exported["demo-image"], image).scores, rtol=0, atol=1e-4
        )


def test_a_large_net_runs_without_masks_and_gives_the_same_scores_as_with_them(
    exported: dict[str, ExportedNet], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = replace(RUNTIMES["openvino"], switch_seconds=1e-9)  # beside which every net is large
    monkeypatch.setitem(cast(Any, RUNTIMES), "openvino", fast)
    path, images, sizes = exported["slimA-image"].path, noise(240, 301, seed=1)[None], np.array([[240, 301]])
    session, masked = open_session(path, "openvino"), openvino_runtime.load(path)
    assert (session.contract.canvas, session.rules.canvas_step) == ("exact", 1)
    expected, *_ = masked.compute(masked.stage(images, sizes))
    # The products were by 1, but the convolutions may be fused with other neighbors now.
    np.testing.assert_allclose(session.run(images, sizes).scores, expected, rtol=0, atol=1e-6)
    ragged = garbage_canvas(session.contract, list(images))
    with pytest.raises(UsageError, match="every image must fill its canvas"):
        session.run(*ragged)
    bare = openvino_runtime.load(path, masks=False)
    hidden, seen = (each.compute(each.stage(*ragged))[0].copy() for each in (masked, bare))
    assert np.abs(hidden - expected).max() < 1e-4 < np.abs(seen - expected).max(), "without masks garbage counts"


def test_answers_stay_what_they_were_when_the_session_runs_again(exported: dict[str, ExportedNet]) -> None:
    session = open_session(exported["demo-image"].path, "openvino")
    image = noise(30, 41, seed=4)
    first = session.run(image[None], np.array([[30, 41]]))
    kept = first.scores.copy(), first.logits.copy()
    session.run(noise(30, 41, seed=5)[None], np.array([[30, 41]]))
    np.testing.assert_array_equal(first.scores, kept[0])
    np.testing.assert_array_equal(first.logits, kept[1])


@pytest.mark.skipif(not supports_bf16(), reason="this CPU has no bfloat16 instructions")
def test_bf16_is_what_runs_where_it_is_requested(exported: dict[str, ExportedNet]) -> None:
    path = exported["demo-image"].path
    session, reference = open_session(path, "openvino", precision="bf16"), open_session(path, "openvino")
    assert session.circumstances.precision == "bf16"
    image = noise(40, 61, seed=6)
    found, exact = (s.run(image[None], np.array([[40, 61]])).scores for s in (session, reference))
    deviation = np.abs(found - exact).max()
    assert 1e-5 < deviation < BF16_TOLERANCE, "float32 would be closer than 1e-5, so this was not bfloat16"


def test_bf16_is_refused_before_the_file_is_read_where_the_cpu_does_not_know_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Core:
        def get_property(self, device: str, name: str) -> list[str]:
            return {("CPU", "OPTIMIZATION_CAPABILITIES"): ["FP32", "INT8"]}[device, name]

        def read_model(self, path: str) -> None:
            raise RuntimeError("the file was read")

    monkeypatch.setattr(openvino_runtime, "_core", Core)
    with pytest.raises(EnvironmentFault, match=r"--precision bf16: on this CPU OpenVINO computes in f32 instead"):
        openvino_runtime.load(tmp_path / "none.onnx", "bf16")
    with pytest.raises(ContractError, match="the file was read"):
        openvino_runtime.load(tmp_path / "none.onnx", "fp32")


class FakeCompiledModel:
    """A compiled model of layers (type, precision)."""

    def __init__(self, *layers: tuple[str, str]):
        self._layers = layers

    def get_runtime_model(self) -> Any:
        ops = [
            SimpleNamespace(get_rt_info=lambda layer=layer: {"layerType": layer[0], "runtimePrecision": layer[1]})
            for layer in self._layers
        ]
        return SimpleNamespace(get_ordered_ops=lambda: ops)


@pytest.mark.parametrize(
    ("requested", "runs"),
    [
        ("bf16", ["f32", "f32"]),
        ("bf16", ["f32", "bf16"]),  # one layer that was left out is one too many
        ("bf16", ["bf16", "f32"]),
        ("bf16", ["f16", "f32"]),
        ("fp32", ["bf16", "bf16"]),
        ("fp32", ["f32", "bf16"]),
    ],
)
def test_another_precision_than_the_requested_one_is_an_error_that_names_both(requested: Any, runs: list[str]) -> None:
    compiled = FakeCompiledModel(
        ("Convolution", runs[0]), ("FullyConnected", runs[1]), ("Softmax", "f32"), ("Pooling", "bf16")
    )
    with pytest.raises(
        EnvironmentFault, match=rf"--precision {requested}: .*computes in {', '.join(sorted(set(runs)))} "
    ):
        openvino_runtime.check_precision(compiled, requested)


def test_layers_without_arithmetic_do_not_decide_the_precision() -> None:
    mean_image = ("MatMul", "f32"), ("MatMul", "bf16")
    openvino_runtime.check_precision(
        FakeCompiledModel(*mean_image, ("Convolution", "bf16"), ("Softmax", "f32")), "bf16"
    )
    openvino_runtime.check_precision(FakeCompiledModel(("Convolution", "f32"), ("Reorder", "bf16")), "fp32")


def test_wrong_scores_of_the_golden_images_are_an_error_when_the_file_is_opened(
    exported: dict[str, ExportedNet],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def last_is_wrong(golden: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*golden[:-1], {**golden[-1], "scores": golden[-1]["scores"][::-1]}]

    path = with_metadata(exported, tmp_path, golden=last_is_wrong)
    found = r"in fp32 on OpenVINO the scores of the golden image of 39x33 are off by \d.* 1e-05 and 0\.0001 are allowed"
    with pytest.raises(EnvironmentFault, match=rf"{found}\. Use --device cpu, and see prelunet verify"):
        open_session(path, "openvino")
    (tmp_path / "images").mkdir()
    assert run(["classify", str(tmp_path / "images"), "--model", str(path), "--device", "openvino"]) == 5
    assert run(["verify", str(path), "--device", "openvino"]) == 6, "which lists all deviations"
    assert capsys.readouterr().out.count("WRONG") == 2, "alone and together"
    open_session(path, "cpu")  # with which the file was checked when it was written
    monkeypatch.setattr(load, "QUICK_CHECK_FLOPS", 0)  # as if the net were large
    open_session(path, "openvino")
    first_is_wrong = with_metadata(exported, tmp_path, golden=lambda golden: last_is_wrong(golden[:1]) + golden[1:])
    with pytest.raises(EnvironmentFault, match="the golden image of 28x28"):
        open_session(first_is_wrong, "openvino")


def test_a_missing_openvino_is_reported_with_the_extra_to_install(
    exported: dict[str, ExportedNet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(EnvironmentFault, match=r"--device openvino: openvino cannot be imported .*\[openvino\]"):
        open_session(exported["demo-image"].path, "openvino")


def test_it_needs_no_onnxruntime(exported: dict[str, ExportedNet], monkeypatch: pytest.MonkeyPatch) -> None:
    path = exported["demo-image"].path
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert open_session(path, "openvino").contract == exported["demo-image"].session.contract


def test_what_is_no_model_is_the_files_fault(tmp_path: Path, exported: dict[str, ExportedNet]) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    whole = exported["demo-image"].path.read_bytes()
    (tmp_path / "half.onnx").write_bytes(whole[: len(whole) // 2])
    for name in ("text", "half"):
        with pytest.raises(ContractError, match=rf"{name}\.onnx: "):
            open_session(tmp_path / f"{name}.onnx", "openvino")


@pytest.mark.parametrize(
    ("device", "precision", "fix"),
    [
        ("cpu", "bf16", "bf16 needs --device openvino"),
        ("cpu", "tf32", "tf32 needs --device cuda"),
        ("openvino", "tf32", "tf32 needs --device cuda"),
        ("cpu", "fp16", "fp16 needs --device cuda and another file: prelunet export --precision fp16"),
        ("openvino", "fp16", "fp16 needs --device cuda and another file: prelunet export --precision fp16"),
    ],
)
def test_a_precision_that_a_device_does_not_have_is_refused_with_what_has_it(
    exported: dict[str, ExportedNet], device: Any, precision: Any, fix: str
) -> None:
    with pytest.raises(UsageError, match=rf"--precision {precision}: .*stores fp32, which --device {device}.*{fix}"):
        open_session(exported["demo-image"].path, device, precision=precision)


def test_a_precision_that_does_not_exist_is_refused_with_the_list(exported: dict[str, ExportedNet]) -> None:
    with pytest.raises(UsageError, match=r"no precision 'f32'\. There are: fp32, tf32, bf16, fp16"):
        open_session(exported["demo-image"].path, "openvino", precision="f32")  # type: ignore[arg-type]


def test_ctrl_c_is_an_interrupt_also_when_a_session_was_freed_in_another_thread(
    exported: dict[str, ExportedNet],
) -> None:
    code = (
        "import os, signal, threading, time\n"
        "from pathlib import Path\n"
        "from prelunet.evaluator.engine.load import open_session\n"
        f"kept = [open_session(Path({str(exported['demo-image'].path)!r}), 'openvino')]\n"
        "freeing = threading.Thread(target=kept.clear)\n"
        "freeing.start(); freeing.join()\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(30)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
