"""Images with several true classes (ReaL): any is right, in the run, its report, comparison and ensemble."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prelunet.evaluator.datasets import Dataset, DatasetSpec, open_from_spec
from prelunet.evaluator.errors import RunFolderError
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.reporting.compare import compare_runs
from prelunet.evaluator.reporting.gallery import build_gallery
from prelunet.evaluator.reporting.page_data import page_data
from prelunet.evaluator.reporting.report import build_report, headline
from prelunet.evaluator.reporting.report_page import render_page, write_report
from prelunet.evaluator.validation.ensemble import ErrorCount, ensemble
from prelunet.evaluator.validation.merge import merge
from prelunet.evaluator.validation.predictions import Prediction, parse_prediction
from prelunet.evaluator.validation.run import build_run_info, describe_dataset, read_run
from prelunet.evaluator.validation.validate import validate
from tests.helpers.fakes import FakeSession, fake_contract, validated
from tests.helpers.tiny_datasets import BAD, CLASSES, DATA, REAL, name_of, write_folder, write_real
from tests.reporting.scored_runs import best_first, check_agreement
from tests.validation.shared_data import contents

CONTRACT = replace(fake_contract(), classes=CLASSES)
TWO_SCALES = build_protocol("dense-29-36", CONTRACT)
LABELED = [number for number, truth in enumerate(REAL, start=1) if truth]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    place = tmp_path_factory.mktemp("data")
    spec = DatasetSpec(write_folder(place / "val", DATA), write_real(place / "real.json"))
    return open_from_spec(spec, CLASSES)


@pytest.fixture(scope="module")
def folder(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run's folder, which tests must not change."""
    place = tmp_path_factory.mktemp("run")
    validated(FakeSession(CONTRACT), dataset, TWO_SCALES, place)
    return place


def places(row: np.ndarray, truth: Sequence[int]) -> list[int]:
    """Return the ranks of true classes in a row of scores, lowest first."""
    return sorted(1 + best_first(row).index(label) for label in truth)


def expected_ranks(scores: np.ndarray) -> list[int]:
    """Return the rank of each image by plain loops, 0 for the damaged one."""
    rows = zip(LABELED, scores, strict=True)
    return [0 if number == BAD else places(row, REAL[number - 1])[0] for number, row in rows]


def test_the_rank_is_that_of_the_best_true_class_in_the_average_and_in_each_view(
    dataset: Dataset, folder: Path
) -> None:
    run = read_run(folder)
    assert [line.labels for line in run.predictions] == [tuple(REAL[number - 1]) for number in LABELED]
    assert [line.rank for line in run.predictions] == expected_ranks(np.load(folder / "scores.f32.npy"))
    for place, view in enumerate(TWO_SCALES.views):
        alone = replace(TWO_SCALES, scales=(view.scale,), mirror=False)
        if not view.mirrored:
            single = folder.parent / f"alone-{view.scale}"
            validated(FakeSession(CONTRACT), dataset, alone, single)
            ranks = [line.view_ranks[place] if line.rank else 0 for line in run.predictions]
            assert ranks == expected_ranks(np.load(single / "scores.f32.npy"))
    assert any(line.rank == 1 and line.top[0][0] in line.also for line in run.predictions), "otherwise nothing is shown"
    check_agreement(run)


