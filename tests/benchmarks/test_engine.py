import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from benchmarks.common.dense_torch import DenseNet, export_plain
from benchmarks.common.photos import Photo, load_photos
from benchmarks.common.results import environment, shuffled
from benchmarks.engine.competitors import COMPETITORS, REFERENCE, BenchmarkNet, NotAvailable, OpenedCompetitor, in_pairs
from benchmarks.engine.interleaved import SAMPLED_CROPS, PhotoTimings, Reference, StopRule, deviation, measure
from benchmarks.engine.naive import classify_every_crop, seconds_of_sample
from benchmarks.engine.table import goals_of, rows_of
from prelunet.evaluator.architectures import ACTIVATIONS, architecture
from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.engine.runtimes import openvino
from prelunet.evaluator.imaging.views import make_views
from prelunet.evaluator.protocols import EvaluationProtocol
from prelunet.training.net.checkpoints import Checkpoint
from prelunet.training.net.dense_reference import dense_windows, subtract_mean
from prelunet.training.net.network import PreluNet, load_tensors, network_from_checkpoint
from tests.helpers.discriminating_nets import discriminating_checkpoint, noise
from tests.helpers.tiny_nets import tiny_checkpoint

PHOTO = Photo("a photo", noise(30, 41, 1))
PROTOCOL = EvaluationProtocol("two scales", "dense", (24, 37), mirror=True)


def exact_net(checkpoint: Checkpoint) -> PreluNet:
    """Return the net in float64, in memory of its own."""
    net = PreluNet(checkpoint.architecture, len(checkpoint.classes))
    load_tensors(net, checkpoint.tensors)
    return net.eval().double()


def expected_scores(checkpoint: Checkpoint, image: np.ndarray) -> np.ndarray:
    """Say what window by window gives, float64 (K,)."""
    return dense_windows(exact_net(checkpoint), image, checkpoint.mean)[0].mean(axis=(0, 1))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_dense_torch_net_gives_every_images_scores_window_by_window(activation: str, channels_last: bool) -> None:
    checkpoint = tiny_checkpoint(activation)
    mean = checkpoint.mean.astype(np.float64)
    net = DenseNet(exact_net(checkpoint), mean, dtype=torch.float64, channels_last=channels_last)
    for height, width in ((24, 24), (24, 37), (45, 31)):
        images = np.stack([noise(height, width, seed) for seed in (1, 2)])
        expected = np.stack([expected_scores(checkpoint, image) for image in images])
        # rtol: float64 sums in another order
        np.testing.assert_allclose(net.scores(images), expected, rtol=1e-10, err_msg=f"{height}x{width}")


def test_the_dense_torch_net_has_the_pyramid_of_models_whose_bins_overlap_and_repeat() -> None:
    checkpoint = discriminating_checkpoint("demo", classes=7)
    net = DenseNet(exact_net(checkpoint), checkpoint.mean.astype(np.float64), dtype=torch.float64)
    image = noise(43, 60, 4)
    np.testing.assert_allclose(net.scores(image[None])[0], expected_scores(checkpoint, image), rtol=1e-10)


def test_float_pixels_channels_first_give_the_scores_of_bytes() -> None:
    checkpoint = tiny_checkpoint()
    net = DenseNet(exact_net(checkpoint), checkpoint.mean, dtype=torch.float64)
    images = noise(29, 40, 3)[None]
    with torch.inference_mode():
        scores = net(torch.from_numpy(images).permute(0, 3, 1, 2).double())
    np.testing.assert_array_equal(scores.numpy(), net.scores(images))


@pytest.mark.parametrize(("settings", "tolerance"), [({"onednn": True}, 1e-5), ({"dtype": torch.bfloat16}, 5e-2)])
def test_the_fast_forms_of_the_dense_torch_net_are_off_by_rounding_only(settings: dict, tolerance: float) -> None:
    checkpoint = discriminating_checkpoint("demo", classes=7)
    net = DenseNet(network_from_checkpoint(checkpoint), checkpoint.mean, channels_last=True, **settings)
    image = noise(43, 60, 4)
    # float32 sums in another order; bfloat16 keeps 8 bits
    np.testing.assert_allclose(net.scores(image[None])[0], expected_scores(checkpoint, image), atol=tolerance)


