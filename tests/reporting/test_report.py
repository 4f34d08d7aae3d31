import csv
import io
import json
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from prelunet.evaluator import cli
from prelunet.evaluator.engine.scores import ranks_of, top_k
from prelunet.evaluator.errors import RunFolderError, UsageError
from prelunet.evaluator.reporting.html import json_bytes
from prelunet.evaluator.reporting.report import (
    build_report,
    classes_csv,
    describe_protocol,
    error_with_interval,
    headline,
    label_order_suspicion,
)
from prelunet.evaluator.reporting.statistics import TOPS, macro_interval, wilson_interval
from prelunet.evaluator.validation.run import Run, read_run
from tests.helpers.run_folders import CLASSES, MULTI_SCALE, VIEWS, evaluated, refused, write_run
from tests.reporting.pages import many_classes

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "report.schema.json").read_text(encoding="utf-8"))

LINES = [
    evaluated("n01/a.jpg", 0, [0, 1, 2, 3, 4], 1, view_ranks=[1, 2, 1, 6]),
    evaluated("n01/b.jpg", 0, [2, 0, 1, 3, 4], 2, view_ranks=[1, 1, 3, 7]),
    evaluated("n01/c.jpg", 0, [2, 1, 3, 4, 5], 7, view_ranks=[7, 1, 2, 1]),
    refused("n01/d.jpg", 0, "truncated after 12 bytes"),
    evaluated("n02/a.jpg", 1, [1, 3, 2, 0, 4], 1),
    evaluated("n02/b.jpg", 1, [3, 1, 2, 0, 4], 2),
    evaluated("n04/a.jpg", 3, [1, 3, 2, 0, 4], 2),
    refused("n06/a.jpg", 5, "no image"),
]


