"""Validation of a dataset gives the same numbers as image by image, interrupted or not; `prelunet validate`."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from prelunet.evaluator import terminal
from prelunet.evaluator.architectures import architecture
from prelunet.evaluator.cli import run
from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.datasets.open import open_dataset
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.memory import portion_size
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.errors import ContractError, DatasetError, EnvironmentFault, Interrupted, RunFolderError
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.imaging.views import make_views
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.reporting.statistics import wilson_interval
from prelunet.evaluator.validation.run import CHUNK, read_run
from prelunet.evaluator.validation.writer import scores_header
from tests.conftest import ExportedNet
from tests.helpers.fakes import FakeSession, fake_contract, validated
from tests.validation.shared_data import contents, write_images

CLASSES = [entry.wnid for entry in fake_contract().classes]
CENTER = build_protocol("center", fake_contract())
MULTI_SCALE = build_protocol("multi-scale", fake_contract())
IMAGES = 150  # two chunks and part of a third
BAD = {f"{CLASSES[0]}/007.png": b"no image", f"{CLASSES[3]}/100.png": b"\x89PNG\r\n\x1a\n" + b"\0" * 9}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 150 images into the folders of five of the model's six classes; two are damaged."""
    folder = tmp_path_factory.mktemp("data") / "val"
    write_images(folder, [CLASSES[index] for index in (0, 1, 2, 3, 5)], IMAGES, enlarged=2)
    for name, damaged in BAD.items():
        assert (folder / name).exists()
        (folder / name).write_bytes(damaged)
    return folder


@pytest.fixture(scope="module")
def dataset(data: Path) -> Dataset:
    return open_dataset(data, split="val", wnids=CLASSES)


