"""Heat maps of mistakes: stored in the run folder beside an unchanged run, resumed, extended, checked when read."""

import base64
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from PIL import Image

from prelunet.evaluator.cli import run as prelunet
from prelunet.evaluator.contract import ModelContract
from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.datasets.open import open_dataset
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.heatmap import heat_maps
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.errors import DatasetError, Interrupted
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.validation.heatmaps import quantize, read_heat_maps
from prelunet.evaluator.validation.run import read_run
from tests.helpers.fakes import FakeSession, fake_contract, validated
from tests.validation.shared_data import contents, write_images

CLASSES = [entry.wnid for entry in fake_contract().classes]
MULTI_SCALE = build_protocol("multi-scale", fake_contract())
PANORAMA = f"{CLASSES[4]}/panorama.png"  # 1:6, of which the protocol sees the central 1:4


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Write 70 images of four classes, one of them damaged, and a panorama of a fifth."""
    folder = tmp_path_factory.mktemp("data") / "val"
    write_images(folder, [CLASSES[index] for index in (0, 1, 3, 5)], 70)
    (folder / CLASSES[0] / "007.png").write_bytes(b"no image")
    (folder / PANORAMA).parent.mkdir()
    noise = np.random.default_rng(8).integers(0, 256, (30, 180, 3), np.uint8)
    Image.fromarray(noise).save(folder / PANORAMA)
    return open_dataset(folder, split="val", wnids=CLASSES)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "heatmaps.jsonl").read_text().splitlines()]


def stored(folder: Path, dataset: Dataset, count: int, session: FakeSession | None = None) -> bytes:
    validated(session or FakeSession(), dataset, MULTI_SCALE, folder, heatmaps=count)
    return (folder / "heatmaps.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store the maps of all mistakes, of which there are fewer than requested."""
    folder = tmp_path_factory.mktemp("whole")
    stored(folder, dataset, 1000)
    return folder


def test_each_byte_is_254_times_the_score_of_the_class_at_that_point_of_the_image(
    whole: Path, dataset: Dataset
) -> None:
    session, samples = FakeSession(), {sample.file: sample for sample in dataset.samples}
    unseen = 0
    for line in lines_of(whole):
        image = decode_rgb(dataset.read(samples[line["file"]]))
        assert (line["height"], line["width"]) == image.shape[:2]
        assert max(line["rows"], line["columns"]) == 28
        sides, points = sorted(image.shape[:2]), sorted((line["rows"], line["columns"]))
        assert (line["rows"] > line["columns"]) <= (line["height"] > line["width"])
        assert abs(points[0] - 28 * sides[0] / sides[1]) <= 0.5
        (answer,) = classify_images(session, [image], MULTI_SCALE, keep_windows=True)
        size = (line["rows"], line["columns"])
        expected = heat_maps(
            answer, [line["answer"], line["label"]], image.shape[:2], size, session.contract, MULTI_SCALE
        )
        for text, values in zip(line["maps"], expected, strict=True):
            codes = base64.b64decode(text, validate=True)
            assert len(codes) == values.size
            for code, value in zip(codes, values.flat, strict=True):
                # A run and a single image give the same scores, but 254 times one may lie between two integers.
                assert code == 255 if np.isnan(value) else abs(code - 254 * value) <= 0.5 + 1e-4
            unseen += codes.count(255)
    assert unseen > 0, "a third of the panorama"


def test_in_a_restricted_run_each_window_is_scored_among_the_classes_of_the_restriction(
    dataset: Dataset, tmp_path: Path
) -> None:
    kept = [0, 1, 3, 4, 5]
    stored(tmp_path, replace(dataset, restriction={"name": "list", "classes": kept}), 3)
    session, samples = FakeSession(), {sample.file: sample for sample in dataset.samples}
    for line in lines_of(tmp_path):
        image = decode_rgb(dataset.read(samples[line["file"]]))
        (answer,) = classify_images(session, [image], MULTI_SCALE, keep_windows=True)
        views = []
        for view in answer.views:
            assert view.window_scores is not None
            among = np.zeros_like(view.window_scores)
            among[..., kept] = view.window_scores[..., kept] / view.window_scores[..., kept].sum(-1, keepdims=True)
            views.append(structs.replace(view, window_scores=among))
        shown, size = [line["answer"], line["label"]], (line["rows"], line["columns"])
        restricted = structs.replace(answer, views=tuple(views))
        expected = heat_maps(restricted, shown, image.shape[:2], size, session.contract, MULTI_SCALE)
        for text, values in zip(line["maps"], expected, strict=True):
            codes = np.frombuffer(base64.b64decode(text), np.uint8)
            seen = ~np.isnan(values.ravel())
            # Half a step of rounding; float32 sums in another order.
            np.testing.assert_allclose(codes[seen], 254 * values.ravel()[seen], rtol=0, atol=0.5 + 1e-3)