def report_of(folder: Path, lines: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
    report = build_report(read_run(write_run(folder, lines, **rest)))
    jsonschema.validate(report, SCHEMA)
    return report


def random_lines(seed: int, count: int, classes: int = 7) -> list[dict[str, Any]]:
    """Return images with different classes, views and ranks; the last class has none, and class 0 is never right."""
    draw = random.Random(seed)
    lines: list[dict[str, Any]] = []
    for number in range(count):
        label = draw.choices(range(classes - 1), weights=range(1, classes))[0]
        if draw.random() < 0.1:
            lines.append(refused(f"{number:04}.jpg", label))
            continue
        order = draw.sample(range(classes), classes)
        order.sort(key=lambda index: index != label and draw.random() < 0.7)
        if label == 0 and order[0] == 0:
            order.reverse()
        ranks = [draw.randint(1, classes) for _ in VIEWS]
        first = draw.choice([0.2, 0.4, 0.61, 1.0])  # the first two lie on an edge between bins
        rank = 1 + order.index(label)
        lines.append(evaluated(f"{number:04}.jpg", label, order[:5], rank, first=first, view_ranks=ranks))
    return lines


def test_the_published_schema_is_a_schema_and_refuses_what_is_no_report(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    report = report_of(tmp_path, LINES)
    for spoil in ({"top1_error": 101}, {"unknown": 1}, {"top1_interval": [3]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**report, **spoil}, SCHEMA)


def test_a_report_from_before_the_newest_keys_still_fits_the_schema(tmp_path: Path) -> None:
    report = report_of(tmp_path, LINES)
    del report["risk_coverage"], report["calibration"]["histogram"]
    jsonschema.validate(report, SCHEMA)


def test_report_counts_an_unreadable_image_as_refused_not_as_error(tmp_path: Path) -> None:
    report = report_of(tmp_path, LINES)
    assert (report["images"], report["evaluated"], report["refused"]) == (8, 6, 2)
    assert report["top1_error"] == 66.6667  # 4 of 6, not 6 of 8
    assert report["top5_error"] == 16.6667
    assert report["refusals"] == [
        {"file": "n01/d.jpg", "reason": "truncated after 12 bytes"},
        {"file": "n06/a.jpg", "reason": "no image"},
    ]


def test_every_class_of_the_model_is_listed_and_one_without_images_has_no_error(tmp_path: Path) -> None:
    classes = report_of(tmp_path, LINES)["classes"]
    assert [(entry["index"], entry["wnid"], entry["name"]) for entry in classes] == [
        (index, entry["wnid"], entry["name"]) for index, entry in enumerate(CLASSES)
    ]
    counts = [(entry["images"], entry["evaluated"], entry["refused"]) for entry in classes]
    assert counts == [(4, 3, 1), (2, 2, 0), (0, 0, 0), (1, 1, 0), (0, 0, 0), (1, 0, 1), (0, 0, 0)]
    assert [entry["top1_error"] for entry in classes] == [66.6667, 50.0, None, 100.0, None, None, None]
    for key in ("top1_interval", "top5_interval"):
        assert [entry[key] is None for entry in classes] == [False, False, True, False, True, True, True]


def test_confusions_are_wrong_first_answers_by_frequency_then_index(tmp_path: Path) -> None:
    report = report_of(tmp_path, LINES)
    assert report["classes"][0]["confusions"] == [{"index": 2, "wnid": "n03", "name": "bottle", "count": 2}]
    assert [(c["label"], c["predicted"], c["count"], c["share"]) for c in report["confusions"]] == [
        (0, 2, 2, 66.6667),
        (1, 3, 1, 50.0),
        (3, 1, 1, 100.0),
    ]


def test_each_view_reports_what_it_would_have_given_alone(tmp_path: Path) -> None:
    views = report_of(tmp_path, LINES[:4])["views"]
    assert [(view["scale"], view["mirrored"]) for view in views] == list(VIEWS)
    assert [view["top1_error"] for view in views] == [33.3333, 33.3333, 66.6667, 66.6667]
    assert [view["top5_error"] for view in views] == [33.3333, 0.0, 0.0, 66.6667]


Lines = list[dict[str, Any]]


def percent(wrong: Callable[[dict[str, Any]], bool], among: Lines) -> float | None:
    return round(100 * len([line for line in among if wrong(line)]) / len(among), 4) if among else None


def beyond(k: int) -> Callable[[dict[str, Any]], bool]:
    """Return whether the true class of a line is not among the k best."""
    return lambda line: line["label"] not in [index for index, _ in line["top"][:k]]


@pytest.mark.parametrize("seed", [0, 1])
def test_report_equals_a_slow_count_line_by_line(tmp_path: Path, seed: int) -> None:
    lines = random_lines(seed, 300)
    report = report_of(tmp_path, lines)
    seen = [line for line in lines if "refused" not in line]
    for entry in (report, *report["classes"]):
        own = [line for line in seen if entry is report or line["label"] == entry["index"]]
        for k in TOPS:
            wrong = len(list(filter(beyond(k), own)))
            assert entry[f"top{k}_wrong"] == wrong
            assert entry[f"top{k}_error"] == percent(beyond(k), own)
            assert entry[f"top{k}_interval"] == wilson_interval(wrong, len(own))
    for number, view in enumerate(report["views"]):
        assert view["top1_error"] == percent(lambda line, n=number: line["view_ranks"][n] != 1, seen)
        assert view["top5_error"] == percent(lambda line, n=number: line["view_ranks"][n] > 5, seen)
    assert sum(entry["images"] for entry in report["classes"]) == report["images"] == 300
    assert sum(entry["refused"] for entry in report["classes"]) == report["refused"] > 0


def test_scores_ranks_and_views_of_a_class_are_counted_over_its_own_images(tmp_path: Path) -> None:
    lines = random_lines(2, 300)
    report = report_of(tmp_path, lines)
    for entry in report["classes"]:
        own = [line for line in lines if "refused" not in line and line["label"] == entry["index"]]
        assert len(entry["views"]) == len(VIEWS)
        for number, view in enumerate(entry["views"]):
            assert view["top1_error"] == percent(lambda line, n=number: line["view_ranks"][n] != 1, own)
            assert view["top5_error"] == percent(lambda line, n=number: line["view_ranks"][n] > 5, own)
        if not own:
            assert (entry["confidence"], entry["median_rank"]) == (None, None)
            continue
        assert entry["median_rank"] == statistics.median(line["rank"] for line in own)
        confidence = 100 * statistics.fmean(line["top"][0][1] for line in own)
        assert entry["confidence"] == pytest.approx(confidence, abs=5.1e-5)  # rounded to 4 decimals
    assert report["classes"][6]["evaluated"] == 0


def test_scales_and_mirrors_are_the_means_of_their_single_views(tmp_path: Path) -> None:
    lines = random_lines(4, 200)
    report = report_of(tmp_path, lines)
    seen = [line for line in lines if "refused" not in line]

    def mean_error(k: int, kind: Callable[[tuple[int, bool]], bool]) -> float:
        ranks = [line["view_ranks"][n] for line in seen for n, view in enumerate(VIEWS) if kind(view)]
        return round(100 * sum(rank > k for rank in ranks) / len(ranks), 4)

    assert report["scales"] == [
        {
            "scale": scale,
            "views": 2,
            "top1_error": mean_error(1, lambda view, s=scale: view[0] == s),
            "top5_error": mean_error(5, lambda view, s=scale: view[0] == s),
        }
        for scale in (256, 384)
    ]
    assert report["mirrors"] == [
        {
            "mirrored": mirrored,
            "views": 2,
            "top1_error": mean_error(1, lambda view, m=mirrored: view[1] == m),
            "top5_error": mean_error(5, lambda view, m=mirrored: view[1] == m),
        }
        for mirrored in (False, True)
    ]


def test_macro_errors_weigh_every_class_alike(tmp_path: Path) -> None:
    macro = report_of(tmp_path, LINES)["macro"]
    assert macro["classes"] == 3
    assert macro["top1_error"] == round(100 * (2 / 3 + 1 / 2 + 1) / 3, 4)  # the images alone give 66.6667
    assert macro["top5_error"] == round(100 * (1 / 3) / 3, 4)
    again = report_of(tmp_path, [*LINES, evaluated("n04/b.jpg", 3, [3, 1, 2, 0, 4], 1)])["macro"]
    totals = [3, 2, 0, 2, 0, 0, 0]
    for key, wrong in (("top1", [2, 1, 0, 1, 0, 0, 0]), ("top5", [1, 0, 0, 0, 0, 0, 0])):
        interval = macro_interval(wrong, [0] * 7, totals)
        assert interval is not None
        assert again[f"{key}_interval"] == interval


def test_where_a_class_has_one_image_report_and_summary_state_why_the_mean_has_no_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_each = write_run(tmp_path / "two", [*LINES, evaluated("n04/b.jpg", 3, [3, 1, 2, 0, 4], 1)])
    assert cli.run(["report", str(two_each)]) == 0
    assert re.search(
        r"mean over 3 classes: top-1 error 55\.56 \[.*\] top-5 error 11\.11 \[.*\] %\n", capsys.readouterr().out
    )
    report = report_of(tmp_path, [evaluated(f"{n}.jpg", n, [0, 1, 2, 3, 4], n + 1) for n in range(4)])
    assert report["macro"] == {
        "classes": 4, "top1_error": 75.0, "top1_interval": None, "top5_error": 0.0, "top5_interval": None
    }  # fmt: skip
    assert report["top1_interval"][0] < 75 < report["top1_interval"][1]
    assert cli.run(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (
        "mean over 4 classes: top-1 error 75.00 top-5 error 0.00 % (no interval: a class has only one image)\n"
        in printed
    )
    page = (tmp_path / "report" / "report.html").read_text()
    assert "mean over classes 75.00 (no interval: a class has only one image)" in page


def test_calibration_compares_the_score_of_the_answer_with_how_often_it_is_right(tmp_path: Path) -> None:
    lines = [
        evaluated("a.jpg", 0, [0, 1], 1, first=0.9),
        evaluated("b.jpg", 0, [1, 0], 2, first=0.88),
        evaluated("c.jpg", 3, [3, 1], 1, first=0.5),
        refused("d.jpg", 3),
    ]
    found = report_of(tmp_path, lines)["calibration"]
    assert found["confidence"] == 76.0
    # Two images of mean 89 % and 50 % right, one of 50 % and right: (2·39 + 1·50) / 3.
    assert found["expected_error"] == round(128 / 3, 4)
    filled = [(each["images"], each["confidence"], each["accuracy"]) for each in found["bins"] if each["images"]]
    assert filled == [(1, 50.0, 100.0), (2, 89.0, 50.0)]
    assert [each["images"] for each in found["bins"]].index(2) == 13


def test_a_score_that_half_precision_lifts_above_one_makes_no_confidence_above_a_hundred(tmp_path: Path) -> None:
    line = evaluated("a.jpg", 1, [1], 1)
    line["top"] = [[1, 1.0005], *([index, 0.0] for index in (0, 2, 3, 4))]
    report = report_of(tmp_path, [line])
    assert report["classes"][1]["confidence"] == report["calibration"]["confidence"] == 100.0


def test_capped_images_are_counted_where_they_were_evaluated(tmp_path: Path) -> None:
    report = report_of(tmp_path, [{**LINES[0], "capped": True}, LINES[1], {**LINES[2], "capped": True}, LINES[3]])
    assert report["capped"] == 2


def test_ranks_of_the_truth_are_counted_in_steps(tmp_path: Path) -> None:
    ranks = report_of(tmp_path, LINES)["ranks"]
    assert (ranks["median"], ranks["mean"]) == (2.0, 2.5)  # of 1, 1, 2, 2, 2, 7
    assert ranks["mean_reciprocal"] == round((1 + 1 + 3 / 2 + 1 / 7) / 6, 4)
    assert ranks["counts"] == [
        {"first": 1, "last": 1, "images": 2},
        {"first": 2, "last": 2, "images": 3},
        {"first": 3, "last": 5, "images": 0},
        {"first": 6, "last": 7, "images": 1},
    ]


def test_confusions_are_counted_and_cut_to_the_most_frequent(tmp_path: Path) -> None:
    lines = random_lines(5, 900, classes=12)
    report = report_of(tmp_path, lines, classes=many_classes(12))
    pairs = Counter((line["label"], line["top"][0][0]) for line in lines if line.get("rank", 1) > 1)
    ranked = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    assert len(ranked) > 50
    assert [((c["label"], c["predicted"]), c["count"]) for c in report["confusions"]] == ranked[:50]
    for entry in report["classes"]:
        own = [(answer, count) for (label, answer), count in ranked if label == entry["index"]]
        assert [(c["index"], c["count"]) for c in entry["confusions"]] == own[:5]
    assert max(len(entry["confusions"]) for entry in report["classes"]) == 5


def test_the_worst_classes_have_their_own_matrix_and_what_is_outside_is_counted(tmp_path: Path) -> None:
    lines = random_lines(6, 700, classes=30)
    report = report_of(tmp_path, lines, classes=many_classes(30))
    worst = report["worst"]
    lowest = {entry["index"]: entry["top1_interval"][0] for entry in report["classes"] if entry["top1_error"]}
    assert len(lowest) > 20
    assert [lowest[index] for index in worst["classes"]] == sorted(lowest.values(), reverse=True)[:20]
    for row, label in enumerate(worst["classes"]):
        answers = [line["top"][0][0] for line in lines if "refused" not in line and line["label"] == label]
        assert worst["counts"][row] == [answers.count(other) for other in worst["classes"]]
        assert worst["elsewhere"][row] == len([answer for answer in answers if answer not in worst["classes"]])
        assert sum(worst["counts"][row]) + worst["elsewhere"][row] == report["classes"][label]["evaluated"]
    assert sum(worst["elsewhere"]) > 0


def test_classes_without_an_error_are_never_among_the_worst(tmp_path: Path) -> None:
    worst = report_of(tmp_path, LINES[3:5])["worst"]
    assert worst == {"classes": [], "counts": [], "elsewhere": []}
    assert report_of(tmp_path / "some", LINES)["worst"] == {
        "classes": [0, 3, 1],  # two of three, one of one, one of two
        "counts": [[1, 0, 0], [0, 0, 1], [0, 1, 1]],
        "elsewhere": [2, 0, 0],
    }


def test_classes_that_share_a_name_are_listed_together(tmp_path: Path) -> None:
    assert report_of(tmp_path, LINES)["same_names"] == [[1, 3]]
    classes = [{"wnid": f"n{index}", "name": name} for index, name in enumerate(["b", "a", "b", "c", "a", "b", "d"])]
    assert report_of(tmp_path / "more", LINES, classes=classes)["same_names"] == [[0, 2, 5], [1, 4]]


def test_equal_scores_count_for_the_lower_class_index(tmp_path: Path) -> None:
    """A net with equal scores for all classes must not be right on every image (tensorflow#13005)."""
    scores = np.full(7, 1 / 7, np.float32)
    answers = [index for index, _ in top_k(scores, 5)]
    lines = [
        evaluated(f"{label}.jpg", label, answers, int(ranks_of(scores[None], np.array([label]))[0]), first=1 / 7)
        for label in range(7)
    ]
    report = report_of(tmp_path, lines)
    assert (report["top1_wrong"], report["top5_wrong"]) == (6, 2)
    assert [entry["top1_wrong"] for entry in report["classes"]] == [0, 1, 1, 1, 1, 1, 1]
    assert [entry["median_rank"] for entry in report["classes"]] == [1, 2, 3, 4, 5, 6, 7]


def test_an_error_counted_on_one_image_keeps_its_width(tmp_path: Path) -> None:
    report = report_of(tmp_path, [LINES[6]])
    assert (report["top1_error"], report["top1_interval"]) == (100.0, [20.6549, 100.0])
    assert (report["top5_error"], report["top5_interval"]) == (0.0, [0.0, 79.3451])
    assert report["macro"]["classes"] == 1
    assert report["ranks"]["median"] == 2.0


def test_report_carries_the_suspicion_about_the_labels(tmp_path: Path) -> None:
    lines = [evaluated(f"{label:03}.jpg", label, [(label + 1) % 300], 300) for label in range(300)]
    report = report_of(tmp_path, lines, classes=many_classes(300))
    assert report["suspicion"] == label_order_suspicion(100.0, 300)
    assert report["suspicion"]
    assert report_of(tmp_path / "plain", LINES)["suspicion"] == label_order_suspicion(66.6667, 7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "scales 256,384 mirrored"),
        ({"kind": "center", "scales": [256], "mirror": False, "crop": 224}, "scale 256, central crop 224"),
        ({"kind": "ten-crop", "scales": [256], "crop": 224}, "scale 256, five crops 224 mirrored"),
        ({"kind": "spp-18", "weights": "view"}, "scales 256,384, nine windows mirrored, every window alike"),
        ({"averaging": "logit"}, "scales 256,384 mirrored, logits averaged"),
        ({"apply_exif": True}, "scales 256,384 mirrored, EXIF orientation applied"),
    ],
)
def test_a_protocol_has_a_short_description(changes: dict[str, Any], words: str) -> None:
    assert describe_protocol({**MULTI_SCALE, **changes}) == words


def test_verb_warns_of_what_is_suspicious(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [evaluated(f"{label:03}.jpg", label, [(label + 1) % 300], 300) for label in range(300)]
    folder = write_run(tmp_path / "run", lines, classes=many_classes(300))
    assert cli.run(["report", str(folder)]) == 0
    assert f"warning: {label_order_suspicion(100.0, 300)}" in capsys.readouterr().out


def ensemble(run: Run) -> Run:
    """Turn a run into that of an ensemble: members, and no views."""
    members = tuple({"model": {**run.info.model, "file": f"{n}.onnx"}, "weight": w} for n, w in ((1, 0.25), (2, 0.75)))
    lines = [replace(prediction, view_ranks=()) for prediction in run.predictions]
    return replace(run, info=replace(run.info, members=members), predictions=lines)


def test_an_ensemble_names_its_members_and_has_no_views(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, LINES))
    alone, report = build_report(run), build_report(ensemble(run))
    jsonschema.validate(report, SCHEMA)
    assert [(member["model"]["file"], member["weight"]) for member in report["members"]] == [
        ("1.onnx", 0.25),
        ("2.onnx", 0.75),
    ]
    assert report["views"] == report["scales"] == report["mirrors"] == []
    assert all(entry["views"] == [] for entry in report["classes"])
    for key in ("top1_error", "macro", "calibration", "ranks", "worst", "confusions"):
        assert report[key] == alone[key]
    assert alone["members"] == []
    assert f"| {report['model']['file']} ({report['model']['architecture']}) |" in headline(report)


def test_a_run_without_labels_has_no_report_but_a_submission(tmp_path: Path) -> None:
    lines = [{**LINES[0], "label": None, "rank": None, "view_ranks": []}, {**LINES[3], "label": None}]
    run = read_run(write_run(tmp_path / "test", lines))
    with pytest.raises(
        UsageError, match=r"class of 2 of 2 images is unknown, so errors cannot be counted.*prelunet submission"
    ):
        build_report(run)


def test_an_image_without_a_label_among_others_is_refused(tmp_path: Path) -> None:
    lines = [LINES[0], {**LINES[1], "label": None, "rank": None, "view_ranks": []}]
    run = read_run(write_run(tmp_path, lines))
    with pytest.raises(UsageError, match="class of 1 of 2 images is unknown"):
        build_report(run)


def test_a_shard_has_no_report_of_its_own(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, LINES))
    shard = replace(run, info=replace(run.info, shard=(2, 4)))
    with pytest.raises(RunFolderError, match=r"shard 2 of 4, not a complete run.*: prelunet merge"):
        build_report(shard)


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    lines = random_lines(3, 100)
    first, second = (build_report(read_run(write_run(tmp_path / name, lines))) for name in "ab")
    assert json_bytes(first) == json_bytes(second)
    assert classes_csv(first) == classes_csv(second)


