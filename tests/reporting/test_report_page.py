import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import vl_convert
from PIL import Image

from prelunet.evaluator import cli
from prelunet.evaluator.datasets import DatasetSpec, open_dataset
from prelunet.evaluator.errors import DatasetError, install_hint
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.reporting.charts import FEW_CLASSES, error_chart
from prelunet.evaluator.reporting.gallery import THUMBNAIL, build_gallery
from prelunet.evaluator.reporting.html import VEGA_LITE
from prelunet.evaluator.reporting.report import build_report
from prelunet.evaluator.reporting.report_page import averaging_rows, coverage_rows, render_page, write_report
from prelunet.evaluator.reporting.score_charts import bin_sizes_chart, histogram_chart, reliability_chart, risk_chart
from prelunet.evaluator.reporting.tables import worst_classes
from prelunet.evaluator.validation.mistakes import GALLERY_SIZE, MAX_PER_CLASS, choose_mistakes
from prelunet.evaluator.validation.run import read_run
from prelunet.evaluator.validation.run_log import find_dataset
from tests.helpers.fakes import FakeSession, fake_contract, validated
from tests.helpers.run_folders import MULTI_SCALE, evaluated, refused, write_ensemble, write_heat_maps, write_run
from tests.reporting.pages import (
    HOSTILE,
    Elements,
    check_self_contained,
    fingerprint_of,
    make_images,
    many_classes,
    mistake,
)


def page_of(folder: Path, lines: list[dict[str, Any]], **rest: Any) -> Elements:
    run = read_run(write_run(folder, lines, **rest))
    return Elements(render_page(build_report(run), run, build_gallery(run, None)).decode())


def thumbnail(address: str | None) -> Image.Image:
    assert address is not None
    return Image.open(io.BytesIO(base64.b64decode(address.split(",")[1])))


def test_page_makes_no_network_requests(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"n01/a.png": (20, 31)})
    page = page_of(tmp_path / "run", [mistake("n01/a.png", 0, 2)], fingerprint=fingerprint_of(data), data=str(data))
    check_self_contained(page, r"#[\w-]+$|report\.json$|classes\.csv$")


def test_hostile_class_and_file_names_stay_text(tmp_path: Path) -> None:
    classes = [{"wnid": f"{index}{name}", "name": name} for index, name in enumerate(HOSTILE)]
    lines = [
        *(
            mistake(f"{name}\u2028/{index}.png", index, (index + 1) % 4, classes=4)
            for index, name in enumerate(HOSTILE)
        ),
        refused(HOSTILE[0], 0, HOSTILE[1]),
    ]
    plain = page_of(tmp_path / "plain", [mistake("n01/a.png", 0, 2), refused("n01/b.png", 0)])
    page = page_of(tmp_path / "run", lines, classes=classes)
    assert len(page.scripts) == len(plain.scripts) == 4
    assert page.named("img") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    for name in HOSTILE:
        assert page.text.count(name) >= 4  # worst, confusions, mistakes, all classes
    rows = json.loads(page.scripts[1])["error"]["data"]["values"]
    assert {row["name"] for row in rows} == set(HOSTILE)
    assert {row[1] for row in json.loads(page.scripts[2])["classes"]} == set(HOSTILE)


def test_styles_of_the_pages_load_nothing_and_their_scripts_cannot_end_early() -> None:
    folder = Path(cli.__file__).parent / "reporting" / "page_files"
    styles, ours = ([path.read_text() for path in folder.glob(suffix)] for suffix in ("*.css", "*.js"))
    assert styles
    assert ours
    assert not any("url(" in style or "@import" in style for style in styles)
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    for script in (bundle, *ours):
        assert "</script" not in script.lower()
        assert "<!--" not in script


def test_page_shows_the_headline_the_banner_and_the_circumstances(tmp_path: Path) -> None:
    page = page_of(
        tmp_path, [mistake("n01/a.png", 0, 2), evaluated("n02/b.png", 1, [1], 1), refused("n03/c.png", 2, "cut")]
    )
    for text in ("50.00", "9.45 – 90.55", "1 of 3 images was refused", "n03/c.png", "cut", "numpy 2.4.6", "CPU, fp32"):
        assert text in page.text
    assert "images were refused" not in page.text


