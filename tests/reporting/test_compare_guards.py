"""Guards of `prelunet compare`: a worse B, a B that refuses images."""

import json
from pathlib import Path
from typing import Any

import pytest

from prelunet.evaluator import cli
from tests.helpers.run_folders import evaluated, refused, write_run

LINES = [evaluated("n01/a.jpg", 0, [0, 1, 2, 3, 4], 1), evaluated("n02/a.jpg", 1, [1, 3, 2, 0, 4], 1)]


@pytest.mark.parametrize(
    ("points", "metric", "code"),
    [  # B is 25 points worse by top-1, and as four images are few, possibly 63; 0 by top-5
        ("0", "both", 6),
        ("24.9", "both", 6),
        ("25", "both", 7),
        ("80", "both", 0),
        ("0", "top1", 6),
        ("0", "top5", 0),
    ],
)
def test_fail_if_worse_exits_6_beyond_the_points_and_has_written_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], points: str, metric: str, code: int
) -> None:
    right = [evaluated(f"{number}.jpg", 0, [0, 1, 2, 3, 4], 1) for number in range(4)]
    a = write_run(tmp_path / "a", right)
    b = write_run(tmp_path / "b", [*right[:3], evaluated("3.jpg", 0, [1, 0, 2, 3, 4], 2)])
    assert cli.run(["compare", str(a), str(b), "--fail-if-worse", points, "--metric", metric]) == code
    message = capsys.readouterr().err
    if code:
        assert f"worse than A by more than {float(points):g} points" in message
        assert "top-1 error 25.00 % against 0.00 %, +25.00 points" in message
        assert "top-5" not in message
    assert (b / "report" / "compared-with-a" / "compare.html").exists()
    assert cli.run(["compare", str(b), str(a), "--fail-if-worse", points, "--metric", metric]) != 6  # better


def test_runs_among_other_classes_are_refused_with_a_class_that_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for name, classes in (("a", [0, 1, 2, 3, 4]), ("b", [0, 1, 2, 3, 5])):
        folders.append(str(write_run(tmp_path / name, [evaluated("0.jpg", 0, classes, 1)])))
        info = json.loads((tmp_path / name / "run.json").read_text())
        info["dataset"]["restriction"] = {"name": "list", "classes": classes}
        (tmp_path / name / "run.json").write_text(json.dumps(info))
    assert cli.run(["compare", *folders]) == 2
    wnid = json.loads((tmp_path / "a" / "run.json").read_text())["classes"][4]["wnid"]
    assert f"predict among different classes (5 and 5; {wnid} in one run only)" in capsys.readouterr().err


def test_a_run_among_all_classes_by_name_is_compared_with_an_ordinary_one(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / name, [evaluated("0.jpg", 0, [0, 1, 2, 3, 4], 1)]) for name in "ab")
    info = json.loads((b / "run.json").read_text())
    info["dataset"]["restriction"] = {"name": "dataset", "classes": list(range(len(info["classes"])))}
    (b / "run.json").write_text(json.dumps(info))
    assert cli.run(["compare", str(a), str(b)]) == 0


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_fail_if_worse_exits_6_also_if_nobody_reads_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    def closed(*_arguments: object, **_options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("prelunet.evaluator.verbs.compare.echo", closed)
    a = write_run(tmp_path / "a", [evaluated("0.jpg", 0, [0, 1, 2, 3, 4], 1)])
    b = write_run(tmp_path / "b", [evaluated("0.jpg", 0, [1, 0, 2, 3, 4], 2)])
    assert cli.run(["compare", str(a), str(b), "--fail-if-worse", "0", *form]) == 6


def ten(refused_ones: int, wrong_ones: int = 0) -> list[dict[str, Any]]:
    """Ten images of class 0: the first refused, then some wrong by top-1, the rest right."""
    return [
        refused(f"{number}.jpg", 0, "no image")
        if number < refused_ones
        else evaluated(f"{number}.jpg", 0, [1, 0, 2], 2)
        if number < refused_ones + wrong_ones
        else evaluated(f"{number}.jpg", 0, [0, 1, 2], 1)
        for number in range(10)
    ]


@pytest.mark.parametrize(
    ("a", "b", "points", "code"),
    [
        (ten(0), ten(2), "19.9", 6),  # 2 of 10 count as wrong in B: 20 points
        (ten(0), ten(2), "20", 7),  # not more, but with so few images possibly
        (ten(2), ten(0), "0", 0),  # images that A refused do not count
        (ten(2), ten(2), "0", 0),  # nor those of both
        (ten(0, 2), ten(2), "0", 0),  # B may refuse what A gets wrong
        (ten(0, 5), ten(1, 5), "11", 6),  # 5 of 9 against 4 of 9: 11.1 points without the refused, 10 with it
    ],
)
def test_b_does_not_pass_by_refusing_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], a: Any, b: Any, points: str, code: int
) -> None:
    folders = [str(write_run(tmp_path / name, lines)) for name, lines in (("a", a), ("b", b))]
    assert cli.run(["compare", *folders, "--fail-if-worse", points, "--metric", "top1"]) == code
    message = capsys.readouterr().err
    only_b = sum("refused" in two and "refused" not in one for one, two in zip(a, b, strict=True))
    assert (f"warning: B refused {only_b} image" in message) == bool(only_b)
    assert ("prelunet: B is worse than A" in message) == (code == 6)


def test_fail_if_worse_does_not_pass_without_common_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", [refused("a.jpg", 0)])
    assert cli.run(["compare", str(a), str(a), "--fail-if-worse", "5"]) == 7
    captured = capsys.readouterr()
    assert "no image was evaluated in both" in captured.out
    assert "no image was evaluated in both" in captured.err


@pytest.mark.parametrize("points", ["-1", "nan", "inf", "much"])
def test_points_that_are_no_points_are_refused_before_anything_is_written(tmp_path: Path, points: str) -> None:
    a, b = write_run(tmp_path / "a", LINES), write_run(tmp_path / "b", LINES)
    assert cli.run(["compare", str(a), str(b), "--fail-if-worse", points]) == 2
    assert not (b / "report").exists()
