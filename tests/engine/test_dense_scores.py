"""The exported file against the oracle of reference.py: the contract's numbers.

That these comparisons can fail is proved in test_deliberate_mistakes.py, which makes one mistake at a time.
"""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from prelunet.evaluator.engine.verify import garbage_canvas
from tests.conftest import ExportedNet, export_discriminating
from tests.helpers import reference
from tests.helpers.discriminating_nets import noise

# Float32 over 20 layers and sums of 32,256 terms: about 3e-6 was measured, so 1e-5 is a bound with little air.
SCORE_TOLERANCE = 1e-5
RELATIVE_TOLERANCE = 1e-4  # of the image's largest score

A_SIZES = [(224, 224), (241, 301), (290, 233)]
E_SIZES = [(224, 224), (239, 301), (300, 224)]
DEMO_SIZES = [(28, 28), (32, 45), (61, 29), (33, 97)]


_ORACLES: dict[tuple[Path, tuple[int, ...], bytes], reference.OracleScores] = {}  # seconds each for models A and E


def oracle_of(exported: ExportedNet, image: np.ndarray) -> reference.OracleScores:
    key = exported.path, image.shape, image.tobytes()
    if key not in _ORACLES:
        checkpoint = exported.checkpoint
        _ORACLES[key] = reference.evaluate(
            exported.name, exported.tensors, checkpoint.mean, image, checkpoint.architecture.activation
        )
    return _ORACLES[key]


def assert_scores_are_the_oracles(exported: ExportedNet, height: int, width: int) -> None:
    image = noise(height, width, seed=height + width)
    answer = oracle_of(exported, image)
    outputs = exported.session.run(image[None], np.array([[height, width]]))
    assert outputs.windows[0].tolist() == list(answer.window_scores.shape[:2])
    difference = np.abs(outputs.scores[0] - answer.scores).max()
    assert difference <= SCORE_TOLERANCE
    assert difference <= RELATIVE_TOLERANCE * answer.scores.max()
    # One window weighs less than the mean does, so its bound is as many times wider as float32 needs: 5e-5.
    np.testing.assert_allclose(outputs.window_scores[0], answer.window_scores, rtol=0, atol=5e-5)
    np.testing.assert_allclose(outputs.logits[0], answer.logits, rtol=0, atol=1e-4 * np.abs(answer.logits).max())


@pytest.mark.parametrize(("height", "width"), A_SIZES)
def test_dense_scores_of_model_a_with_few_channels_equal_the_oracle(
    exported: dict[str, ExportedNet], height: int, width: int
):
    assert_scores_are_the_oracles(exported["slimA-image"], height, width)


@pytest.mark.parametrize(("height", "width"), E_SIZES)
def test_dense_scores_of_model_e_with_few_channels_equal_the_oracle(
    exported: dict[str, ExportedNet], height: int, width: int
):
    assert_scores_are_the_oracles(exported["slimE-image"], height, width)


@pytest.mark.parametrize(("height", "width"), DEMO_SIZES)
@pytest.mark.parametrize("key", ["demo-channel", "demo-image", "demo-shared", "demo-relu", "demo-lrelu"])
def test_dense_scores_of_the_demo_net_equal_the_oracle(
    exported: dict[str, ExportedNet], key: str, height: int, width: int
):
    assert_scores_are_the_oracles(exported[key], height, width)