def test_a_link_in_place_of_the_file_is_replaced_and_its_target_left_alone(
    whole: Path, dataset: Dataset, tmp_path: Path
) -> None:
    for name in ("run.json", "predictions.jsonl", "scores.f32.npy"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    (tmp_path / "notes.txt").write_text("mine\n")
    (tmp_path / "heatmaps.jsonl").symlink_to(tmp_path / "notes.txt")
    expected = b"".join((whole / "heatmaps.jsonl").read_bytes().splitlines(keepends=True)[:2])
    assert stored(tmp_path, dataset, 2) == expected
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


def test_scores_from_0_to_1_become_0_to_254_and_what_no_view_shows_becomes_255() -> None:
    assert list(quantize(np.array([[0, 1, 1.0004], [0.5, np.nan, 0.3]]))) == [0, 254, 254, 127, 255, 76]


def test_the_mistakes_that_the_report_shows_first_come_first(whole: Path) -> None:
    predictions = read_run(whole).predictions
    wrong = sorted((p for p in predictions if p.refused is None and p.rank > 1), key=lambda p: (-p.top[0][1], p.file))
    gallery = []
    for p in wrong:
        if len(gallery) < 48 and sum(other.label == p.label for other in gallery) < 3:
            gallery.append(p)
    turns = [
        (turn, -p.top[0][1], p)
        for label in range(6)
        for turn, p in enumerate(p for p in wrong if p.label == label)
        if p not in gallery
    ]
    expected = [*gallery, *(p for _, _, p in sorted(turns, key=lambda each: each[:2]))]
    assert len(expected) > len(gallery) > 10
    found = [(line["file"], line["answer"], line["label"]) for line in lines_of(whole)]
    assert found == [(p.file, p.top[0][0], p.label) for p in expected]


def test_more_maps_are_added_to_a_finished_run_and_fewer_remove_none(
    whole: Path, dataset: Dataset, tmp_path: Path
) -> None:
    validated(FakeSession(), dataset, MULTI_SCALE, tmp_path)
    run = contents(tmp_path)
    log = (tmp_path / "log.jsonl").read_bytes()
    expected = (whole / "heatmaps.jsonl").read_bytes().splitlines(keepends=True)
    said: list[str] = []
    for count, total in ((3, 3), (8, 8), (5, 8)):
        validated(FakeSession(), dataset, MULTI_SCALE, tmp_path, heatmaps=count, report=said.append)
        assert (tmp_path / "heatmaps.jsonl").read_bytes() == b"".join(expected[:total])
    assert said == [f"{tmp_path}: already evaluated"] * 3
    assert contents(tmp_path) == run == contents(whole)
    assert (tmp_path / "log.jsonl").read_bytes() == log
    session = FakeSession()
    stored(tmp_path, dataset, 8, session)
    assert session.calls == [], "nothing is computed twice"


class StoppingSession(FakeSession):
    """Raise KeyboardInterrupt in a call."""

    left = 5

    def compute(self, staged: Any) -> Outputs:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return super().compute(staged)


def test_ctrl_c_keeps_the_maps_that_are_done_and_the_same_command_resumes(
    whole: Path, dataset: Dataset, tmp_path: Path
) -> None:
    validated(FakeSession(), dataset, MULTI_SCALE, tmp_path)
    with pytest.raises(Interrupted, match=r"71 of 71 images are done\. Repeat the same command"):
        stored(tmp_path, dataset, 9, StoppingSession())
    expected = (whole / "heatmaps.jsonl").read_bytes().splitlines(keepends=True)
    done = len(lines_of(tmp_path))
    assert 0 < done < 9
    assert (tmp_path / "heatmaps.jsonl").read_bytes() == b"".join(expected[:done])
    assert stored(tmp_path, dataset, 9) == b"".join(expected[:9])


def test_a_line_that_is_still_being_written_does_not_count(whole: Path, dataset: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "heatmaps.jsonl"
    expected = stored(tmp_path, dataset, 3)
    ends = [place + 1 for place, byte in enumerate(expected) if byte == ord("\n")]
    for cut in (1, ends[0], ends[0] + 1, ends[2] - 2, ends[2] - 1):
        path.write_bytes(expected[:cut])
        assert len(read_heat_maps(read_run(tmp_path), 1000)) == sum(end <= cut for end in ends)
        assert stored(tmp_path, dataset, 3) == expected


def changed(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda line: line.update(values)


BAD_LINES: list[Callable[[dict[str, Any]], Any]] = [
    changed(file="n00000000/other.png"),
    changed(answer=4, label=4),
    changed(rows=1000),
    changed(maps=["AAAA", "AAAA"]),
    changed(maps=["%", "%"]),
    lambda line: line.pop("maps"),
]


@pytest.mark.parametrize("change", BAD_LINES)
def test_maps_from_a_damaged_line_on_are_not_shown_until_they_are_computed_again(
    change: Callable[[dict[str, Any]], Any], whole: Path, dataset: Dataset, tmp_path: Path
) -> None:
    for name in ("run.json", "predictions.jsonl", "scores.f32.npy"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    expected = (whole / "heatmaps.jsonl").read_bytes().splitlines(keepends=True)[:3]
    line = json.loads(expected[1])
    change(line)
    (tmp_path / "heatmaps.jsonl").write_bytes(b"".join([expected[0], json.dumps(line).encode() + b"\n", expected[2]]))
    assert len(read_heat_maps(read_run(tmp_path), 1000)) == 1
    assert stored(tmp_path, dataset, 3) == b"".join(expected)


def test_an_image_that_can_no_longer_be_read_is_named(dataset: Dataset, tmp_path: Path) -> None:
    run = validated(FakeSession(), dataset, MULTI_SCALE, tmp_path)
    wrong = max((p for p in run.predictions if p.rank > 1), key=lambda p: p.top[0][1])
    path = dataset.location / wrong.file
    whole = path.read_bytes()
    path.write_bytes(b"x" * len(whole))
    try:
        with pytest.raises(DatasetError, match=rf"{wrong.file} can no longer be read .*Restore it"):
            stored(tmp_path, dataset, 3)
    finally:
        path.write_bytes(whole)


def test_a_fresh_start_deletes_the_maps(dataset: Dataset, tmp_path: Path) -> None:
    stored(tmp_path, dataset, 2)
    validated(FakeSession(seed=1), dataset, MULTI_SCALE, tmp_path, fresh=True)
    assert not (tmp_path / "heatmaps.jsonl").exists()


Command = Callable[..., int]


@pytest.fixture
def command(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs `prelunet validate` with a fake session and these options."""

    def validate(*options: str, contract: ModelContract | None = None, folder: str = "run") -> int:
        monkeypatch.setattr(
            "prelunet.evaluator.verbs.validate.open_sessions", lambda *_: [FakeSession(contract or fake_contract())]
        )
        data = ["--model", "m.onnx", "--data", str(dataset.location), "--run", str(tmp_path / folder)]
        return prelunet(["validate", *data, *options])

    return validate


def fixed_size() -> ModelContract:
    return fake_contract(max_side=28, default_scales=(28,))


@pytest.mark.parametrize(
    ("options", "contract", "message"),
    [
        (["--shard", "1/2"], fake_contract(), "Merge the shards, then repeat the command with --run MERGED"),
        (["--no-labels"], fake_contract(), "without labels there are none"),
        (["--protocol", "center"], fake_contract(), "one window per view.*use --protocol multi-scale"),
        (["--protocol", "ten-crop"], fake_contract(), "one window per view"),
        ([], fixed_size(), "protocol center has one window per view.*adopt the net with `prelunet adopt --dense`"),
        (["--heatmaps", "-1"], fake_contract(), "Invalid value for '--heatmaps'"),
    ],
)
def test_maps_that_would_show_nothing_are_refused_before_anything_is_written(
    options: list[str],
    contract: ModelContract,
    message: str,
    command: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command("--heatmaps", "3", *options, contract=contract) == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
    assert list(tmp_path.iterdir()) == []


def test_a_merged_run_gets_maps_by_the_same_command_without_its_shard(
    command: Command, dataset: Dataset, tmp_path: Path, whole: Path
) -> None:
    for part in ("1", "2"):
        assert command("--shard", f"{part}/2", folder=part) == 0
    assert prelunet(["merge", str(tmp_path / "1"), str(tmp_path / "2"), "--run", str(tmp_path / "run")]) == 0
    before = contents(tmp_path / "run")
    assert command("--heatmaps", "4") == 0
    assert contents(tmp_path / "run") == before
    expected = (whole / "heatmaps.jsonl").read_bytes().splitlines(keepends=True)
    assert (tmp_path / "run" / "heatmaps.jsonl").read_bytes() == b"".join(expected[:4])
