"""Predictions among some classes only, as ImageNet-A and -R are published: lines, reports, ensembles."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prelunet.evaluator.cli import run as prelunet
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets import Dataset, DatasetSpec, open_from_spec
from prelunet.evaluator.datasets.labels.class_file import read_class_list
from prelunet.evaluator.engine.scores import softmax
from prelunet.evaluator.errors import DatasetError, RunFolderError, UsageError
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.reporting.compare import compare_runs
from prelunet.evaluator.reporting.compare_page import write_comparison
from prelunet.evaluator.reporting.report import build_report, headline
from prelunet.evaluator.validation.ensemble import ensemble
from prelunet.evaluator.validation.merge import merge
from prelunet.evaluator.validation.run import build_run_info, describe_dataset, read_run
from prelunet.evaluator.validation.validate import validate
from tests.helpers.fakes import FakeSession, fake_contract, validated
from tests.helpers.tiny_datasets import CLASSES, FOLDERS, IMAGES, LABELS, WNIDS, write_folder, write_real
from tests.reporting.scored_runs import changed_info, check_agreement
from tests.validation.shared_data import contents

CONTRACT = replace(fake_contract(), classes=CLASSES)
CENTER = build_protocol("center", CONTRACT)
PRESENT = (0, 1, 2, 3, 5, 6, 7, 8, 9, 10)  # the classes with images, of 12
IMAGENET = read_class_list(Path("imagenet-1k"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "val", FOLDERS)


def opened(path: Path, chosen: str | None, classes: Sequence[ClassEntry] = CLASSES, **spec: Any) -> Dataset:
    return open_from_spec(DatasetSpec(path, restrict_classes=chosen, **spec), classes)


def among(row: np.ndarray, classes: Sequence[int]) -> dict[int, np.float32]:
    """Return the scores of some classes divided by their sum, in Python's own float64."""
    total = sum(float(row[index]) for index in classes)
    return {index: np.float32(float(row[index]) / total) for index in classes}


def ordered(scores: dict[int, np.float32]) -> list[int]:
    return sorted(scores, key=lambda index: (-float(scores[index]), index))


def test_the_lines_of_a_run_are_about_these_classes_and_the_stored_scores_about_all(data: Path, tmp_path: Path) -> None:
    plain = validated(FakeSession(CONTRACT), opened(data, None), CENTER, tmp_path / "plain")
    found = validated(FakeSession(CONTRACT), opened(data, "dataset"), CENTER, tmp_path / "among")
    assert (tmp_path / "plain" / "scores.f32.npy").read_bytes() == (tmp_path / "among" / "scores.f32.npy").read_bytes()
    changed = 0
    for row, line, before in zip(
        np.load(tmp_path / "among" / "scores.f32.npy"), found.predictions, plain.predictions, strict=True
    ):
        if line.refused is None:
            scores = among(row, PRESENT)
            best = ordered(scores)
            assert [index for index, _ in line.top] == best[:5]
            assert [np.float32(score) for _, score in line.top] == [scores[index] for index in best[:5]]
            assert line.rank == 1 + best.index(line.label)
            assert line.view_ranks == (line.rank,)
            changed += before.top[0][0] != best[0]
    assert changed, "otherwise the restriction does not matter here"
    assert found.info.dataset["restriction"] == {"name": "dataset", "classes": list(PRESENT)}
    assert "restriction" not in plain.info.dataset
    check_agreement(found)


@pytest.mark.parametrize("averaging", ["softmax", "logit"])
def test_one_view_has_the_softmax_over_the_logits_of_these_classes(averaging: Any, data: Path, tmp_path: Path) -> None:
    session = FakeSession(CONTRACT)
    protocol = replace(CENTER, averaging=averaging)
    found = validated(session, opened(data, "dataset"), protocol, tmp_path)
    rows = np.load(tmp_path / "scores.f32.npy")
    for line, row in zip(found.predictions, rows, strict=True):
        if line.refused is None:  # the center crop is one window, so its logits follow from its scores
            logits = np.log(row.astype(np.float64))[list(PRESENT)]
            expected = dict(zip(PRESENT, softmax(logits), strict=True))
            for index, score in line.top:
                assert score == pytest.approx(expected[index], rel=1e-6)  # float32 scores