def test_csv_has_the_same_numbers_as_the_report(tmp_path: Path) -> None:
    report = report_of(tmp_path, LINES)
    rows = list(csv.DictReader(io.StringIO(classes_csv(report).decode())))
    assert len(rows) == len(CLASSES)
    for row, entry in zip(rows, report["classes"], strict=True):
        assert (int(row["index"]), row["wnid"], row["name"]) == (entry["index"], entry["wnid"], entry["name"])
        assert (float(row["top1_error"]) if row["top1_error"] else None) == entry["top1_error"]
        for top in ("top1", "top5"):
            assert int(row[f"{top}_wrong"]) == entry[f"{top}_wrong"]
            bounds = [row[f"{top}_low"], row[f"{top}_high"]]
            assert (None if bounds == ["", ""] else list(map(float, bounds))) == entry[f"{top}_interval"]
        for key in ("confidence", "median_rank"):
            assert (float(row[key]) if row[key] else None) == entry[key]


def test_an_error_is_shown_with_its_interval() -> None:
    errors = {"top1_error": 12.3456, "top1_interval": [10.04, 14.96], "top5_error": 0.0, "top5_interval": [0.0, 3.7]}
    assert error_with_interval(errors, 1) == "12.35 [10.0, 15.0]"
    assert error_with_interval(errors, 5, 2, unit=" %") == "0.00 % [0.00, 3.70]"


