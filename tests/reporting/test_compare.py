import csv
import io
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from prelunet.evaluator import cli
from prelunet.evaluator.errors import RunFolderError
from prelunet.evaluator.reporting.compare import compare_runs, comparison_csv, format_p_value, judgment
from prelunet.evaluator.reporting.compare_page import write_comparison
from prelunet.evaluator.reporting.html import json_bytes
from prelunet.evaluator.reporting.paired import adjusted_p, difference_interval, mcnemar
from prelunet.evaluator.reporting.statistics import macro_interval
from prelunet.evaluator.validation.run import read_run
from tests.helpers.run_folders import CLASSES, evaluated, refused, write_run
from tests.reporting.scored_runs import changed_info

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "compare.schema.json").read_text(encoding="utf-8"))

A_LINES = [
    evaluated("n01/a.jpg", 0, [0, 1, 2, 3, 4], 1),
    evaluated("n01/b.jpg", 0, [2, 0, 1, 3, 4], 2),
    evaluated("n01/c.jpg", 0, [2, 1, 3, 4, 5], 7, first=0.9),
    evaluated("n01/d.jpg", 0, [0, 1, 2, 3, 4], 1),
    evaluated("n02/a.jpg", 1, [1, 3, 2, 0, 4], 1),
    evaluated("n02/b.jpg", 1, [1, 3, 2, 0, 4], 1),
    refused("n04/a.jpg", 3, "truncated"),
    evaluated("n04/b.jpg", 3, [1, 3, 2, 0, 4], 2),
    refused("n06/a.jpg", 5, "no image"),
]
B_LINES = [
    evaluated("n01/a.jpg", 0, [3, 0, 1, 2, 4], 2, first=0.7),  # right, then second
    evaluated("n01/b.jpg", 0, [0, 1, 2, 3, 4], 1),  # second, then right
    evaluated("n01/c.jpg", 0, [0, 1, 2, 3, 4], 1),  # seventh, then right
    evaluated("n01/d.jpg", 0, [0, 1, 2, 3, 4], 1),
    evaluated("n02/a.jpg", 1, [3, 2, 0, 4, 5], 6),  # right, then sixth
    evaluated("n02/b.jpg", 1, [1, 3, 2, 0, 4], 1),
    evaluated("n04/a.jpg", 3, [3, 1, 2, 0, 4], 1),
    refused("n04/b.jpg", 3, "too large"),
    refused("n06/a.jpg", 5, "no image"),
]


def compared(folder: Path, a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]], **rest: Any) -> dict[str, Any]:
    runs = [read_run(write_run(folder / name, lines, **rest)) for name, lines in (("a", a), ("b", b))]
    comparison = compare_runs(*runs)
    jsonschema.validate(comparison, SCHEMA)
    return comparison


def random_run(seed: int, labels: Sequence[int], skill: float) -> list[dict[str, Any]]:
    """Return a line per image. labels: classes; skill: probability that the answer is right."""
    draw = random.Random(seed)
    lines: list[dict[str, Any]] = []
    for number, label in enumerate(labels):
        if draw.random() < 0.05:
            lines.append(refused(f"{number:04}.jpg", label))
            continue
        order = draw.sample(range(7), 7)
        order.sort(key=lambda index: index != label or draw.random() > skill)
        lines.append(evaluated(f"{number:04}.jpg", label, order[:5], 1 + order.index(label), first=draw.random()))
    return lines


def labels_of(count: int) -> list[int]:
    """Return labels 0..5 in very unequal numbers; class 6 has no image."""
    return random.Random(5).choices(range(6), weights=[1, 1, 3, 5, 10, 40], k=count)


