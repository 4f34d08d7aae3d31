"""`prelunet validate` on layouts and parts of datasets: what it prints, and which command it suggests next."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prelunet.evaluator.cli import run
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.engine.session import Placement
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.validation.run import read_run
from tests.conftest import ExportedNet
from tests.helpers.fakes import FakeSession, fake_contract
from tests.helpers.tiny_datasets import (
    CLASSES,
    DATA,
    FOLDERS,
    IMAGES,
    WNIDS,
    write_devkit,
    write_folder,
    write_list,
    write_tar,
)

SESSION = FakeSession(replace(fake_contract(), classes=CLASSES))


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs the verb with a fake model."""
    monkeypatch.setattr("prelunet.evaluator.verbs.validate.open_sessions", lambda *_: [SESSION])

    def call(data: Path, *extra: str, folder: str = "run") -> int:
        options = ["--model", "m.onnx", "--data", str(data), "--run", str(tmp_path / folder), "--protocol", "center"]
        return run(["validate", *options, *extra])

    return call


def test_layout_labels_and_selection_are_printed_first(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devkit, data = write_devkit(tmp_path / "kit"), write_tar(tmp_path / "val.tar", DATA)
    chosen = ",".join(WNIDS[:4])
    assert command(data, "--labels", str(devkit), "--limit", "5", "--classes", chosen) == 0
    printed = capsys.readouterr()
    assert f"{data}: 5 images of " in printed.err
    assert "of the model's 12 classes (flat, devkit labels)" in printed.err
    assert "ids mapped by" in printed.err
    assert f"selection: classes {', '.join(WNIDS[:4])}, of these 5 images spread evenly" in printed.err
    assert re.search(
        r"top-1 error \d+\.\d\d \[.*\] top-5 error .* %, \d of 5 images \(only classes n0.* evenly\)\n$", printed.out
    )
    assert json.loads((tmp_path / "run" / "run.json").read_text())["dataset"]["selection"].startswith("classes n0")


def test_the_options_of_the_protocol_are_those_of_the_run(command: Callable[..., int], tmp_path: Path) -> None:
    data = write_folder(tmp_path / "val", FOLDERS)
    options = ["--protocol", "dense-32", "--no-flip", "--averaging", "logit", "--weights", "view", "--exif"]
    assert command(data, *options) == 0
    protocol = read_run(tmp_path / "run").info.protocol
    assert (protocol.name, protocol.scales, protocol.mirror) == ("dense-32", (32,), False)
    assert (protocol.averaging, protocol.weights, protocol.apply_exif) == ("logit", "view", True)
    assert command(data, "--protocol", "multi-scale", "--scales", "30,33", folder="two") == 0
    assert read_run(tmp_path / "two").info.protocol == build_protocol("dense-30-33", SESSION.contract)


def test_auto_resumes_a_run_on_the_device_that_began_it(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., int], tmp_path: Path
) -> None:
    data = write_folder(tmp_path / "val", FOLDERS)
    requested: list[str] = []

    def open_fake(_model: Path, placement: Placement, _gpus: int) -> list[FakeSession]:
        requested.append(placement.device)
        return [FakeSession(SESSION.contract, provider="OpenVINO")]

    monkeypatch.setattr("prelunet.evaluator.verbs.validate.open_sessions", open_fake)
    assert command(data) == 0
    assert command(data) == 0
    assert command(data, "--fresh") == 0
    assert command(data, "--device", "cpu") == 0
    assert requested == ["auto", "openvino", "auto", "cpu"]