def ragged_sizes(crop: int) -> list[tuple[int, int]]:
    """Eight sizes, odd ones among them, each side at least the crop."""
    extras = [(0, 0), (7, 3), (1, 50), (33, 32), (90, 1), (15, 77), (64, 64), (3, 141)]
    return [(crop + a * crop // 224, crop + b * crop // 224) for a, b in extras]


@pytest.mark.parametrize("rubbish", [0, 77, 255])
@pytest.mark.parametrize("key", ["slimE-image", "demo-image", "demo-channel"])
def test_eight_images_of_eight_sizes_in_one_run_get_the_scores_they_get_alone(
    exported: dict[str, ExportedNet], key: str, rubbish: int
) -> None:
    session = exported[key].session
    images = [noise(h, w, seed=i) for i, (h, w) in enumerate(ragged_sizes(session.contract.crop))]
    together = session.run(*garbage_canvas(session.contract, images, rubbish))
    for index, image in enumerate(images):
        alone = session.run(image[None], np.array([image.shape[:2]]))
        rows, columns = alone.windows[0]
        assert together.windows[index].tolist() == [rows, columns]
        np.testing.assert_array_equal(together.window_scores[index, :rows, :columns], alone.window_scores[0])
        outside = together.window_scores[index].copy()
        outside[:rows, :columns] = 0
        assert not outside.any()
        # The sum runs over other zeros, so only its last bits may differ.
        np.testing.assert_allclose(together.scores[index], alone.scores[0], rtol=0, atol=1e-6)


def test_ragged_images_of_model_a_with_few_channels_get_the_scores_they_get_alone(
    exported: dict[str, ExportedNet],
) -> None:
    session = exported["slimA-image"].session
    images = [noise(h, w, seed=i) for i, (h, w) in enumerate([(224, 224), (231, 301), (256, 241)])]
    together = session.run(*garbage_canvas(session.contract, images))
    for index, image in enumerate(images):
        alone = session.run(image[None], np.array([image.shape[:2]]))
        rows, columns = alone.windows[0]
        np.testing.assert_array_equal(together.window_scores[index, :rows, :columns], alone.window_scores[0])
        np.testing.assert_allclose(together.scores[index], alone.scores[0], rtol=0, atol=1e-6)


def test_a_file_without_masks_gives_the_same_scores_where_images_fill_the_canvas(
    exported: dict[str, ExportedNet],
) -> None:
    images = np.stack([noise(40, 33, seed=i) for i in range(3)])
    sizes = np.array([[40, 33]] * 3)
    ragged = exported["demo-image"].session.run(images, sizes)
    exact = exported["demo-exact"].session.run(images, sizes)
    np.testing.assert_array_equal(exact.window_scores, ragged.window_scores)
    np.testing.assert_array_equal(exact.scores, ragged.scores)


@pytest.mark.parametrize("key", ["slimA-image", "slimE-image", "demo-image"])
def test_the_file_runs_in_plain_onnxruntime(exported: dict[str, ExportedNet], key: str) -> None:
    crop = exported[key].session.contract.crop
    image = noise(crop + 5, crop + 20, seed=1)
    session = onnxruntime.InferenceSession(exported[key].path)
    sizes = np.array([image.shape[:2]])
    (scores,) = session.run(["scores"], {"images": image[None], "sizes": sizes})
    np.testing.assert_allclose(scores[0], oracle_of(exported[key], image).scores, rtol=0, atol=SCORE_TOLERANCE)


@pytest.mark.processor
@pytest.mark.parametrize("key", ["slimA-image", "slimE-image", "demo-image"])
def test_the_file_runs_in_openvino_also_with_a_single_window(exported: dict[str, ExportedNet], key: str) -> None:
    openvino = pytest.importorskip("openvino")
    crop = exported[key].session.contract.crop
    compiled = openvino.Core().compile_model(
        openvino.Core().read_model(exported[key].path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    for height, width in [(crop, crop), (crop + 9, crop + 31)]:  # one window alone is what another head got wrong there
        image = noise(height, width, seed=2)
        scores = compiled({"images": image[None], "sizes": np.array([[height, width]])})["scores"]
        expected = oracle_of(exported[key], image).scores
        np.testing.assert_allclose(scores[0], expected, rtol=0, atol=1e-4)  # the contract's bound for other runtimes


@pytest.mark.large
@pytest.mark.parametrize("name", ["A", "C", "E"])
def test_dense_scores_of_the_large_models_equal_the_oracle(name: str, tmp_path: Path) -> None:
    exported = export_discriminating(name, "image", tmp_path)
    for height, width in [(224, 224), (256, 341)]:
        assert_scores_are_the_oracles(exported, height, width)