@pytest.fixture(scope="module")
def undisturbed(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    validated(FakeSession(), dataset, CENTER, folder)
    return contents(folder)


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def executed(folder: Path) -> list[object]:
    return [line["index"] for line in log_of(folder) if line["event"] == "chunk"]


def test_every_line_of_a_run_is_what_the_model_predicts_for_the_image_alone(dataset: Dataset, tmp_path: Path) -> None:
    session = FakeSession()
    found = validated(session, dataset, MULTI_SCALE, tmp_path / "run")
    scores = np.load(tmp_path / "run" / "scores.f32.npy")
    assert scores.shape == (IMAGES, 6)
    assert [p.file for p in found.predictions] == sorted(sample.file for sample in dataset.samples)
    for sample, prediction, row in zip(dataset.samples, found.predictions, scores, strict=True):
        assert (prediction.file, prediction.label) == (sample.file, CLASSES.index(sample.file.split("/")[0]))
        if sample.file in BAD:
            assert prediction.refused is not None
            assert np.isnan(row).all()
            continue
        (alone,) = classify_images(session, [decode_rgb(dataset.read(sample))], MULTI_SCALE)
        np.testing.assert_array_equal(row, alone.scores)
        assert [(index, np.float32(score)) for index, score in prediction.top] == alone.top(5)
        assert prediction.rank == alone.rank(sample.label)
        assert list(prediction.view_ranks) == alone.view_ranks(sample.label)


def test_progress_is_shown_before_the_first_chunk_is_written(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "LINE_INTERVAL", 0)
    validated(FakeSession(), dataset, MULTI_SCALE, tmp_path / "run")
    shown = [int(found[1]) for found in re.finditer(r"^validate: (\d+)/150 images", capsys.readouterr().err, re.M)]
    assert shown == sorted(set(shown)), "never back, never twice"
    assert shown[0] < CHUNK
    assert shown[-1] == 150, "refused images count, too"

    damaged = tmp_path / "run" / "predictions.jsonl"
    damaged.write_bytes(b"".join(damaged.read_bytes().splitlines(keepends=True)[:70]))
    validated(FakeSession(), dataset, MULTI_SCALE, tmp_path / "run")
    shown = [int(found[1]) for found in re.finditer(r"^validate: (\d+)/150 images", capsys.readouterr().err, re.M)]
    assert shown == sorted(set(shown))
    assert shown[0] > 64, "a resumed run begins where it was"
    assert shown[-1] == 150


def test_a_refused_image_is_recorded_with_the_reason_and_the_others_are_evaluated(
    undisturbed: dict[str, bytes],
) -> None:
    lines = [json.loads(line) for line in undisturbed["predictions.jsonl"].splitlines()]
    refused = {line["file"]: line["refused"] for line in lines if "refused" in line}
    assert set(refused) == set(BAD)
    assert "not a readable image" in refused[f"{CLASSES[0]}/007.png"]
    assert len(lines) == IMAGES


def test_the_log_records_the_start_the_place_of_the_data_and_each_chunk(dataset: Dataset, tmp_path: Path) -> None:
    validated(FakeSession(), dataset, CENTER, tmp_path)
    start, *chunks = log_of(tmp_path)
    assert (start["event"], start["done"], start["device"]) == ("start", 0, "CPUExecutionProvider")
    assert start["dataset"] == str(dataset.location.resolve())
    assert [(line["index"], line["images"]) for line in chunks] == [(0, 64), (1, 64), (2, 22)]
    assert all(0 <= line["seconds"] < 60 for line in chunks)


def test_a_finished_run_is_reported_as_finished_and_nothing_is_done(dataset: Dataset, tmp_path: Path) -> None:
    validated(FakeSession(), dataset, CENTER, tmp_path)
    before, log, said, session = contents(tmp_path), log_of(tmp_path), [], FakeSession()
    validated(session, dataset, CENTER, tmp_path, report=said.append)
    assert (contents(tmp_path), log_of(tmp_path), session.calls) == (before, log, [])
    assert "already finished" in said[0]


class FailingSession(FakeSession):
    """A session that fails after a number of calls."""

    def __init__(self, calls: int, error: BaseException):
        super().__init__()
        self._left = calls
        self._error = error

    def compute(self, staged: Any) -> Outputs:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return super().compute(staged)


def test_ctrl_c_keeps_complete_chunks_and_the_same_command_resumes(
    dataset: Dataset, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    session = FailingSession(
        1, KeyboardInterrupt()
    )  # in the second of three chunks: crops of one size take one call per chunk
    with pytest.raises(Interrupted, match=r"64 of 150 images are done\. Repeat the same command or call"):
        validated(session, dataset, CENTER, tmp_path / "run")
    said: list[str] = []
    validated(FakeSession(), dataset, CENTER, tmp_path / "run", report=said.append)
    assert "resuming after 64 of 150" in said[0]
    assert contents(tmp_path / "run") == undisturbed
    assert executed(tmp_path / "run") == [0, 1, 2]
    assert [line["event"] for line in log_of(tmp_path / "run")] == ["start", "chunk", "resume", "chunk", "chunk"]


@pytest.mark.parametrize(
    ("name", "images"),
    [("center", 64), ("ten-crop", 64), ("multi-scale", 64), ("spp-net", 32), ("resnet", 32), ("dense-2000", 8)],
)
def test_a_chunk_is_prepared_in_parts_that_fit_into_memory_even_if_all_images_are_elongated(
    name: str, images: int
) -> None:
    net = architecture("demo", crop=224)
    contract = fake_contract(architecture=net, crop=224, window=56, default_scales=(256, 384, 480), max_side=8000)
    protocol = build_protocol(name, contract)
    assert portion_size(protocol, CHUNK, None) == images
    views = make_views(np.zeros((100, 400, 3), np.uint8), protocol)
    kept = {np.lib.array_utils.byte_bounds(view.image): view.image.nbytes for view in views}  # shared: once
    assert images * sum(kept.values()) <= 3 * 2**27
    assert images == CHUNK or 2 * images * sum(kept.values()) > 3 * 2**27, "the portions are needlessly small"


def test_a_chunk_in_parts_gives_the_same_lines_and_scores(
    dataset: Dataset, tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "prelunet.evaluator.engine.memory.PORTION_BYTES", 10 * 3 * 28 * 28
    )  # of crops of 28: 7 portions, of 10
    found = validated(FakeSession(), dataset, CENTER, tmp_path)
    assert found.info.batching is not None
    assert found.info.batching.images_together == 10
    for name in ("predictions.jsonl", "scores.f32.npy"):
        assert (tmp_path / name).read_bytes() == undisturbed[name]


def test_nan_stops_the_run_and_names_the_file(dataset: Dataset, tmp_path: Path) -> None:
    class Broken(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            outputs = super().compute(staged)
            outputs.scores[-1] = np.nan
            return outputs

    with pytest.raises(ContractError, match=rf"{CLASSES[2]}/063\.png: .*not finite"):
        validated(Broken(), dataset, CENTER, tmp_path)
    assert (tmp_path / "predictions.jsonl").read_bytes() == b""


def test_a_dataset_without_images_is_refused_before_anything_is_written(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no images"):
        validated(FakeSession(), replace(dataset, samples=[]), CENTER, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_model_in_the_folder_is_refused_and_fresh_replaces_it(
    dataset: Dataset, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    validated(FakeSession(seed=1), dataset, CENTER, tmp_path)
    with pytest.raises(RunFolderError, match=r"model\.sha256: \w{64} in the folder, \w{64} now"):
        validated(FakeSession(), dataset, CENTER, tmp_path)
    validated(FakeSession(), dataset, CENTER, tmp_path, fresh=True)
    assert contents(tmp_path) == undisturbed
    assert executed(tmp_path) == [0, 1, 2]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1), st.floats(0, 1))
@example(1.0, 1.0)  # already complete: nothing is done, so nothing is logged
def test_truncated_anywhere_a_run_ends_in_the_same_bytes_and_complete_chunks_are_not_repeated(
    dataset: Dataset, tmp_path: Path, undisturbed: dict[str, bytes], lines_kept: float, scores_kept: float
) -> None:
    folder = tmp_path / "cut"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    lines, scores = undisturbed["predictions.jsonl"], undisturbed["scores.f32.npy"]
    lines, scores = lines[: round(lines_kept * len(lines))], scores[: round(scores_kept * len(scores))]
    (folder / "run.json").write_bytes(undisturbed["run.json"])
    (folder / "predictions.jsonl").write_bytes(lines)
    (folder / "scores.f32.npy").write_bytes(scores)
    whole = min(lines.count(b"\n"), max(0, len(scores) - len(scores_header(IMAGES, 6))) // 24)
    validated(FakeSession(), dataset, CENTER, folder)
    assert contents(folder) == undisturbed
    if whole == IMAGES:
        assert not (folder / "log.jsonl").exists()
    else:
        assert executed(folder) == list(range(whole // CHUNK, 3))


# prelunet validate


@pytest.fixture
def command(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the command line with a fake model behind `open_sessions`."""
    monkeypatch.setattr("prelunet.evaluator.verbs.validate.open_sessions", lambda *_: [FakeSession()])

    def call(*more: str, protocol: str = "center", images: Path = data) -> int:
        folder = tmp_path / "run"
        options = ["--model", "dir/m.onnx", "--data", str(images), "--run", str(folder), "--protocol", protocol]
        return run(["validate", *options, *more])

    return call


def test_the_last_line_has_the_errors_with_their_intervals_and_counts(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(protocol="multi-scale") == 0
    told = capsys.readouterr()
    ranks = [p.rank for p in read_run(tmp_path / "run").predictions if p.refused is None]
    top1, top5 = sum(rank > 1 for rank in ranks), sum(rank > 5 for rank in ranks)
    (low1, high1), (low5, high5) = wilson_interval(top1, 148), wilson_interval(top5, 148)
    assert told.out == (
        "demo, multi-scale, mirrored, over all 6 classes (images of 5): "
        f"top-1 error {100 * top1 / 148:.2f} [{low1:.1f}, {high1:.1f}] "
        f"top-5 error {100 * top5 / 148:.2f} [{low5:.1f}, {high5:.1f}] %, 148 of 150 images\n"
    )
    for said in [
        "demo on CPUExecutionProvider, fp32",
        "150 images of 5 of the model's 6 classes",
        "150/150 images",
        "warning: 2 of 150 images were refused",
        f"prelunet report {tmp_path / 'run'}",
    ]:
        assert said in told.err


def test_json_holds_the_same_numbers(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["images"], numbers["evaluated"], numbers["refused"]) == (150, 148, 2)
    assert numbers["top1_interval"][0] < numbers["top1_error"] < numbers["top1_interval"][1]


def test_a_run_in_which_every_image_is_refused_has_no_error_rate(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    (images / CLASSES[2]).mkdir(parents=True)
    (images / CLASSES[2] / "only.png").write_text("no image")
    assert command(images=images) == 0
    assert "no error can be computed, 0 of 1 images" in capsys.readouterr().out


def test_another_protocol_in_the_folder_exits_2_and_fresh_starts_over(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == 0
    assert command(protocol="dense-40") == 2
    assert "protocol.name: center in the folder, dense-40 now" in capsys.readouterr().err
    assert command("--fresh", protocol="dense-40") == 0


def test_workers_without_a_cluster_exit_2(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--ray-workers", "3") == 2
    assert "give --ray ADDRESS too" in capsys.readouterr().err


def test_an_interrupted_validation_exits_4_and_a_full_disk_5(
    command: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code in [(KeyboardInterrupt(), 4), (EnvironmentFault("disk"), 5)]:
        stopping = FailingSession(1, error)
        monkeypatch.setattr("prelunet.evaluator.verbs.validate.open_sessions", lambda *_, session=stopping: [session])
        assert command() == code
    told = capsys.readouterr().err
    assert "64 of 150 images are done" in told
    assert told.endswith("prelunet: disk\n")


def test_a_class_folder_that_the_model_does_not_know_exits_2(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    (images / "unknown").mkdir(parents=True)
    (images / "unknown" / "a.png").write_text("")
    assert command(images=images) == 2
    assert "unknown" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_exported_model_validates_like_image_by_image(
    exported: dict[str, ExportedNet], data: Path, tmp_path: Path
) -> None:
    session = exported["demo-image"].session
    wnids = [entry.wnid for entry in session.contract.classes]
    for index in (0, 2):
        shutil.copytree(data / CLASSES[index], tmp_path / "val" / wnids[index])
    few = open_dataset(tmp_path, split="val", wnids=wnids)
    protocol = build_protocol("dense-30", session.contract)
    found = validated(session, few, protocol, tmp_path / "run")
    scores = np.load(tmp_path / "run" / "scores.f32.npy")
    for index in (0, 31, 59):
        (alone,) = classify_images(session, [decode_rgb(few.read(few.samples[index]))], protocol)
        np.testing.assert_allclose(scores[index], alone.scores, atol=1e-6)  # in a batch sums run over other zeros
        assert found.predictions[index].rank == alone.rank(found.predictions[index].label)