def test_lines_have_further_labels_only_where_there_are_any(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    for number, line in zip(LABELED, lines, strict=True):
        assert [line["label"], *line.get("also", [])] == REAL[number - 1]
        assert ("also" in line) == (len(REAL[number - 1]) > 1)
        assert ("refused" in line) == (number == BAD)


def test_a_killed_run_resumes_to_the_same_bytes_and_shards_merge_to_them(
    dataset: Dataset, folder: Path, tmp_path: Path
) -> None:
    session = FakeSession(CONTRACT)
    info = replace(build_run_info(session, "m.onnx", describe_dataset(dataset), TWO_SCALES), chunk=5)
    validate([session], dataset, info, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    lines = (tmp_path / "whole" / "predictions.jsonl").read_bytes()
    (tmp_path / "whole" / "predictions.jsonl").write_bytes(lines[: len(lines) // 2])
    validate([session], dataset, info, tmp_path / "whole")
    assert contents(tmp_path / "whole") == whole
    for number in (1, 2, 3):
        validate([session], dataset, replace(info, shard=(number, 3)), tmp_path / str(number))
    merge([tmp_path / str(number) for number in (3, 1, 2)], tmp_path / "merged")
    assert contents(tmp_path / "merged") == whole
    assert whole["predictions.jsonl"] == contents(folder)["predictions.jsonl"]


def test_lines_of_other_labels_are_not_kept_when_a_run_resumes(dataset: Dataset, folder: Path, tmp_path: Path) -> None:
    whole = contents(folder)
    for name, data in whole.items():
        (tmp_path / name).write_bytes(data)
    lines = whole["predictions.jsonl"].splitlines(keepends=True)
    place = next(place for place, line in enumerate(lines) if b"also" in line and b"refused" not in line)
    lines[place] = json.dumps({**json.loads(lines[place]), "also": []}).encode() + b"\n"
    (tmp_path / "predictions.jsonl").write_bytes(b"".join(lines))
    validated(FakeSession(CONTRACT), dataset, TWO_SCALES, tmp_path)
    assert contents(tmp_path) == whole


def test_a_report_counts_wrong_only_what_is_none_of_the_true_classes(folder: Path) -> None:
    run = read_run(folder)
    report = build_report(run)
    seen = [(number, line) for number, line in zip(LABELED, run.predictions, strict=True) if number != BAD]
    wrong = [(REAL[number - 1][0], line.top[0][0]) for number, line in seen if line.top[0][0] not in REAL[number - 1]]
    assert 0 < len(wrong) < len(seen)
    assert report["top1_wrong"] == len(wrong)
    assert report["top5_wrong"] == sum(
        not {index for index, _ in line.top} & set(REAL[number - 1]) for number, line in seen
    )
    assert sum(pair["count"] for pair in report["confusions"]) == len(wrong)
    assert {(pair["label"], pair["predicted"]) for pair in report["confusions"]} == set(wrong)
    worst = report["worst"]
    for row, label in enumerate(worst["classes"]):
        answers = [answer for of, answer in wrong if of == label]
        expected = [answers.count(column) for column in worst["classes"]]
        expected[row] = sum(REAL[number - 1][0] == label for number, _ in seen) - len(answers)
        assert worst["counts"][row] == expected
        assert worst["elsewhere"][row] == len(answers) - sum(answers.count(column) for column in worst["classes"])
    assert "val, only images with ReaL labels" in headline(report)


def test_the_page_marks_every_true_class(dataset: Dataset, folder: Path) -> None:
    run = read_run(folder)
    report, gallery = build_report(run), build_gallery(run, None)
    assert gallery.missing is None, "the images are found again, with these labels"
    assert build_gallery(run, dataset.location) == gallery
    data = page_data(report, run, gallery)
    marked = {}
    for label, images in enumerate(data["images"]):
        middles, also = images[2], images[9] if len(images) > 9 else {}
        marked |= {f"{images[0]}{middles[n]}{images[1]}": (label, *others) for n, others in also.items()}
    evaluated = [number for number in LABELED if number != BAD]
    assert marked == {name_of(n): tuple(REAL[n - 1]) for n in evaluated if len(REAL[n - 1]) > 1}
    page = render_page(report, run, gallery).decode()
    shown = [mistake.prediction for mistake in gallery.mistakes]
    right = sum(index in line.labels for line in shown for index, _ in line.top)
    assert right > sum(index == line.label for line in shown for index, _ in line.top)
    assert page.count('<li class="right">') == right


def test_an_ensemble_and_a_comparison_accept_any_true_class(dataset: Dataset, folder: Path, tmp_path: Path) -> None:
    validated(FakeSession(CONTRACT, seed=1), dataset, TWO_SCALES, tmp_path / "b")
    found = ensemble([folder, tmp_path / "b"], tmp_path / "e")
    scores = [np.load(place / "scores.f32.npy") for place in (folder, tmp_path / "b", tmp_path / "e")]
    ranks = [expected_ranks(rows) for rows in scores]
    assert [line.rank for line in found.run.predictions] == ranks[2]
    assert [line.labels for line in found.run.predictions] == [line.labels for line in read_run(folder).predictions]
    errors = [ErrorCount(len(LABELED) - 1, sum(r > 1 for r in of), sum(r > 5 for r in of)) for of in ranks]
    assert (list(found.member_errors), found.cumulative_errors[-1]) == (errors[:2], errors[2])
    check_agreement(found.run)
    compared = compare_runs(read_run(folder), read_run(tmp_path / "b"))
    assert compared["top1"]["only_b_wrong"] == sum(a == 1 < b for a, b in zip(*ranks[:2], strict=True))
    for flip in compared["flips"]:
        assert [flip["label"], *flip.get("also", [])] == REAL[int(flip["file"][-13:-5]) - 1]


def test_runs_that_differ_in_a_further_label_do_not_belong_together(folder: Path, tmp_path: Path) -> None:
    run = read_run(folder)
    place = next(place for place, line in enumerate(run.predictions) if line.also)
    line = run.predictions[place]
    others = [*run.predictions[:place], replace(line, also=(), rank=9), *run.predictions[place + 1 :]]
    with pytest.raises(RunFolderError, match=rf"label {line.label}, {line.also[0]}.*\(label {line.label}\)"):
        compare_runs(run, replace(run, predictions=others))


def test_reports_are_written_and_lines_are_read_as_they_were(folder: Path, tmp_path: Path) -> None:
    written = write_report(folder, out=tmp_path)
    assert json.loads(written.json.read_text()) == json.loads(json.dumps(build_report(read_run(folder))))
    lines = (folder / "predictions.jsonl").read_bytes().splitlines(keepends=True)
    run = read_run(folder)
    assert [json.dumps(line.to_json()).encode() + b"\n" for line in run.predictions] == lines
    assert [parse_prediction(line, 12, 4) for line in lines] == list(run.predictions)
    assert all(one.file < other.file for one, other in pairwise(run.predictions))


LINE = {
    "file": "a", "label": 7, "also": [2, 0], "top": [[n, 0.2] for n in (1, 2, 3, 4, 5)], "rank": 2,
    "view_ranks": [6, 9], "capped": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"also": [2, 7]}, "also should contain other classes than label"),
        ({"also": [2, 2]}, "none of them twice"),
        ({"label": None, "rank": None, "view_ranks": []}, "also should contain other classes than label"),
        ({"also": [11, 2]}, "label should be less than 11, not 11"),
        ({"also": [-1]}, r"also\[0\]"),
        ({"view_ranks": [6, 10]}, "at most 9"),  # the best of three among eleven
    ],
)
def test_damaged_lines_are_refused(change: dict[str, Any], fault: str) -> None:
    assert parse_prediction(json.dumps(LINE).encode(), 11, 2) == Prediction(
        "a", 7, tuple((n, 0.2) for n in (1, 2, 3, 4, 5)), 2, (6, 9), also=(2, 0)
    )
    with pytest.raises(ValueError, match=fault):
        parse_prediction(json.dumps({**LINE, **change}).encode(), 11, 2)