def test_another_selection_in_the_folder_is_refused_with_both(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_folder(tmp_path / "val", FOLDERS)
    assert command(data, "--limit", "5") == 0
    assert command(data, "--limit", "6") == 2
    assert "dataset.selection: 5 images spread evenly in the folder, 6 images spread evenly now" in (
        capsys.readouterr().err
    )


def test_shards_print_their_images_and_are_the_parts_of_the_whole(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {f"{WNIDS[number % 12]}/{number:03}.jpg": list(DATA.values())[number % 5] for number in range(80)}
    data = write_folder(tmp_path / "val", files)
    assert command(data, folder="whole") == 0
    whole = read_run(tmp_path / "whole").predictions
    capsys.readouterr()
    for number, part in ((1, whole[:64]), (2, whole[64:])):
        assert command(data, "--shard", f"{number}/2", folder=f"part{number}") == 0
        printed = capsys.readouterr()
        first, end = (1, 64) if number == 1 else (65, 80)
        assert f"shard {number}/2: images {first} to {end} in order of name" in printed.err
        assert printed.out == f"{len(part)} of {len(part)} images evaluated\n"
        assert "when every shard of 2 is done: prelunet merge" in printed.err
        assert list(read_run(tmp_path / f"part{number}").predictions) == list(part)
    assert command(data, "--shard", "3/3", "--json", folder="part3") == 0
    assert json.loads(capsys.readouterr().out) == {
        "run": str(tmp_path / "part3"), "images": 16, "evaluated": 16, "refused": 0,
    }  # fmt: skip


@pytest.mark.parametrize("shard", ["0/2", "3/2", "2", "a/b", "1/0", "-1/2", "1/2/3", "01/2"])
def test_an_invalid_shard_is_a_usage_error(
    command: Callable[..., int], tmp_path: Path, shard: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, f"--shard={shard}") == 2
    assert f"--shard {shard}: give I/N with I from 1 to N" in capsys.readouterr().err


def test_a_run_among_the_class_folders_is_refused_before_it_begins(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_folder(tmp_path / "data", FOLDERS)
    (tmp_path / "link").symlink_to(data)
    assert command(data, folder="link/run") == 2
    assert f"inside {data}, where it would be taken for a class" in capsys.readouterr().err
    assert not (data / "run").exists()


def test_a_test_set_is_classified_only_with_no_labels_and_points_to_submission(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_folder(tmp_path / "lone" / "test", DATA)
    assert command(data) == 2
    assert "use validate --no-labels" in capsys.readouterr().err
    assert command(data, "--no-labels") == 0
    printed = capsys.readouterr()
    assert f"{data}: 30 images (unlabelled)" in printed.err
    assert printed.out == "29 of 30 images classified; without labels there are no errors\n"
    assert "warning: 1 of 30 images were refused" in printed.err
    assert f"prelunet submission {tmp_path / 'run'}" in printed.err
    assert command(data, "--no-labels", "--json") == 0
    assert json.loads(capsys.readouterr().out)["evaluated"] == 29


def test_merged_shards_of_a_test_set_point_to_submission(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_folder(tmp_path / "lone" / "test", DATA)
    assert command(data, "--no-labels", "--shard", "1/1") == 0
    capsys.readouterr()
    assert run(["merge", str(tmp_path / "run"), "--run", str(tmp_path / "whole")]) == 0
    assert f"prelunet submission {tmp_path / 'whole'} -o FILE" in capsys.readouterr().err


def test_bad_labels_are_refused_before_the_model_runs(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_folder(tmp_path / "lone" / "images", DATA)
    labels = write_list(tmp_path / "l.csv", lambda name, label: f"{name},{label + 2}", "name,label\n")
    before = len(SESSION.calls)
    assert command(data, "--labels", str(labels)) == 2
    assert f"{labels}: line " in capsys.readouterr().err
    assert len(SESSION.calls) == before
    assert not (tmp_path / "run").exists()


def test_an_error_rate_of_guessing_is_printed_with_a_suspicion(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = tuple(ClassEntry(f"n{index:08}", f"class {index}") for index in range(200))
    session = FakeSession(replace(fake_contract(), classes=classes))
    monkeypatch.setattr("prelunet.evaluator.verbs.validate.open_sessions", lambda *_: [session])
    data = write_folder(tmp_path / "lone" / "images", DATA)
    assert command(data, "--no-labels", folder="answers") == 0
    answers = {line.file: line.top[0][0] for line in read_run(tmp_path / "answers").predictions if line.top}
    for shift in (0, 1):
        labels = tmp_path / f"labels{shift}.txt"
        labels.write_text("".join(f"{name} {(answers.get(name, 0) + shift) % 200}\n" for name in DATA))
        capsys.readouterr()
        assert command(data, "--labels", str(labels), folder=f"run{shift}") == 0
        printed = capsys.readouterr()
        assert ("may be in a different order than the model's classes" in printed.err) == bool(shift)
        assert f"top-1 error {100 * shift:.2f}" in printed.out


def test_a_real_model_validates_a_flat_layout_like_class_folders(
    exported: dict[str, ExportedNet], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = exported["demo-image"]
    wnids = [entry.wnid for entry in model.session.contract.classes]
    label_of = {name: (7 * number) % len(wnids) for number, name in enumerate(DATA)}
    folders = write_folder(tmp_path / "val", {f"{wnids[label_of[name]]}/{name}": DATA[name] for name in DATA})
    flat = write_tar(tmp_path / "flat.tar.gz", DATA, "w:gz")
    labels = write_list(tmp_path / "l.txt", lambda name, _label: f"{name} {wnids[label_of[name]]}")
    lines, scores = [], []
    for number, (data, extra) in enumerate(((folders, []), (flat, ["--labels", str(labels)]))):
        folder = tmp_path / f"run{number}"
        options = ["--model", str(model.path), "--data", str(data), "--run", str(folder), "--protocol", "center"]
        assert run(["validate", *options, "--device", "cpu", *extra]) == 0
        lines.append(capsys.readouterr().out)
        order = np.argsort([line.file.rpartition("/")[2] for line in read_run(folder).predictions])
        scores.append(np.load(folder / "scores.f32.npy")[order])
    assert lines[0] == lines[1]
    assert f"of {IMAGES} images" in lines[0]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-6)  # batches of other neighbours add in another order