def test_ranks_of_views_are_among_these_classes_too(data: Path, tmp_path: Path) -> None:
    protocol = build_protocol("dense-29-36", CONTRACT)
    found = validated(FakeSession(CONTRACT), opened(data, "dataset"), protocol, tmp_path / "run")
    for place, view in enumerate(protocol.views):
        if not view.mirrored:
            alone = replace(protocol, scales=(view.scale,), mirror=False)
            single = validated(FakeSession(CONTRACT), opened(data, "dataset"), alone, tmp_path / str(view.scale))
            pairs = zip(found.predictions, single.predictions, strict=True)
            assert all(one.rank == 0 or one.view_ranks[place] == other.rank for one, other in pairs)


def test_a_killed_run_resumes_and_shards_merge_to_the_same_bytes(data: Path, tmp_path: Path) -> None:
    session, dataset = FakeSession(CONTRACT), opened(data, "dataset")
    info = replace(build_run_info(session, "m.onnx", describe_dataset(dataset), CENTER), chunk=5)  # type: ignore[arg-type]
    validate([session], dataset, info, tmp_path / "whole")  # type: ignore[list-item]
    whole = contents(tmp_path / "whole")
    lines = whole["predictions.jsonl"]
    (tmp_path / "whole" / "predictions.jsonl").write_bytes(lines[: len(lines) // 2])
    validate([session], dataset, info, tmp_path / "whole")  # type: ignore[list-item]
    assert contents(tmp_path / "whole") == whole
    for number in (1, 2):
        validate([session], dataset, replace(info, shard=(number, 2)), tmp_path / str(number))  # type: ignore[list-item]
    with pytest.raises(RunFolderError, match="missing: 2/2, 15 of 30 images"):
        merge([tmp_path / "1"], tmp_path / "none")
    merge([tmp_path / "2", tmp_path / "1"], tmp_path / "merged")
    assert contents(tmp_path / "merged") == whole


def test_the_same_classes_under_another_name_are_the_same_run_and_others_are_another(
    data: Path, tmp_path: Path
) -> None:
    session = FakeSession(CONTRACT)
    run = validated(session, opened(data, "dataset"), CENTER, tmp_path)
    listed = ",".join(WNIDS[index] for index in PRESENT)
    assert validated(session, opened(data, listed), CENTER, tmp_path).info == run.info
    for other in (f"{listed},{WNIDS[4]}", None):
        with pytest.raises(RunFolderError, match=r"another run:\n  dataset\.restriction"):
            validated(session, opened(data, other), CENTER, tmp_path)


def test_a_report_says_among_how_many_classes(data: Path, tmp_path: Path) -> None:
    reports = {}
    for name, chosen in (("all", None), ("some", "dataset"), ("more", f"{','.join(WNIDS[:11])}")):
        reports[name] = build_report(validated(FakeSession(CONTRACT), opened(data, chosen), CENTER, tmp_path / name))
    assert "| val, among 10 classes |" in headline(reports["some"])
    assert "| val, among 11 classes |" in headline(reports["more"])
    assert "| val, over all 12 classes (images of 10) |" in headline(reports["all"])
    assert reports["some"]["ranks"]["counts"][-1]["last"] == 10
    assert [reports[name]["ranks"]["counts"][-1]["last"] for name in ("more", "all")] == [11, 12]
    rows = zip(np.load(tmp_path / "some" / "scores.f32.npy"), sorted(FOLDERS), strict=True)
    best = {name.rpartition("/")[2]: ordered(among(row, PRESENT)) for row, name in rows if np.isfinite(row).all()}
    assert reports["some"]["evaluated"] == len(best) == IMAGES - 1
    assert reports["some"]["top1_wrong"] == sum(order[0] != LABELS[name] for name, order in best.items())
    assert reports["some"]["top5_wrong"] == sum(LABELS[name] not in order[:5] for name, order in best.items())


def test_fewer_than_five_classes_have_as_many_answers(data: Path, tmp_path: Path) -> None:
    chosen = f"{WNIDS[6]},{WNIDS[9]},{WNIDS[11]}"
    dataset = open_from_spec(DatasetSpec(data, classes=(WNIDS[6], WNIDS[9]), restrict_classes=chosen), CLASSES)
    run = validated(FakeSession(CONTRACT), dataset, CENTER, tmp_path)
    assert {sample.label for sample in dataset.samples} == {6, 9}
    for line in run.predictions:
        assert line.refused is not None or {index for index, _ in line.top} == {6, 9, 11}
    assert read_run(tmp_path).predictions[0] == run.predictions[0]
    assert build_report(run)["top5_error"] == 0


def test_an_ensemble_averages_all_scores_and_then_takes_these_classes(data: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        validated(FakeSession(CONTRACT, seed=seed), opened(data, "dataset"), CENTER, folder)
    found = ensemble(folders, tmp_path / "e", weights=[2, 1])
    one, two = (np.load(folder / "scores.f32.npy").astype(np.float64) for folder in folders)
    wrong = 0
    for line, a, b in zip(found.run.predictions, one, two, strict=True):
        if line.refused is None:
            best = ordered(among(np.float32(2 / 3 * a + 1 / 3 * b), PRESENT))
            assert [index for index, _ in line.top] == best[:5]
            assert line.rank == 1 + best.index(line.label)
            wrong += best[0] != line.label
    assert found.cumulative_errors[-1].top1_wrong == wrong
    check_agreement(found.run)
    validated(FakeSession(CONTRACT, seed=2), opened(data, None), CENTER, tmp_path / "all")
    with pytest.raises(RunFolderError, match=r"(?s)predictions among other classes than .*same --restrict-classes"):
        ensemble([*folders, tmp_path / "all"], tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(
        RunFolderError,
        match=r"among different classes \(10 and 12; n\d+ in one run only\)\. Validate both with the same",
    ):
        compare_runs(read_run(folders[0]), read_run(tmp_path / "all"))
    assert "30 images evaluated in both, among 10 classes" in str(write_comparison(*folders)).replace("29 of ", "")


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("dataset", "restriction", "classes"), [0, 1, 3, 2], "ascending indices"),
        (("dataset", "restriction", "classes"), [0, 1, 12], "ascending indices"),
        (("dataset", "restriction", "classes"), [0], "length"),
        (("dataset", "restriction", "classes"), [0, True], "int"),
        (("dataset", "restriction"), None, "restriction"),
        (
            ("dataset", "restriction", "classes"),
            list(range(1, 12)),
            "among the classes to which the run is restricted, not 0",
        ),
    ],
)
def test_a_damaged_restriction_is_refused(
    path: tuple[str, ...], value: Any, fault: str, data: Path, tmp_path: Path
) -> None:
    validated(FakeSession(CONTRACT), opened(data, "dataset"), CENTER, tmp_path)
    changed_info(tmp_path, *path, value=value)
    with pytest.raises(RunFolderError, match=fault):
        read_run(tmp_path)


REFUSED: list[tuple[str, str]] = [
    ("imagenet-a", "the model lacks 200 of ImageNet-A's 200 classes: n01498041, n01531178"),
    ("imagenet-r", "the model lacks 200 of ImageNet-R's 200 classes"),
    (f"{WNIDS[0]},n99", "--restrict-classes: the label 'n99' is not one of the model's 12 classes"),
    (WNIDS[0], f"--restrict-classes {WNIDS[0]}: 1 class, but a prediction needs at least 2"),
    (",".join(WNIDS[:9]), f"images are of classes outside --restrict-classes {WNIDS[0]}"),
]


@pytest.mark.parametrize(("chosen", "fault"), REFUSED)
def test_classes_that_do_not_fit_are_refused(chosen: str, fault: str, data: Path) -> None:
    with pytest.raises(DatasetError) as refused:
        opened(data, chosen)
    assert fault in str(refused.value)


def test_no_classes_and_no_labels_are_refused(data: Path) -> None:
    with pytest.raises(UsageError, match="--restrict-classes ,: names no class"):
        opened(data, ",")
    with pytest.raises(UsageError, match="--restrict-classes with --no-labels"):
        opened(data, "dataset", no_labels=True)


def test_images_outside_are_named_unless_classes_leaves_them_out(data: Path) -> None:
    chosen = ",".join(WNIDS[:9])
    with pytest.raises(DatasetError, match=rf"\d of 30 images .*: {WNIDS[9]}, {WNIDS[10]}\. Use .* dataset, or leave"):
        opened(data, chosen)
    part = open_from_spec(DatasetSpec(data, classes=WNIDS[2:7], restrict_classes=chosen), CLASSES)
    assert part.candidates == tuple(range(9))
    assert {sample.label for sample in part.samples} == {2, 3, 5, 6}


def test_every_true_class_of_an_image_must_be_inside(data: Path, tmp_path: Path) -> None:
    labels = write_real(tmp_path / "real.json", [[0, 1]] * 29 + [[1, 2]])
    assert opened(data, "dataset", labels=labels).candidates == (0, 1, 2)
    with pytest.raises(DatasetError, match=rf"1 of 30 images .*: {WNIDS[2]}\."):
        opened(data, f"{WNIDS[0]},{WNIDS[1]}", labels=labels)


def test_the_classes_of_the_dataset_are_those_before_a_selection(data: Path) -> None:
    assert opened(data, "dataset", limit=2).candidates == PRESENT
    assert opened(data, None, limit=2).candidates is None


def imagenet_folders(folder: Path, wnids: Sequence[str]) -> Path:
    return write_folder(folder, {f"{wnid}/a.png": b"image" for wnid in wnids})


def test_a_partial_dataset_is_never_scored_over_all_classes_silently(data: Path, tmp_path: Path) -> None:
    (remark,) = (text for text in opened(data, None).remarks if "scored over" in text)
    assert remark == (
        f"{data}: scored over all 12 classes although the dataset has images of 10 only; "
        "to predict among these alone: --restrict-classes dataset"
    )
    assert not any("scored over" in text for text in opened(data, "dataset").remarks)
    complete = write_folder(tmp_path / "val", {f"{wnid}/a.png": b"image" for wnid in WNIDS})
    assert opened(complete, None, limit=3).remarks == ()
    assert not any("scored over" in text for text in opened(data, None, no_labels=True).remarks)


def test_every_true_class_of_an_image_counts_as_present(data: Path, tmp_path: Path) -> None:
    labels = write_real(tmp_path / "real.json", [[0, 1]] * 29 + [[1, 2]])
    assert "has images of 3 only" in "".join(opened(data, None, labels=labels).remarks)


@pytest.mark.parametrize(("name", "title"), [("imagenet-a", "ImageNet-A"), ("imagenet-r", "ImageNet-R")])
def test_a_published_set_is_recognized_by_its_classes(name: str, title: str, tmp_path: Path) -> None:
    wnids = files("prelunet.evaluator.datasets.labels").joinpath(f"{name}.txt").read_text().split()
    folder = imagenet_folders(tmp_path / "set", wnids)
    (remark,) = (text for text in opened(folder, None, IMAGENET).remarks if "scored over" in text)
    assert remark.endswith(f"these are the classes of {title}, which is published over them: --restrict-classes {name}")
    indices = tuple(index for index, entry in enumerate(IMAGENET) if entry.wnid in wnids)
    assert opened(folder, name, IMAGENET).candidates == opened(folder, "dataset", IMAGENET).candidates == indices
    assert len(indices) == 200
    by_name = [ClassEntry(f"{index}", entry.name) for index, entry in enumerate(IMAGENET)]  # a model without wnids
    assert opened(folder, name, by_name).candidates == indices


def test_folders_numbered_0_to_199_are_not_taken_for_the_first_200_of_1000_classes(tmp_path: Path) -> None:
    folder = imagenet_folders(tmp_path / "set", [str(index) for index in range(200)])
    with pytest.raises(DatasetError, match="200 of 200 class folders are not among the model's 1000 classes"):
        opened(folder, "imagenet-a", IMAGENET)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    session = FakeSession(CONTRACT)
    monkeypatch.setattr("prelunet.evaluator.verbs.validate.open_sessions", lambda *_: [session])
    return lambda *words: prelunet(
        ["validate", "--model", "m.onnx", "--run", str(tmp_path / "run"), "--protocol", "center", *map(str, words)]
    )


def test_the_command_prints_among_which_classes_and_writes_nothing_when_they_do_not_fit(
    command: Callable[..., int], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--data", data, "--restrict-classes", "imagenet-a") == 2
    assert "the model lacks 200 of ImageNet-A's" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    (tmp_path / "classes.txt").write_text("".join(f"{WNIDS[index]}\n" for index in PRESENT))
    assert command("--data", data, "--restrict-classes", tmp_path / "classes.txt") == 0
    assert capsys.readouterr().out.startswith("demo, center, among 10 classes: top-1 ")
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["dataset"]["restriction"]
    assert stored == {"name": "list", "classes": list(PRESENT)}
    assert prelunet(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert "class folders; scored among 10 classes" in page