def test_the_published_schema_is_a_schema_and_refuses_what_is_no_comparison(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    comparison = compared(tmp_path, A_LINES, B_LINES)
    for spoil in ({"version": 2}, {"unknown": 1}, {"evaluated": -1}, {"flips": [{"file": "a"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**comparison, **spoil}, SCHEMA)


def test_images_that_one_run_refused_count_for_neither_and_are_listed(tmp_path: Path) -> None:
    comparison = compared(tmp_path, A_LINES, B_LINES)
    assert (comparison["images"], comparison["evaluated"]) == (9, 6)
    assert (comparison["a"]["refused"], comparison["b"]["refused"]) == (2, 2)
    assert comparison["left_out"] == [
        {"file": "n04/a.jpg", "label": 3, "a": "truncated", "b": None},
        {"file": "n04/b.jpg", "label": 3, "a": None, "b": "too large"},
        {"file": "n06/a.jpg", "label": 5, "a": "no image", "b": "no image"},
    ]
    assert comparison["a"]["top1_error"] == 33.3333  # 2 of the 6 that both evaluated, not 3 of its own 7
    assert comparison["b"]["top1_error"] == 33.3333
    assert (comparison["a"]["top5_error"], comparison["b"]["top5_error"]) == (16.6667, 16.6667)


def test_each_class_has_its_difference_and_is_improved_unchanged_or_worse(tmp_path: Path) -> None:
    comparison = compared(tmp_path, A_LINES, B_LINES)
    first, second, _, fourth, *_ = comparison["classes"]
    assert (first["evaluated"], first["top1"]["a_error"], first["top1"]["b_error"]) == (4, 50.0, 25.0)
    assert (first["top1"]["difference"], first["top1"]["only_a_wrong"], first["top1"]["only_b_wrong"]) == (-25.0, 2, 1)
    assert (second["top1"]["difference"], second["top5"]["difference"]) == (50.0, 50.0)
    assert fourth["evaluated"] == 0
    assert (fourth["top1"]["difference"], fourth["top1"]["p"], fourth["top1"]["adjusted_p"]) == (None, None, None)
    assert fourth["top1"]["interval"] is fourth["top5"]["interval"] is None
    counts = [comparison["top1"][f"classes_{change}"] for change in ("improved", "unchanged", "worse")]
    assert counts == [1, 0, 1]  # classes without common images are none of the three


def test_flipped_images_have_both_answers_and_the_errors_by_which_they_flipped(tmp_path: Path) -> None:
    flips = compared(tmp_path, A_LINES, B_LINES)["flips"]
    assert [(flip["file"], flip["top1"], flip["top5"]) for flip in flips] == [
        ("n01/a.jpg", "worse", None),
        ("n01/b.jpg", "better", None),
        ("n01/c.jpg", "better", "better"),
        ("n02/a.jpg", "worse", "worse"),
    ]
    assert flips[0]["label"] == 0
    assert flips[0]["a"] == {"answer": 0, "score": 0.6, "rank": 1}
    assert flips[0]["b"] == {"answer": 3, "score": 0.7, "rank": 2}


@pytest.mark.parametrize("seed", [0, 1])
def test_a_comparison_equals_a_slow_count_image_by_image(tmp_path: Path, seed: int) -> None:
    labels = labels_of(300)
    a_lines, b_lines = random_run(seed, labels, 0.5), random_run(seed + 10, labels, 0.8)
    comparison = compared(tmp_path, a_lines, b_lines)
    common = [(a, b) for a, b in zip(a_lines, b_lines, strict=True) if "refused" not in a and "refused" not in b]
    assert comparison["evaluated"] == len(common) < 300
    for key, k in (("top1", 1), ("top5", 5)):

        def wrong(line: dict[str, Any], k: int = k) -> bool:
            return line["label"] not in [index for index, _ in line["top"][:k]]

        p_values = {}
        for index, entry in enumerate(comparison["classes"]):
            own = [(wrong(a), wrong(b)) for a, b in common if a["label"] == index]
            table = [own.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))]
            assert [entry[key][name] for name in ("both_wrong", "only_a_wrong", "only_b_wrong")] == table[:3]
            if own:
                assert entry[key]["interval"] == list(difference_interval(*table))
                assert entry[key]["difference"] == round(100 * (table[2] - table[1]) / len(own), 4)
                p_values[index] = mcnemar(table[1], table[2])
                assert entry[key]["p"] == p_values[index]
        adjusted = dict(zip(p_values, adjusted_p(list(p_values.values())), strict=True))
        assert {e["index"]: e[key]["adjusted_p"] for e in comparison["classes"] if e["evaluated"]} == adjusted
        assert {e["index"] for e in comparison["classes"] if e[key]["stands"]} == {
            index for index, p in adjusted.items() if p <= 0.05
        }
        all_ = [(wrong(a), wrong(b)) for a, b in common]
        assert comparison[key]["only_a_wrong"] == all_.count((True, False))
        assert comparison[key]["only_b_wrong"] == all_.count((False, True))
        assert comparison[key]["p"] == mcnemar(all_.count((True, False)), all_.count((False, True)))
        for side, place in (("a", 0), ("b", 1)):
            expected = round(100 * sum(pair[place] for pair in all_) / len(all_), 4)
            assert comparison[side][f"{key}_error"] == expected
    assert comparison["top1"]["difference"] < 0  # B is right more often
    assert comparison["top1"]["classes_improved_that_stand"] >= 1
    assert judgment(comparison["top1"]) == "B is better"


def test_the_mean_over_classes_weighs_classes_alike_and_its_interval_is_that_of_the_statistics(tmp_path: Path) -> None:
    labels = labels_of(400)
    comparison = compared(tmp_path, random_run(3, labels, 0.5), random_run(4, labels, 0.7))
    seen = [entry for entry in comparison["classes"] if entry["evaluated"]]
    for key in ("top1", "top5"):
        found = comparison[key]
        mean = sum(entry[key]["difference"] for entry in seen) / len(seen)
        assert found["macro_difference"] == pytest.approx(mean, abs=1e-4)  # of figures with 4 decimals
        only_a, only_b = ([entry[key][f"only_{side}_wrong"] for entry in seen] for side in "ab")
        images = [entry["evaluated"] for entry in seen]
        assert found["macro_interval"] == macro_interval(only_b, only_a, images)
        assert found["macro_interval"][0] < found["macro_difference"] < found["macro_interval"][1]
        for side in "ab":
            mean = sum(entry[key][f"{side}_error"] for entry in seen) / len(seen)
            assert comparison[side][f"{key}_macro_error"] == pytest.approx(mean, abs=1e-4)
    assert abs(comparison["top1"]["macro_difference"] - comparison["top1"]["difference"]) > 0.1


def test_where_a_class_has_one_image_in_both_the_mean_over_classes_has_no_interval(tmp_path: Path) -> None:
    a, b = A_LINES[:6], B_LINES[:6]
    assert compared(tmp_path / "two", a, b)["top1"]["macro_interval"] is not None
    comparison = compared(tmp_path / "one", a, [*b[:5], refused("n02/b.jpg", 1)])
    assert [comparison[key]["macro_interval"] for key in ("top1", "top5")] == [None, None]
    write_comparison(tmp_path / "one" / "a", tmp_path / "one" / "b", out=tmp_path)
    assert (tmp_path / "compare.html").read_text().count("no interval: a class has only one image") == 2


def test_exchanging_the_runs_turns_every_sign(tmp_path: Path) -> None:
    labels = labels_of(120)
    runs = random_run(6, labels, 0.4), random_run(7, labels, 0.8)
    forth, back = compared(tmp_path / "1", *runs), compared(tmp_path / "2", *reversed(runs))
    for key in ("top1", "top5"):
        one, other = forth[key], back[key]
        assert one["difference"] == -other["difference"]
        assert one["interval"] == [-bound for bound in reversed(other["interval"])]
        assert (one["p"], one["only_a_wrong"]) == (other["p"], other["only_b_wrong"])
        assert (one["classes_improved"], one["classes_unchanged"]) == (
            other["classes_worse"],
            other["classes_unchanged"],
        )
    turned = {"better": "worse", "worse": "better", None: None}
    assert [flip["top1"] for flip in forth["flips"]] == [turned[flip["top1"]] for flip in back["flips"]]


def test_a_run_compared_with_itself_shows_no_difference_anywhere(tmp_path: Path) -> None:
    lines = random_run(8, labels_of(100), 0.6)
    comparison = compared(tmp_path, lines, lines)
    for key in ("top1", "top5"):
        found = comparison[key]
        assert (found["difference"], found["macro_difference"], found["p"]) == (0, 0, 1)
        assert found["interval"][0] < 0 < found["interval"][1]
        assert found["classes_improved"] == found["classes_worse"] == 0
        assert found["classes_unchanged"] == len({line["label"] for line in lines if "refused" not in line})
        assert judgment(found) == "no difference"
        assert not any(entry[key]["stands"] for entry in comparison["classes"])
    assert comparison["flips"] == []


def test_as_many_wrong_in_each_alone_is_a_tie_though_images_flipped(tmp_path: Path) -> None:
    comparison = compared(tmp_path, A_LINES[:1] + B_LINES[1:2], B_LINES[:1] + A_LINES[1:2])
    found = comparison["top1"]
    assert (found["only_a_wrong"], found["only_b_wrong"]) == (0, 2)
    tie = compared(tmp_path / "tie", A_LINES[:2], B_LINES[:2])
    assert (tie["top1"]["only_a_wrong"], tie["top1"]["only_b_wrong"]) == (1, 1)
    assert (tie["top1"]["difference"], tie["top1"]["p"], tie["top1"]["classes_unchanged"]) == (0, 1, 1)
    assert len(tie["flips"]) == 2


def test_runs_without_a_common_image_have_no_difference(tmp_path: Path) -> None:
    a = [evaluated("n01/a.jpg", 0, [0], 1), refused("n02/a.jpg", 1)]
    b = [refused("n01/a.jpg", 0), evaluated("n02/a.jpg", 1, [2, 1], 2)]
    comparison = compared(tmp_path, a, b)
    assert (comparison["evaluated"], comparison["images"]) == (0, 2)
    for key in ("top1", "top5"):
        found = comparison[key]
        assert (found["difference"], found["p"], found["macro_difference"]) == (None, None, None)
        assert found["interval"] is found["macro_interval"] is None
        assert comparison["a"][f"{key}_interval"] is comparison["b"][f"{key}_interval"] is None
        assert judgment(found) == "no image was evaluated in both"


def test_one_class_alone_can_be_compared(tmp_path: Path) -> None:
    lines = [evaluated(f"{number}.jpg", 0, [0], 1, classes=1) for number in range(3)]
    comparison = compared(tmp_path, lines, lines, classes=CLASSES[:1])
    assert comparison["top1"]["classes_unchanged"] == len(comparison["classes"]) == 1


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    labels = labels_of(60)
    lines = random_run(1, labels, 0.4), random_run(2, labels, 0.5)
    first, second = (compared(tmp_path / name, *lines) for name in "xy")
    assert json_bytes(first) == json_bytes(second)
    assert comparison_csv(first) == comparison_csv(second)


def test_csv_has_the_same_numbers_as_the_comparison(tmp_path: Path) -> None:
    comparison = compared(tmp_path, A_LINES, B_LINES)
    rows = list(csv.DictReader(io.StringIO(comparison_csv(comparison).decode())))
    assert len(rows) == len(CLASSES)
    for row, entry in zip(rows, comparison["classes"], strict=True):
        assert (int(row["index"]), row["wnid"], int(row["evaluated"])) == (
            entry["index"], entry["wnid"], entry["evaluated"],
        )  # fmt: skip
        for key in ("top1", "top5"):
            for name in ("a_error", "b_error", "difference", "p", "adjusted_p", "only_a_wrong", "only_b_wrong"):
                cell = row[f"{key}_{name}"]
                assert (float(cell) if cell else None) == entry[key][name]
            bounds = [row[f"{key}_low"], row[f"{key}_high"]]
            assert (None if bounds == ["", ""] else list(map(float, bounds))) == entry[key]["interval"]
            assert row[f"{key}_stands"] == ("yes" if entry[key]["stands"] else "no")


def test_model_and_protocol_may_differ_and_are_recorded(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", A_LINES)
    b = write_run(tmp_path / "b", B_LINES)
    changed_info(b, "model", "file", value="other.onnx")
    changed_info(b, "protocol", "averaging", value="logit")
    comparison = compare_runs(read_run(a), read_run(b))
    assert [comparison[side]["model"]["file"] for side in "ab"] == ["c.onnx", "other.onnx"]
    assert [comparison[side]["protocol"]["averaging"] for side in "ab"] == ["softmax", "logit"]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"fingerprint": "cd" * 32}, ("different images or labels", "abababababab…", "cdcdcdcdcdcd…", "same dataset")),
        ({"classes": CLASSES[1:] + CLASSES[:1]}, ("different class lists", "class 0 is 'n01'", "'n02'", "same order")),
        ({"classes": [*CLASSES, {"wnid": "n99", "name": "new"}]}, ("7 and 8 classes",)),
    ],
)
def test_runs_that_cannot_be_paired_are_refused_with_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], parts: Sequence[str]
) -> None:
    a = write_run(tmp_path / "a", A_LINES)
    b = write_run(tmp_path / "b", B_LINES, **changes)
    assert cli.run(["compare", str(a), str(b)]) == 2
    message = capsys.readouterr().err
    for part in (*parts, str(a), str(b)):
        assert part in message
    assert not (b / "report").exists()