def test_page_without_refusals_has_no_banner(tmp_path: Path) -> None:
    page = page_of(tmp_path, [evaluated("n01/a.png", 0, [0], 1)])
    assert "banner" not in [attributes.get("class") for attributes in page.named("p")]
    assert "No image was misclassified" in page.text


def test_a_page_is_the_same_bytes_again(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"n01/a.png": (300, 200)})
    folder = write_run(tmp_path / "run", [mistake("n01/a.png", 0, 2)], fingerprint=fingerprint_of(data), data=str(data))
    first = write_report(folder).html.read_bytes()
    assert write_report(folder).html.read_bytes() == first


def test_mistakes_are_shown_most_confident_first_and_few_of_a_class(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [
        mistake(f"{number:04}.png", int(rng.integers(0, 3 if number % 2 else 40)), 50, float(rng.uniform(0.5, 1)))
        for number in range(400)
    ]
    lines += [evaluated("right.png", 0, [0], 1, first=1.0), refused("refused.png", 0)]
    expected: list[str] = []
    taken: list[int] = []
    for line in sorted((line for line in lines if line.get("rank", 1) > 1), key=lambda line: -line["top"][0][1]):
        if len(expected) < GALLERY_SIZE and taken.count(line["label"]) < MAX_PER_CLASS:
            expected.append(line["file"])
            taken.append(line["label"])
    chosen = choose_mistakes(read_run(write_run(tmp_path, lines, classes=many_classes(51))).predictions)
    assert [prediction.file for prediction in chosen] == expected
    assert len(expected) == GALLERY_SIZE


def test_thumbnails_keep_tiny_images_exactly_and_shrink_large_ones(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"n01/tiny.png": (20, 31), "n02/large.png": (300, 200)})
    lines = [mistake("n01/tiny.png", 0, 2, 0.9), mistake("n02/large.png", 1, 2, 0.8)]
    run = read_run(write_run(tmp_path / "run", lines, fingerprint=fingerprint_of(data)))
    tiny, large = build_gallery(run, data).mistakes
    assert tiny.tiny
    original = np.asarray(Image.open(data / "val" / "n01" / "tiny.png"))
    np.testing.assert_array_equal(np.asarray(thumbnail(tiny.thumbnail)), original)
    assert not large.tiny
    assert thumbnail(large.thumbnail).size == (THUMBNAIL, THUMBNAIL * 2 // 3)


def test_images_are_found_where_the_last_run_found_them(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"n01/a.png": (20, 31)})
    folder = write_run(tmp_path / "run", [mistake("n01/a.png", 0, 2)], fingerprint=fingerprint_of(data))
    places = (("start", "/gone"), ("resume", str(data)))
    starts = [json.dumps({"event": event, "dataset": place}) for event, place in places]
    (folder / "log.jsonl").write_text("\n".join([starts[0], "[]", starts[1], '{"event": "chunk"}', '{"event": "sta']))
    assert find_dataset(folder) == DatasetSpec(data)
    assert build_gallery(read_run(folder), None).mistakes[0].thumbnail is not None


