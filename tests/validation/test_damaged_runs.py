"""Damaged and malicious run folders are refused with the place of the fault and the fix."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator import cli
from prelunet.evaluator.datasets import DatasetSpec, open_dataset
from prelunet.evaluator.errors import RunFolderError
from prelunet.evaluator.reporting.gallery import build_gallery
from prelunet.evaluator.validation.run import read_run
from prelunet.evaluator.validation.run_log import find_dataset
from tests.helpers.run_folders import CLASSES, evaluated, refused, write_run

LINES = [
    evaluated("n01/a.png", 0, [0, 1, 2], 1),
    evaluated("n01/b.png", 0, [2, 0, 1], 2),
    evaluated("n02/c.png", 1, [1, 3, 2], 1),
    refused("n02/d.png", 1),
]
DEEP = "[" * 100_000


def changed_run(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets one value of run.json, at a path of keys."""

    def change(run: dict[str, Any]) -> None:
        for key in path[:-1]:
            run = run[key]
        run[path[-1]] = value

    return change


BAD_RUNS: list[tuple[tuple[str, ...], Any, str]] = [
    *(((key,), value, key) for key in ("model", "dataset", "circumstances") for value in (None, "abc", {}, [])),
    *((("version",), value, "version") for value in (0, -1, True, 1.0, "1", None, {})),
    *((("chunk",), value, "chunk") for value in (0, -64, True, 64.0, "64", None)),
    *((("model", "sha256"), value, "sha256") for value in (5, None, "3f9c", "Z" * 64, "ab" * 32 + "\n")),
    *((("dataset", "fingerprint"), value, "fingerprint") for value in (5, None, "")),
    *((("dataset", "images"), value, "images") for value in ("4", True, 0, -4, 4.0)),
    (("dataset", "name"), 7, "name"),
    (("model", "architecture"), 7, "architecture"),
    (("model", "extra"), 7, r"unknown field `extra` - at `\$\.model`"),
    (("circumstances", "versions"), [], "versions"),
    (("circumstances", "versions"), {"numpy": 2}, "versions"),
    (("circumstances", "provider"), None, "provider"),
    *((("classes",), value, "class") for value in (None, {}, [], ["n01"], [{"wnid": "n01"}])),
    (("classes",), [{"wnid": 1, "name": "tench"}] * 7, r"Expected `str`, got `int` - at `\$\.classes\[0\]\.wnid`"),
    (("classes",), [{"wnid": "n01", "name": 2}] * 7, r"Expected `str`, got `int` - at `\$\.classes\[0\]\.name`"),
    *(
        (("protocol", "scales"), value, "scale")
        for value in (None, [], "256", ["a"], [0], [-5], [256.5], [True], [256, 256])
    ),
    (("protocol",), None, r"Expected `object`, got `null` - at `\$\.protocol`"),
    (("protocol", "kind"), "zz", r"not a protocol: Invalid enum value .zz. - at `\$\.kind`"),
    (("protocol", "averaging"), 3, "averaging"),
    (("protocol", "mirror"), 1, r"not a protocol: Expected `bool`, got `int` - at `\$\.mirror`"),
    (("classes",), [{"wnid": "n01", "name": "x" * 1001}] * 7, r"length <= 1000.*\.name"),
    (("model", "file"), "../m.onnx", r"'\.\./m\.onnx' should be a name without folders"),
    (("dataset", "name"), "a/val", "'a/val' should be a name without folders"),
    (("protocol", "crop"), "28", "crop"),
    *((("batching",), value, "batching|rules of batches") for value in ([], {}, {"images_together": 4})),
    *((("batching", "images_together"), value, "batching") for value in (0, "4", True)),
    (("batching", "rows"), 3, "the rules of batches: unknown key 'rows'"),
    (("batching", "canvas_step"), 0, "canvas_step"),
    (("shard",), {"number": 3, "of": 2}, "number should be at most 2"),
    (("members",), [{"model": {}, "weight": 1}], "members"),
    (("protocol", "long_side_cap"), None, "long_side_cap"),
]


@pytest.mark.parametrize(("path", "value", "fault"), BAD_RUNS)
def test_a_wrong_value_in_run_json_names_its_field(
    tmp_path: Path, path: tuple[str, ...], value: Any, fault: str
) -> None:
    write_run(tmp_path, LINES)
    run = json.loads((tmp_path / "run.json").read_text())
    changed_run(*path, value=value)(run)
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(RunFolderError, match=rf"run\.json: damaged \(.*{fault}.*--fresh"):
        read_run(tmp_path)


