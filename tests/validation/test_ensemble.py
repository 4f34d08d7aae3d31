"""Ensembles are the plain average of stored scores. Incompatible runs are refused with the difference."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prelunet.evaluator.cli import run as prelunet
from prelunet.evaluator.datasets import DatasetSpec
from prelunet.evaluator.datasets.dataset import UNLABELLED
from prelunet.evaluator.errors import RunFolderError, UsageError
from prelunet.evaluator.reporting.statistics import wilson_interval
from prelunet.evaluator.validation.ensemble import ErrorCount, ensemble
from prelunet.evaluator.validation.run import read_run
from prelunet.evaluator.validation.run_log import find_dataset
from prelunet.evaluator.validation.stored_runs import BLOCK, read_rows
from prelunet.evaluator.validation.writer import RunWriter
from tests.reporting.scored_runs import (
    CLASSES,
    best_first,
    changed_info,
    check_agreement,
    random_scores,
    write_scored_run,
)
from tests.validation.shared_data import contents

IMAGES = BLOCK + 30
LABELS = [index * 5 % 7 for index in range(IMAGES)]
SHAS = ["a1" * 32, "b2" * 32, "c3" * 32]
REFUSALS: list[dict[int, str]] = [{4: "truncated"}, {4: "no image", BLOCK + 9: "too large"}, {}]
WEIGHTS = [2.0, 1.0, 0.5]


def member(folder: Path, number: int, *, images: int = IMAGES, **rest: Any) -> Path:
    """Write the run of one model, number from 0."""
    given = {
        "refusals": {index: why for index, why in REFUSALS[number].items() if index < images},
        "model": {"file": f"m{number}.onnx", "sha256": SHAS[number], "architecture": "ABC"[number]},
        **rest,
    }
    labels = given.pop("labels", LABELS[:images])
    return write_scored_run(folder / f"m{number}", random_scores(number, images), labels, **given)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write three runs, shared by many tests, which must not change them."""
    folder = tmp_path_factory.mktemp("members")
    return [member(folder, number) for number in range(3)]


@pytest.fixture
def small(tmp_path: Path) -> list[Path]:
    """Write three runs of 20 images, for tests that damage them."""
    return [member(tmp_path, number, images=20) for number in range(3)]


def plain_average(weights: Sequence[float], images: int = IMAGES) -> np.ndarray:
    """Average the scores of the first models number by number, in Python's own float64."""
    of_models = [random_scores(number, images) for number in range(len(weights))]
    for scores, refused in zip(of_models, REFUSALS, strict=False):
        scores[[index for index in refused if index < images]] = np.nan
    result = np.zeros((images, 7), np.float32)
    for image in range(images):
        for index in range(7):
            total = 0.0
            for scores, weight in zip(of_models, weights, strict=True):
                total += weight / sum(weights) * float(scores[image, index])
            result[image, index] = total
    return result


def errors(scores: np.ndarray) -> ErrorCount:
    """Count the errors over the images that all three models evaluated."""
    refused = {index for of_member in REFUSALS for index in of_member}
    counted = [image for image in range(IMAGES) if image not in refused]
    places = [best_first(scores[image]).index(LABELS[image]) for image in counted]
    return ErrorCount(len(counted), sum(place >= 1 for place in places), sum(place >= 5 for place in places))


# 0.3, 0.7, 0.1: the normalized weights do not sum to exactly 1, so they must not be normalized twice
@pytest.mark.parametrize("weights", [None, WEIGHTS, [0.3, 0.7, 0.1]])
def test_an_ensemble_is_the_weighted_average_of_what_was_stored(
    members: list[Path], tmp_path: Path, weights: list[float] | None
) -> None:
    found = ensemble(members, tmp_path / "e", weights=weights)
    expected = plain_average(weights or [1, 1, 1])
    expected[[4, BLOCK + 9]] = np.nan
    np.testing.assert_array_equal(np.load(tmp_path / "e" / "scores.f32.npy"), expected)
    reasons = {4: "member 1 (m0.onnx): truncated", BLOCK + 9: "member 2 (m1.onnx): too large"}
    for image, line in enumerate(found.run.predictions):
        assert (line.file, line.label, line.refused) == (f"val/{image:05}.png", LABELS[image], reasons.get(image))
        if line.refused is None:
            order = best_first(expected[image])
            assert [(index, np.float32(score)) for index, score in line.top] == [
                (index, expected[image, index]) for index in order[:5]
            ]
            assert line.rank == 1 + order.index(LABELS[image])
            assert line.capped == (image % 11 == 3)
            assert line.view_ranks == ()


