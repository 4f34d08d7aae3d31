import csv
import io
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from run_folders import CLASSES, VIEWS, evaluated, refused, write_run

from evaluator import cli
from evaluator.errors import RunFolderError
from evaluator.reporting.report import build_report, classes_csv, headline, report_bytes
from evaluator.validation.run import Prediction, read_run

SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "report.schema.json").read_text(encoding="utf-8"))

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


def random_lines(seed: int, count: int) -> list[dict[str, Any]]:
    """Images of classes 0..5 in which no two classes, views or ranks are alike."""
    draw = random.Random(seed)
    lines: list[dict[str, Any]] = []
    for number in range(count):
        label = draw.choices(range(6), weights=range(1, 7))[0]
        if draw.random() < 0.1:
            lines.append(refused(f"{number:04}.jpg", label))
            continue
        order = draw.sample(range(7), 7)
        order.sort(key=lambda index: index != label and draw.random() < 0.7)
        ranks = [draw.randint(1, 7) for _ in VIEWS]
        lines.append(evaluated(f"{number:04}.jpg", label, order[:5], 1 + order.index(label), view_ranks=ranks))
    return lines


def test_the_published_schema_is_a_schema_and_refuses_what_is_no_report(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    report = report_of(tmp_path, LINES)
    for spoil in ({"top1_error": 101}, {"unknown": 1}, {"top1_interval": [3]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**report, **spoil}, SCHEMA)


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
    assert classes[5]["top1_interval"] == [0.0, 100.0]


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


@pytest.mark.parametrize("seed", [0, 1])
def test_report_equals_a_slow_count_line_by_line(tmp_path: Path, seed: int) -> None:
    lines = random_lines(seed, 300)
    report = report_of(tmp_path, lines)
    seen = [line for line in lines if "refused" not in line]

    def percent(wrong: Callable[[dict[str, Any]], bool], among: list[dict[str, Any]]) -> float | None:
        return round(100 * len([line for line in among if wrong(line)]) / len(among), 4) if among else None

    for index, entry in enumerate(report["classes"]):
        own = [line for line in seen if line["label"] == index]
        assert entry["top1_error"] == percent(lambda line: line["top"][0][0] != line["label"], own)
        assert entry["top5_error"] == percent(lambda line: line["label"] not in [i for i, _ in line["top"]], own)
    for number, view in enumerate(report["views"]):
        assert view["top1_error"] == percent(lambda line, n=number: line["view_ranks"][n] != 1, seen)
        assert view["top5_error"] == percent(lambda line, n=number: line["view_ranks"][n] > 5, seen)
    pairs = Counter((line["label"], line["top"][0][0]) for line in seen if line["rank"] > 1)
    assert {(c["label"], c["predicted"]): c["count"] for c in report["confusions"]} == dict(pairs)
    assert sum(entry["images"] for entry in report["classes"]) == report["images"] == 300
    assert sum(entry["refused"] for entry in report["classes"]) == report["refused"] > 0


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    lines = random_lines(3, 100)
    first, second = (build_report(read_run(write_run(tmp_path / name, lines))) for name in "ab")
    assert report_bytes(first) == report_bytes(second)
    assert classes_csv(first) == classes_csv(second)


def test_csv_has_the_same_numbers_as_the_report(tmp_path: Path) -> None:
    report = report_of(tmp_path, LINES)
    rows = list(csv.DictReader(io.StringIO(classes_csv(report).decode())))
    assert len(rows) == len(CLASSES)
    for row, entry in zip(rows, report["classes"], strict=True):
        assert (int(row["index"]), row["wnid"], row["name"]) == (entry["index"], entry["wnid"], entry["name"])
        assert (float(row["top1_error"]) if row["top1_error"] else None) == entry["top1_error"]
        assert [float(row["top5_low"]), float(row["top5_high"])] == entry["top5_interval"]


def test_a_file_name_that_is_no_text_still_gives_valid_files(tmp_path: Path) -> None:
    name = 'n01/\udcff"=cmd,\n.jpg'  # how Python carries a byte that is no UTF-8
    report = report_of(tmp_path, [refused(name, 0)], classes=[{"wnid": "n\udcfe", "name": 'a,"b"\n'}])
    assert json.loads(report_bytes(report))["refusals"][0]["file"] == name
    assert len(list(csv.reader(io.StringIO(classes_csv(report).decode())))) == 2


def test_headline_carries_the_circumstances(tmp_path: Path) -> None:
    line = headline(report_of(tmp_path, LINES))
    for part in (
        "top-1 error 66.67 % (4 of 6)",
        "2 of 8 images refused, listed",
        "scales 256,384 mirrored",
        "3f9c",
        "CPU, fp32",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (Prediction("x.jpg", 7, ((0, 0.5),), 1), "class index 7"),
        (Prediction("x.jpg", -1, ((0, 0.5),), 1), "class index -1"),
        (Prediction("x.jpg", 0, ((9, 0.5),), 1), "class index 9"),
        (Prediction("x.jpg", 0, ((0, 0.5),), 0), "rank 0"),
    ],
)
def test_an_answer_that_the_model_cannot_give_is_refused(tmp_path: Path, line: Prediction, fault: str) -> None:
    run = read_run(write_run(tmp_path, LINES))
    with pytest.raises(RunFolderError, match=rf"prediction 2 \(x.jpg\) has {fault}.* 7 classes"):
        build_report(replace(run, predictions=[run.predictions[0], line]))


def test_verb_writes_three_files_and_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", LINES)
    assert cli.run(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "top-1 error 66.67 % (4 of 6)" in out
    assert "crane, mostly taken for crane (1 of 1)" in out
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
    assert "no image evaluated; 2 of 2 images refused" in capsys.readouterr().out
    report = json.loads((folder / "report" / "report.json").read_bytes())
    jsonschema.validate(report, SCHEMA)
    assert report["top1_error"] is None
    assert report["top1_interval"] == [0, 100]
    assert "2 of 2 images were refused" in (folder / "report" / "report.html").read_text()


def test_missing_unfinished_and_damaged_runs_are_told_apart_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = write_run(tmp_path / "unfinished", LINES, images=9)
    damaged = write_run(tmp_path / "damaged", LINES)
    text = (damaged / "predictions.jsonl").read_text().splitlines()
    (damaged / "predictions.jsonl").write_text("\n".join([*text[:2], text[2][:30], *text[3:]]) + "\n")
    for folder, message in (
        (tmp_path / "missing", "no run.json here"),
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