def test_the_plain_export_takes_batches_and_images_of_any_size(tmp_path: Path) -> None:
    checkpoint = discriminating_checkpoint("demo", classes=7)
    net = DenseNet(network_from_checkpoint(checkpoint), checkpoint.mean)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody should have to read them at each run
        export_plain(net, tmp_path / "plain.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "plain.onnx"), providers=["CPUExecutionProvider"])
    for count, height, width in ((1, 28, 28), (2, 28, 33), (3, 61, 40)):
        images = np.stack([noise(height, width, seed) for seed in range(count)])
        (scores,) = session.run(None, {"images": images.transpose(0, 3, 1, 2).astype(np.float32)})
        expected = [expected_scores(checkpoint, image) for image in images]
        np.testing.assert_allclose(scores, expected, atol=1e-5)  # float32


def crops_of(checkpoint: Checkpoint, view: np.ndarray) -> np.ndarray:
    """Cut out a crop for each window: 4 pixels apart, the last ones moved inside."""
    rows, columns = dense_windows(exact_net(checkpoint), view, checkpoint.mean)[0].shape[:2]
    tops, lefts = (
        [min(4 * i, side - 24) for i in range(n)] for n, side in zip((rows, columns), view.shape, strict=False)
    )
    return np.stack([view[top : top + 24, left : left + 24] for top in tops for left in lefts])


def test_the_naive_way_classifies_each_crop_of_each_view() -> None:
    checkpoint = tiny_checkpoint()
    net, plain = DenseNet(network_from_checkpoint(checkpoint), checkpoint.mean), exact_net(checkpoint)
    per_view = []
    for view in make_views(PHOTO.pixels, PROTOCOL):
        crops = torch.from_numpy(crops_of(checkpoint, view.image))
        with torch.no_grad():
            scores = plain(subtract_mean(crops, checkpoint.mean.astype(np.float64))).softmax(1)
        per_view.append(scores.numpy().mean(axis=0))
    found = classify_every_crop(net, PHOTO.pixels, PROTOCOL)
    np.testing.assert_allclose(found, np.mean(per_view, axis=0), rtol=1e-4)  # float32


def test_the_naive_way_is_the_dense_one_where_an_image_is_one_window() -> None:
    checkpoint = tiny_checkpoint()
    net = DenseNet(network_from_checkpoint(checkpoint), checkpoint.mean)
    protocol, image = EvaluationProtocol("one", "dense", (24,), mirror=True), noise(24, 24, 5)
    np.testing.assert_allclose(
        classify_every_crop(net, image, protocol), in_pairs(net.scores)(image, protocol), atol=1e-6
    )


def test_a_sample_of_crops_tells_the_seconds_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_checkpoint()
    net = DenseNet(network_from_checkpoint(checkpoint), checkpoint.mean)
    clock, classified = [0.0], []

    def scores(images: np.ndarray) -> np.ndarray:
        clock[0] += 2.0 * len(images)
        classified.append(len(images))
        return np.zeros((len(images), 3))

    monkeypatch.setattr(net, "scores", scores)
    monkeypatch.setattr("benchmarks.engine.naive.time.perf_counter", lambda: clock[0])
    every = sum(len(crops_of(checkpoint, view.image)) for view in make_views(PHOTO.pixels, PROTOCOL))
    assert every > 20
    assert seconds_of_sample(net, PHOTO.pixels, PROTOCOL, 20) == pytest.approx(2.0 * every)
    assert sum(classified) == 20


def test_answers_in_pairs_average_views_then_scales() -> None:
    batches = []

    def run(images: np.ndarray) -> np.ndarray:
        batches.append(images)
        return images.reshape(len(images), -1)[:, :2].astype(np.float32)

    scores = in_pairs(run)(PHOTO.pixels, PROTOCOL)
    assert [batch.shape for batch in batches] == [(2, 24, 33, 3), (2, 37, 51, 3)]
    np.testing.assert_array_equal(batches[0][1], batches[0][0][:, ::-1])
    expected = np.mean([b.reshape(2, -1)[:, :2].astype(np.float64).mean(axis=0) for b in batches], axis=0)
    np.testing.assert_allclose(scores, expected)


def test_a_deviation_is_a_part_of_the_largest_score_expected() -> None:
    expected = np.array([0.01, 0.04])
    assert deviation(np.array([0.02, 0.039]), expected) == pytest.approx(0.25)
    assert deviation(np.array([0.02, 4.0]), np.array([0.02, 2.0])) == pytest.approx(1)  # not of the largest found


@pytest.mark.parametrize("largest", [0.5, 0.005])  # of an untrained net scores are small, and so are its mistakes
@pytest.mark.parametrize(("name", "off"), [("ours, cpu", 2e-4), ("ours, openvino bf16", 0.2), ("ours, cpu", np.nan)])
def test_wrong_scores_stop_the_benchmark(name: str, off: float, largest: float) -> None:
    right = largest * np.array([1, 0.6, 0.4])
    reference = Reference(lambda image, protocol: right)
    assert reference.deviation(name, right + 1e-5 * largest, PHOTO, PROTOCOL) == pytest.approx(1e-5)
    with pytest.raises(SystemExit, match=f"{name}: wrong scores on a photo"):
        reference.deviation(name, right + largest * np.array([0, off, 0]), PHOTO, PROTOCOL)


def test_every_round_asks_all_in_an_order_of_its_own_that_another_run_repeats() -> None:
    names = list(COMPETITORS)
    orders = [shuffled(names, number) for number in range(9)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert orders == [shuffled(names, number) for number in range(9)]
    before = {name: {order[order.index(name) - 1] for order in orders if order[0] != name} for name in names}
    assert min(map(len, before.values())) > 3  # nobody always follows the same one


def test_measuring_visits_the_pictures_in_turn_and_asks_the_slow_one_once() -> None:
    asked: list[str] = []

    def opened(name: str) -> OpenedCompetitor:
        scores = np.array([0.5, 0.25])
        sample = (lambda *_: asked.append(name) or 1.5) if name == "naive" else None
        return OpenedCompetitor(lambda *_: (asked.append(name), scores)[1], {}, sample)

    names = ["naive", REFERENCE, "ours, cpu", "ours, openvino"]
    photos = [replace(PHOTO, name="one"), replace(PHOTO, name="two")]
    found = measure({name: opened(name) for name in names}, photos, PROTOCOL, architecture("demo"), StopRule(3, 3, 0),
                    Reference(opened(REFERENCE).answer))  # fmt: skip
    assert [visit.photo.name for visit in found] == ["one", "two", "one"]
    rounds = [shuffled(names, number) for number in range(3)]
    assert asked == [name for number, order in enumerate(rounds) for name in order if name != "naive" or number == 0]
    assert found[0].seconds["naive"] == 1.5
    assert "naive" not in found[1].seconds
    assert found[0].crops is not None
    assert found[0].gflop == found[2].gflop > 0


def test_the_reference_answers_each_picture_and_protocol_once() -> None:
    calls = []

    def answer(image: np.ndarray, protocol: EvaluationProtocol) -> np.ndarray:
        calls.append(protocol.name)
        return np.array([float(len(calls))])

    reference = Reference(answer)
    other = replace(PROTOCOL, name="other")
    found = [reference.scores(PHOTO, protocol)[0] for protocol in (PROTOCOL, other, PROTOCOL, other)]
    assert found == [1, 2, 1, 2]
    reference.store(np.array([9.0]), Photo("another", PHOTO.pixels), PROTOCOL)
    assert reference.scores(Photo("another", PHOTO.pixels), PROTOCOL)[0] == 9


def test_measuring_goes_on_while_one_more_image_fits_into_the_time() -> None:
    limits = StopRule(min_images=3, max_images=8, seconds=40)
    assert not limits.reached(0, 0)
    assert not limits.reached(2, 100)  # at least three, however long
    assert limits.reached(3, 100)
    assert not limits.reached(3, 30)  # a fourth would end at 40
    assert limits.reached(3, 30.1)
    assert limits.reached(8, 1)  # every picture once
    assert not limits.reached(7, 1)


def test_a_slow_machine_is_shown_fewer_pictures_but_one() -> None:
    limits = StopRule(min_images=3, max_images=8, seconds=40, patience=180)
    assert not limits.reached(0, 0)
    assert limits.reached(1, 90.1)  # a second would end after 180.2
    assert not limits.reached(1, 90)
    assert limits.reached(2, 121)
    assert not limits.reached(2, 120)
    assert limits.reached(3, 40)


def visits() -> list[PhotoTimings]:
    """Make two pictures of 10 and 30 GFLOP, each in two groups."""
    small, large = replace(PHOTO, name="small"), replace(PHOTO, name="large")
    fp32 = [
        {"naive": 20.0, REFERENCE: 2.0, "onnxruntime, plain export": 1.0, "ours, cpu": 0.5},
        {REFERENCE: 3.0, "onnxruntime, plain export": 4.5, "ours, cpu": 3.0},
    ]
    bf16 = [
        {"torch channels_last bf16": 1.0, "ours, openvino bf16": 0.5},
        {"torch channels_last bf16": 3.0, "ours, openvino bf16": 4.0},
    ]
    return [
        PhotoTimings(photo, gflop, seconds, dict.fromkeys(seconds, 1e-6 * gflop), 70 if "naive" in seconds else None)
        for group in (fp32, bf16)
        for photo, gflop, seconds in zip((small, large), (10.0, 30.0), group, strict=True)
    ]


def test_rows_hold_speed_and_ratios_on_the_same_pictures() -> None:
    rows = {
        row["competitor"]: row for row in rows_of(visits(), {"ours, cpu": {"peak_memory_mb": 5, "load_seconds": 1}})
    }
    assert list(rows) == list(COMPETITORS)
    ours = rows["ours, cpu"]
    assert ours["images_per_second"] == pytest.approx(2 / 3.5, rel=1e-3)
    assert ours["gflop_per_second"] == {"median": 15, "lowest": 10, "highest": 20}
    assert ours["times_naive"] == pytest.approx(15 / 0.5)  # naive computes 10 GFLOP in 20 s
    # By its rate on most pictures: 10 and 6.7 GFLOP/s against 5 and 10 of the reference
    assert ours["fastest"] == "onnxruntime, plain export" == rows[REFERENCE]["fastest"]
    assert ours["times_fastest"]["median"] == pytest.approx((1 / 0.5 + 4.5 / 3) / 2)
    # of 2 and 1.5: sqrt(pi / 2) times their standard deviation, 0.3536, by the root of two
    assert ours["times_fastest"]["error"] == pytest.approx(0.313, abs=0.005)
    assert ours["times_fastest"]["pictures"] == 2
    assert rows["onnxruntime, plain export"]["times_fastest"]["median"] == 1
    assert rows["naive"]["times_fastest"]["error"] is None  # on one picture
    assert ours["largest_deviation"] == pytest.approx(3e-5)
    assert ours["peak_memory_mb"] == 5
    assert rows["ours, openvino bf16"]["fastest"] == "torch channels_last bf16"
    assert rows["ours, openvino bf16"]["times_naive"] == pytest.approx((20 + 7.5) / 2 / 0.5, rel=1e-3)
    assert rows["naive"]["crops"] == {"of the picture": 70, "classified": SAMPLED_CROPS}
    assert rows["torch.compile"]["not_available"] == "not chosen"


def test_goals_are_judged_by_the_best_of_ours_in_each_precision_and_say_whether_they_are_sure() -> None:
    protocol = {"name": "multi-scale", "scales": [24, 37]}

    def times(median: float, error: float | None) -> dict[str, float | int | None]:
        return {"median": median, "error": error, "pictures": 3}

    rows = [
        {"ours": True, "precision": "fp32", "times_fastest": times(0.7, 0.001), "times_naive": 9},
        {"ours": True, "precision": "fp32", "times_fastest": times(1.01, 0.029), "times_naive": 10},
        {"ours": True, "precision": "bf16", "times_fastest": times(0.94, 0.006), "times_naive": 30},
        {"ours": True, "precision": "bf16", "not_available": "no such CPU"},
        {"ours": False, "precision": "bf16", "times_fastest": times(1, None), "times_naive": 40},
    ]
    goals = goals_of([{"net": "A", "protocol": protocol, "rows": rows}])
    assert [(goal["met"], goal["measured"]) for goal in goals] == [(True, 1.01), (False, 0.94), (True, 10)]
    assert [goal.get("sure") for goal in goals] == [True, False, None]
    one_scale = goals_of([{"net": "A", "protocol": {"name": "dense-24", "scales": [24]}, "rows": rows}])
    assert [goal["measured"] for goal in one_scale] == [1.01, 0.94]  # ten times naive is for several scales
    rows[1]["times_fastest"] = times(2, None)
    assert not goals_of([{"net": "A", "protocol": protocol, "rows": rows}])[0]["sure"]  # a single picture tells little


def test_a_compiler_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_compiler(net: torch.nn.Module, **settings: object) -> object:
        def run(images: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("No working C++ compiler found\nwith a long story")

        return run

    checkpoint = tiny_checkpoint()
    monkeypatch.setattr(torch, "compile", no_compiler)
    monkeypatch.setattr(BenchmarkNet, "net", DenseNet(network_from_checkpoint(checkpoint), checkpoint.mean))
    with pytest.raises(NotAvailable, match=r"torch.compile: No working C\+\+ compiler found$"):
        COMPETITORS["torch.compile"].open(BenchmarkNet(tmp_path, 1))


def test_openvino_that_computes_in_another_precision_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    export_plain(DenseNet(network_from_checkpoint(checkpoint), checkpoint.mean), tmp_path / "plain.onnx")
    monkeypatch.setattr(openvino, "check_processor", lambda precision: None)
    monkeypatch.setattr(openvino, "_precisions", lambda compiled: {"f32"})
    with pytest.raises(NotAvailable, match=r"bf16: .* computes in f32"):
        COMPETITORS["openvino, plain export, bf16"].open(BenchmarkNet(tmp_path, 1))


def test_photos_of_a_folder_are_taken_evenly_and_others_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(30):
        Image.fromarray(noise(20, 30 + index, index)).save(tmp_path / f"{index:02}.png")
    (tmp_path / "0.txt").write_text("no picture")
    photos = load_photos(tmp_path)
    assert len(photos) == 11  # of twelve files, and the first is none
    assert photos[-1].name > "25.png"
    assert len({photo.pixels.shape for photo in photos}) == len(photos)
    assert "0.txt: skipped" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no readable picture found"):
        load_photos(tmp_path / "nothing")


def test_made_pictures_have_many_shapes_and_the_golden_pixels() -> None:
    photos = load_photos(None)
    assert len({photo.pixels.shape for photo in photos}) == len(photos) > 5
    np.testing.assert_array_equal(photos[1].pixels, golden_image(*photos[1].pixels.shape[:2]))


def test_the_engine_benchmark_runs_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "engine.json"
    chosen = ["naive", "onnxruntime, plain export", "ours, cpu", "openvino, plain export, bf16"]
    arguments = ["--nets", "demo", "--protocols", "dense-32", "dense-28-45", "--images", "2", "2", "--seconds", "0"]
    arguments += ["--threads", "1", "--output", str(output), "--only", *chosen]
    command = [sys.executable, "-m", "benchmarks.engine.run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert [(one["net"], one["protocol"]["name"]) for one in result["results"]] == [
        ("demo", "dense-32"), ("demo", "dense-28-45")
    ]  # fmt: skip
    for one in result["results"]:
        rows = {row["competitor"]: row for row in one["rows"]}
        assert set(rows) == set(COMPETITORS)
        there = {name for name, row in rows.items() if "not_available" not in row}
        assert {"naive", REFERENCE, "onnxruntime, plain export", "ours, cpu"} <= there
        assert rows["ours, cpu"]["images"] == 2
        assert rows["ours, cpu"]["largest_deviation"] < 1e-5
        assert rows["ours, cpu"]["peak_memory_mb"] < rows[REFERENCE]["peak_memory_mb"]  # which needs torch
        assert rows["torch.compile"]["not_available"] == "not chosen"
        assert set(result["settings"]["demo"]) == there
    tables = output.with_suffix(".md").read_text()
    assert "## demo, dense-28-45" in tables
    assert "| ours, cpu " in tables
    assert "- torch.compile: not available: not chosen" in tables
    assert "ours in fp32 at least 0.95 of the fastest fp32 competitor" in tables
    assert tables in done.stdout
