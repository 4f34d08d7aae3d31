import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vl_convert

from prelunet.evaluator import cli
from prelunet.evaluator.datasets import DatasetSpec, open_from_spec
from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.errors import DatasetError
from prelunet.evaluator.reporting.charts import FEW_CLASSES
from prelunet.evaluator.reporting.compare import compare_runs
from prelunet.evaluator.reporting.compare_charts import difference_chart
from prelunet.evaluator.reporting.compare_page import (
    LEFT_OUT_SHOWN,
    MAX_FLIPPED_PER_DIRECTION,
    MAX_MOVED_CLASSES,
    gather_flips,
    most_changed_classes,
    protocol_remark,
    render_comparison,
    run_titles,
    write_comparison,
)
from prelunet.evaluator.reporting.html import VEGA_LITE, signed
from prelunet.evaluator.validation.mistakes import MAX_PER_CLASS
from prelunet.evaluator.validation.run import read_run
from tests.helpers.run_folders import CLASSES, MULTI_SCALE, evaluated, refused, write_run
from tests.reporting.pages import (
    HOSTILE,
    Elements,
    check_self_contained,
    fingerprint_of,
    make_images,
    many_classes,
    mistake,
)


def right(file: str, label: int, classes: int = 7) -> dict[str, Any]:
    return evaluated(file, label, [label, (label + 1) % 3], 1, classes=classes)


def page_of(folder: Path, a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]], **rest: Any) -> Elements:
    runs = [read_run(write_run(folder / name, lines, **rest)) for name, lines in (("a", a), ("b", b))]
    comparison = compare_runs(*runs)
    return Elements(render_comparison(comparison, gather_flips(comparison, *runs, None)).decode())


def comparison_of(folder: Path, a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]], **rest: Any) -> Any:
    return compare_runs(*(read_run(write_run(folder / n, lines, **rest)) for n, lines in (("a", a), ("b", b))))