BAD_LINES: list[tuple[dict[str, Any], str]] = [
    *(({"rank": value}, "rank") for value in ("a", None, 2.5, 0, -5, 8, 1e300, True, [1])),
    *(({"label": value}, "label") for value in ("a", 1.5, True, -1, 7, {})),
    *(({"capped": value}, "capped") for value in ("yes", None, 1, [1])),
    *(({"file": value}, r"Expected `str`, .*\$\.file`") for value in (5, None, ["n01/b.png"])),
    *(
        ({"file": value}, "file should be a relative name inside the dataset")
        for value in ("", "/etc/passwd", "../b.png", "n01/../../b.png", "n01/..", ".", "n01//b.png", "n01/b\0.png")
    ),
    *(({"top": value}, "top") for value in (None, "abc", [], [[0, 0.1]] * 6, [["a", 0.5]], [[7, 0.5]], [[True, 0.5]])),
    *(
        ({"top": [[0, value]]}, r"Expected `float`.*\$\.top\[0\]\[1\]`")
        for value in ("0.5", None, -0.5, 2, 1e300, True)
    ),
    ({"rank": float("nan")}, "NaN is not a finite number"),
    ({"top": [[0, float("nan")]]}, "NaN is not a finite number"),
    ({"top": [[0, float("inf")]]}, "Infinity is not a finite"),
    ({"top": [[0]]}, r"`array` of length 2, got 1 - at `\$\.top\[0\]`"),
    *(({"view_ranks": value}, "view_ranks") for value in (None, [], [2], [2] * 5, {"rank": 2})),
    *(({"view_ranks": [2, 2, 2, value]}, "view_ranks") for value in ("x", 0, 8, True, None, 1.5)),
    ({"top": [[2, 0.6], [0, 0.2], [1, 0.1], [3, 0.05]]}, "top should have 5 answers, not 4"),
    ({"label": None}, "rank and view_ranks should be given with a label, and only then"),
    ({"refused": "and yet it has a rank"}, "unknown field `top`"),
    ({"certainty": 1}, "unknown field `certainty`"),
]


def write_lines(folder: Path, lines: list[str]) -> None:
    (folder / "predictions.jsonl").write_text("".join(line + "\n" for line in lines))


@pytest.mark.parametrize(("change", "fault"), BAD_LINES)
def test_a_wrong_value_in_a_line_names_its_number(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    write_run(tmp_path, LINES)
    write_lines(tmp_path, [json.dumps(line) for line in (LINES[0], {**LINES[1], **change}, *LINES[2:])])
    with pytest.raises(
        RunFolderError, match=rf"predictions\.jsonl: line 2 is damaged \((.*({fault}).*)\).*command of this run"
    ):
        read_run(tmp_path)


@pytest.mark.parametrize("place", [0, 1])
def test_compare_refuses_a_run_with_a_damaged_line_as_report_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: int
) -> None:
    folders = [write_run(tmp_path / name, LINES) for name in "ab"]
    write_lines(folders[place], [json.dumps(line) for line in (LINES[0], {**LINES[1], "rank": 8}, *LINES[2:])])
    for command in (["compare", *map(str, folders)], ["report", str(folders[place])]):
        assert cli.run(command) == 2
        assert (
            f"{folders[place]}/predictions.jsonl: line 2 is damaged (rank and view_ranks should be at most 7"
            in capsys.readouterr().err
        )


def test_half_a_character_in_run_json_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, LINES)
    info = json.loads((tmp_path / "run.json").read_text())
    info["model"]["architecture"] = "\udcff"
    (tmp_path / "run.json").write_text(json.dumps(info))
    with pytest.raises(RunFolderError, match=r"run\.json: damaged .*half a character"):
        read_run(tmp_path)


def test_tied_scores_in_the_order_of_the_classes_are_accepted(tmp_path: Path) -> None:
    line = evaluated("n01/a.png", 6, [], 7)
    line["top"] = [[index, 1 / 7] for index in range(5)]
    assert read_run(write_run(tmp_path, [line])).predictions[0].rank == 7


