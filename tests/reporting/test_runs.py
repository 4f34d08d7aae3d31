"""`prelunet runs`: which runs the table finds, what it says of each, and its files."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from statsmodels.stats.proportion import proportion_confint

from prelunet.evaluator.cli import run
from prelunet.evaluator.reporting.report_page import write_report
from prelunet.evaluator.reporting.runs import Row, group_of, read_runs, render_runs, runs_csv
from tests.helpers.run_folders import evaluated, refused, write_run
from tests.reporting.pages import HOSTILE, Elements, check_self_contained

CHUNK = {"event": "chunk", "date": "2026-11-02T10:00:07+01:00", "index": 0, "images": 64, "seconds": 4.0}


def lines_with(wrong: int, images: int = 20, beyond: int = 0) -> list[dict[str, Any]]:
    """Return images of which the first are wrong; of these, the first `beyond` by top-5 too."""
    ranks = [6] * beyond + [2] * (wrong - beyond) + [1] * (images - wrong)
    return [
        evaluated(f"{n:03}.png", n % 6, [n % 6] if rank == 1 else [(n + 1) % 6], rank) for n, rank in enumerate(ranks)
    ]


def change(folder: Path, **parts: Mapping[str, Any]) -> Path:
    """Change parts of run.json."""
    info = json.loads((folder / "run.json").read_text())
    for part, values in parts.items():
        info[part] = {**(info[part] or {}), **values}
    (folder / "run.json").write_text(json.dumps(info))
    return folder


def only_row(folder: Path) -> Row:
    (row,) = read_runs(folder).values()
    return row


def names(rows: Sequence[Row]) -> list[str]:
    return [row["run"] for row in rows]


def test_the_lowest_error_comes_first_within_each_dataset_and_protocol_and_what_has_none_last(tmp_path: Path) -> None:
    for name, wrong in (("a", 9), ("b", 3), ("deep/er/c", 5)):
        write_run(tmp_path / name, lines_with(wrong))
    write_run(tmp_path / "begun", lines_with(0), images=30)
    for name, wrong in (("other", 8), ("other2", 1)):
        change(write_run(tmp_path / name, lines_with(wrong)), dataset={"name": "street", "fingerprint": "cd" * 32})
    change(write_run(tmp_path / "renamed", lines_with(0)), protocol={"name": "center"})
    expected = ["other2", "other", "renamed", "b", "deep/er/c", "a", "begun"]
    assert names(list(read_runs(tmp_path).values())) == expected


def test_errors_are_counted_over_the_images_that_were_not_refused_with_wilson_intervals(tmp_path: Path) -> None:
    lines = [*lines_with(7, beyond=2), *(refused(f"x{n}.png", 0) for n in range(3))]
    row = only_row(write_run(tmp_path / "run", lines))
    assert (row["status"], row["images"], row["evaluated"], row["refused"]) == ("finished", 23, 20, 3)
    for k, wrong in ((1, 7), (5, 2)):
        low, high = proportion_confint(wrong, 20, method="wilson")
        assert row[f"top{k}_error"] == 100 * wrong / 20
        assert [row[f"top{k}_low"], row[f"top{k}_high"]] == pytest.approx([100 * low, 100 * high], abs=1e-4)


def test_a_row_says_which_model_on_which_images_and_what_computed_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines_with(2))
    change(
        folder,
        dataset={"selection": "first 20", "restriction": {"name": "imagenet-x", "classes": [0, 1, 2, 3, 4, 5]}},
        circumstances={
            "provider": "CUDAExecutionProvider",
            "precision": "fp16",
            "versions": {"onnxruntime": "1.2", "gpu": "H"},
        },
    )
    row = only_row(folder)
    assert (row["run"], row["model"], row["architecture"], row["dataset"]) == (".", "c.onnx", "C", "val")
    assert (row["selection"], row["restriction"]) == ("first 20", "among 6 classes of imagenet-x")
    assert (row["protocol"], row["views"]) == ("multi-scale", "scales 256,384 mirrored")
    assert (row["provider"], row["precision"], row["versions"]) == ("CUDA", "fp16", "onnxruntime 1.2, gpu H")


def test_runs_among_other_classes_are_not_ranked_together(tmp_path: Path) -> None:
    for name, classes in (("one", [0, 1, 2, 3, 4]), ("other", [0, 1, 2, 3, 5]), ("same", [0, 1, 2, 3, 4])):
        change(write_run(tmp_path / name, lines_with(2)), dataset={"restriction": {"name": "list", "classes": classes}})
    groups = {row["run"]: group_of(row) for row in read_runs(tmp_path).values()}
    assert groups["one"] == groups["same"] != groups["other"]
    assert all("among 5 classes, sha256 " in " ".join(group) for group in groups.values())


def test_runs_with_changed_protocols_are_not_ranked_together(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "multi-scale": {},
        "multi-scale, equal weight to each view": {"weights": "view"},
        "multi-scale, logits averaged, EXIF orientation applied": {"averaging": "logit", "apply_exif": True},
    }
    for number, changed in enumerate(changes.values()):
        change(write_run(tmp_path / str(number), lines_with(2)), protocol=changed)
    rows = {row["run"]: row for row in read_runs(tmp_path).values()}
    assert [rows[str(number)]["protocol"] for number in range(len(changes))] == list(changes)
    assert len(set(map(group_of, rows.values()))) == len(changes)


def test_the_speed_is_that_of_all_chunks_and_the_date_that_of_the_last_event(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines_with(2))
    assert [only_row(folder)[key] for key in ("images_per_second", "date")] == [None, None]
    later = {**CHUNK, "images": 36, "seconds": 1.0, "date": "2026-11-03T00:00:00+01:00"}
    start = {"event": "start", "date": "2026-11-01T00:00:00+01:00", "dataset": "/x", "done": 0}
    log = [json.dumps(each) for each in (start, CHUNK, {**CHUNK, "seconds": -1}, "chunk", later)]
    (folder / "log.jsonl").write_text("\n".join([*log, '{"event": "chu']))
    row = only_row(folder)
    assert row["images_per_second"] == (64 + 36) / 5
    assert row["date"] == "2026-11-02T23:00:00+00:00"


def test_a_run_without_errors_to_show_says_why(tmp_path: Path) -> None:
    write_run(tmp_path / "begun", lines_with(2), images=1030)
    (write_run(tmp_path / "new", lines_with(2)) / "predictions.jsonl").unlink()
    part = write_run(tmp_path / "part", lines_with(2, 64), images=100)
    change(part, shard={"number": 1, "of": 2})
    unknown = [{**line, "label": None, "rank": None, "view_ranks": []} for line in lines_with(2)]
    write_run(tmp_path / "unlabeled", unknown)
    rows = {row["run"]: row for row in read_runs(tmp_path).values()}
    found = {name: (row["status"], row["problem"]) for name, row in rows.items()}
    assert found == {
        "begun": ("unfinished", "20 of 1,030 images are done"),
        "new": ("unfinished", "0 of 20 images are done"),
        "part": ("shard", "part 1 of 2, for prelunet merge"),
        "unlabeled": ("unlabeled", "without labels there are no errors"),
    }
    assert all(row[key] is None for row in rows.values() for key in ("top1_error", "top5_high", "evaluated"))


def test_a_damaged_run_is_named_with_the_reason_and_the_others_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "good", lines_with(2))
    (write_run(tmp_path / "torn", lines_with(2)) / "run.json").write_text('{"version": 3, "mod')
    lines = write_run(tmp_path / "wrong", lines_with(2)) / "predictions.jsonl"
    lines.write_text(lines.read_text().replace('"rank": 2', '"rank": 99', 1))
    newer = write_run(tmp_path / "newer", lines_with(2)) / "run.json"
    newer.write_text(json.dumps({**json.loads(newer.read_text()), "version": 9}))
    assert run(["runs", str(tmp_path), "--html", str(tmp_path / "t.html")]) == 0
    printed = capsys.readouterr()
    assert "c.onnx (C)" in printed.out
    assert "torn" not in printed.out
    page = Elements((tmp_path / "t.html").read_text()).text
    for text in ("torn/run.json: damaged", "wrong/predictions.jsonl: line 1 is damaged", "newer/run.json: version 9"):
        assert f"left out: {text}" in printed.err
        assert text in page
    rows = {row["run"]: row for row in read_runs(tmp_path).values()}
    assert [rows[name]["model"] for name in ("wrong", "torn")] == ["c.onnx", None]


def test_the_portions_of_a_comparison_are_not_runs_of_their_own(tmp_path: Path) -> None:
    for name in ("b-against-a/a", "b-against-a/portions/0000-a"):
        write_run(tmp_path / name, lines_with(2))
    assert names(list(read_runs(tmp_path).values())) == ["b-against-a/a"]


def test_files_that_are_links_are_read_unless_forbidden_and_folders_that_are_links_never(tmp_path: Path) -> None:
    inside, outside = tmp_path / "runs", write_run(tmp_path / "outside", lines_with(2))
    (inside / "linked").mkdir(parents=True)
    (inside / "folder").symlink_to(outside)
    for name in ("run.json", "predictions.jsonl"):
        (inside / "linked" / name).symlink_to(outside / name)
    assert (only_row(inside)["run"], only_row(inside)["top1_error"]) == ("linked", 10)
    (row,) = read_runs(inside, open_file=None).values()
    assert (row["status"], row["model"], row["top1_error"]) == ("damaged", None, None)
    (inside / "linked" / "run.json").unlink()
    (inside / "linked" / "run.json").write_bytes((outside / "run.json").read_bytes())
    (row,) = read_runs(inside, open_file=None).values()
    assert (row["status"], row["model"], row["top1_error"]) == ("damaged", "c.onnx", None)


def test_rows_of_unchanged_runs_are_taken_from_an_earlier_result_and_others_are_read(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, lines_with(2))
    known = {key: {**row, "model": "remembered"} for key, row in read_runs(tmp_path).items()}
    write_report(write_run(tmp_path / "b", lines_with(4)))
    write_report(tmp_path / "a")
    again = list(read_runs(tmp_path, known).values())
    assert [(row["run"], row["model"]) for row in again] == [("a", "remembered"), ("b", "c.onnx")]
    assert [row["report"] for row in again] == ["a/report/report.html", "b/report/report.html"]
    (tmp_path / "a" / "run.json").unlink()
    assert names(list(read_runs(tmp_path, known).values())) == ["b"]


def test_the_csv_file_has_plain_numbers_and_a_row_for_each_run_and_json_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (write_run(tmp_path / "a", lines_with(6, 1040)) / "log.jsonl").write_text(json.dumps(CHUNK))
    write_run(tmp_path / "begun, later", lines_with(1), images=30)
    assert run(["runs", str(tmp_path), "--csv", str(tmp_path / "t.csv"), "--json"]) == 0
    first, second = csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text()))
    assert (first["images"], first["top1_error"], first["images_per_second"]) == ("1040", "0.5769", "16.0")
    assert (second["run"], second["status"], second["top1_error"]) == ("begun, later", "unfinished", "")
    for row, printed in zip((first, second), json.loads(capsys.readouterr().out)["runs"], strict=True):
        assert row == {key: "" if value is None else str(value) for key, value in printed.items()}


def test_the_terminal_shows_each_group_under_its_dataset_and_protocol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", lines_with(5))
    write_run(tmp_path / "b", lines_with(2))
    change(write_run(tmp_path / "c", lines_with(1)), protocol={"name": "center"})
    write_run(tmp_path / "none", [refused("x.png", 0)], fingerprint="cd" * 32)
    assert run(["runs", str(tmp_path)]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "model"
    assert [line.split()[:4] for line in lines if line.startswith("c.onnx")] == [
        ["c.onnx", "(C)", "c", "5.00"], ["c.onnx", "(C)", "b", "10.00"], ["c.onnx", "(C)", "a", "25.00"],
        ["c.onnx", "(C)", "none", "no"],
    ]  # fmt: skip
    assert lines[:2] == ["", "val, 20 images, center:"]
    assert lines[3:5] == ["", "val, 20 images, multi-scale:"]


def test_a_run_is_linked_to_its_report_from_wherever_the_page_is(tmp_path: Path) -> None:
    name = "50 % & #1"
    write_report(write_run(tmp_path / "runs" / name, lines_with(2)))
    write_run(tmp_path / "runs" / "without", lines_with(3))
    for place in (tmp_path / "runs", tmp_path / "pages"):
        place.mkdir(exist_ok=True)
        assert run(["runs", str(tmp_path / "runs"), "--html", str(place / "table.html")]) == 0
        (link,) = [each["href"] or "" for each in Elements((place / "table.html").read_text()).named("a")]
        assert link.endswith("50%20%25%20%26%20%231/report/report.html")
        path = place / "/".join(part.replace("50%20%25%20%26%20%231", name) for part in link.split("/"))
        assert path.resolve() == tmp_path / "runs" / name / "report" / "report.html"


def test_the_page_loads_nothing_and_hostile_names_stay_text(tmp_path: Path) -> None:
    for number, text in enumerate(HOSTILE):
        safe = text.replace("/", "\\")
        folder = write_run(tmp_path / f"{number}{safe}", lines_with(number))
        change(folder, model={"file": safe, "architecture": safe}, dataset={"name": safe, "selection": text})
    os.mkdir(os.fsencode(tmp_path) + b"/\xff\xe2\x80\xae")  # noqa: PTH102 - a name that is not UTF-8
    (tmp_path / os.fsdecode(b"\xff\xe2\x80\xae") / "run.json").write_text("[]")
    rows = list(read_runs(tmp_path).values())
    page = Elements(render_runs(rows, HOSTILE[0], link=lambda page: f"r/{page}").decode())
    check_self_contained(page, "r/")
    assert len(page.scripts) == 2
    assert not page.named("img")
    for text in HOSTILE:
        assert text.replace("/", "\\") in page.text
    assert b"\\udcff" in runs_csv(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["runs", "none"], "none: not a folder"), (["runs", "."], "no run in this folder or below. Create one"),
     (["runs", ".", "--html", "x/t.html"], "does not exist")],
)  # fmt: skip
def test_a_folder_without_runs_and_a_file_that_cannot_be_written_are_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    assert message in capsys.readouterr().err