def test_a_file_name_that_is_no_text_still_gives_valid_files(tmp_path: Path) -> None:
    name = 'n01/\udcff"=cmd,\n.jpg'  # how Python represents a byte that is not UTF-8
    report = report_of(tmp_path, [refused(name, 0)], classes=[{"wnid": "n1", "name": 'a,"b"'}])
    assert json.loads(json_bytes(report))["refusals"][0]["file"] == name
    assert len(list(csv.reader(io.StringIO(classes_csv(report).decode())))) == 2


def test_the_verb_writes_to_another_folder_and_reports_that_the_page_has_no_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = write_run(tmp_path / "run", LINES), tmp_path / "a" / "b"
    for options in ([], ["--json"]):
        assert cli.run(["report", str(folder), "--out", str(out), *options]) == 0
        output = capsys.readouterr()
        assert re.search(
            r"note: .*report\.html has no images\. The run does not record the location.*--data DIR\n", output.err
        )
        assert "no images" not in output.out
    assert sorted(path.name for path in out.iterdir()) == ["classes.csv", "report.html", "report.json"]
    assert not (folder / "report").exists()
    (tmp_path / "file").touch()
    assert cli.run(["report", str(folder), "--out", str(tmp_path / "file")]) == 2
    assert "choose another folder with --out" in capsys.readouterr().err
    assert cli.run(["report", str(write_run(tmp_path / "right", LINES[:1]))]) == 0
    assert capsys.readouterr().err == ""


