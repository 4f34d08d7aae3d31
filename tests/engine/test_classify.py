"""The path of one image, against Pillow and loops; and `prelunet classify` on top of it."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.cli import run
from prelunet.evaluator.engine.classify import average_image, classify_images, run_views
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.errors import ContractError
from prelunet.evaluator.imaging.views import ViewImage, make_views
from prelunet.evaluator.protocols import EvaluationProtocol, View, build_protocol
from tests.conftest import ExportedNet
from tests.helpers.fakes import FakeSession, fake_contract

RNG = np.random.default_rng(8)


def picture(height: int, width: int) -> np.ndarray:
    """Make an image without symmetry: coarse random patches, so that resizing keeps something to see."""
    small = RNG.integers(0, 256, (height // 7 + 1, width // 7 + 1, 3), np.uint8)
    return np.kron(small, np.ones((7, 7, 1), np.uint8))[:height, :width]


PICTURES = [picture(31, 47), picture(90, 60), picture(29, 28), picture(64, 200), picture(47, 31)]
MULTI_SCALE = build_protocol("multi-scale", fake_contract())
CENTER = build_protocol("center", fake_contract())


def scores_by_hand(session: FakeSession, image: np.ndarray, scales: tuple[int, ...]) -> np.ndarray:
    """Average windows, then mirror pair, then scales, with Pillow and loops."""
    height, width = image.shape[:2]
    of_scales = []
    for scale in scales:
        factor = scale / min(height, width)
        size = (scale, int(width * factor + 0.5)) if height <= width else (int(height * factor + 0.5), scale)
        resized = np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BILINEAR))
        of_pair = []
        for view in (resized, resized[:, ::-1]):
            powers = np.exp(session.window_logits(view))
            of_pair.append((powers / powers.sum(axis=-1, keepdims=True)).mean(axis=(0, 1)))
        of_scales.append((of_pair[0] + of_pair[1]) / 2)
    return sum(of_scales) / len(of_scales)


@pytest.mark.parametrize("provider", ["CPUExecutionProvider", "CUDAExecutionProvider"])
def test_scores_are_those_of_resizing_mirroring_and_averaging_by_hand(provider: str) -> None:
    session = FakeSession(provider=provider)
    for image, classified in zip(PICTURES, classify_images(session, PICTURES, MULTI_SCALE), strict=True):
        expected = scores_by_hand(session, image, MULTI_SCALE.scales)
        np.testing.assert_allclose(classified.scores, expected, atol=1e-6)  # the session gives float32
        assert classified.scores.dtype == np.float32
        assert [result.view for result in classified.views] == list(MULTI_SCALE.views)


def test_on_a_gpu_images_of_different_shapes_share_canvases_and_on_a_cpu_they_do_not() -> None:
    cpu, gpu = FakeSession(), FakeSession(provider="CUDAExecutionProvider")
    alone = [classify_images(cpu, [image], MULTI_SCALE)[0] for image in PICTURES]
    cpu.calls.clear()
    for session in (cpu, gpu):
        for shared, one in zip(classify_images(session, PICTURES, MULTI_SCALE), alone, strict=True):
            np.testing.assert_array_equal(shared.scores, one.scores)
    shapes = {view.image.shape for image in PICTURES for view in make_views(image, MULTI_SCALE)}
    assert {call[1:] for call in cpu.calls} == shapes
    assert len(gpu.calls) < len(shapes)
    assert all(side % 8 == 0 for call in gpu.calls for side in call[1:3])


def test_an_exact_file_gets_canvases_that_are_filled_even_on_a_gpu() -> None:
    session = FakeSession(fake_contract(canvas="exact"), provider="CUDAExecutionProvider")
    classify_images(session, PICTURES, MULTI_SCALE)  # the session refuses a canvas that is not filled


def test_the_central_crop_is_one_window_of_one_view() -> None:
    (classified,) = classify_images(FakeSession(), [PICTURES[1]], CENTER)
    (result,) = classified.views
    assert (result.view, result.windows, result.height, result.width) == (View(32, False, "center"), (1, 1), 28, 28)
    np.testing.assert_array_equal(classified.scores, result.scores)


def test_views_tell_their_grid_their_ranks_and_whether_they_were_capped() -> None:
    wide, capped = classify_images(FakeSession(), [PICTURES[0], picture(3, 40)], MULTI_SCALE)
    contract = fake_contract()
    assert [result.windows for result in wide.views] == [
        contract.window_grid(result.height, result.width) for result in wide.views
    ]
    assert (wide.capped, capped.capped) == (False, True)
    order = np.argsort(-wide.view_scores[3])
    assert wide.view_ranks(int(order[2]))[3] == 3
    assert wide.top(2)[0][0] == int(np.argmax(wide.scores))
    assert wide.rank(int(np.argmax(wide.scores))) == 1


def test_with_logit_averaging_each_view_is_judged_by_the_softmax_of_its_logits() -> None:
    protocol = replace(MULTI_SCALE, averaging="logit")
    (classified,) = classify_images(FakeSession(), [PICTURES[0]], protocol)
    powers = np.exp(np.stack([result.logits for result in classified.views]).astype(np.float64))
    np.testing.assert_allclose(classified.view_scores, powers / powers.sum(axis=1, keepdims=True), rtol=1e-6)  # float32


def test_window_scores_are_kept_only_when_asked_for_and_average_to_the_scores() -> None:
    session = FakeSession(provider="CUDAExecutionProvider")
    (without,) = classify_images(session, [PICTURES[3]], MULTI_SCALE)
    assert all(result.window_scores is None for result in without.views)
    (kept,) = classify_images(session, [PICTURES[3]], MULTI_SCALE, keep_windows=True)
    for result in kept.views:
        assert result.window_scores is not None
        assert result.window_scores.shape == (*result.windows, 6)
        np.testing.assert_allclose(result.window_scores.mean(axis=(0, 1)), result.scores, atol=1e-6)  # float32 means


def test_no_images_give_no_answers() -> None:
    assert classify_images(FakeSession(), [], MULTI_SCALE) == []


class OverflowingSession(FakeSession):
    """A model that overflows on bright images."""

    def run(self, images: np.ndarray, sizes: np.ndarray) -> Outputs:
        outputs = super().run(images, sizes)
        outputs.scores[images.mean(axis=(1, 2, 3)) > 250] = np.nan
        return outputs


def test_nan_for_one_image_is_an_error_for_it_and_not_for_the_others_of_its_batch() -> None:
    bright = np.full_like(PICTURES[0], 255)
    views = [*make_views(PICTURES[0], CENTER), *make_views(bright, CENTER)]
    good, bad = run_views(OverflowingSession(), views)
    assert average_image(CENTER, [good]).rank(0) >= 1
    with pytest.raises(ContractError, match="not finite"):
        average_image(CENTER, [bad])


def test_an_exported_model_gives_images_in_one_batch_the_scores_they_get_alone(
    exported: dict[str, ExportedNet],
) -> None:
    session = exported["demo-image"].session
    protocol = build_protocol("multi-scale", session.contract)
    together = classify_images(session, PICTURES, protocol)
    for image, shared in zip(PICTURES, together, strict=True):
        (alone,) = classify_images(session, [image], protocol)
        np.testing.assert_allclose(shared.scores, alone.scores, atol=1e-6)  # sums over other numbers of zeros
        np.testing.assert_allclose(shared.scores.sum(), 1, atol=1e-5)


# prelunet classify


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lay out a picture, a text named like one, and a model behind `open_with_placement`."""
    Image.fromarray(PICTURES[0]).save(tmp_path / "good.png")
    Image.fromarray(PICTURES[1]).save(tmp_path / "other.png")
    (tmp_path / "bad.jpg").write_text("no image")
    monkeypatch.setattr("prelunet.evaluator.verbs.classify.open_session", lambda _path, _device, **_: FakeSession())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_classify_prints_names_and_scores_of_the_best_classes(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["classify", "good.png", "--model", "m.onnx", "--top", "2"]) == 0
    (classified,) = classify_images(FakeSession(), [PICTURES[0]], MULTI_SCALE)
    (best, score), _ = classified.top(2)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "good.png"
    assert len(lines) == 2
    assert lines[0].split("  ")[-1] == f"class {best} (n{best:08})"
    assert f"{score:.2%}" in lines[0]