def test_shards_runs_without_labels_and_unfinished_runs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_run(tmp_path / "whole", A_LINES)
    shard = write_run(tmp_path / "shard", A_LINES)
    changed_info(shard, "shard", value={"number": 1, "of": 1})
    unfinished = write_run(tmp_path / "unfinished", A_LINES, images=12)
    nameless = write_run(
        tmp_path / "nameless", [{**A_LINES[0], "label": None, "rank": None, "view_ranks": []}, *A_LINES[1:]]
    )
    for folder, part in (
        (shard, "shard 1 of 1, not a complete run. Merge all shards first: prelunet merge"),
        (unfinished, "9 of 12 images are done"),
        (nameless, "the true class of 1 of 9 images is unknown"),
    ):
        for pair in ((whole, folder), (folder, whole)):
            assert cli.run(["compare", *map(str, pair)]) == 2
            message = capsys.readouterr().err
            assert part in message
            assert str(folder) in message


def test_a_run_whose_images_are_not_those_of_its_fingerprint_is_called_damaged(tmp_path: Path) -> None:
    a, b = (read_run(write_run(tmp_path / name, A_LINES)) for name in "ab")
    for change in ({"file": "n01/zz.jpg"}, {"label": 4}):
        swapped = replace(b, predictions=[b.predictions[0], replace(b.predictions[1], **change), *b.predictions[2:]])
        with pytest.raises(
            RunFolderError, match=r"line 2 of the predictions is n01/b.jpg \(label 0\).*one of them is damaged"
        ):
            compare_runs(a, swapped)