def test_what_validate_leaves_is_reported_with_its_images(tmp_path: Path) -> None:
    wnids = [entry.wnid for entry in fake_contract().classes]
    sizes = {f"{wnid}/{number}.png": (40 + number, 33) for wnid in wnids[1:] for number in range(4)}
    dataset = open_dataset(make_images(tmp_path / "data", sizes), split="val", wnids=wnids)
    protocol = build_protocol("multi-scale", fake_contract())
    run = validated(FakeSession(), dataset, protocol, tmp_path / "run")
    written = write_report(tmp_path / "run")
    schema = json.loads((Path(__file__).parents[2] / "docs" / "report.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(written.json.read_bytes()), schema)
    wrong = [prediction for prediction in run.predictions if prediction.rank > 1]
    assert len(Elements(written.html.read_text()).named("img")) == len(choose_mistakes(wrong)) > 0


def test_a_page_names_the_command_for_heat_maps_where_there_could_be_some(tmp_path: Path) -> None:
    command, line = "prelunet validate … --heatmaps 200", mistake("n01/a.png", 0, 2)
    assert command in page_of(tmp_path / "run", [line]).text
    write_heat_maps(tmp_path / "run", [(line, (20, 31), [[[1, 2]], [[3, 4]]])])
    assert command not in page_of(tmp_path / "run", [line]).text
    assert command not in page_of(tmp_path / "right", [evaluated("n01/a.png", 0, [0], 1)]).text
    ensemble = read_run(write_ensemble(tmp_path / "ensemble", [line]))
    assert command not in render_page(build_report(ensemble), ensemble, build_gallery(ensemble, None)).decode()
    run = json.loads((write_run(tmp_path / "crops", [{**line, "view_ranks": [2]}]) / "run.json").read_text())
    run["protocol"] = {**MULTI_SCALE, "name": "center", "kind": "center", "crop": 224, "scales": [256], "mirror": False}
    run["views"] = [{"scale": 256, "mirrored": False, "part": "center"}]
    (tmp_path / "crops" / "run.json").write_text(json.dumps(run))
    crops = read_run(tmp_path / "crops")
    assert command not in render_page(build_report(crops), crops, build_gallery(crops, None)).decode()


@pytest.mark.parametrize("data", ["/gone/away", None])
def test_unreachable_images_are_reported_with_the_command_and_without_a_path(tmp_path: Path, data: str | None) -> None:
    page = page_of(tmp_path / "run", [mistake("n01/a.png", 0, 2)], data=data)
    assert "prelunet report RUN --data DIR|ARCHIVE" in page.text
    assert "/gone" not in page.text
    assert "n01/a.png" in page.text
    assert page.named("img") == []


def test_without_the_extra_a_report_has_numbers_but_no_page_and_says_why(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [evaluated("val/a.png", 1, [3, 1], rank=2)])
    code = (
        "import sys; sys.modules['vl_convert'] = sys.modules['scipy'] = None\n"
        "from prelunet.evaluator.cli import run\n"
        f"sys.exit(run(['report', {str(run)!r}]) or run(['compare', {str(run)!r}, {str(run)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 5  # of `compare`, which is nothing without its statistics
    note, error = [line for line in done.stderr.splitlines() if "needs" in line]
    assert note.startswith("note: there is no report.html: this needs vl_convert")
    assert all(install_hint("report") in line for line in (note, error))
    assert {path.name for path in (run / "report").iterdir()} == {"report.json", "classes.csv"}
    assert json.loads((run / "report" / "report.json").read_bytes()) == build_report(read_run(run))
    assert "report.html" not in done.stdout


def test_changed_images_are_not_shown_as_those_of_the_run(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"n01/a.png": (20, 31)})
    folder = write_run(tmp_path / "run", [mistake("n01/a.png", 0, 2)], fingerprint="cd" * 32, data=str(data))
    gallery = build_gallery(read_run(folder), None)
    assert gallery.missing is not None
    assert gallery.mistakes[0].thumbnail is None


def test_another_dataset_given_by_hand_is_refused_and_no_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_images(tmp_path / "data", {"n01/a.png": (20, 31)})
    folder = write_run(tmp_path / "run", [mistake("n01/a.png", 0, 2)], fingerprint="cd" * 32)
    with pytest.raises(DatasetError, match="not the images of this run: 1 images with fingerprint"):
        write_report(folder, data=data)
    assert cli.run(["report", str(folder), "--data", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
    assert not (folder / "report").exists()


def test_an_image_that_went_bad_since_the_run_leaves_a_gap_not_an_error(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"n01/a.png": (20, 31), "n02/b.png": (22, 33)})
    fingerprint = fingerprint_of(data)
    bad = data / "val" / "n01" / "a.png"
    bad.write_bytes(b"x" * bad.stat().st_size)  # same length, so the fingerprint still fits
    lines = [mistake("n01/a.png", 0, 2), mistake("n02/b.png", 1, 2)]
    page = page_of(tmp_path / "run", lines, fingerprint=fingerprint, data=str(data))
    assert len(page.named("img")) == 1
    assert "can no longer be read" in page.text


def test_few_classes_are_named_worst_first_in_the_chart(tmp_path: Path) -> None:
    lines = [
        *(mistake(f"n01/{number}.png", 0, 2) for number in range(3)),
        mistake("n02/a.png", 1, 2),
        evaluated("n02/b.png", 1, [1], 1),
        evaluated("n06/a.png", 5, [5], 1),
    ]
    chart = error_chart(build_report(read_run(write_run(tmp_path, lines))))
    assert chart is not None
    svg = vl_convert.vegalite_to_svg({**chart, "width": 600}, vl_version=VEGA_LITE)
    labels = re.findall(r">(tench|crane|fox|never seen)</text>", svg)
    assert labels == ["tench", "crane", "fox"]


def test_many_classes_become_two_curves_that_each_ascend(tmp_path: Path) -> None:
    count = FEW_CLASSES + 5
    rng = np.random.default_rng(2)
    lines = []
    for label in range(1, count):  # class 0 has no image
        for number in range(5):
            rank = int(rng.integers(1, 9))
            answers = [label if place == rank else (label + place) % count for place in range(1, 6)]
            lines.append(evaluated(f"{label}/{number}.png", label, answers, rank))
    report = build_report(read_run(write_run(tmp_path, lines, classes=many_classes(count))))
    chart = error_chart(report)
    assert chart is not None
    for key, metric in (("top1", "top-1"), ("top5", "top-5")):
        rows = [row for row in chart["data"]["values"] if row["metric"] == metric]
        assert [row["place"] for row in rows] == list(range(1, count))
        errors = [row["error"] for row in rows]
        assert errors == sorted(errors)
        assert errors[0] < errors[-1]
        assert all(row["error"] == report["classes"][row["index"]][f"{key}_error"] for row in rows)
    svg = vl_convert.vegalite_to_svg({**chart, "width": 600}, vl_version=VEGA_LITE)
    assert "over all images (dashed)" in svg


def test_the_worst_class_is_that_of_many_mistakes_and_not_that_of_a_single_unlucky_image(tmp_path: Path) -> None:
    lines = [mistake("n01/a.png", 0, 2)]  # 1 of 1
    lines += [mistake(f"n02/{n}.png", 1, 2) if n else evaluated("n02/0.png", 1, [1], 1) for n in range(10)]  # 9 of 10
    lines += [mistake(f"n03/{n}.png", 2, 1, 0.9 - n / 50) for n in range(2)]  # 2 of 2, as in the next class
    lines += [mistake(f"n04/{n}.png", 3, 1, 0.99 - n / 50) for n in range(2)]  # more confident
    lines += [evaluated("n05/a.png", 4, [4], 1)]
    run = read_run(write_run(tmp_path, lines))
    report = build_report(run)
    assert [entry["index"] for entry in worst_classes(report["classes"], "top1", 9)] == [1, 3, 2, 0]
    page = Elements(render_page(report, run, build_gallery(run, None)).decode())
    rows = [str(row["id"]) for row in page.named("tr") if row.get("id")]
    assert rows == [f"class-{index}" for index in (1, 3, 2, 0, 4, 5, 6)]  # without images: last
    assert "9 of 10 wrong, answered bottle" in page.text


def test_worst_classes_leave_out_perfect_and_unseen_ones(tmp_path: Path) -> None:
    lines = [
        mistake("a.png", 0, 2),
        mistake("b.png", 3, 2),
        evaluated("c.png", 3, [3], 1),
        evaluated("d.png", 1, [1], 1),
    ]
    report = build_report(read_run(write_run(tmp_path, lines)))
    assert [entry["index"] for entry in worst_classes(report["classes"], "top1", 9)] == [0, 3]
    assert [entry["index"] for entry in worst_classes(report["classes"], "top1", 1)] == [0]
    assert worst_classes(report["classes"], "top5", 9) == []


def test_rows_of_the_views_are_each_scale_with_its_views_then_both_mirrors(tmp_path: Path) -> None:
    lines = [
        evaluated(f"n01/{number}.png", 0, [2, 0], 2, view_ranks=ranks)
        for number, ranks in enumerate([(1, 2, 7, 2), (2, 2, 1, 1), (1, 7, 7, 2), (2, 1, 7, 7)])
    ]
    rows = averaging_rows(build_report(read_run(write_run(tmp_path, lines))))
    assert [(row["label"], row["top1_error"], row["top5_error"]) for row in rows] == [
        ("scale 256, mean of 2", 62.5, 12.5),
        ("scale 256", 50, 0),
        ("scale 256 mirrored", 75, 25),
        ("scale 384, mean of 2", 75, 50),
        ("scale 384", 75, 75),
        ("scale 384 mirrored", 75, 25),
        ("plain views, mean of 2", 62.5, 37.5),
        ("mirrored views, mean of 2", 75, 25),
    ]


def test_an_ensemble_and_a_run_without_images_have_no_views_to_compare(tmp_path: Path) -> None:
    assert averaging_rows(build_report(read_run(write_ensemble(tmp_path / "two", [mistake("n01/a.png", 0, 2)])))) == []
    nothing = build_report(read_run(write_run(tmp_path / "none", [refused("n01/a.png", 0)])))
    assert averaging_rows(nothing) == []
    page = page_of(tmp_path / "none", [refused("n01/a.png", 0)])
    assert "No image was evaluated" in page.text


def test_page_states_the_effect_of_averaging_with_its_sign(tmp_path: Path) -> None:
    lines = [evaluated(f"n01/{n}.png", 0, [0], 1, view_ranks=(1, 2, 2, 1)) for n in range(3)]
    lines.append(evaluated("n01/x.png", 0, [2, 0], 2, view_ranks=(6, 6, 2, 2)))
    page = page_of(tmp_path, lines)  # single views: 25, 100, 100, 25 percent and 25, 25, 0, 0
    assert re.search(r"gains +\+37\.50 points of top-1 error and +\+12\.50 points of top-5 error", page.text)


def test_page_shows_the_mean_over_classes_beside_that_over_images(tmp_path: Path) -> None:
    lines = [mistake("n01/a.png", 0, 2), *(evaluated(f"n02/{n}.png", 1, [1], 1) for n in range(3))]
    page = page_of(tmp_path, lines)
    assert "mean over classes 50.00" in page.text
    assert "25.00" in page.text


def test_a_suspicion_is_shown_at_the_top_as_an_alert(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [mistake("n01/a.png", 0, 2)]))
    report = {**build_report(run), "suspicion": "the labels look like <another order>"}
    page = Elements(render_page(report, run, build_gallery(run, None)).decode())
    (banner,) = [attributes for attributes in page.named("p") if attributes.get("class") == "banner alarm"]
    assert banner["role"] == "alert"
    sentence = "These errors may be misleading: the labels look like <another order>."
    assert page.text.index(sentence) < page.text.index("Top-1 error")
    plain = Elements(render_page({**report, "suspicion": None}, run, build_gallery(run, None)).decode())
    assert "banner alarm" not in [attributes.get("class") for attributes in plain.named("p")]


def test_members_of_an_ensemble_are_listed_with_their_weights(tmp_path: Path) -> None:
    run = read_run(write_ensemble(tmp_path, [mistake("n01/a.png", 0, 2), evaluated("n02/b.png", 1, [1], 1)]))
    page = Elements(render_page(build_report(run), run, build_gallery(run, None)).decode())
    assert "The scores of 2 models were averaged" in page.text
    assert page.text.index("weight 0.25") < page.text.index("weight 0.75")


def test_a_page_opens_on_the_worst_classes_and_ends_with_what_to_paste(tmp_path: Path) -> None:
    page = page_of(
        tmp_path, [mistake("n01/a.png", 0, 2), mistake("n02/b.png", 1, 2), evaluated("n03/c.png", 2, [2], 1)]
    )
    sections = [str(element["id"]) for element in page.named("section")]
    assert sections[:5] == ["worst", "confusions", "mistakes", "classes", "table"]
    assert sections[-1] == "details"
    assert page.text.index("Details\n") < page.text.index("top-1 error 66.67")


def test_a_confusion_matrix_that_would_be_nearly_empty_is_left_to_the_list_of_pairs(tmp_path: Path) -> None:
    def named(lines: list[dict[str, Any]], folder: str) -> bool:
        return "Confusion matrix" in page_of(tmp_path / folder, lines, classes=many_classes(50)).text

    wrong = [mistake(f"{label}.png", label, (label + 1) % 12, classes=50) for label in range(12)]
    assert not named(wrong, "sparse")  # 12 of 132 cells
    assert named([*wrong, *(mistake(f"{n}b.png", n, n + 2, classes=50) for n in range(2))], "filled")  # 14 of 132
    assert not named([mistake(f"{n}.png", n, 40 + n, classes=50) for n in range(5)], "outside")


def test_elsewhere_is_a_column_only_where_an_answer_is_elsewhere(tmp_path: Path) -> None:
    inside = [mistake("n01/a.png", 0, 1), mistake("n02/b.png", 1, 0)]
    assert "elsewhere" not in page_of(tmp_path / "inside", inside).text
    assert "elsewhere" in page_of(tmp_path / "outside", [*inside, mistake("n02/c.png", 1, 5)]).text


def test_pairs_that_occur_once_are_listed_only_where_no_pair_occurs_twice(tmp_path: Path) -> None:
    once = [mistake("n01/a.png", 0, 2), mistake("n02/b.png", 1, 2)]
    assert "The 2 most frequent pairs" in page_of(tmp_path / "once", once).text
    assert "The 1 most frequent pairs" not in page_of(tmp_path / "once", once).text
    twice = page_of(tmp_path / "twice", [*once, mistake("n02/c.png", 1, 2)])
    assert "The most frequent pair" in twice.text


@pytest.mark.parametrize(
    ("score", "shown"), [(0.9996, "0.999"), (0.5, "0.500"), (0.0123, "0.012"), (0.00047, "0.0005")]
)
def test_a_threshold_is_rounded_and_never_up_to_one_that_keeps_nothing(
    tmp_path: Path, score: float, shown: str
) -> None:
    page = page_of(tmp_path, [evaluated("n01/a.png", 0, [0], 1, first=score)])
    assert re.search(rf"100\.0 %\s*{re.escape(shown)}\s*0\.00", page.text)


def test_matrix_of_the_worst_classes_counts_the_diagonal_and_elsewhere(tmp_path: Path) -> None:
    lines = [
        *(mistake(f"n01/{n}.png", 0, 1) for n in range(3)),
        evaluated("n01/right.png", 0, [0], 1),
        *(mistake(f"n02/{n}.png", 1, wrong) for n, wrong in enumerate((0, 5))),
    ]
    run = read_run(write_run(tmp_path, lines))
    text = render_page(build_report(run), run, build_gallery(run, None)).decode()
    matrix = text[text.index('<table class="matrix">') :]
    body = matrix[matrix.index("<tbody>") : matrix.index("</tbody>")]
    rows = [re.findall(r"<td[^>]*>(?:<a [^>]*>)?(\d*)", row) for row in body.split("<tr>")[1:]]
    assert rows == [["", "1", "1"], ["3", "1", ""]]  # the second class is the worst; fox is elsewhere
    assert re.findall(r'href="#(pair-[^"]*)"[^>]*>(\d+)', body) == [("pair-1-0", "1"), ("pair-0-1", "3")]


def test_class_names_on_the_page_link_to_their_class(tmp_path: Path) -> None:
    page = page_of(tmp_path, [mistake("n01/a.png", 0, 2), mistake("n04/b.png", 3, 0)])
    known = {row["id"] for row in page.named("tr") if row.get("id")}
    assert known == {f"class-{index}" for index in range(7)}
    links = [str(link["href"]) for link in page.named("a") if str(link["href"]).startswith("#class-")]
    assert {link[1:] for link in links} <= known
    assert len(links) > 2 * len(known)


def test_reliability_diagram_has_the_filled_bins_in_percent(tmp_path: Path) -> None:
    lines = [
        evaluated("n01/a.png", 0, [0], 1, first=0.95),
        evaluated("n01/b.png", 0, [2, 0], 2, first=0.97),
        evaluated("n02/c.png", 1, [1], 1, first=0.3),
    ]
    report = build_report(read_run(write_run(tmp_path, lines)))
    for chart in (reliability_chart(report), bin_sizes_chart(report)):
        assert chart is not None
        rows = chart["data"]["values"]
        assert [(row["low"], row["high"]) for row in rows] == [(26.67, 33.33), (93.33, 100)]
        assert [(row["images"], row["confidence"], row["accuracy"]) for row in rows] == [(1, 30, 100), (2, 96, 50)]
        vl_convert.vegalite_to_svg({**chart, "width": 400}, vl_version=VEGA_LITE)
    nothing = build_report(read_run(write_run(tmp_path, [refused("n01/a.png", 0)])))
    assert {chart(nothing) for chart in (reliability_chart, bin_sizes_chart, histogram_chart, risk_chart)} == {None}


def test_histogram_shows_right_and_wrong_answers_side_by_side_each_in_percent_of_its_own(tmp_path: Path) -> None:
    lines = [evaluated(f"n01/{n}.png", 0, [0], 1, first=score) for n, score in enumerate((0.97, 0.99, 0.4))]
    lines += [mistake(f"n02/{n}.png", 1, 2, score) for n, score in enumerate((0.93, 0.96, 0.51, 0.9))]
    run = read_run(write_run(tmp_path, lines))
    chart = histogram_chart(build_report(run))
    assert chart is not None
    rows = [tuple(row[key] for key in ("low", "high", "images", "share")) for row in chart["data"]["values"]]
    assert rows == [
        (35, 37.5, 1, 33.33), (95, 97.5, 2, 66.67),
        (52.5, 55, 1, 25), (87.5, 90, 1, 25), (92.5, 95, 1, 25), (97.5, 100, 1, 25),
    ]  # fmt: skip
    vl_convert.vegalite_to_svg({**chart, "width": 400}, vl_version=VEGA_LITE)
    page = Elements(render_page(build_report(run), run, build_gallery(run, None)).decode())
    assert "3 right answers and of the 4 wrong ones" in page.text
    assert "50.0 % of the wrong answers (2) have a score above 0.9" in page.text  # 0.9 is not above itself


def test_page_shows_the_threshold_and_the_error_of_each_coverage_once(tmp_path: Path) -> None:
    lines = [evaluated(f"{n}.png", 0, [0], 1, first=0.9 - n / 100) for n in range(6)]
    lines += [mistake(f"{n}.png", 1, 2, 0.51234567) for n in range(6, 10)]
    run = read_run(write_run(tmp_path, lines))
    report = build_report(run)
    assert [(row["coverage"], row["threshold"]) for row in coverage_rows(report)] == [(100, 0.51234567), (50, 0.86)]
    page = Elements(render_page(report, run, build_gallery(run, None)).decode())
    assert re.search(r"50\.0 %\s*0\.860\s*0\.00\s*0\.00 – 43\.45", page.text)
    chart = risk_chart(report)
    assert chart is not None
    vl_convert.vegalite_to_svg({**chart, "width": 400}, vl_version=VEGA_LITE)


def test_the_matrix_is_named_a_confusion_matrix(tmp_path: Path) -> None:
    page = page_of(tmp_path, [mistake("n01/a.png", 0, 2), mistake("n02/b.png", 1, 2), mistake("n03/c.png", 2, 0)])
    assert "Confusion matrix of the 3 worst classes" in page.text
    (name,) = [element["aria-labelledby"] for element in page.named("div") if element.get("role") == "region"]
    assert name in {element.get("id") for element in page.named("h3")}


def test_ranks_of_the_truth_are_counted_on_the_page(tmp_path: Path) -> None:
    lines = [evaluated("n01/a.png", 0, [0], 1), mistake("n01/b.png", 0, 2), evaluated("n01/c.png", 0, [1, 2], 7)]
    page = page_of(tmp_path, lines)
    assert re.search(r"Median 2, mean 3\.33, mean reciprocal rank 0\.548", page.text)
    assert re.search(r"6 – 7\s+1\s+33\.33", page.text)
