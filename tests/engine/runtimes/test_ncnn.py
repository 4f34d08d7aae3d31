"""ncnn as the device: the oracle's scores in float32, of every kind of layer, and only where it can compute them."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.verify import verify
from prelunet.evaluator.errors import EnvironmentFault, UsageError
from tests.conftest import ExportedNet
from tests.engine.test_dense_scores import oracle_of
from tests.helpers.discriminating_nets import noise

pytest.importorskip("openvino")


@pytest.fixture(scope="module")
def ncnn() -> Any:
    return pytest.importorskip("ncnn")


@pytest.mark.parametrize("key", ["slimA-image", "slimE-image", "demo-exact", "demo-shared", "demo-relu", "demo-lrelu"])
def test_scores_are_the_oracles_of_each_image_of_a_batch(exported: dict[str, ExportedNet], key: str, ncnn: Any) -> None:
    session = open_session(exported[key].path, "ncnn")
    assert (session.circumstances.provider, session.circumstances.precision) == ("ncnn", "fp32")
    assert session.circumstances.versions["ncnn"] == ncnn.__version__
    assert "openvino" in session.circumstances.versions
    crop = session.contract.crop
    for height, width in [(crop + 9, crop + 31), (crop, crop)]:
        images = [noise(height, width, seed) for seed in (2, 3)]
        batch = np.stack(images), np.array([[height, width]] * 2)
        outputs = session.run(*batch)
        # A resumed run has the same bytes.
        np.testing.assert_array_equal(session.run(*batch).scores, outputs.scores)
        for row, image in enumerate(images):
            expected = oracle_of(exported[key], image)
            # 1e-5: as of every engine in float32. Of one window more: Winograd's sums cancel, as does their noise.
            np.testing.assert_allclose(outputs.scores[row], expected.scores, rtol=0, atol=1e-5)
            np.testing.assert_allclose(outputs.window_scores[row], expected.window_scores, rtol=0, atol=1e-4)
            assert tuple(outputs.windows[row]) == expected.window_scores.shape[:2]


def test_golden_images_are_verified_alone_and_images_that_leave_room_on_their_canvas_are_refused(
    exported: dict[str, ExportedNet], ncnn: Any
) -> None:
    session = open_session(exported["demo-image"].path, "ncnn")
    deviations = verify(session)
    assert {each.case for each in deviations} == {"alone"}
    assert all(each.passed for each in deviations)
    with pytest.raises(UsageError, match=r"as in ncnn.* every image must fill its canvas"):
        session.run(np.zeros((1, 40, 50, 3), np.uint8), np.array([[40, 49]]))


def test_a_missing_ncnn_is_reported_with_the_extra_to_install(
    exported: dict[str, ExportedNet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ncnn", None)
    with pytest.raises(EnvironmentFault, match=r"--device ncnn: ncnn cannot be imported .*\[ncnn\]"):
        open_session(exported["demo-image"].path, "ncnn")


def test_a_half_file_is_refused_with_what_to_export(exported: dict[str, ExportedNet], tmp_path: Path) -> None:
    half = tmp_path / "half.onnx"
    whole = exported["demo-image"].path.read_bytes()
    assert whole.count(b'"fp32"') == 1
    half.write_bytes(whole.replace(b'"fp32"', b'"fp16"'))
    with pytest.raises(UsageError, match=r"--device ncnn: .*half\.onnx stores fp16\. Export it with --precision fp32"):
        open_session(half, "ncnn")