@pytest.mark.parametrize(("provider", "code"), [("CPUExecutionProvider", 2), ("CUDAExecutionProvider", 0)])
def test_a_view_that_does_not_fit_into_this_machine_is_refused_unless_a_gpu_has_to_hold_it(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, provider: str, code: int
) -> None:
    session = FakeSession(provider=provider)
    monkeypatch.setattr("prelunet.evaluator.verbs.classify.open_session", lambda _path, _device, **_: session)
    monkeypatch.setattr("prelunet.evaluator.python.net.machine_memory", lambda: 2**20)
    assert run(["classify", "good.png", "--model", "m.onnx"]) == code
    assert ("this machine has 1.00M" in capsys.readouterr().err) == (code == 2)


def test_classify_json_holds_the_scores_the_protocol_and_the_circumstances(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["classify", "good.png", "other.png", "--model", "dir/m.onnx", "--protocol", "center", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["file"] for line in lines] == ["good.png", "other.png"]
    (classified,) = classify_images(FakeSession(), [PICTURES[1]], CENTER)
    found = [(p["class_index"], np.float32(p["score"])) for p in lines[1]["predictions"]]
    assert found == [(index, np.float32(score)) for index, score in classified.top(5)]
    assert lines[1]["protocol"] == CENTER.to_json()
    (view,) = lines[1]["views"]
    assert view == {"scale": 32, "mirrored": False, "part": "center", "windows": {"rows": 1, "columns": 1}}
    assert lines[1]["model"] == {"name": "m", "sha256": FakeSession().model_sha256}
    assert lines[1]["circumstances"]["provider"] == "CPUExecutionProvider"


def test_a_bad_image_is_named_and_the_others_are_answered(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["classify", "bad.jpg", "good.png", "missing.png", "--model", "m.onnx"]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("good.png\n")
    assert "bad.jpg: not a readable image" in printed.err
    assert "missing.png: cannot be read" in printed.err
    assert "2 of 3 images could not be classified" in printed.err


def test_one_bad_image_is_one_message(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["classify", "bad.jpg", "--model", "m.onnx"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("prelunet:") == 1


def test_an_image_can_come_through_stdin(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["classify", "good.png", "--model", "m.onnx"])
    from_file = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path("good.png").read_bytes())))
    assert run(["classify", "-", "--model", "m.onnx"]) == 0
    assert capsys.readouterr().out == from_file.replace("good.png", "-")


def test_an_image_is_resized_as_it_was_decoded_and_not_copied_whole(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way through an array takes half of the memory of a large photo once more."""
    given: list[bool] = []

    def noting(image: Any, protocol: EvaluationProtocol) -> list[ViewImage]:
        given.append(isinstance(image, Image.Image))
        return make_views(image, protocol)

    monkeypatch.setattr("prelunet.evaluator.engine.classify.make_views", noting)
    assert run(["classify", "good.png", "other.png", "--model", "m.onnx"]) == 0
    assert given == [True, True]


def test_a_heat_map_is_a_png_beside_the_answer(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["classify", "good.png", "--model", "m.onnx", "--heatmap", "map.png"]) == 0
    with Image.open("map.png") as drawn:
        assert drawn.format == "PNG"
        assert drawn.width > 600
    assert capsys.readouterr().out.startswith("good.png")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "needs either --model MODEL.onnx or --server"),
        (["--model", "m.onnx", "--server", "host:1"], "needs either --model MODEL.onnx or --server"),
        (["--model", "m.onnx", "--heatmap", "nowhere/map.png"], "nowhere/map.png"),
        (["--server", "host:1", "--device", "cpu"], "a server chooses them when it starts"),
        (["--model", "m.onnx", "--name", "m"], "leave them out with --model"),
        (["other.png", "--model", "m.onnx", "--heatmap", "map.png"], "draws one image, not 2"),
        (["--model", "m.onnx", "--top", "7"], "must be 1 to 6"),
        (["--model", "m.onnx", "--protocol", "dense-9"], "takes scales from 28"),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_the_reason(
    files: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert run(["classify", "good.png", *arguments]) == 2
    assert reason in capsys.readouterr().err