def runs_of_classes(count: int, images: int = 4) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return two runs in which class k loses or gains a number of images determined by k."""
    a, b = [], []
    for label in range(count):
        for number in range(images):
            file = f"n{label:04}/{number}.png"
            for lines, shift in ((a, 1), (b, 5)):
                bad = (label * 7 + number * 3 + shift) % 11 < (4 if lines is a else 3 + label % 3)
                lines.append(mistake(file, label, (label + 1) % count) if bad else evaluated(file, label, [label], 1))
    return a, b


def test_page_makes_no_network_requests(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"n01/a.png": (20, 31)})
    places = {"fingerprint": fingerprint_of(data), "data": str(data)}
    page = page_of(tmp_path, [right("n01/a.png", 0)], [mistake("n01/a.png", 0, 2)], **places)
    assert len(page.named("img")) == 1
    check_self_contained(page, r"#|compare\.(json|csv)$")


def test_hostile_class_and_file_names_stay_text(tmp_path: Path) -> None:
    classes = [{"wnid": f"{index}{name}", "name": name} for index, name in enumerate(HOSTILE)]
    files = [f"{name}\u2028/{index}.png" for index, name in enumerate(HOSTILE)]
    a = [*(right(file, index, 4) for index, file in enumerate(files)), refused(HOSTILE[0], 0, HOSTILE[1])]
    b = [
        *(mistake(file, index, (index + 1) % 4, classes=4) for index, file in enumerate(files)),
        right(HOSTILE[0], 0, 4),
    ]
    plain = page_of(tmp_path / "plain", [right("a.png", 0)], [mistake("a.png", 0, 1)])
    page = page_of(tmp_path / "run", a, b, classes=classes)
    assert len(page.scripts) == len(plain.scripts) == 4
    assert page.named("img") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    for name in HOSTILE:
        assert page.text.count(name) >= 4  # largest changes, flips (true class and answer), all classes
    charts, table = map(json.loads, page.scripts[1:3])
    for chart in charts.values():
        assert {row["name"] for row in chart["data"]["values"]} == set(HOSTILE)
    assert {name for _, _, name, *_ in table} == set(HOSTILE)


def test_differences_that_round_to_0_have_no_sign_on_the_page_and_in_the_chart(tmp_path: Path) -> None:
    a, b = [right("a.png", 0), right("b.png", 0)], [right("a.png", 0), right("b.png", 0)]
    comparison = comparison_of(tmp_path, a, b)
    for key in ("top1", "top5"):  # as for 25,000 images of which one flipped
        of_class = comparison["classes"][0][key]
        for found in (comparison[key], of_class):
            found |= {"difference": -0.004, "interval": [-0.0049, 0.0049]}
        comparison[key] |= {"macro_difference": -0.004, "macro_interval": [-0.0049, -0.001]}
    chart = difference_chart(comparison, "top1")
    assert chart is not None
    assert chart["data"]["values"][0]["summary"].startswith("0.0 points (0.0 to 0.0)")
    flipped = gather_flips(comparison, *(read_run(tmp_path / name) for name in "ab"), None)
    text = Elements(render_comparison(comparison, flipped).decode()).text
    assert "0.00" in text
    assert not re.search(r"[-−+]0\.0+(?!\d)", text)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (-0.004, 2, "0.00"),
        (0.04, 1, "0.0"),
        (-0.0, 2, "0.00"),
        (-0.006, 2, "−0.01"),
        (3.0, 0, "+3"),
        (-0.05, 2, "−0.05"),
    ],
)
def test_only_differences_that_do_not_round_to_0_have_a_sign(value: float, digits: int, text: str) -> None:
    assert signed(value, digits) == text
    assert signed(value, digits, minus="-") == text.replace("−", "-")


def test_the_dataset_of_the_flipped_images_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["n01/a.png", "n02/b.png"]
    fingerprint = fingerprint_of(make_images(tmp_path / "data", dict.fromkeys(files, (20, 31))))
    opened = []

    def open_from_spec_once(spec: DatasetSpec, classes: Any) -> Dataset:
        opened.append(spec.path)
        return open_from_spec(spec, classes)

    monkeypatch.setattr("prelunet.evaluator.reporting.gallery.open_from_spec", open_from_spec_once)
    a = [right(files[0], 0), mistake(files[1], 1, 0)]
    b = [mistake(files[0], 0, 1), right(files[1], 1)]
    data = tmp_path / "data"
    page = page_of(tmp_path / "1", a, b, fingerprint=fingerprint, data=str(data))
    assert len(page.named("img")) == 2
    assert opened == [data]


def test_pictures_come_from_where_either_run_found_them(tmp_path: Path) -> None:
    files = ["n01/a.png", "n02/b.png"]
    fingerprint = fingerprint_of(make_images(tmp_path / "data", dict.fromkeys(files, (20, 31))))
    places = {"a": tmp_path / "data", "b": tmp_path / "gone"}
    lines = {"a": [right(files[0], 0), mistake(files[1], 1, 0)], "b": [mistake(files[0], 0, 1), right(files[1], 1)]}
    runs = [
        read_run(write_run(tmp_path / name, lines[name], fingerprint=fingerprint, data=str(places[name])))
        for name in "ab"
    ]
    for one, other in (runs, runs[::-1]):
        comparison = compare_runs(one, other)
        page = render_comparison(comparison, gather_flips(comparison, one, other, None))
        assert len(Elements(page.decode()).named("img")) == 2


def test_page_states_which_run_is_better_by_how_much_and_with_which_p_value(tmp_path: Path) -> None:
    files = [f"{number:02}.png" for number in range(12)]
    a = [mistake(file, 0, 1) for file in files]
    b = [right(file, 0) for file in files[:9]] + [mistake(file, 0, 1) for file in files[9:11]] + [refused(files[11], 0)]
    page = page_of(tmp_path, a, b)
    comparison = comparison_of(tmp_path / "again", a, b)
    low, high = (signed(bound) for bound in comparison["top1"]["interval"])
    for part in ("−81.82", "B is better", f"{low} to {high}", "p = 0.0039", "1 of 12 images was refused", "100.00"):
        assert part in page.text
    assert "B is worse" not in page.text
    assert "12.png" not in page.text
    assert files[11] in page.text


def test_exchanging_the_runs_exchanges_the_colors(tmp_path: Path) -> None:
    files = [f"{number}.png" for number in range(9)]
    lines = [right(file, 0) for file in files], [mistake(file, 0, 1) for file in files]
    worse, better = page_of(tmp_path / "1", *lines), page_of(tmp_path / "2", *reversed(lines))
    for page, verdict, kind in ((worse, "B is worse", "worse"), (better, "B is better", "improved")):
        assert verdict in page.text
        assert [d["class"] for d in page.named("div") if (d.get("class") or "").startswith(f"figure {kind}")]
        sign = 1 if kind == "worse" else -1
        a, b = (0, 100) if kind == "worse" else (100, 0)
        (tench,) = [row for row in json.loads(page.scripts[2]) if row[0] == 0]
        assert tench[3:] == [9, [a, b, 100 * sign, True], [0, 0, 0, False]]


def test_a_page_of_runs_without_common_images_states_this_and_has_no_chart(tmp_path: Path) -> None:
    page = page_of(tmp_path, [right("a.png", 0), refused("b.png", 1)], [refused("a.png", 0), right("b.png", 1)])
    assert "no image was evaluated in both" in page.text
    assert "nothing to compare" in page.text
    assert page.scripts[1] == "{}"


def test_the_table_starts_with_what_got_worse_and_ends_with_classes_without_images(tmp_path: Path) -> None:
    a = [right("a.png", 4), right("b.png", 1), mistake("c.png", 2, 0), refused("d.png", 0)]
    b = [mistake("a.png", 4, 0), right("b.png", 1), right("c.png", 2), right("d.png", 0)]
    comparison = comparison_of(tmp_path, a, b)
    html = render_comparison(comparison, gather_flips(comparison, *(read_run(tmp_path / n) for n in "ab"), None))
    table = html.decode().split('<table class="all compared">')[1].split("</table>")[0]
    shown = [int(index) for index in re.findall(r'<tr id="class-(\d+)">', table)]
    assert shown[:3] == [4, 1, 2]
    assert sorted(shown) == list(range(len(CLASSES)))
    rows = json.loads(Elements(html.decode()).scripts[2])
    assert [row[0] for row in rows] == shown


def test_flipped_images_are_those_of_top_1_most_confident_mistake_first(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = [], []
    for number in range(300):
        file, label = f"{number:04}.png", int(rng.integers(0, 40))
        scores = rng.uniform(0.5, 1, 2)
        a.append(mistake(file, label, 50, scores[0]) if rng.random() < 0.5 else right(file, label))
        b.append(mistake(file, label, 50, scores[1]) if rng.random() < 0.5 else right(file, label))
    classes = many_classes(51)
    comparison = comparison_of(tmp_path, a, b, classes=classes)
    flipped = gather_flips(comparison, *(read_run(tmp_path / name) for name in "ab"), None)
    for gallery, before, after in ((flipped["worse"], a, b), (flipped["better"], b, a)):
        turned = [now for was, now in zip(before, after, strict=True) if was["rank"] == 1 and now["rank"] > 1]
        expected: list[str] = []
        taken: list[int] = []
        for line in sorted(turned, key=lambda line: -line["top"][0][1]):
            if taken.count(line["label"]) < MAX_PER_CLASS and len(expected) < MAX_FLIPPED_PER_DIRECTION:
                expected.append(line["file"])
                taken.append(line["label"])
        assert [mistake.prediction.file for mistake in gallery.mistakes] == expected
        assert gallery.total == len(turned) > len(expected) == MAX_FLIPPED_PER_DIRECTION


def test_flipped_images_are_shown_where_the_dataset_is_reachable_and_named_where_not(tmp_path: Path) -> None:
    files = ["n01/a.png", "n02/b.png"]
    fingerprint = fingerprint_of(make_images(tmp_path / "data", dict.fromkeys(files, (20, 31))))
    a = [right(files[0], 0), mistake(files[1], 1, 0)]
    b = [mistake(files[0], 0, 1), right(files[1], 1)]
    there = page_of(tmp_path / "1", a, b, fingerprint=fingerprint, data=str(tmp_path / "data"))
    assert len(there.named("img")) == 2
    gone = page_of(tmp_path / "2", a, b, fingerprint=fingerprint, data=str(tmp_path / "nowhere"))
    assert gone.named("img") == []
    assert "--data" in gone.text
    assert str(tmp_path) not in gone.text
    given = write_comparison(tmp_path / "2" / "a", tmp_path / "2" / "b", data=tmp_path / "data")
    assert len(Elements(given.html.read_text()).named("img")) == 2


def test_another_dataset_given_by_hand_is_refused_and_no_file_is_written(tmp_path: Path) -> None:
    make_images(tmp_path / "data", {"n01/a.png": (20, 31)})
    a = write_run(tmp_path / "a", [right("n01/a.png", 0)])
    b = write_run(tmp_path / "b", [mistake("n01/a.png", 0, 1)])
    with pytest.raises(DatasetError, match="not the images of this run"):
        write_comparison(a, b, data=tmp_path / "data")
    assert not (b / "report").exists()


def test_few_classes_are_named_most_improved_first_in_the_chart(tmp_path: Path) -> None:
    a = [mistake("a.png", 0, 1), right("b.png", 2), right("c.png", 5)]
    b = [right("a.png", 0), mistake("b.png", 2, 1), right("c.png", 5)]
    chart = difference_chart(comparison_of(tmp_path, a, b), "top1")
    assert chart is not None
    svg = vl_convert.vegalite_to_svg({**chart, "width": 600}, vl_version=VEGA_LITE)
    assert re.findall(r">(tench|fox|bottle|never seen)</text>", svg) == ["tench", "fox", "bottle"]
    assert re.findall(r">(\+50|−50|0)</text>", svg)
    assert ">+0<" not in svg


def test_many_classes_become_a_curve_that_ascends_through_zero(tmp_path: Path) -> None:
    count = FEW_CLASSES + 5
    comparison = comparison_of(tmp_path, *runs_of_classes(count), classes=many_classes(count))
    chart = difference_chart(comparison, "top1")
    assert chart is not None
    rows = chart["data"]["values"]
    assert [row["place"] for row in rows] == list(range(1, count + 1))
    differences = [row["difference"] for row in rows]
    assert differences == sorted(differences)
    assert differences[0] < 0 < differences[-1]
    changes = [row["change"] for row in rows]
    for change in ("improved", "unchanged", "worse"):
        assert changes.count(change) == comparison["top1"][f"classes_{change}"] > 0
    for row in rows:
        metric = comparison["classes"][row["index"]]["top1"]
        assert row["difference"] == pytest.approx(metric["difference"], abs=0.005)
        assert [row["low"], row["high"]] == pytest.approx(metric["interval"], abs=0.005)
    assert "class 4" in str(rows)
    vl_convert.vegalite_to_svg({**chart, "width": 600}, vl_version=VEGA_LITE)


def test_moved_most_are_the_classes_at_either_end(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path, *runs_of_classes(60), classes=many_classes(60))
    by_difference = sorted(comparison["classes"], key=lambda entry: (entry["top1"]["difference"], entry["index"]))
    assert most_changed_classes(comparison, "top1", "improved") == by_difference[:MAX_MOVED_CLASSES]
    worst = most_changed_classes(comparison, "top1", "worse")
    assert [entry["top1"]["difference"] for entry in worst] == [
        entry["top1"]["difference"] for entry in reversed(by_difference[-MAX_MOVED_CLASSES:])
    ]
    same = comparison_of(tmp_path / "same", *[runs_of_classes(5)[0]] * 2, classes=many_classes(5))
    assert most_changed_classes(same, "top1", "improved") == most_changed_classes(same, "top1", "worse") == []


def test_runs_of_one_model_file_are_distinguished_by_protocol_or_letter() -> None:
    def titles(a: tuple[str, str], b: tuple[str, str], **changes: Any) -> list[str]:
        sides = {
            s: {
                "model": {"file": f, "sha256": f},
                "protocol": {**MULTI_SCALE, "name": p, **different},
                "circumstances": {"provider": "CPUExecutionProvider", "precision": "fp32"},
            }
            for s, (f, p), different in (("a", a, {}), ("b", b, changes))
        }
        assert bool(protocol_remark(sides)) == bool(changes)
        return list(run_titles(sides).values())

    dense = ("a.onnx", "multi-scale")
    assert titles(dense, dense, averaging="logit") == [
        "a.onnx, scales 256,384 mirrored",
        "a.onnx, scales 256,384 mirrored, logits averaged",
    ]
    assert titles(("a.onnx", "center"), ("b.onnx", "center")) == ["a.onnx", "b.onnx"]
    assert titles(("a.onnx", "center"), ("a.onnx", "resnet")) == ["a.onnx, center", "a.onnx, resnet"]
    assert titles(("a.onnx", "center"), ("a.onnx", "center")) == ["a.onnx (A)", "a.onnx (B)"]


@pytest.mark.parametrize(
    ("model", "protocol", "remark"),
    [
        (
            {},
            {"mirror": False},
            "the same model evaluated with different protocols. Any difference is due to the protocols.",
        ),
        (  # as adopted with --dense and without
            {"sha256": "b" * 64},
            {"mirror": False},
            "the same model evaluated with different protocols. Any difference is due to the protocols.",
        ),
        (
            {"sha256": "b" * 64, "checkpoint_sha256": "b" * 64},
            {"mirror": False},
            "different models evaluated with different protocols. The difference may be",
        ),
        ({"sha256": "b" * 64}, {}, ""),
        # A different name, or what follows from the model, is no different protocol.
        ({"sha256": "b" * 64}, {"name": "own", "interpolation": "bicubic"}, ""),
        ({}, {}, ""),
    ],
)
def test_summary_and_page_state_whether_models_or_protocols_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: dict[str, str], protocol: dict[str, Any], remark: str
) -> None:
    a, b = (write_run(tmp_path / name, [right("a.png", 0)]) for name in "ab")
    run = json.loads((b / "run.json").read_text())
    changed = {**run, "model": {**run["model"], **model}, "protocol": {**run["protocol"], **protocol}}
    if protocol.get("mirror") is False:
        changed["views"] = [view for view in run["views"] if not view["mirrored"]]
        line = {**right("a.png", 0), "view_ranks": [1] * len(changed["views"])}
        (b / "predictions.jsonl").write_text(json.dumps(line) + "\n")
    (b / "run.json").write_text(json.dumps(changed))
    assert cli.run(["compare", str(a), str(b), "--out", str(tmp_path)]) == 0
    for text in (capsys.readouterr().out, (tmp_path / "compare.html").read_text()):
        assert f"A and B are {remark}" in text if remark else "A and B are" not in text


@pytest.mark.parametrize("other", [{"precision": "bf16"}, {"provider": "OpenVINOExecutionProvider"}])
def test_a_difference_is_not_due_to_the_protocols_alone_if_the_arithmetic_differs_too(other: dict[str, str]) -> None:
    side = {"model": {"sha256": "a"}, "circumstances": {"provider": "CPUExecutionProvider", "precision": "fp32"}}
    a = {**side, "protocol": {"name": "center", "mirror": False}}
    b = {**side, "protocol": {"name": "dense-40", "mirror": True}, "circumstances": {**side["circumstances"], **other}}
    assert "due to the protocols" in protocol_remark({"a": a, "b": {**a, "protocol": b["protocol"]}})
    assert "The difference may be due to any of these" in protocol_remark({"a": a, "b": b})


def test_a_page_is_the_same_bytes_again_and_bounded_at_a_thousand_classes(tmp_path: Path) -> None:
    a, b = runs_of_classes(1000, images=2)
    b = [refused(line["file"], line["label"]) if n % 7 == 0 else line for n, line in enumerate(b)]
    for name, lines in (("a", a), ("b", b)):
        write_run(tmp_path / name, lines, classes=many_classes(1000))
    first = write_comparison(tmp_path / "a", tmp_path / "b", out=tmp_path / "1").html.read_bytes()
    assert write_comparison(tmp_path / "a", tmp_path / "b", out=tmp_path / "2").html.read_bytes() == first
    assert len(first) < 5_000_000  # 8 MB with the pictures: 2 x 24 of at most 20 kB, and the rest is the same
    page = Elements(first.decode())
    assert len([row for row in page.named("tr") if row.get("id", "")]) == 1000
    listed = first.decode().split('<table class="refusals">')[1].split("</table>")[0]
    assert listed.count("<tr>") == LEFT_OUT_SHOWN < 2000 // 7