def test_the_result_for_every_number_of_models_is_that_of_the_first_ones(members: list[Path], tmp_path: Path) -> None:
    found = ensemble(members, tmp_path / "e", weights=WEIGHTS)
    assert found.cumulative_errors == tuple(errors(plain_average(WEIGHTS[:number])) for number in (1, 2, 3))
    assert found.member_errors == tuple(errors(random_scores(number, IMAGES)) for number in range(3))
    assert found.cumulative_errors[0] == found.member_errors[0]
    assert (
        len({error_count.top1_wrong for error_count in found.cumulative_errors}) == 3
    )  # otherwise the order would not matter


def test_an_ensemble_is_a_run_that_records_its_members(members: list[Path], tmp_path: Path) -> None:
    ensemble(members, tmp_path / "e", weights=[2, 1, 1])
    info = read_run(tmp_path / "e").info
    text = "".join(f"{sha} {weight}\n" for sha, weight in zip(SHAS, ("0.5", "0.25", "0.25"), strict=True))
    assert info.model == {
        "file": "ensemble of 3",
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "architecture": "A+B+C",
        "activation": "prelu",
        "provenance": None,
        "checkpoint_sha256": None,
    }
    assert [(entry["model"]["file"], entry["weight"]) for entry in info.members] == [
        ("m0.onnx", 0.5), ("m1.onnx", 0.25), ("m2.onnx", 0.25),
    ]  # fmt: skip
    assert info.circumstances == read_run(members[0]).info.circumstances
    assert info.views == ()
    assert info.protocol.name == "multi-scale"
    check_agreement(read_run(tmp_path / "e"))


def test_circumstances_that_differ_are_all_recorded(small: list[Path], tmp_path: Path) -> None:
    changed_info(small[1], "circumstances", value={"provider": "G", "precision": "fp16", "versions": {"cuda": "13"}})
    changed_info(small[1], "model", "activation", value="relu")
    info = ensemble(small, tmp_path / "e").run.info
    assert info.circumstances == {
        "provider": "CPUExecutionProvider+G",
        "precision": "fp32+fp16",
        "versions": {"numpy": "2.4.6+none", "cuda": "none+13"},
    }
    assert info.model["activation"] == "mixed"


def test_names_may_differ_where_they_mean_the_same(small: list[Path], tmp_path: Path) -> None:
    changed_info(small[1], "dataset", "name", value="val.tar")
    changed_info(small[1], "dataset", "layout", value="tar of class folders")
    changed_info(small[1], "protocol", "name", value="dense-256-384")
    changed_info(small[1], "classes", value=[{**entry, "name": "another word"} for entry in CLASSES])
    assert ensemble(small, tmp_path / "e").run.info.dataset["name"] == "val"


DIFFERENT: list[tuple[tuple[str, ...], Any, str]] = [
    (("protocol", "averaging"), "logit", r"another protocol than .*m0:\n  averaging: softmax in .*m0, logit in .*m1\n"),
    (("protocol", "long_side_cap"), 5, r"long_side_cap: 4 in .*Validate m1\.onnx again, with the protocol of m0\.onnx"),
    (("dataset", "fingerprint"), "e" * 64, r"other images than .*\n  fingerprint: abab"),
    (("classes",), CLASSES[::-1], r"another class list than .*\n  classes\.0\.wnid: n00 in .*m0, n06 in .*m1"),
    (("classes",), [*CLASSES, {"wnid": "n99", "name": "x"}], r"classes\.length: 7 in .*m0, 8 in"),
    (("model", "sha256"), SHAS[0], r"the same model as .*m0 \(m0\.onnx\).*count twice.*--weights"),
    (("model", "sha256"), SHAS[2], r"m2: the same model as .*m1"),
]