def test_verb_writes_three_files_named_after_the_baseline_and_prints_which_run_is_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = labels_of(200)
    a = write_run(tmp_path / "baseline", random_run(1, labels, 0.4))
    b = write_run(tmp_path / "new", random_run(2, labels, 0.9))
    assert cli.run(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    folder = b / "report" / "compared-with-baseline"
    assert sorted(path.name for path in folder.iterdir()) == ["compare.csv", "compare.html", "compare.json"]
    comparison = json.loads((folder / "compare.json").read_bytes())
    jsonschema.validate(comparison, SCHEMA)
    found = comparison["top1"]
    for part in (
        f"top-1 error: B is better: {found['difference']:+.2f} points",
        f"95 % interval {found['interval'][0]:+.2f} to {found['interval'][1]:+.2f}",
        f"images: {found['only_a_wrong']} wrong in A only, {found['only_b_wrong']} wrong in B only; McNemar p < 0.0001",
        f"classes: {found['classes_improved']} improved, {found['classes_unchanged']} unchanged",
        f"{comparison['evaluated']} of 200 images evaluated in both",
        f"{len(comparison['left_out'])} refused in A or B",
    ):
        assert part in out
    assert out.splitlines()[-1] == f"{folder / 'compare.html'}, compare.json, compare.csv"


def test_help_needs_neither_templates_nor_charts() -> None:
    code = (
        "import sys; from prelunet.evaluator import cli; "
        "codes = [cli.run([verb, '--help']) for verb in ('compare', 'report')]; "
        "sys.exit(str(codes) + str({'jinja2', 'vl_convert', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[0, 0]set()"


def test_verb_writes_to_the_given_folder_and_prints_the_comparison_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write_run(tmp_path / "a", A_LINES), write_run(tmp_path / "b", B_LINES)
    out = tmp_path / "some" / "where"
    assert cli.run(["compare", str(a), str(b), "--out", str(out), "--json"]) == 0
    assert capsys.readouterr().out.encode() == (out / "compare.json").read_bytes()
    assert not (b / "report").exists()


def test_images_that_only_b_refused_are_counted_and_count_as_wrong_in_one_difference(tmp_path: Path) -> None:
    labels = labels_of(150)
    a_lines, b_lines = random_run(3, labels, 0.6), random_run(9, labels, 0.6)
    comparison = compared(tmp_path, a_lines, b_lines)
    judged = [(a, b) for a, b in zip(a_lines, b_lines, strict=True) if "refused" not in a]
    only_b = sum("refused" in b for _, b in judged)
    assert comparison["refused_by_b_only"] == only_b > 0
    assert len(judged) != 150
    for key, k in (("top1", 1), ("top5", 5)):
        wrong_a = sum(a["rank"] > k for a, _ in judged)
        wrong_b = sum("refused" in b or b["rank"] > k for _, b in judged)
        assert comparison[key]["difference_with_refusals"] == round(100 * (wrong_b - wrong_a) / len(judged), 4)
        assert comparison[key]["difference_with_refusals"] != comparison[key]["difference"]


def test_p_values_are_shown_without_false_precision() -> None:
    shown = [format_p_value(p) for p in (0.0, 0.00009, 0.0138612, 0.5, 1.0)]
    assert shown == ["p < 0.0001", "p < 0.0001", "p = 0.014", "p = 0.5", "p = 1"]


def test_a_difference_is_called_better_or_worse_only_where_chance_is_unlikely() -> None:
    cases = {(-1.0, 0.05): "B is better", (1.0, 0.05): "B is worse", (1.0, 0.051): "no significant difference"}
    assert {case: judgment({"difference": case[0], "p": case[1]}) for case in cases} == cases