def test_names_of_a_run_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run\x1b]0;", [evaluated("a\x1b[31m.png", 0, [1], 2)])
    assert cli.run(["report", str(folder)]) == 0
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
    assert r"run\x1b]0;" in output.out


def test_headline_carries_the_circumstances(tmp_path: Path) -> None:
    line = headline(report_of(tmp_path, LINES))
    for part in (
        "top-1 error 66.67 % [30.00, 90.32]",
        "of 6 images",
        "2 of 8 refused, listed",
        "| val, over all 7 classes (images of 4) | multi-scale: ",
        "c.onnx (C, 3f9c",
        "scales 256,384 mirrored",
        "3f9c",
        "CPU, fp32",
    ):
        assert part in line


def test_verb_writes_three_files_and_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", LINES)
    assert cli.run(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "top-1 error 66.67 % [30.00, 90.32]" in out
    assert "mean over 3 classes: top-1 error 72.22 top-5 error 11.11 % (no interval" in out
    assert "mean score of the top-1 class 60.0 %, expected calibration error 26.7 %" in out
    assert "warning" not in out
    assert "crane, mostly confused with crane (1 of 1)" in out
    for name in ("report.json", "classes.csv", "report.html"):
        assert str(folder / "report" / name) in out
        assert (folder / "report" / name).stat().st_size > 0
    assert sorted(path.name for path in (folder / "report").iterdir()) == ["classes.csv", "report.html", "report.json"]


def test_verb_prints_the_report_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", LINES)
    assert cli.run(["report", str(folder), "--json"]) == 0
    assert capsys.readouterr().out.encode() == (folder / "report" / "report.json").read_bytes()


def test_a_run_with_every_image_refused_is_still_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", [refused("n01/a.jpg", 0), refused("n02/b.jpg", 1)])
    assert cli.run(["report", str(folder)]) == 0
    assert "no image evaluated; 2 of 2 refused" in capsys.readouterr().out
    report = json.loads((folder / "report" / "report.json").read_bytes())
    jsonschema.validate(report, SCHEMA)
    assert report["top1_error"] is None
    assert report["top1_interval"] is report["top5_interval"] is None
    assert (report["top1_wrong"], report["top5_wrong"], report["calibration"]) == (0, 0, None)
    assert report["risk_coverage"] is None
    nothing = {"top1_error": None, "top1_interval": None, "top5_error": None, "top5_interval": None}
    assert report["macro"] == {"classes": 0, **nothing}
    assert [report["ranks"][key] for key in ("median", "mean", "mean_reciprocal")] == [None, None, None]
    assert {step["images"] for step in report["ranks"]["counts"]} == {0}
    assert [view["top1_error"] for view in report["views"] + report["scales"] + report["mirrors"]] == [None] * 8
    assert report["worst"] == {"classes": [], "counts": [], "elsewhere": []}
    assert "2 of 2 images were refused" in (folder / "report" / "report.html").read_text()


def test_missing_unfinished_and_damaged_runs_have_different_errors_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = write_run(tmp_path / "unfinished", LINES, images=9)
    damaged = write_run(tmp_path / "damaged", LINES)
    text = (damaged / "predictions.jsonl").read_text().splitlines()
    (damaged / "predictions.jsonl").write_text("\n".join([*text[:2], text[2][:30], *text[3:]]) + "\n")
    for folder, message in (
        (tmp_path / "missing", "no run.json in this folder"),
        (unfinished, "8 of 9 images are done"),
        (damaged, "line 3 is damaged"),
    ):
        assert cli.run(["report", str(folder)]) == 2
        assert message in capsys.readouterr().err
        assert not (folder / "report").exists()


def test_a_folder_that_cannot_hold_the_report_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", LINES)
    (folder / "report").write_text("a file where the folder should be")
    assert cli.run(["report", str(folder)]) == 2
    assert str(folder / "report") in capsys.readouterr().err