@pytest.mark.parametrize(("path", "value", "fault"), DIFFERENT)
def test_runs_that_do_not_belong_together_are_refused_with_the_difference(
    small: list[Path], tmp_path: Path, path: tuple[str, ...], value: Any, fault: str
) -> None:
    changed_info(small[1], *path, value=value)
    with pytest.raises(RunFolderError, match=rf"(?s).*{fault}"):
        ensemble(small, tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_runs_with_other_scales_have_another_protocol(small: list[Path], tmp_path: Path) -> None:
    run = json.loads((small[1] / "run.json").read_text())
    changed_info(small[1], "protocol", "scales", value=[256, 480])
    changed_info(small[1], "views", value=[{**v, "scale": 480 if v["scale"] == 384 else 256} for v in run["views"]])
    with pytest.raises(RunFolderError, match=r"scales: \[256, 384\] in .*m0, \[256, 480\] in .*m1"):
        ensemble(small, tmp_path / "e")


def test_a_shard_must_be_merged_first(small: list[Path], tmp_path: Path) -> None:
    changed_info(small[1], "shard", value={"number": 1, "of": 2})
    with pytest.raises(RunFolderError, match=r"m1: shard 1 of 2, not a complete run.*prelunet merge"):
        ensemble(small, tmp_path / "e")


def test_the_same_run_twice_is_refused(small: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="count twice"):
        ensemble([small[0], small[1], small[0]], tmp_path / "e")


def test_lines_of_other_images_are_refused_whatever_the_fingerprints_say(tmp_path: Path) -> None:
    files = [f"val/{index:05}.png" for index in range(20)]
    folders = [member(tmp_path, 0, images=20), member(tmp_path, 1, images=20, files=[*files[:19], "val/other.png"])]
    with pytest.raises(
        RunFolderError, match=r"line 20 .*is val/00019\.png \(label 4\) in .*m0, but .*other\.png \(label 4\) in .*m1"
    ):
        ensemble(folders, tmp_path / "e")
    folders[1] = member(tmp_path / "again", 1, images=20, labels=[*LABELS[:19], 6])
    with pytest.raises(RunFolderError, match=r"line 20 .*\(label 4\) in .*, but .*\(label 6\)"):
        ensemble(folders, tmp_path / "e")


def test_an_unfinished_run_and_a_damaged_line_are_refused_by_file(small: list[Path], tmp_path: Path) -> None:
    path = small[2] / "predictions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:9], "{}\n", *lines[10:]]))
    with pytest.raises(RunFolderError, match=r"m2/predictions\.jsonl: line 10 is damaged"):
        ensemble(small, tmp_path / "e")
    path.write_text("".join(lines[:9]))
    with pytest.raises(RunFolderError, match=r"m2: 9 of 20 images are done"):
        ensemble(small, tmp_path / "e")
    path.write_text("")
    with pytest.raises(RunFolderError, match=r"m2: 0 of 20 images are done"):
        ensemble(small, tmp_path / "e")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("weights", "fault"),
    [
        ([1, 1], "2 weights for 3 runs"),
        ([1, 1, 1, 1], "4 weights for 3 runs"),
        ([], "0 weights for 3 runs"),
        ([1, 0, 1], "positive"),
        ([1, -1, 1], "positive"),
        ([1, float("nan"), 1], "positive"),
        ([1, float("inf"), 1], "positive"),
        ([1e-9, 1, 1], "factor of a million"),
    ],
)
def test_invalid_weights_are_refused(small: list[Path], tmp_path: Path, weights: list[float], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        ensemble(small, tmp_path / "e", weights=weights)


@pytest.mark.parametrize("number", [0, 1])
def test_an_ensemble_of_fewer_than_two_runs_is_refused(small: list[Path], tmp_path: Path, number: int) -> None:
    with pytest.raises(UsageError, match="at least two runs"):
        ensemble(small[:number], tmp_path / "e")


def test_weights_that_mean_the_same_make_the_same_ensemble(small: list[Path], tmp_path: Path) -> None:
    ensemble(small, tmp_path / "e", weights=[1, 1, 1])
    before = contents(tmp_path / "e")
    said: list[str] = []
    ensemble(small, tmp_path / "e", weights=[3, 3, 3], report=said.append)
    assert "already finished" in said[0]
    assert contents(tmp_path / "e") == before
    with pytest.raises(
        RunFolderError, match=r"(?s)contains another run:.*members\.0\.weight: 0\.33.* in the folder, 0\.6"
    ):
        ensemble(small, tmp_path / "e", weights=[3, 1, 1])


@pytest.mark.parametrize("appended", [0, 1])
def test_an_ensemble_that_was_killed_is_finished_by_the_same_command(
    members: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appended: int
) -> None:
    append, calls = RunWriter.append, 0

    def stopping(self: RunWriter, *args: Any) -> None:
        nonlocal calls
        if calls == appended:
            raise KeyboardInterrupt
        calls += 1
        append(self, *args)

    whole = ensemble(members, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "append", stopping)
        with pytest.raises(KeyboardInterrupt):
            ensemble(members, tmp_path / "e")
    with pytest.raises(RunFolderError, match=rf"{appended * BLOCK} of {IMAGES} images are done"):
        read_run(tmp_path / "e")
    resumed = ensemble(members, tmp_path / "e")
    assert contents(tmp_path / "e") == contents(tmp_path / "whole")
    assert (resumed.member_errors, resumed.cumulative_errors) == (whole.member_errors, whole.cumulative_errors)


def test_a_member_is_never_the_target_and_another_run_never_overwritten(small: list[Path], tmp_path: Path) -> None:
    before = contents(small[0])
    with pytest.raises(UsageError, match="is the input itself"):
        ensemble(small, small[0], fresh=True)
    with pytest.raises(RunFolderError, match=r"(?s)contains another run.*--fresh"):
        ensemble(small[1:], small[0])
    assert contents(small[0]) == before
    ensemble(small[1:], small[0], fresh=True)
    assert read_run(small[0]).info.model["file"] == "ensemble of 2"


def test_images_without_labels_are_averaged_and_no_error_is_counted(tmp_path: Path) -> None:
    folders = [member(tmp_path, number, images=20, labels=[None] * 20) for number in range(3)]
    found = ensemble(folders, tmp_path / "e")
    assert (found.member_errors, found.cumulative_errors) == ((), ())
    assert not found.run.has_labels
    expected = plain_average([1, 1, 1], 20)
    assert [line.top[0][0] for line in found.run.predictions if line.refused is None] == [
        best_first(row)[0] for row in expected if not np.isnan(row[0])
    ]
    check_agreement(found.run)


def test_images_without_labels_among_others_count_for_no_error(tmp_path: Path) -> None:
    labels = [None if index % 3 else index % 7 for index in range(20)]
    found = ensemble([member(tmp_path, number, images=20, labels=labels) for number in (0, 2)], tmp_path / "e")
    known = [line for line in found.run.predictions if line.label != UNLABELLED]
    assert len(known) == 7
    wrong = sum(line.rank > 1 for line in known), sum(line.rank > 5 for line in known)
    assert found.cumulative_errors[1] == ErrorCount(7, *wrong)


def test_an_ensemble_of_ensembles_is_an_ensemble_too(small: list[Path], tmp_path: Path) -> None:
    ensemble(small[:2], tmp_path / "two")
    found = ensemble([tmp_path / "two", small[2]], tmp_path / "e", weights=[2, 1])
    assert found.run.info.model["architecture"] == "A+B+C"
    # 1e-7: the inner ensemble is rounded to float32
    np.testing.assert_allclose(read_rows(found.run, 0, found.run.info.images), plain_average([1, 1, 1], 20), atol=1e-7)


def test_a_model_inside_an_ensemble_does_not_count_twice(small: list[Path], tmp_path: Path) -> None:
    ensemble(small[:2], tmp_path / "ab")
    ensemble(small[1:], tmp_path / "bc")
    for pair, file in (("ab", "m1"), "m1"), (("m0", "ab"), "m0"), (("ab", "bc"), "m1"):
        with pytest.raises(RunFolderError, match=rf"{pair[1]}: the same model as .*{pair[0]} \({file}\.onnx\).*twice"):
            ensemble([tmp_path / name for name in pair], tmp_path / "e")
    ensemble([tmp_path / "ab", small[2]], tmp_path / "abc")
    other = write_scored_run(tmp_path / "d", random_scores(9, 20), LABELS[:20], model={"sha256": "d4" * 32})
    for pair in ([tmp_path / "abc", other], [other, tmp_path / "abc"]):
        with pytest.raises(RunFolderError, match=r"abc: an ensemble of ensembles, which .*runs of the single models"):
            ensemble(pair, tmp_path / "e")


def test_an_ensemble_of_long_names_can_be_read_again(small: list[Path], tmp_path: Path) -> None:
    for path in small:
        changed_info(path, "model", "architecture", value="x" * 1000)
        changed_info(path, "circumstances", "provider", value=path.name * 400)
    info = ensemble(small, tmp_path / "e").run.info
    assert len(info.model["architecture"]) == len(info.circumstances["provider"]) == 1000


def test_the_ensemble_records_where_its_images_are(tmp_path: Path) -> None:
    folders = [member(tmp_path, 0, images=20), member(tmp_path, 1, images=20, data="/data/val")]
    ensemble(folders, tmp_path / "e")
    assert find_dataset(tmp_path / "e") == DatasetSpec(Path("/data/val"))


def test_the_verb_prints_the_errors_of_every_number_of_models(
    members: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ensemble", *map(str, members), "--run", str(tmp_path / "e"), "--weights", "2,1,0.5"]
    assert prelunet(command) == 0
    told = capsys.readouterr()
    expected = [errors(plain_average(WEIGHTS[:number])) for number in (1, 2, 3)]
    lines = told.out.splitlines()
    assert f"{IMAGES - 2:,} of {IMAGES:,} images" in lines[0]
    for line, error_count in zip(lines[-3:], expected, strict=True):
        low, high = wilson_interval(error_count.top1_wrong, error_count.images)
        assert f"{100 * error_count.top1_wrong / error_count.images:.2f} [{low:.2f}, {high:.2f}]" in line
        assert f"  {100 * error_count.top5_wrong / error_count.images:.2f} [" in line
    assert "m1.onnx" in lines[4]
    assert "0.2857" in lines[4]
    assert "makes them look too good" in told.err
    assert prelunet([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [entry["models"] for entry in data["first"]] == [1, 2, 3]
    assert data["first"][2]["top1_interval"] == list(wilson_interval(expected[2].top1_wrong, expected[2].images))
    assert [entry["model"]["sha256"] for entry in data["members"]] == SHAS
    assert (data["images"], data["evaluated"], data["refused"]) == (IMAGES, IMAGES - 2, 2)


@pytest.mark.parametrize(
    "weights", ["", "1,2", "1,,1", "a,b,c", "1;1;1", "1,1,-1", "1e3,1,1", "nan,1,1", "١,1,1", "0,1,1"]
)
def test_the_verb_refuses_invalid_weights(
    small: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: str
) -> None:
    assert prelunet(["ensemble", *map(str, small), "--run", str(tmp_path / "e"), f"--weights={weights}"]) == 2
    assert "--weights" in capsys.readouterr().err


def test_an_ensemble_in_which_every_image_is_refused_counts_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        member(tmp_path, 0, images=3, refusals=dict.fromkeys(range(3), "no image")),
        member(tmp_path, 2, images=3),
    ]
    assert prelunet(["ensemble", *map(str, folders), "--run", str(tmp_path / "e")]) == 0
    assert "no image" in capsys.readouterr().out.splitlines()[-1]


def test_an_ensemble_can_be_reported(members: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ensemble(members, tmp_path / "e")
    assert prelunet(["report", str(tmp_path / "e"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    error_count = found.cumulative_errors[-1]
    assert report["top1_error"] == round(100 * error_count.top1_wrong / error_count.images, 4)
    assert report["views"] == []
