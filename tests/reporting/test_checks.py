"""What builds read of a comparison: exit codes, Markdown and JUnit."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from prelunet.evaluator import cli
from prelunet.evaluator.errors import EnvironmentFault
from tests.helpers.run_folders import evaluated, write_run

RIGHT, WRONG = [0, 1, 2, 3, 4], [1, 0, 2, 3, 4]


def two_runs(folder: Path, only_a: int, only_b: int, images: int = 40) -> list[str]:
    """Write runs of which A or B alone is wrong, by top-1, on some images."""
    wrong = {"a": range(only_a), "b": range(only_a, only_a + only_b)}
    for name, numbers in wrong.items():
        lines = [
            evaluated(f"{number:02}.jpg", 0, WRONG if number in numbers else RIGHT, 2 if number in numbers else 1)
            for number in range(images)
        ]
        write_run(folder / name, lines)
    return ["compare", str(folder / "a"), str(folder / "b"), "--fail-if-worse", "5", "--metric", "top1"]


@pytest.mark.parametrize(
    ("only_a", "only_b", "code", "verdict"),
    [
        (0, 0, 0, "not worse"),  # although the interval of so few images is wide: nothing changed
        (12, 0, 0, "not worse"),
        (1, 2, 7, "cannot tell"),  # 2.5 points more, but possibly 13
        (2, 5, 6, "worse"),
    ],
)
def test_a_build_passes_fails_or_cannot_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], only_a: int, only_b: int, code: int, verdict: str
) -> None:
    files = ["--markdown", str(tmp_path / "summary.md"), "--junit", str(tmp_path / "junit.xml")]
    assert cli.run([*two_runs(tmp_path, only_a, only_b), *files]) == code
    captured = capsys.readouterr()
    assert "A, the baseline" in captured.out
    assert ("cannot tell if B is worse than A by more than 5 points" in captured.err) == (code == 7)
    tokens = MarkdownIt("commonmark").enable("table").parse((tmp_path / "summary.md").read_text())
    cells = [token.content for token in tokens if token.type == "inline"]
    assert cells[:7] == ["B `c.onnx (B)` compared with A `c.onnx (A)`", "error", "A", "B", "B − A, points",
                         "95 % interval", "result"]  # fmt: skip
    results = {"not worse": "holds", "worse": "does not hold", "cannot tell": "cannot tell"}
    assert cells[-1].startswith(f"top-1 error of B at most 5 points above A's: **{results[verdict]}**")
    (suite,) = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert [suite.get(key) for key in ("tests", "failures", "errors", "skipped")] == [
        "1", str(int(code == 6)), "0", str(int(code == 7))
    ]  # fmt: skip
    (case,) = suite
    assert [child.tag for child in case] == {0: [], 6: ["failure"], 7: ["skipped"]}[code]


def test_the_summary_is_appended_to_the_file_that_the_build_system_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary, own = tmp_path / "step.md", tmp_path / "own.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    words = two_runs(tmp_path, 0, 0)
    assert cli.run([*words, "--markdown", str(own)]) == 0
    assert summary.read_text() == f"before\n{own.read_text()}"
    assert cli.run([*words, "--markdown", str(summary)]) == 0
    assert summary.read_text() == f"before\n{2 * own.read_text()}"


@pytest.mark.parametrize("option", ["--markdown", "--junit", "GITHUB_STEP_SUMMARY"])
def test_a_summary_that_cannot_be_written_is_named_before_anything_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    words, taken = two_runs(tmp_path, 2, 5), tmp_path / "taken"
    taken.mkdir()
    for path, fault in ((tmp_path / "none" / "summary", "does not exist"), (taken, "not a regular file")):
        if option.startswith("--"):
            options = [option, str(path)]
        else:
            monkeypatch.setenv(option, str(path))
            options = ["--markdown", str(tmp_path / "own.md")]
        assert cli.run([*words, *options]) == 2
        message = capsys.readouterr().err
        assert str(path) in message
        assert fault in message
    assert not (tmp_path / "b" / "report").exists()


def test_the_verdict_is_the_exit_code_even_if_the_disk_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise EnvironmentFault("the disk is full")

    monkeypatch.setattr("prelunet.evaluator.verbs.compare.write_junit", full)
    file = ["--junit", str(tmp_path / "junit.xml")]
    assert cli.run([*two_runs(tmp_path, 2, 5), *file]) == 6
    captured = capsys.readouterr()
    assert "B is worse than A by more than 5 points" in captured.err
    assert "McNemar" in captured.out
    assert (tmp_path / "b" / "report" / "compared-with-a" / "compare.json").exists()
    assert cli.run([*two_runs(tmp_path / "same", 0, 0), *file]) == 5


def test_names_cannot_break_out_of_the_summary(tmp_path: Path) -> None:
    words = two_runs(tmp_path, 0, 3)
    run = tmp_path / "b" / "run.json"
    run.write_text(run.read_text().replace("c.onnx", "a|b` <b>.onnx"))
    cli.run([*words, "--markdown", str(tmp_path / "s.md"), "--junit", str(tmp_path / "j.xml")])
    tokens = MarkdownIt("commonmark").enable("table").parse((tmp_path / "s.md").read_text())
    heading = next(token for token in tokens if token.type == "inline")
    codes = [child.content for child in heading.children or [] if child.type == "code_inline"]
    assert codes[0] == "a|b' <b>.onnx"
    case = ElementTree.parse(tmp_path / "j.xml").getroot()[0][0]
    assert case.get("classname") == "a|b` <b>.onnx against c.onnx"


def test_options_that_belong_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = two_runs(tmp_path, 0, 0)
    assert cli.run([*words[:3], "--junit", str(tmp_path / "j.xml")]) == 2
    assert "--junit writes the verdicts of --fail-if-worse" in capsys.readouterr().err
    assert cli.run([*words, str(tmp_path), "--data", str(tmp_path)]) == 2
    assert cli.run([*words, "--until-decided"]) == 2
    assert "prelunet compare A.onnx B.onnx DATA" in capsys.readouterr().err
    for words_only, message in (
        ([*words, "--margin", "3"], "belong to --until-decided"),
        ([*words, "--device", "cpu"], "belong to --until-decided"),
        ([*words[:3], str(tmp_path), "--until-decided", "--metric", "both"], "needs one error that decides"),
        ([*words[:3], str(tmp_path), "--until-decided"], "a folder, not a model file"),
        (["compare", __file__, words[2]], "a file, not the folder of a run"),
        ([*words[:3], words[1]], "a third run; compare two at a time"),
    ):
        assert cli.run(words_only) == 2
        assert message in capsys.readouterr().err