@pytest.mark.parametrize("kind", ["loop", "folder", "pipe"])
@pytest.mark.parametrize("name", ["predictions.jsonl", "run.json"])
def test_what_is_not_a_file_is_not_read_as_a_run_without_lines(tmp_path: Path, kind: str, name: str) -> None:
    write_run(tmp_path, LINES)
    path = tmp_path / name
    path.unlink()
    if kind == "loop":
        path.symlink_to(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(RunFolderError) as caught:
        read_run(tmp_path)
    assert "images are done" not in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("value", [5, None, ["a"], True])
def test_a_refusal_whose_reason_is_not_text_is_refused(tmp_path: Path, value: Any) -> None:
    write_run(tmp_path, [*LINES[:3], {**LINES[3], "refused": value}])
    with pytest.raises(RunFolderError, match=r"line 4 is damaged .*Expected `str`, .* at `\$\.refused`"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "line", ["[]", '"refused"', "5", "null", "{}", DEEP, "\udcff", "1" * 5000, "{" + '"a":{' * 90_000]
)
def test_a_line_that_is_not_a_prediction_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    write_run(tmp_path, LINES)
    text = "\n".join([json.dumps(LINES[0]), line, json.dumps(LINES[2])])
    (tmp_path / "predictions.jsonl").write_bytes(text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(RunFolderError, match=r"predictions\.jsonl: line 2 is damaged .*command of this run"):
        read_run(tmp_path)


@pytest.mark.parametrize(("order", "number"), [((3, 2, 1, 0), 2), ((0, 1, 1, 2), 3), ((0, 1, 2, 3, 0), 5)])
def test_lines_out_of_order_or_repeated_are_refused(tmp_path: Path, order: tuple[int, ...], number: int) -> None:
    write_run(tmp_path, LINES)
    write_lines(tmp_path, [json.dumps(LINES[index]) for index in order])
    with pytest.raises(RunFolderError, match=rf"line {number} is damaged .*should not follow.*Restore"):
        read_run(tmp_path)


def test_more_lines_than_images_are_not_called_unfinished(tmp_path: Path) -> None:
    write_run(tmp_path, LINES, images=3)
    with pytest.raises(RunFolderError, match=r"4 lines, but the run has 3 images\. Restore") as caught:
        read_run(tmp_path)
    assert "Finish" not in str(caught.value)


@pytest.mark.parametrize("name", ["run.json", "predictions.jsonl"])
@pytest.mark.parametrize(
    "content", [b"", b"null", b"abc", DEEP.encode(), b"\xff\xfe\x00", b'{"version": NaN}', b"\x1f\x8b"]
)
def test_the_program_exits_2_with_one_message_for_any_damaged_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    write_run(tmp_path, LINES)
    (tmp_path / name).write_bytes(content)
    assert cli.run(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"prelunet: {tmp_path}")
    assert error.count("\n") == 1
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    "line",
    [
        DEEP,
        '{"event": "start", "dataset": "a\\ud800b"}',
        '{"event": "start", "dataset": "/a", "labels": "\\ud800"}',
        '{"event": "start", "dataset": "a\\u0000b"}',
        '{"event": [], "dataset": 5}',
        "5",
        *(
            f'{{"event": "start", "dataset": "/a", {field}}}'
            for field in (
                '"labels": 5',
                '"labels": "a\\u0000b"',
                '"no_labels": 1',
                '"limit": 0',
                '"limit": "7"',
                '"classes": "n1"',
                '"classes": [3]',
            )
        ),
    ],
)
def test_a_damaged_log_is_ignored_and_stops_no_report(tmp_path: Path, line: str) -> None:
    write_run(tmp_path, LINES)
    (tmp_path / "log.jsonl").write_text(line + "\n")
    assert find_dataset(tmp_path) is None
    assert build_gallery(read_run(tmp_path), None).missing is not None


def test_the_last_undamaged_start_in_the_log_locates_the_dataset(tmp_path: Path) -> None:
    starts = (
        {"event": "start", "dataset": "/old"},
        {"event": "resume", "dataset": "/d\udcff", "labels": None, "no_labels": False, "limit": 7, "classes": ["n1"]},
        {"event": "resume", "dataset": "/new", "limit": "7"},
        {"event": "chunk", "index": 0},
    )
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    assert find_dataset(tmp_path) == DatasetSpec(Path("/d\udcff"), limit=7, classes=("n1",))


@pytest.mark.parametrize("given", [True, False])
def test_only_images_of_the_dataset_get_onto_the_page(tmp_path: Path, given: bool) -> None:
    data = tmp_path / "data"
    pixels = np.random.default_rng(0).integers(0, 256, (20, 31, 3), dtype=np.uint8)
    for path in (data / "n01" / "a.png", data / ".n01" / "private.png"):  # hidden, so not an image of the dataset
        path.parent.mkdir(parents=True)
        Image.fromarray(pixels).save(path)
    fingerprint = open_dataset(data, split="val", wnids=[entry["wnid"] for entry in CLASSES]).fingerprint
    lines = [evaluated(".n01/private.png", 0, [2, 0], 2)]
    folder = write_run(tmp_path / "run", lines, fingerprint=fingerprint, data=os.fspath(data))
    with pytest.raises(RunFolderError, match=r"'\.n01/private\.png' is not in its dataset.*--fresh"):
        build_gallery(read_run(folder), data if given else None)
